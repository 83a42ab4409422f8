"""The pool's mapping, pinned for a device: registered with CUDA, so that kernels reach it.

Pinning takes a second for some GiB and can be forbidden (locked memory is limited, some virtual
machines refuse it). So it happens in the background, and where it fails copies go on unpinned:
the copy engine takes such memory, kernels do not get it (B23).
"""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)

_PORTABLE_AND_MAPPED = 1 | 2
"""cudaHostRegisterPortable: for all of the process's contexts; cudaHostRegisterMapped: in a
device's address space. Values of cudaHostRegister's flags in CUDA's driver_types.h."""


class HostRegistry(Protocol):
    """What registers host memory: ``torch.cuda.cudart()``, or a stand-in for it."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:  # noqa: N802 # CUDA's
        """Pin memory; returns an error number, 0 for success."""

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802 # CUDA's
        """Undo it."""


class CudaRegistry:
    """The CUDA runtime, for one device whatever the calling thread's is.

    A new thread's device is the first one: without this, every worker of a host would open a
    context of some hundred MiB there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._runtime: HostRegistry = torch.cuda.cudart()  # type: ignore[no-untyped-call] # theirs

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> Any:  # noqa: N802 # CUDA's
        """See ``HostRegistry``."""
        with torch.cuda.device(self._device):
            return self._runtime.cudaHostRegister(address, num_bytes, flags)

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802 # CUDA's
        """See ``HostRegistry``."""
        with torch.cuda.device(self._device):
            return self._runtime.cudaHostUnregister(address)


class PinnedMemory:
    """Pins memory from now on until ``close``. Thread: any one at a time."""

    def __init__(self, memory: torch.Tensor, registry: HostRegistry) -> None:
        """Begin in a thread of its own; ``memory``: flat uint8 in host memory, kept mapped."""
        self._memory = memory
        self._registry = registry
        self._lock = threading.Lock()
        self._is_pinned = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._pin, name="maru-pin", daemon=True)
        self._thread.start()

    def _pin(self) -> None:
        # A CUDA error is kept per thread: one that pinning leaves behind ends with this thread and
        # is not found by the engine's next check.
        size = self._memory.numel()
        try:
            error = int(
                self._registry.cudaHostRegister(self._memory.data_ptr(), size, _PORTABLE_AND_MAPPED)
            )
        except Exception as failure:  # whatever a CUDA runtime raises: the engine goes on unpinned
            self._say_unpinned(f"{type(failure).__name__}: {failure}")
            return
        if error:
            self._say_unpinned(f"cudaHostRegister returned error {error}")
            return
        with self._lock:
            too_late = self._is_closed
            self._is_pinned = not too_late
        if too_late:
            self._registry.cudaHostUnregister(self._memory.data_ptr())
        else:
            logger.info("Maru: %.1f GiB of the pool are pinned", size / (1 << 30))

    def _say_unpinned(self, why: str) -> None:
        logger.warning(
            "Maru: the pool's mapping of %.1f GiB cannot be pinned (%s). Copies go through the "
            "copy engine, unpinned, which is slower; raise the limit of locked memory (ulimit -l) "
            "or make the pool smaller",
            self._memory.numel() / (1 << 30),
            why,
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the attempt; whether the memory is pinned."""
        self._thread.join(timeout_s)
        return self._is_pinned

    def close(self) -> None:
        """Undo it; no copy may be under way. Idempotent.

        An attempt under way is not waited for, because it can take many seconds: its thread keeps
        the memory and undoes it.
        """
        with self._lock:
            self._is_closed = True
            was_pinned, self._is_pinned = self._is_pinned, False
        if was_pinned:
            self._registry.cudaHostUnregister(self._memory.data_ptr())
