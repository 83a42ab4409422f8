"""Which copy operations this process has, found out once.

Three places offer the same operations: the CUDA extension (``maru_kv_ops._C``), its host build
(``maru_kv_ops._host``) and torch. Nothing else is ever looked for: no other project's module, and
no path that is slower without saying so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

import maru_kv_ops
from maru_kv_ops import extension, host_executor, torch_ops

logger = logging.getLogger(__name__)


class CopyOperations(Protocol):
    """What the connector calls by name; whole chunks go as plans through an executor."""

    def single_layer_kv_transfer(
        self,
        lmc_key_value_cache: torch.Tensor,
        vllm_key_value_cache: torch.Tensor | Sequence[torch.Tensor],
        slot_mapping: torch.Tensor,
        direction: int,
        engine_kv_format: int,
        token_major: bool = False,
    ) -> None:
        """Place one layer; see ``maru_kv_ops.torch_ops``."""
        ...


@dataclass(frozen=True, slots=True)
class KVOps:
    """What is there, and for what is not, why and what to run."""

    native: CopyOperations | None
    """``maru_kv_ops._C``."""
    native_missing: str | None
    host: CopyOperations | None
    """``maru_kv_ops._host``."""
    host_missing: str | None

    def operations_for(self, device: torch.device) -> CopyOperations:
        """The fastest operations for a cache on this device."""
        found = self.host if device.type == "cpu" else self.native
        return cast(CopyOperations, torch_ops) if found is None else found


@functools.cache
def _resolve_kv_ops() -> KVOps:
    """Look once per process; warn once if the extension is missing."""
    ops = KVOps(
        native=cast("CopyOperations | None", extension.module()),
        native_missing=maru_kv_ops.import_error(),
        host=cast("CopyOperations | None", host_executor.host_module()),
        host_missing=host_executor.host_import_error(),
    )
    if ops.native_missing is not None:
        logger.warning("Maru: %s", _what_is_missing(ops))
    return ops


def _what_is_missing(ops: KVOps) -> str:
    """One message: the cause, what runs instead, and what to run (part of the cause)."""
    instead = "caches on a device are copied layer by layer through torch, which is slower"
    if ops.host_missing is None:
        instead += "; caches in host memory are copied by the native host executor and lose nothing"
    else:
        instead += f"; caches in host memory too, because {ops.host_missing}"
    return f"the copy kernels are not available: {ops.native_missing}. Until then {instead}"
