"""What a page and a chunk of this engine's KV cache are, in names and bytes.

Both halves build the same ``ChunkLayout`` from vLLM's ``KVCacheConfig``; the worker half then holds
the registered tensors against it (``maru_vllm/worker/caches.py``) and refuses to start where
they differ, so the sizes that the scheduler half reserves are the sizes that workers write.

Who knows what, and when:

    KV cache layout name   ``KVCacheConfig.kv_cache_layout`` on both sides, resolved by the engine
                           core before it makes the scheduler; ``cache_config`` holds it too
    block size, layers,    ``KVCacheConfig.kv_cache_groups`` on both sides
    page bytes
    kernel blocks          the worker's tensors only; accepted where they do not change the bytes
    strides, padding       the worker's tensors only; they leave no trace in an object

``PageLayout`` is all of this that gives an object's bytes their meaning, so all of it is in the
namespace.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from maru_kv_ops.layouts import KVLayout
from maru_vllm import compat


class LayoutRefused(ValueError):
    """This engine's KV cache is of a kind that Maru does not store. The engine must not start."""


@dataclass(frozen=True, slots=True)
class LayerPage:
    """One block of one layer: ``[heads, states, content]``, padding not counted."""

    name: str
    """vLLM's name of the layer; layers are paired by it, never by position."""
    heads: int
    """Head slots of one rank; 1 for MLA."""
    states: int
    """Stored states of one block; one per token."""
    content_bytes: int
    """Bytes of one head's state, K and V together."""
    dtype: str
    """Element type as torch spells it, e.g. ``torch.bfloat16``; ``opaque`` where there is none."""
    kind: str
    """vLLM's class of the layer's cache specification."""

    @property
    def page_bytes(self) -> int:
        """KV bytes of one block."""
        return self.heads * self.states * self.content_bytes


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What gives the bytes of one rank's pages their meaning, as far as the cache's shape does."""

    layout: KVLayout
    block_size: int
    """Tokens of one manager block."""
    layers: tuple[LayerPage, ...]
    """In the order of the KV cache group, which is the order in stored chunks."""

    @property
    def block_bytes(self) -> int:
        """KV bytes of one block of all layers, one rank."""
        return sum(layer.page_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank does with an object's parts."""

    part: int
    """The part that this rank reads, and that its pages are."""
    writes: bool
    """Whether this rank stores the part; of ranks with the same KV one does."""


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """One object: a chunk of ``chunk_tokens`` tokens, one part per distinct share of the heads."""

    pages: PageLayout
    num_blocks: int
    """Manager blocks of the engine's cache."""
    chunk_tokens: int
    num_ranks: int
    """Tensor-parallel ranks of the engine."""
    num_parts: int
    """Fewer than ranks where neighbouring ranks hold the same KV (MLA, few KV heads)."""

    @property
    def blocks_per_chunk(self) -> int:
        """Manager blocks of one chunk."""
        return self.chunk_tokens // self.pages.block_size

    @property
    def part_bytes(self) -> int:
        """Payload bytes of one part."""
        return self.pages.block_bytes * self.blocks_per_chunk

    @property
    def object_bytes(self) -> int:
        """Payload bytes of one object, all parts."""
        return self.part_bytes * self.num_parts

    def share_of(self, rank: int) -> RankShare:
        """The share of tensor-parallel rank ``rank``: neighbouring ranks are replicas."""
        replicas = self.num_ranks // self.num_parts
        return RankShare(part=rank // replicas, writes=rank % replicas == 0)


def chunk_layout(
    kv_cache_config: KVCacheConfig, layout_name: str, chunk_tokens: int, tensor_parallel_size: int
) -> ChunkLayout:
    """Describe the objects of an engine. Raises LayoutRefused with what to change.

    ``layout_name`` is vLLM's resolved layout; ``chunk_tokens`` a multiple of the block size (see
    ``Settings.check_block_size``).
    """
    group = _only_group(kv_cache_config)
    specs = [(name, _layer_spec(group, name)) for name in group.layer_names]
    block_size = group.kv_cache_spec.block_size
    replicas = compat.kv_replicas(kv_cache_config, group.kv_cache_spec, tensor_parallel_size)
    if chunk_tokens % block_size:
        raise LayoutRefused(
            f"a chunk of {chunk_tokens} tokens is no multiple of the block size {block_size}; "
            "change maru_kv_chunk_tokens or --block-size"
        )
    if tensor_parallel_size % replicas:
        raise LayoutRefused(
            f"{tensor_parallel_size} tensor-parallel ranks with {replicas} replicas of the KV each "
            "do not divide evenly; run this model without Maru"
        )
    return ChunkLayout(
        pages=PageLayout(
            layout=_known_layout(layout_name),
            block_size=block_size,
            layers=tuple(_layer_page(name, spec, block_size) for name, spec in specs),
        ),
        num_blocks=kv_cache_config.num_blocks,
        chunk_tokens=chunk_tokens,
        num_ranks=tensor_parallel_size,
        num_parts=tensor_parallel_size // replicas,
    )


def _only_group(kv_cache_config: KVCacheConfig) -> KVCacheGroupSpec:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        raise LayoutRefused(
            f"this model has {len(groups)} KV cache groups ({kinds}); Maru stores models with one "
            "group of full attention or MLA so far. A model that mixes sliding-window and full "
            "attention can run with --disable-hybrid-kv-cache-manager; run others without Maru"
        )
    group = groups[0]
    if not group.enable_kv_transfer or group.host_resident or not group.layer_names:
        raise LayoutRefused(
            f"the KV cache group of {len(group.layer_names)} layers (transfer "
            f"{'on' if group.enable_kv_transfer else 'off'}, "
            f"{'host' if group.host_resident else 'device'} memory) cannot be stored; "
            "run this model without Maru"
        )
    return group


def _layer_spec(group: KVCacheGroupSpec, name: str) -> KVCacheSpec:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[name]
    return spec


def _layer_page(name: str, spec: KVCacheSpec, block_size: int) -> LayerPage:
    # Subclasses add meaning (sinks, hidden states) that this code does not know: exact types only.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise LayoutRefused(
            f"layer {name} keeps its KV as {type(spec).__name__}; Maru stores FullAttentionSpec "
            "and MLAAttentionSpec so far. A sliding-window model can run with "
            "--disable-hybrid-kv-cache-manager; run others without Maru"
        )
    assert isinstance(spec, FullAttentionSpec)
    if spec.tokens_per_state != 1 or spec.block_size != block_size:
        raise LayoutRefused(
            f"layer {name} stores a state per {spec.tokens_per_state} tokens in blocks of "
            f"{spec.block_size}; Maru stores one state per token in blocks of {block_size} so far"
        )
    return LayerPage(
        name=name,
        heads=spec.num_heads,
        states=int(spec.num_states),
        content_bytes=spec.state_content_size_bytes,
        dtype=str(getattr(spec, "dtype", None) or "opaque"),
        kind=type(spec).__name__,
    )


def _known_layout(name: str) -> KVLayout:
    try:
        return KVLayout(name)
    except ValueError:
        known = ", ".join(layout.value for layout in KVLayout)
        raise LayoutRefused(
            f"KV cache layout {name!r} is not known; Maru knows {known}. Set VLLM_KV_CACHE_LAYOUT "
            "to one of them"
        ) from None
