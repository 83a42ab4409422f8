"""The native executor for caches in host memory: ``maru_kv_ops._host``.

The same strided copies as the kernels, compiled for the host, with threads and stores past the
caches. It needs a C++ compiler at installation and no torch there; where it could not be built,
``TorchExecutor`` moves the same bytes.
"""

from __future__ import annotations

from types import ModuleType

from maru_kv_ops import build_record
from maru_kv_ops.errors import ExecutorMissing, MemoryMismatch
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.plan import CopyPlan

try:
    import maru_kv_ops._host as _host
except ImportError as error:
    _reason: str | None = f"cannot be loaded: {error}"
else:
    _reason = None


def host_is_available() -> bool:
    """Whether ``maru_kv_ops._host`` was built and can be loaded."""
    return _reason is None


def host_module() -> ModuleType | None:
    """The module itself, which has the three copy operations too; None if it is not there."""
    return _host if _reason is None else None


def host_import_error() -> str | None:
    """Why it is not there and what to run; None if it is."""
    if _reason is None:
        return None
    record = build_record.read().get("_host")
    why = _reason if record is None or not record.reason else f"was not built: {record.reason}"
    if build_record.BUILD_STEP in why:
        return f"maru_kv_ops._host {why}"
    return f"maru_kv_ops._host {why.rstrip('.')}. To build it: {build_record.BUILD_STEP}"


class HostExecutor:
    """Runs every plan whose cache lies in host memory."""

    name = "host"

    def __init__(self, threads: int = 1) -> None:
        """``threads``: how many share one large call, the calling thread included.

        Raises ``ExecutorMissing`` if the module was not built.
        """
        if threads < 1:
            raise ValueError(f"host executor: {threads} threads; at least 1 is needed")
        missing = host_import_error()
        if missing is not None:
            raise ExecutorMissing(missing)
        self._threads = _host.CopyThreads(threads)

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        """See ``Executor.run``. The copy is complete when this returns."""
        memory.check(plan)
        for region in memory.regions:
            if region.device.type != "cpu":
                raise MemoryMismatch(
                    f"host executor: it copies caches in host memory; found one on {region.device}"
                )
        _host.run_plan(
            plan,
            [region.data_ptr() for region in memory.regions],
            memory.objects.data_ptr(),
            self._threads,
        )
        return CopyPath.HOST

    def close(self) -> None:
        """See ``Executor.close``. The threads end with the executor."""
