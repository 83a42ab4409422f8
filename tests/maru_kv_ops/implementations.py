"""What does the three copy operations here; every one of them runs over the same cases."""

from __future__ import annotations

from types import ModuleType

from maru_kv_ops import torch_ops
from maru_kv_ops.host_executor import host_import_error


def implementations() -> dict[str, ModuleType]:
    """Name -> module with the three operations, for caches in host memory.

    The native module is no option here: where it is missing, the tests fail and say what to run.
    """
    missing = host_import_error()
    if missing is not None:
        raise RuntimeError(missing)
    import maru_kv_ops._host as _host

    return {"torch": torch_ops, "host": _host}
