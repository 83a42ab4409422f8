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
Work goes to the current stream of the cache's device. Which rows move is worked out on the host, so
ids that lie on a device are read back: the one place where these operations wait for a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from maru_kv_ops.errors import TransferRefused
from maru_kv_ops.formats import (
    FORMATS,
    SCALE_BYTES,
    Content,
    EngineKVFormat,
    FormatFacts,
    PageBufferShapeDesc,
)
from maru_kv_ops.geometry import (
    PageGeometry,
    PoolSizes,
    RowPart,
    TensorShape,
    check_rows,
    layer_geometry,
    pointer_index,
    pool_geometry,
)
from maru_kv_ops.plan import TransferDirection


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
    facts, way = _format_of(engine_kv_format), _direction_of(direction)
    shape = _shape_of(key_value)
    if len(shape.sizes) != 4 or shape.sizes[0] != facts.kv_size or min(shape.sizes[1::2]) < 1:
        raise TransferRefused(
            f"key_value: expected [{facts.kv_size}, layers, tokens, width] for "
            f"{facts.format.name}, found {shape}"
        )
    check_rows("key_value", shape)
    _, layers, tokens, width = shape.sizes
    addresses = _addresses("key_value_ptrs", key_value_ptrs, facts, layers)
    ids = _ids("slot_mapping", slot_mapping, tokens)
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
    _check_scale(facts, sizes)
    pages = pool_geometry(facts, sizes)
    _check_range(ids, pages.num_slots, "slot", skip_prefix_n_tokens)
    rows = _rows_of(ids, skip_prefix_n_tokens)
    object_bytes = _as_bytes(key_value)
    for plane in range(facts.kv_size):
        for layer in range(layers):
            address = addresses[pointer_index(facts, layers, plane, layer)]
            address += plane * pages.plane_stride + layer * pages.layer_stride
            _move_tokens(pages, address, paged_memory_device, object_bytes[plane, layer], rows, way)


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
    facts, way = _format_of(engine_kv_format), _direction_of(direction)
    shape = _shape_of(lmc_key_value_cache)
    two_planes = facts.kv_size == 2
    plane_at = 1 if token_major else 0
    if len(shape.sizes) != (3 if two_planes else 2) or (two_planes and shape.sizes[plane_at] != 2):
        expected = "[tokens, width]"
        if two_planes:
            expected = "[tokens, 2, width]" if token_major else "[2, tokens, width]"
        raise TransferRefused(
            f"lmc_key_value_cache: expected {expected} for {facts.format.name}, found {shape}"
        )
    check_rows("lmc_key_value_cache", shape)
    staging = _as_bytes(lmc_key_value_cache)
    planes = staging.unbind(plane_at) if two_planes else (staging,)
    tokens, width = int(planes[0].shape[0]), shape.sizes[-1]
    ids = _ids("slot_mapping", slot_mapping, tokens)
    given = vllm_key_value_cache
    tensors = [given] if isinstance(given, torch.Tensor) else list(given)
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
    pages = [layer_geometry(facts, _shape_of(tensor), width) for tensor in tensors]
    if pages[0] != pages[-1]:
        raise TransferRefused(
            f"vllm_key_value_cache: K and V must lie alike, found {_shape_of(tensors[0])} and "
            f"{_shape_of(tensors[-1])}"
        )
    _check_range(ids, pages[0].num_slots, "slot", 0)
    rows = _rows_of(ids, 0)
    for number, plane in enumerate(planes):
        tensor = tensors[min(number, len(tensors) - 1)]
        address = tensor.data_ptr() + number * pages[0].plane_stride
        _move_tokens(pages[0], address, tensor.device, plane, rows, way)


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
    facts, way = _format_of(engine_kv_format), _direction_of(direction)
    desc = shape_desc
    sizes = (desc.nl, desc.nb, desc.bs, desc.nh, desc.hs, desc.element_size)
    if desc.kv_size != facts.kv_size or min(sizes) < 1 or desc.block_stride_elems < 0:
        raise TransferRefused(
            f"shape_desc: expected kv_size {facts.kv_size} for {facts.format.name} and sizes of 1 "
            f"or more, found {desc}"
        )
    addresses = _addresses("paged_buffer_ptrs_tensor", paged_buffer_ptrs_tensor, facts, desc.nl)
    ids = _ids("block_ids", block_ids, None)
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
    width = desc.nh * desc.hs * desc.element_size
    heads = desc.nh if facts.head_major else 1
    pool = PoolSizes(
        layers=desc.nl,
        num_blocks=desc.nb,
        block_tokens=desc.bs,
        heads=heads,
        run_bytes=width // heads,
        block_stride=desc.block_stride_elems * desc.element_size,
    )
    _check_scale(facts, pool)
    pages = pool_geometry(facts, pool)
    _check_range(ids, desc.nb, "block", skip_prefix_n_blocks)
    shape = (facts.kv_size, desc.nl, chunk_tokens, width)
    for number, object_address in enumerate(object_ptrs):
        first = number * per_object
        slots = [
            id * desc.bs + offset if id >= 0 and first + place >= skip_prefix_n_blocks else -1
            for place, id in enumerate(ids[first : first + per_object])
            for offset in range(desc.bs)
        ]
        rows = _rows_of(slots, 0)
        if not rows.slots:
            continue
        objects = _memory_at(object_address, shape[0] * shape[1] * shape[2] * width, "cpu")
        planes = objects.view(shape)
        for plane in range(facts.kv_size):
            for layer in range(desc.nl):
                address = addresses[pointer_index(facts, desc.nl, plane, layer)]
                address += plane * pages.plane_stride + layer * pages.layer_stride
                _move_tokens(pages, address, device, planes[plane, layer], rows, way)


# ---------------------------------------------------------------------------- moving


@dataclass(frozen=True, slots=True)
class _Rows:
    """Which tokens move."""

    positions: list[int]
    """In the object."""
    slots: list[int]
    """In the cache, one for each position."""


def _rows_of(ids: Sequence[int], first: int) -> _Rows:
    positions = [i for i in range(first, len(ids)) if ids[i] >= 0]
    return _Rows(positions, [ids[i] for i in positions])


def _move_tokens(
    pages: PageGeometry,
    address: int,
    device: torch.device | str,
    object_rows: torch.Tensor,
    rows: _Rows,
    direction: TransferDirection,
) -> None:
    """Move tokens of one plane of one layer; ``object_rows`` uint8 ``[tokens, width]``."""
    if not rows.slots:
        return
    slots = torch.tensor(rows.slots)
    positions = torch.tensor(rows.positions)
    for part, cache in _cache_parts(pages, address, device):
        blocks = (slots // pages.block_tokens).to(cache.device)
        offsets = (slots % pages.block_tokens).to(cache.device)
        stored = object_rows[:, part.object_offset : part.object_offset + _part_bytes(part)]
        stored = stored.view(len(stored), part.heads, part.run_bytes)
        at = positions.to(stored.device)
        if direction is TransferDirection.D2H:
            stored[at] = cache[blocks, offsets].to(stored.device)
        else:
            cache[blocks, offsets] = stored[at].to(cache.device)


def _cache_parts(
    pages: PageGeometry, address: int, device: torch.device | str
) -> Iterator[tuple[RowPart, torch.Tensor]]:
    """Each part of the rows, as uint8 ``[blocks, tokens, heads, run]`` over the cache's memory."""
    for part in pages.parts:
        shape = (pages.num_blocks, pages.block_tokens, part.heads, part.run_bytes)
        strides = (pages.block_stride, part.slot_stride, part.head_stride, 1)
        end = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        memory = _memory_at(address + part.cache_offset, end, device)
        yield part, memory.as_strided(shape, strides)


def _part_bytes(part: RowPart) -> int:
    return part.heads * part.run_bytes


@dataclass(frozen=True, slots=True)
class _DeviceMemory:
    """Memory of a CUDA device, in the form that torch takes addresses in."""

    __cuda_array_interface__: dict[str, object]


def _memory_at(address: int, num_bytes: int, device: torch.device | str) -> torch.Tensor:
    """Return ``num_bytes`` at ``address`` as a flat uint8 tensor that does not own them."""
    where = torch.device(device)
    if where.type == "cpu":
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)
    interface: dict[str, object] = {
        "shape": (num_bytes,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 2,
    }
    return torch.as_tensor(_DeviceMemory(interface), device=where)


# ---------------------------------------------------------------------------- arguments


def _format_of(number: int) -> FormatFacts:
    try:
        return FORMATS[EngineKVFormat(int(number))]
    except ValueError:
        raise TransferRefused(
            f"engine_kv_format: {number} is no known format; they are 0 to {len(FORMATS) - 1}"
        ) from None


def _direction_of(number: int) -> TransferDirection:
    try:
        return TransferDirection(int(number))
    except ValueError:
        raise TransferRefused(f"direction: {number} is neither H2D (0) nor D2H (1)") from None


def _shape_of(tensor: torch.Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8, the last axis that much longer."""
    size = tensor.element_size()
    if tensor.shape[-1] == 1:
        tensor = tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))
    return tensor if size == 1 and tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


def _int64s(name: str, tensor: torch.Tensor) -> list[int]:
    if tensor.dtype is not torch.int64:
        raise TypeError(f"{name}: expected int64, found {tensor.dtype}")
    if tensor.dim() != 1 or (tensor.numel() > 1 and tensor.stride(0) != 1):
        raise TransferRefused(f"{name}: expected one contiguous dimension of int64")
    return [int(value) for value in tensor.tolist()]


def _addresses(name: str, tensor: torch.Tensor, facts: FormatFacts, layers: int) -> list[int]:
    addresses = _int64s(name, tensor)
    expected = facts.num_pointers(layers)
    if len(addresses) != expected:
        raise TransferRefused(
            f"{name}: {facts.format.name} with {layers} layers has {expected} addresses, found "
            f"{len(addresses)}"
        )
    return addresses


def _ids(name: str, tensor: torch.Tensor, expected: int | None) -> list[int]:
    ids = _int64s(name, tensor)
    if expected is not None and len(ids) != expected:
        raise TransferRefused(
            f"{name}: expected a slot for each of {expected} tokens, found {len(ids)}"
        )
    return ids


def _check_range(ids: Sequence[int], limit: int, what: str, first: int) -> None:
    for place in range(first, len(ids)):
        if ids[place] >= limit:
            raise TransferRefused(
                f"{what} {ids[place]} at position {place}: the cache has {what}s 0 to {limit - 1}; "
                "nothing was moved"
            )


def _check_scale(facts: FormatFacts, sizes: PoolSizes) -> None:
    if facts.content is Content.BLOCKED_SCALE and (
        sizes.heads != 1 or sizes.run_bytes <= SCALE_BYTES
    ):
        raise TransferRefused(
            f"a token of {facts.format.name} is one head of values and {SCALE_BYTES} bytes of "
            f"scale, found {sizes.heads} heads of {sizes.run_bytes} bytes"
        )
