"""Gathers the namespace's fields from vLLM's configuration objects."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.platforms import current_platform

from maru_vllm.encoding import UnencodableError, encode
from maru_vllm.identity import KEY_FORMAT
from maru_vllm.namespace import PAYLOAD_FORMAT, GroupFields, NamespaceFields
from maru_vllm.settings import KVPayload, Settings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from maru_vllm.layout import ChunkLayout

_NOT_CONFIGURATION: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version"})
"""Entries of a model's configuration that say where it came from, not what it is."""

_LENGTH_FREE_ROPE: Final = frozenset(
    {"default", "linear", "yarn", "llama3", "mrope", "proportional", "deepseek_yarn"}
)
"""Rotary embeddings whose angles do not depend on ``max_model_len``. Others may (longrope picks its
factors by it), and then engines of unlike ``max_model_len`` do not share."""


class IdentityRefused(ValueError):
    """KV of this engine has no identity that another engine could have too."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How the attention backend lays out what is inside a block; a fact of the workers' host."""

    device: str
    attention_backends: tuple[str, ...]
    instruction_set: str


def packing_from_vllm(vllm_config: VllmConfig) -> Packing:
    """The packing on this host, for an engine of this configuration.

    Exact where this process holds the model's layers. Elsewhere (a scheduler whose workers are
    processes of their own) vLLM's selector is asked, which answers the same for the same
    configuration and device.
    """
    backends = {
        ".".join(backend.full_cls_name()) for backend in get_current_attn_backends(vllm_config)
    }
    device = str(current_platform.device_type)
    instruction_set = ""
    if current_platform.is_cpu():
        instruction_set = _instruction_set()
    elif (capability := current_platform.get_device_capability()) is not None:
        device = f"{device} {capability.as_version_str()}"
    return Packing(device, tuple(sorted(backends)), instruction_set)


def fields_from_vllm(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    settings: Settings,
    fingerprint: bytes,
    layout: ChunkLayout,
    packing: Packing,
) -> NamespaceFields:
    """Everything that counts about an engine. Raises IdentityRefused, naming what has no place
    in an identity."""
    model_config = vllm_config.model_config
    parallel = vllm_config.parallel_config
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise IdentityRefused(
            "calculate_kv_scales takes the scales of the KV cache from this engine's first "
            "requests, so no other engine can read its KV; switch it off, or use a checkpoint "
            "with scales"
        )
    speculative = vllm_config.speculative_config
    drafts = speculative is not None and any(
        getattr(group, "is_eagle_group", False) for group in kv_cache_config.kv_cache_groups
    )
    pages = settings.kv_payload is KVPayload.PAGES
    return NamespaceFields(
        payload_format=PAYLOAD_FORMAT,
        key_format=KEY_FORMAT,
        model_id=settings.model_id or "",
        weights=fingerprint,
        model_config=_model_config_digest(model_config),
        architecture=str(model_config.architecture),
        rope_length=_rope_length(model_config),
        multimodal=_multimodal(model_config),
        model_dtype=str(model_config.dtype),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        quantization=str(model_config.quantization or ""),
        speculation=str(getattr(speculative, "method", "")) if drafts else "",
        engine_version=vllm.__version__ if pages else "",
        device=packing.device if pages else "",
        attention_backends=packing.attention_backends if pages else (),
        instruction_set=packing.instruction_set if pages else "",
        payload=settings.kv_payload.value,
        kv_layout=layout.pages.layout.value if pages else "",
        block_size=layout.pages.block_size if pages else 0,
        chunk_tokens=settings.kv_chunk_tokens,
        tensor_parallel=parallel.tensor_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        prefill_context_parallel=getattr(parallel, "prefill_context_parallel_size", 1),
        decode_context_parallel=parallel.decode_context_parallel_size,
        context_interleave=parallel.cp_kv_cache_interleave_size,
        num_parts=layout.num_parts,
        groups=tuple(
            GroupFields(
                layer_names=tuple(group.layer_names),
                spec=_encoded("KV cache group", _spec(group.kv_cache_spec, pages)),
            )
            for group in kv_cache_config.kv_cache_groups
        ),
        cache_namespace=settings.cache_namespace,
    )


def _model_config_digest(model_config: ModelConfig) -> bytes:
    plain = _plain(model_config.hf_config.to_dict())
    return hashlib.sha256(_encoded("model configuration", plain)).digest()


def _rope_length(model_config: ModelConfig) -> int:
    text_config = model_config.hf_text_config
    kinds = set(
        _rope_types(getattr(text_config, "rope_parameters", None))
        + _rope_types(getattr(text_config, "rope_scaling", None))
    )
    return 0 if kinds <= _LENGTH_FREE_ROPE else int(model_config.max_model_len)


def _rope_types(parameters: object) -> list[str]:
    """Of one set of parameters, or of one set per kind of layer."""
    if not isinstance(parameters, Mapping):
        return []
    own = parameters.get("rope_type", parameters.get("type"))
    return ([str(own)] if own is not None else []) + [
        kind for nested in parameters.values() for kind in _rope_types(nested)
    ]


def _multimodal(model_config: ModelConfig) -> bytes:
    """vLLM's identity of an image covers the image and the request's own options, not these."""
    config = model_config.multimodal_config
    if config is None:
        return b""
    names = ("mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
    options = {name: getattr(config, name, None) for name in names}
    return _encoded("multimodal options", _plain(options))


def _spec(spec: Any, pages: bool) -> object:
    """Class and fields of a cache specification, nested ones included. Fields that another vLLM
    adds count by themselves."""
    fields = {
        f.name: getattr(spec, f.name)
        for f in dataclasses.fields(spec)
        if pages or f.name not in ("block_size", "page_size_padded", "block_stride_alignment")
    }
    return (
        type(spec).__qualname__,
        {
            name: {layer: _spec(nested, pages) for layer, nested in value.items()}
            if name == "kv_cache_specs"
            else _plain(value)
            for name, value in fields.items()
        },
    )


def _plain(value: Any) -> object:
    """The value as ``encode`` takes it: torch's dtypes and enums by name, sets in order."""
    match value:
        case Enum():
            return (type(value).__qualname__, value.name)
        case torch.dtype():
            return ("dtype", str(value))
        case Fraction():
            return ("fraction", value.numerator, value.denominator)
        case Mapping():
            return {
                key if isinstance(key, str) else f"{type(key).__name__} {key}": _plain(entry)
                for key, entry in value.items()
                if key not in _NOT_CONFIGURATION
            }
        case list() | tuple():
            return tuple(map(_plain, value))
        case set() | frozenset():
            return tuple(sorted((_plain(entry) for entry in value), key=encode))
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            entries = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            return (type(value).__qualname__, _plain(entries))
    return value


def _encoded(what: str, plain: object) -> bytes:
    try:
        return encode(plain)
    except UnencodableError as error:
        raise IdentityRefused(f"the {what} of this engine has no identity: {error}") from None


def _instruction_set() -> str:
    """The CPU backend packs K and V for the widest instructions that it finds. All that its
    choice depends on counts, so that a later order of preference cannot make two packings one."""
    found = [
        name
        for name, probe in (
            ("avx512", "_is_avx512_supported"),
            ("amx", "_is_amx_tile_supported"),
        )
        if getattr(torch.cpu, probe, bool)()
    ]
    return " ".join((platform.machine(), *found))
