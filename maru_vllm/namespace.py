"""The namespace: one digest of everything that gives KV bytes their meaning, save the tokens.

    namespace = SHA-256( NAMESPACE_FORMAT | encode( ((field name, value), ...) ) )

with the fields of ``NamespaceFields`` in their order, and ``encoding.encode``. Names and types
are part of the bytes, so no two sets of fields have the same encoding. Engines that differ in any
field share nothing. ``engine_facts.py`` fills the fields in from vLLM; nothing here needs vLLM.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Final

from maru_shm.types import Namespace
from maru_vllm.encoding import encode

NAMESPACE_FORMAT: Final = b"maru-namespace-1"
"""Domain and version of the namespace encoding; 16 bytes."""

PAYLOAD_FORMAT: Final = 1
"""Version of what lies inside an object's payload: the order of parts, blocks and layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFields:
    """One KV cache group of the engine."""

    layer_names: tuple[str, ...]
    """In the group's order, which is the order in stored objects."""
    spec: bytes
    """Encoding of the group's cache specification: its class and all its fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceFields:
    """What two engines must have in common to share. Every field counts."""

    payload_format: int
    """``PAYLOAD_FORMAT``."""
    key_format: bytes
    """``identity.KEY_FORMAT``."""
    model_id: str
    """``maru_model_id``; empty where it is not set."""
    weights: bytes
    """Fingerprint of the model's files, and of the draft model's where there is one."""
    model_config: bytes
    """Digest of the model's configuration as the engine uses it, after ``--hf-overrides``: rope,
    sizes, sliding windows and all else."""
    architecture: str
    """The model class, e.g. ``LlamaForCausalLM``."""
    rope_length: int
    """``max_model_len`` where the rotary embedding depends on it, else 0."""
    multimodal: bytes
    """Encoding of the engine-wide options that change what an image or a video becomes."""
    model_dtype: str
    kv_cache_dtype: str
    quantization: str
    """Of the weights; empty for none."""
    speculation: str
    """Method of the draft model whose KV is among the groups; empty for none."""
    engine_version: str
    """vLLM's version for ``pages``, whose inside is the engine's affair; empty for ``tokens``."""
    device: str
    """Kind and generation, e.g. ``cuda 9.0``; backends pack by it."""
    attention_backends: tuple[str, ...]
    """Full class names, sorted."""
    instruction_set: str
    """What the CPU backend packs by; empty elsewhere."""
    payload: str
    """``maru_kv_payload``."""
    kv_layout: str
    """vLLM's name of the KV cache layout for ``pages``; empty for ``tokens``."""
    block_size: int
    """Tokens of a block for ``pages``; 0 for ``tokens``."""
    chunk_tokens: int
    tensor_parallel: int
    pipeline_parallel: int
    prefill_context_parallel: int
    decode_context_parallel: int
    context_interleave: int
    """Consecutive tokens that one context-parallel rank holds."""
    num_parts: int
    """Distinct shares of one object; fewer than the ranks where neighbours hold the same KV."""
    groups: tuple[GroupFields, ...]
    cache_namespace: str
    """``maru_cache_namespace``."""


def namespace_bytes(fields: NamespaceFields) -> bytes:
    """What is hashed; the golden fixtures pin it."""
    return NAMESPACE_FORMAT + encode(_named_values(fields))


def namespace_digest(fields: NamespaceFields) -> Namespace:
    """The namespace of engines with these fields."""
    return Namespace(hashlib.sha256(namespace_bytes(fields)).digest())


def _named_values(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return tuple(
            (f.name, _named_values(getattr(value, f.name))) for f in dataclasses.fields(value)
        )
    if isinstance(value, tuple):
        return tuple(map(_named_values, value))
    return value
