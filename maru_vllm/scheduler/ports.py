"""What the scheduler half is given: names of chunks, settings, block tables.

Protocols only, so that the half runs in an engine, in the simulation and under a scripted plane
without knowing which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from maru_shm.types import Key, Namespace
from maru_vllm.settings import LoadMode

if TYPE_CHECKING:
    from vllm.v1.request import Request


class RequestKeys(Protocol):
    """The growing chain of one request's chunk keys."""

    def extend(self) -> Sequence[Key]:
        """Keys of all full chunks of the token ids known so far; each chunk is hashed once.
        Empty where the request has inputs that cannot be named."""


class ChunkKeys(Protocol):
    """Names the chunks of an engine's requests."""

    def namespace(self) -> Namespace | None:
        """None until the identity of the model is known; until then every request misses."""

    def for_request(self, request: Request) -> RequestKeys:
        """Called only after ``namespace`` has answered."""


class SchedulerSettings(Protocol):
    """The rows of docs/settings.md that concern the scheduler half."""

    @property
    def load_mode(self) -> LoadMode:
        """When hits are loaded."""

    @property
    def store_decode(self) -> bool:
        """Also store chunks that decoding completes."""

    @property
    def lookup_timeout_ms(self) -> float:
        """How long the scheduler is told to ask again."""

    @property
    def log_timing(self) -> bool:
        """Log each load's end."""


BlockTable = Callable[[str], Sequence[int]]
"""Manager block ids that a request holds now, in token order; raises or is empty if it has none."""

EvictBlocks = Callable[[set[int]], None]
"""Take blocks out of vLLM's own prefix cache; whoever holds them keeps them."""

Clock = Callable[[], float]
"""Monotonic seconds."""
