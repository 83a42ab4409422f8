"""The pool as one worker has it mapped, and the lock that keeps its space ours.

The scheduler half names the pool in every step (``PoolRef``). A worker maps it when the first job
needs it, populates the mapping in the background, and maps anew when the name changes; what is
mapped already stays until the last job on it is done, so no copy ever loses its memory.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from maru_shm.control.session_lock import join_session_lock
from maru_shm.errors import MaruError
from maru_shm.pool.pool import Pool, open_pool
from maru_vllm.metadata import PoolRef
from maru_vllm.once import OncePerKind
from maru_vllm.worker.pinning import CudaRegistry, HostRegistry, PinnedMemory

logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""After a pool could not be mapped, jobs fail without another try for this long."""


class Hold(Protocol):
    """Proof that this worker may write: a session lock, or a stand-in for one."""

    def close(self) -> None:
        """Give the hold up."""


class MappedPool:
    """One mapped pool, with the session lock held. Counted by the worker's thread."""

    def __init__(self, pool: Pool, lock: Hold, registry: HostRegistry | None = None) -> None:
        """``registry``: pins the mapping for a device; None where copies stay in host memory."""
        self.pool = pool
        self.objects = torch.frombuffer(pool.mapping.buffer, dtype=torch.uint8)
        """All bytes of the pool, as executors take them."""
        self._lock = lock
        self._pin = None if registry is None else PinnedMemory(self.objects, registry)
        self._jobs = 0
        self._retired = False

    def begin_job(self) -> None:
        """Keep the mapping and the lock until ``end_job``."""
        self._jobs += 1

    def end_job(self) -> None:
        """Undo one ``begin_job``."""
        self._jobs -= 1
        self._close_if_unused()

    def retire(self) -> None:
        """Close as soon as no job needs it."""
        self._retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._jobs == 0:
            if self._pin is not None:
                self._pin.close()
                self._pin = None
            # The bytes stay mapped while a tensor over them lives (SharedMapping.close).
            del self.objects
            self.pool.close()
            self._lock.close()


class PoolMapping:
    """The mapping of this worker. Thread: the worker's one."""

    def __init__(
        self,
        map_pool: Callable[[PoolRef], MappedPool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._map_pool = map_pool or map_and_populate
        self._clock = clock
        self._once = OncePerKind(logger)
        self._ref: PoolRef | None = None
        self._mapped: MappedPool | None = None
        self._retry_at = 0.0

    def get(self, ref: PoolRef | None) -> MappedPool | None:
        """The pool that ``ref`` names, mapped; None if it cannot be (logged once per reason)."""
        if ref is None:
            return None
        if ref != self._ref:
            self._forget()
            self._ref, self._retry_at = ref, 0.0
        if self._mapped is None and self._clock() >= self._retry_at:
            try:
                self._mapped = self._map_pool(ref)
            except (MaruError, OSError, ValueError) as error:
                self._retry_at = self._clock() + RETRY_S
                self._once.warn(
                    "map",
                    "Maru: this worker cannot use the pool %s: %s. Loads fail and stores are "
                    "dropped until it can",
                    ref.path,
                    error,
                )
        return self._mapped

    @property
    def populated_bytes(self) -> int:
        """How much of the current mapping is populated."""
        return 0 if self._mapped is None else self._mapped.pool.mapping.populated_bytes

    def close(self) -> None:
        """Give the mapping up; jobs that still run on it keep it. Idempotent."""
        self._forget()
        self._ref = None

    def _forget(self) -> None:
        if self._mapped is not None:
            self._mapped.retire()
            self._mapped = None


def map_and_populate(ref: PoolRef, registry: HostRegistry | None = None) -> MappedPool:
    """Join the session's lock, map, and begin to populate and, with a registry, to pin.

    Raises MaruError, OSError.
    """
    lock = join_session_lock(ref.lock_path)
    try:
        pool = open_pool(ref.path, ref.medium, expect_uuid=ref.uuid)
    except BaseException:
        lock.close()
        raise
    pool.start_populate()
    return MappedPool(pool, lock, registry)


def mapping_for(device: torch.device) -> PoolMapping:
    """The mapping of a worker whose cache lies on ``device``, which is its thread's."""
    if device.type != "cuda":
        return PoolMapping()
    registry = CudaRegistry(torch.device("cuda", torch.cuda.current_device()))
    return PoolMapping(lambda ref: map_and_populate(ref, registry))
