"""The registered cache tensors of one worker, held against what the scheduler half reckons with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.errors import ViewError
from maru_kv_ops.plan import CopyPlan, PagePlanner, TransferDirection
from maru_kv_ops.views import ObjectView, PagedView, object_view_for
from maru_vllm.layout import ChunkLayout, LayerPage, LayoutRefused


@dataclass(frozen=True, slots=True)
class RegisteredCaches:
    """One worker's paged cache, ready for planning and copying. Used by all copy threads."""

    regions: tuple[torch.Tensor, ...]
    """Flat uint8 tensors over the caches' storages; they keep the memory alive."""
    tensors: tuple[torch.Tensor, ...]
    """The engine's tensors, in the order of the stored layers."""
    views: tuple[PagedView, ...]
    """One for each of them."""
    planner: PagePlanner
    part_layout: ObjectView
    """One part of an object, at offset 0."""
    device: torch.device

    def plan(
        self,
        part_offset: int,
        first_block: int,
        block_ids: tuple[int, ...],
        direction: TransferDirection,
    ) -> CopyPlan:
        """Plan one chunk's blocks against the part that starts ``part_offset`` bytes into the pool.

        Raises CopyError before anything moves.
        """
        part = self.part_layout.at(part_offset, self.part_layout.chunk_bytes)
        return self.planner.plan(part, first_block, block_ids, direction)


def register_caches(layout: ChunkLayout, kv_caches: Mapping[str, torch.Tensor]) -> RegisteredCaches:
    """Describe vLLM's tensors ``[block, head, token, content]`` by their real strides.

    Layers are taken by name, in the order of ``layout``; names that share another layer's memory
    (KV sharing) add nothing. Raises LayoutRefused with what was expected and what was found: a
    cache that is not understood must stop the engine's start, not turn into silent misses.
    """
    tensors = [_tensor_of(layer, kv_caches) for layer in layout.pages.layers]
    _check_nothing_is_left_out(layout, kv_caches)
    for layer, tensor in zip(layout.pages.layers, tensors, strict=True):
        _check_shape(layout, layer, tensor)
    try:
        caches = paged_caches([CacheTensor(t, "BHNC") for t in tensors], layout.num_blocks)
        part_layout = object_view_for(
            caches.views, layout.blocks_per_chunk, layout.pages.layout.object_order
        )
        planner = PagePlanner(caches.views, part_layout)
    except ViewError as error:
        raise LayoutRefused(f"the KV cache cannot be described: {error}") from error
    if part_layout.chunk_bytes != layout.part_bytes:
        raise LayoutRefused(
            f"a chunk of these tensors has {part_layout.chunk_bytes} bytes per rank, but the KV "
            f"cache configuration says {layout.part_bytes}; this is a fault in Maru, please report "
            "it with the model's name"
        )
    return RegisteredCaches(
        regions=caches.regions,
        tensors=tuple(tensors),
        views=caches.views,
        planner=planner,
        part_layout=part_layout,
        device=tensors[0].device,
    )


def _tensor_of(layer: LayerPage, kv_caches: Mapping[str, torch.Tensor]) -> torch.Tensor:
    found = kv_caches.get(layer.name)
    if not isinstance(found, torch.Tensor):
        what = "nothing" if found is None else type(found).__name__
        raise LayoutRefused(
            f"layer {layer.name}: expected one cache tensor, vLLM registered {what} "
            f"({len(kv_caches)} layers in all)"
        )
    return found


def _check_nothing_is_left_out(layout: ChunkLayout, kv_caches: Mapping[str, torch.Tensor]) -> None:
    known = {layer.name for layer in layout.pages.layers}
    stored = {kv_caches[name].data_ptr() for name in known}
    for name, tensor in kv_caches.items():
        if name in known:
            continue
        if not isinstance(tensor, torch.Tensor) or tensor.data_ptr() not in stored:
            raise LayoutRefused(
                f"vLLM registered a cache for layer {name}, which is in no KV cache group that "
                "Maru stores; serving hits without it would give wrong output"
            )


def _check_shape(layout: ChunkLayout, layer: LayerPage, tensor: torch.Tensor) -> None:
    found = (
        f"shape {tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.element_size()} bytes "
        "per element"
    )
    expected = (
        f"[{layout.num_blocks} blocks, {layer.heads} heads, {layer.states} tokens, "
        f"{layer.content_bytes} bytes] (or finer blocks) in memory order "
        f"{layout.pages.layout.value}"
    )
    fits = False
    if tensor.dim() == 4:
        blocks, heads, states, content = tensor.shape
        fits = (
            blocks % layout.num_blocks == 0
            and heads == layer.heads
            and blocks * states == layout.num_blocks * layer.states
            and content * tensor.element_size() == layer.content_bytes
        )
    if not fits:
        raise LayoutRefused(f"layer {layer.name}: expected {expected}, found {found}")
    if layer.heads > 1 and tensor.shape[2] > 1:
        name = layout.pages.layout.value
        heads_outside = tensor.stride(1) > tensor.stride(2)
        if heads_outside != (name.index("H") < name.index("N")):
            raise LayoutRefused(f"layer {layer.name}: expected {expected}, found {found}")
        if heads_outside and tensor.shape[0] != layout.num_blocks:
            # The same tokens would lie in another order than in an engine whose kernel takes the
            # whole block, and nothing in the namespace tells the two apart.
            raise LayoutRefused(
                f"layer {layer.name}: the attention backend splits blocks of {layer.states} tokens "
                f"into kernel blocks of {tensor.shape[2]}, which head-major pages cannot share; "
                f"set --block-size {tensor.shape[2]}, or VLLM_KV_CACHE_LAYOUT to LBNHC"
            )
