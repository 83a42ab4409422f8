"""The three copy operations in torch: every format, every device that torch knows.

Names, arguments and results are those of the native modules ``_C`` and ``_host``, which do the same
faster; this is what runs where they are missing, and what they are tested against. All three move
bytes between a paged cache and objects:

    multi_layer_kv_transfer        a token range of all layers: [kv_size, layers, tokens, width]
    single_layer_kv_transfer       a token range of one layer: a staging tensor
    multi_layer_block_kv_transfer  whole blocks of all layers: objects like the first

``width`` is heads x head size (x 2 where K and V are fused; the latent for MLA; values and scale
for blocked scales), ``slot = block * block_size + offset``. Directions and formats may be members
of any module's enumeration. A negative slot or block id is skipped in all layers and planes.

Everything is refused before anything moves, with ``TransferRefused`` (a ValueError) or TypeError.
Work goes to the current stream of the cache's device. Which rows move is worked out on the host:
ids that lie on a device are read back, and stores from a device into host memory wait for their
bytes. The native modules do neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch

from maru_kv_ops.errors import TransferRefused
from maru_kv_ops.formats import Content, EngineKVFormat, FormatFacts, PageBufferShapeDesc
from maru_kv_ops.geometry import (
    PageGeometry,
    PoolSizes,
    layer_geometry,
    pointer_index,
    pool_geometry,
)
from maru_kv_ops.plan import TransferDirection
from maru_kv_ops.torch_memory import TokenRows, as_bytes, memory_at, move_tokens, token_rows
from maru_kv_ops.transfer_arguments import (
    addresses_argument,
    check_range,
    direction_argument,
    format_argument,
    ids_argument,
    rows_argument,
    shape_argument,
    slots_argument,
    tensor_argument,
    tensor_shape,
)

__all__ = [
    "EngineKVFormat",
    "PageBufferShapeDesc",
    "TransferDirection",
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "single_layer_kv_transfer",
]


def multi_layer_kv_transfer(
    key_value: torch.Tensor,
    key_value_ptrs: torch.Tensor,
    slot_mapping: torch.Tensor,
    paged_memory_device: torch.device | str,
    page_buffer_size: int,
    direction: int,
    engine_kv_format: int,
    block_size: int = 0,
    head_size: int = 0,
    skip_prefix_n_tokens: int = 0,
    block_stride_elems: int = 0,
) -> None:
    """Copy all layers of a token range.

    ``key_value`` ``[kv_size, layers, tokens, width]`` with a contiguous last axis;
    ``key_value_ptrs`` int64 addresses, one per layer (one in all for the formats of one tensor, all
    K before all V for those of two lists); ``slot_mapping`` int64 ``[tokens]``.
    ``page_buffer_size``: slots of the cache. ``head_size``: elements of one head, needed where
    heads lie outside tokens; K and V fused count once. ``skip_prefix_n_tokens``: tokens at the
    front that stay as they are. ``block_stride_elems``: elements between blocks; 0: no padding.
    """
    facts, way = format_argument(engine_kv_format), direction_argument(direction)
    shape = rows_argument("key_value", key_value)
    if len(shape.sizes) != 4 or shape.sizes[0] != facts.kv_size or min(shape.sizes[1::2]) < 1:
        raise TransferRefused(
            f"key_value: expected [{facts.kv_size}, layers, tokens, width] for "
            f"{facts.format.name}, found {shape}"
        )
    _, layers, tokens, width = shape.sizes
    addresses = addresses_argument("key_value_ptrs", key_value_ptrs, facts, layers)
    slots = slots_argument(slot_mapping, tokens)
    if not 0 <= skip_prefix_n_tokens <= tokens:
        raise TransferRefused(f"skip_prefix_n_tokens: {skip_prefix_n_tokens} of {tokens} tokens")
    if min(page_buffer_size, block_size, head_size, block_stride_elems) < 0:
        raise TransferRefused(
            f"sizes: page_buffer_size {page_buffer_size}, block_size {block_size}, head_size "
            f"{head_size}, block_stride_elems {block_stride_elems}: none may be negative"
        )
    if block_size == 0 and (facts.needs_block_size or block_stride_elems != 0):
        raise TransferRefused(
            f"block_size: {facts.format.name} needs the number of tokens of a block, found 0"
        )
    block_tokens = block_size or 1
    if page_buffer_size % block_tokens:
        raise TransferRefused(
            f"page_buffer_size: {page_buffer_size} is no multiple of block_size {block_size}"
        )
    run = width
    if facts.head_major:
        run = head_size * (2 if facts.content is Content.FUSED_HEAD else 1)
        if run < 1 or width % run:
            raise TransferRefused(
                f"head_size: {facts.format.name} has heads of {run} elements, but a token of "
                f"key_value has {width}, which is no multiple of that"
            )
    sizes = PoolSizes(
        layers=layers,
        num_blocks=page_buffer_size // block_tokens,
        block_tokens=block_tokens,
        heads=width // run,
        run_bytes=run * shape.element_bytes,
        block_stride=block_stride_elems * shape.element_bytes,
    )
    pages = pool_geometry(facts, sizes)
    check_range(slots, pages.num_slots, "slot", skip_prefix_n_tokens)
    device = torch.device(paged_memory_device)
    rows = token_rows(slots, skip_prefix_n_tokens)
    _move_all_layers(facts, pages, addresses, device, as_bytes(key_value), rows, way)


def single_layer_kv_transfer(
    lmc_key_value_cache: torch.Tensor,
    vllm_key_value_cache: torch.Tensor | Sequence[torch.Tensor],
    slot_mapping: torch.Tensor,
    direction: int,
    engine_kv_format: int,
    token_major: bool = False,
) -> None:
    """Copy one layer.

    ``lmc_key_value_cache``: staging ``[2, tokens, width]``, with ``token_major``
    ``[tokens, 2, width]``, for formats of one plane ``[tokens, width]``; the last axis contiguous.
    ``vllm_key_value_cache``: the layer's tensor (K and V in a list where they have tensors of their
    own), described by its real strides; see ``geometry.layer_geometry``.
    """
    facts, way = format_argument(engine_kv_format), direction_argument(direction)
    shape = rows_argument("lmc_key_value_cache", lmc_key_value_cache)
    two_planes = facts.kv_size == 2
    plane_at = 1 if token_major else 0
    if len(shape.sizes) != (3 if two_planes else 2) or (two_planes and shape.sizes[plane_at] != 2):
        expected = "[tokens, width]"
        if two_planes:
            expected = "[tokens, 2, width]" if token_major else "[2, tokens, width]"
        raise TransferRefused(
            f"lmc_key_value_cache: expected {expected} for {facts.format.name}, found {shape}"
        )
    staging = as_bytes(lmc_key_value_cache)
    planes = staging.unbind(plane_at) if two_planes else (staging,)
    tokens, width = int(planes[0].shape[0]), shape.sizes[-1]
    slots = slots_argument(slot_mapping, tokens)
    given = vllm_key_value_cache
    tensors = [
        tensor_argument("vllm_key_value_cache", tensor)
        for tensor in (given if isinstance(given, list | tuple) else [given])
    ]
    expected_tensors = facts.num_pointers(1)
    if len(tensors) != expected_tensors:
        raise TransferRefused(
            f"vllm_key_value_cache: {facts.format.name} has {expected_tensors} tensors per layer, "
            f"found {len(tensors)}"
        )
    for tensor in tensors:
        if tensor.dtype != lmc_key_value_cache.dtype:
            raise TransferRefused(
                f"vllm_key_value_cache: expected {lmc_key_value_cache.dtype} as in "
                f"lmc_key_value_cache, found {tensor.dtype}"
            )
    pages = [layer_geometry(facts, tensor_shape(tensor), width) for tensor in tensors]
    if pages[0] != pages[-1]:
        raise TransferRefused(
            f"vllm_key_value_cache: K and V must lie alike, found {tensor_shape(tensors[0])} and "
            f"{tensor_shape(tensors[-1])}"
        )
    check_range(slots, pages[0].num_slots, "slot", 0)
    rows = token_rows(slots, 0)
    for number, plane in enumerate(planes):
        tensor = tensors[min(number, len(tensors) - 1)]
        address = tensor.data_ptr() + number * pages[0].plane_stride
        move_tokens(pages[0], address, tensor.device, plane, rows, way)


def multi_layer_block_kv_transfer(
    paged_buffer_ptrs_tensor: torch.Tensor,
    object_ptrs: Sequence[int],
    block_ids: torch.Tensor,
    device: torch.device | str,
    direction: int,
    shape_desc: PageBufferShapeDesc,
    chunk_tokens: int,
    engine_kv_format: int,
    skip_prefix_n_blocks: int,
) -> None:
    """Copy whole blocks of all layers.

    ``object_ptrs``: addresses in host memory of objects ``[kv_size, nl, chunk_tokens, nh * hs]``;
    ``block_ids`` int64, the same number for each object; ``skip_prefix_n_blocks`` counts over all
    of them. Where K and V are fused, ``shape_desc.hs`` is both. Opaque pages are
    ``NL_X_NB_BS_HS`` with ``bs`` 1 and ``hs`` a page's elements.
    """
    facts, way = format_argument(engine_kv_format), direction_argument(direction)
    desc = shape_argument(shape_desc)
    least = min(desc.nl, desc.nb, desc.bs, desc.nh, desc.hs, desc.element_size)
    if desc.kv_size != facts.kv_size or least < 1 or desc.block_stride_elems < 0:
        raise TransferRefused(
            f"shape_desc: expected kv_size {facts.kv_size} for {facts.format.name} and sizes of 1 "
            f"or more, found {desc}"
        )
    addresses = addresses_argument(
        "paged_buffer_ptrs_tensor", paged_buffer_ptrs_tensor, facts, desc.nl
    )
    ids = ids_argument("block_ids", block_ids)
    if not object_ptrs or len(ids) % len(object_ptrs):
        raise TransferRefused(
            f"block_ids: {len(ids)} ids cannot be divided among {len(object_ptrs)} objects"
        )
    if 0 in object_ptrs:
        raise TransferRefused("object_ptrs: a null address")
    per_object = len(ids) // len(object_ptrs)
    if ids and per_object * desc.bs != chunk_tokens:
        raise TransferRefused(
            f"chunk_tokens: {per_object} blocks of {desc.bs} tokens per object, but objects of "
            f"{chunk_tokens} tokens"
        )
    if not 0 <= skip_prefix_n_blocks <= len(ids):
        raise TransferRefused(f"skip_prefix_n_blocks: {skip_prefix_n_blocks} of {len(ids)} blocks")
    if facts.content is Content.BLOCKED_SCALE and desc.nh != 1:
        raise TransferRefused(
            f"shape_desc: a token of {facts.format.name} has one head, found nh {desc.nh}"
        )
    width = desc.nh * desc.hs * desc.element_size
    heads = desc.nh if facts.head_major else 1
    sizes = PoolSizes(
        layers=desc.nl,
        num_blocks=desc.nb,
        block_tokens=desc.bs,
        heads=heads,
        run_bytes=width // heads,
        block_stride=desc.block_stride_elems * desc.element_size,
    )
    pages = pool_geometry(facts, sizes)
    check_range(ids, desc.nb, "block", skip_prefix_n_blocks)
    where = torch.device(device)
    shape = (facts.kv_size, desc.nl, chunk_tokens, width)
    for number, object_address in enumerate(object_ptrs):
        first = number * per_object
        rows = token_rows(
            [
                block * desc.bs + token if block >= 0 and place >= skip_prefix_n_blocks else -1
                for place, block in enumerate(ids[first : first + per_object], first)
                for token in range(desc.bs)
            ],
            0,
        )
        if rows.slots.numel() == 0:
            continue
        object_bytes = memory_at(object_address, math.prod(shape), torch.device("cpu")).view(shape)
        _move_all_layers(facts, pages, addresses, where, object_bytes, rows, way)


def _move_all_layers(
    facts: FormatFacts,
    pages: PageGeometry,
    addresses: Sequence[int],
    device: torch.device,
    object_bytes: torch.Tensor,
    rows: TokenRows,
    direction: TransferDirection,
) -> None:
    """Move tokens of one object, uint8 ``[kv_size, layers, tokens, width]``."""
    planes, layers = object_bytes.shape[:2]
    for plane, layer in product(range(planes), range(layers)):
        address = addresses[pointer_index(facts, layers, plane, layer)]
        address += plane * pages.plane_stride + layer * pages.layer_stride
        move_tokens(pages, address, device, object_bytes[plane, layer], rows, direction)
