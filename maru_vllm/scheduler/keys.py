"""The engine's chain of chunk keys, which exists only once the model's weights are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from maru_shm.types import Namespace
from maru_vllm.identity import ChunkChain
from maru_vllm.scheduler.ports import RequestKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ChainWhenKnown:
    """``ChunkKeys`` over a chain that is still being found out, by a fingerprint job say."""

    def __init__(self, find: Callable[[], ChunkChain | None]) -> None:
        """``find`` is called, on the scheduler's thread, until it answers; it must not wait."""
        self._find = find
        self._chain: ChunkChain | None = None

    def namespace(self) -> Namespace | None:
        """None until the chain is known."""
        if self._chain is None:
            self._chain = self._find()
        return None if self._chain is None else self._chain.namespace

    def for_request(self, request: Request) -> RequestKeys:
        """Called only after ``namespace`` has answered."""
        if self._chain is None:
            raise RuntimeError("keys asked for before the namespace is known")
        return self._chain.follow(request)
