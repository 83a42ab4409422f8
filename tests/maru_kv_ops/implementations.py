"""What does the three copy operations here; every one of them runs over the same cases."""

from __future__ import annotations

from types import ModuleType

from maru_kv_ops import torch_ops
from maru_kv_ops.host_executor import host_import_error

IMPLEMENTATIONS = ("torch", "host")
"""For caches in host memory."""


def implementation(name: str) -> ModuleType:
    """Return the module with the three operations.

    The native module is no option here: where it is missing, its tests fail and say what to run.
    """
    if name == "torch":
        return torch_ops
    missing = host_import_error()
    if missing is not None:
        raise RuntimeError(missing)
    import maru_kv_ops._host as _host

    return _host
