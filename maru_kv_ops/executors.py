"""What runs a plan, and the memory that it runs over.

A plan holds numbers only; an executor is given the memories that the numbers count in. Executors
are interchangeable: each moves exactly the bytes of the plan, or refuses before it moves any.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from maru_kv_ops.errors import MemoryMismatch
from maru_kv_ops.plan import CopyPlan

if TYPE_CHECKING:  # a host without torch names paths too: `maru doctor` prints placement tables
    import torch


class CopyPath(StrEnum):
    """What moved the bytes of a plan. The values are names in statistics and logs."""

    HOST = "host"
    """The kernels' copies, compiled for the host."""
    KERNEL = "kernel"
    COPY_ENGINE = "copy_engine"
    TORCH = "torch"
    """The fallback, which runs anywhere."""


@dataclass(frozen=True, slots=True)
class CopyMemory:
    """The memories of one engine's cache and of the object store, as flat bytes."""

    regions: tuple[torch.Tensor, ...]
    """One per region of the views: uint8, one dimension, contiguous; all on one device.
    ``maru_kv_ops.cache_tensors.paged_caches`` makes them."""
    objects: torch.Tensor
    """The object memory (the pool's mapping), uint8, one dimension, in host memory."""

    def check(self, plan: CopyPlan) -> None:
        """Refuse memory that is not as described, or less than ``plan`` addresses.

        Raises ``MemoryMismatch``.
        """
        import torch

        for tensor in (*self.regions, self.objects):
            if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
                raise MemoryMismatch(
                    f"copy: memories are contiguous, flat uint8 tensors; found {tensor.dtype} of "
                    f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
                )
        if self.objects.device.type != "cpu":
            raise MemoryMismatch(
                f"copy: the object memory is the pool's mapping in host memory; found a tensor on "
                f"{self.objects.device}"
            )
        if len(self.regions) < len(plan.region_ends):
            raise MemoryMismatch(
                f"copy: the plan addresses {len(plan.region_ends)} cache regions, "
                f"{len(self.regions)} were given"
            )
        for index, end in enumerate(plan.region_ends):
            if self.regions[index].numel() < end:
                raise MemoryMismatch(
                    f"copy: cache region {index} has {self.regions[index].numel()} bytes, the "
                    f"plan's views end at {end}"
                )
        if self.objects.numel() < plan.object_end:
            raise MemoryMismatch(
                f"copy: the object memory has {self.objects.numel()} bytes, the plan's object ends "
                f"at {plan.object_end}"
            )


class Executor(Protocol):
    """Moves the bytes of plans.

    ``run`` may be called from any thread, and from several at once with plans whose destinations
    do not overlap. On a CPU cache the copy is complete when it returns. On a device it is queued
    on the calling thread's current stream and nothing waits: the caller makes that stream wait for
    the work that fills or still reads the blocks, keeps both memories alive, and before it
    publishes a stored object or reports a loaded one it waits for an event recorded behind ``run``.
    """

    @property
    def name(self) -> str:
        """Name in settings, logs and benchmarks."""
        ...

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        """Move the plan's bytes, and say by what. Raises ``MemoryMismatch`` before that."""
        ...

    def close(self) -> None:
        """Release what the executor holds (threads); no ``run`` may be in progress or follow."""
        ...
