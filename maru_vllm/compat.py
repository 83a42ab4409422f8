"""Where the supported minors of vLLM (0.30 to 0.33) differ, and nothing else.

tests/maru_vllm/hook_tables.json holds the connector hooks of each minor, taken from its wheel by
tests/maru_vllm/record_hooks.py; a test holds our overrides against all of them. What is left to
bridge:

    0.32  external hits are labelled by their source (``_cache_hit_source``)
    0.31  ``KVCacheConfig.kv_tp_replicas``
    0.33  sleep mode asks ``supports_sleep_mode`` first
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MLAAttentionSpec


def kv_replicas(
    kv_cache_config: KVCacheConfig, spec: KVCacheSpec, tensor_parallel_size: int
) -> int:
    """How many neighbouring tensor-parallel ranks hold identical KV (1: none).

    Before 0.31 vLLM does not say; there MLA is known to be replicated, and grouped heads are
    treated as distinct, which stores them twice and is right.
    """
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is not None:
        return int(replicas)
    return tensor_parallel_size if isinstance(spec, MLAAttentionSpec) else 1


def kv_layout_name(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """vLLM's resolved KV cache layout, by name. Raises ValueError while it is not resolved."""
    name = kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout
    if name is None:
        raise ValueError(
            "vLLM has not resolved a KV cache layout yet (KVCacheConfig.kv_cache_layout is None); "
            "the connector must be made after the engine core did"
        )
    return str(name)


def host_hit_source() -> Any:
    """The label of hits served from host memory, or None where vLLM has no labels (before 0.32)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST
