"""Executors for caches on a CUDA device, over ``maru_kv_ops._C``.

``KernelExecutor`` moves a plan with kernels: best for many short runs, but a kernel that reads slow
host memory holds a part of the device's multiprocessors for as long as that takes.
``CopyEngineExecutor`` gives the plan to the copy engines, which take none: best for long runs. Both
move the same bytes, so which of them runs a plan is a question of speed alone.

This module imports without the extension; making an executor raises ``ExecutorMissing`` then.
"""

from __future__ import annotations

from types import ModuleType

from maru_kv_ops import extension
from maru_kv_ops.errors import ExecutorMissing, MemoryMismatch
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.plan import CopyPlan


class KernelExecutor:
    """Runs every plan with kernels. The object memory has to be pinned and mapped."""

    name = "kernel"

    def __init__(self) -> None:
        """Raises ``ExecutorMissing``, with what to run, where ``_C`` is not available."""
        self._module = _extension(self.name)

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        """See ``Executor.run``. The plan itself may go when this returns."""
        memory.check(plan)
        if plan.copies and not memory.objects.is_pinned():
            raise MemoryMismatch(
                f"{self.name} executor: a kernel reaches the object memory only where it is "
                f"pinned, and these {memory.objects.numel()} bytes are not; register them with "
                "cudaHostRegister once, or take CopyEngineExecutor, which needs no pinned memory"
            )
        _queue(self._module, self._module.CopyPath.KERNEL, self.name, plan, memory)
        return CopyPath.KERNEL

    def close(self) -> None:
        """See ``Executor.close``. There is nothing to release."""


class CopyEngineExecutor:
    """Runs every plan with the copy engines.

    Where the object memory is not pinned this works as well, but CUDA holds the calling thread
    while it stages the bytes. A load may read its objects ahead of the work that is queued on the
    stream before it: an object that this stream is still writing is not to be loaded.
    """

    name = "copy_engine"

    def __init__(self) -> None:
        """Raises ``ExecutorMissing``, with what to run, where ``_C`` is not available."""
        self._module = _extension(self.name)

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        """See ``Executor.run``. The plan itself may go when this returns."""
        memory.check(plan)
        _queue(self._module, self._module.CopyPath.COPY_ENGINE, self.name, plan, memory)
        return CopyPath.COPY_ENGINE

    def close(self) -> None:
        """See ``Executor.close``. There is nothing to release."""


def _extension(name: str) -> ModuleType:
    module = extension.module()
    if module is None:
        raise ExecutorMissing(f"{name} executor: {extension.import_error()}")
    return module


def _queue(module: ModuleType, path: object, name: str, plan: CopyPlan, memory: CopyMemory) -> None:
    if not plan.copies:
        return
    devices = {region.device for region in memory.regions}
    device = memory.regions[0].device
    if len(devices) > 1 or device.type != "cuda":
        raise MemoryMismatch(
            f"{name} executor: it copies caches on one CUDA device; found them on "
            f"{', '.join(sorted(str(found) for found in devices))}"
        )
    module.run_plan(
        plan,
        [region.data_ptr() for region in memory.regions],
        memory.objects.data_ptr(),
        device,
        path,
    )
