"""Maru as a KV connector of vLLM: ``"kv_connector_module_path": "maru_vllm"``.

Importing this package needs neither vLLM nor torch; asking it for the connector needs both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maru_vllm.connector import MaruKVConnector

__all__ = ["MaruKVConnector"]


def __getattr__(name: str) -> Any:
    if name != "MaruKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError as error:
        raise ImportError(
            f"MaruKVConnector needs vLLM, which cannot be imported here ({error}). Install it in "
            "this environment, e.g. with `pip install 'maru[vllm]'`"
        ) from error
    from maru_vllm.connector import MaruKVConnector

    return MaruKVConnector
