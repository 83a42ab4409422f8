"""Rows of tokens between paged memory that is known by its address and tensors, in torch.

The memory is viewed by strides as ``[blocks, tokens, heads, run]`` bytes and indexed, so alignment
and element types play no part. Addresses are 64 bits wide; no offset is ever held in fewer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from maru_kv_ops.geometry import PageGeometry, RowPart
from maru_kv_ops.plan import TransferDirection


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Which tokens move. The same length; no negative numbers."""

    positions: torch.Tensor
    """int64, in the object."""
    slots: torch.Tensor
    """int64, in the cache."""


def token_rows(slots: Sequence[int], first: int) -> TokenRows:
    """Return the tokens from position ``first`` on whose slot is not negative."""
    positions = [i for i in range(first, len(slots)) if slots[i] >= 0]
    return TokenRows(
        positions=torch.tensor(positions, dtype=torch.int64),
        slots=torch.tensor([slots[i] for i in positions], dtype=torch.int64),
    )


def move_tokens(
    pages: PageGeometry,
    address: int,
    device: torch.device,
    object_rows: torch.Tensor,
    rows: TokenRows,
    direction: TransferDirection,
) -> None:
    """Move tokens of one plane of one layer, whose pages begin at ``address``.

    ``object_rows``: uint8 ``[tokens, width]`` by any strides, on any device.
    """
    if rows.slots.numel() == 0:
        return
    blocks = (rows.slots // pages.block_tokens).to(device)
    offsets = (rows.slots % pages.block_tokens).to(device)
    positions = rows.positions.to(object_rows.device)
    for part, cache in _cache_parts(pages, address, device):
        end = part.object_offset + part.heads * part.run_bytes
        stored = object_rows[:, part.object_offset : end]
        stored = stored.view(-1, part.heads, part.run_bytes)
        if direction is TransferDirection.D2H:
            stored[positions] = cache[blocks, offsets].to(stored.device)
        else:
            cache[blocks, offsets] = stored[positions].to(device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as uint8; the last axis, contiguous, is that much longer."""
    if tensor.shape[-1] == 1:  # torch wants a step of 1 even where there is no next element
        tensor = tensor.as_strided(tensor.shape, (*tensor.stride()[:-1], 1))
    return tensor.view(torch.uint8)


@dataclass(frozen=True)
class _DeviceMemory:
    """Memory of a CUDA device, in the form in which torch takes addresses."""

    __cuda_array_interface__: dict[str, object]


def memory_at(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return ``num_bytes`` at ``address`` as a flat uint8 tensor that does not own them."""
    if device.type == "cpu":
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.uint8)
    interface: dict[str, object] = {
        "shape": (num_bytes,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 2,
    }
    return torch.as_tensor(_DeviceMemory(interface), device=device)


def _cache_parts(
    pages: PageGeometry, address: int, device: torch.device
) -> Iterator[tuple[RowPart, torch.Tensor]]:
    """Each part of the rows, as uint8 ``[blocks, tokens, heads, run]`` over the cache's memory."""
    for part in pages.parts:
        shape = (pages.num_blocks, pages.block_tokens, part.heads, part.run_bytes)
        strides = (pages.block_stride, part.slot_stride, part.head_stride, 1)
        end = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        memory = memory_at(address + part.cache_offset, end, device)
        yield part, memory.as_strided(shape, strides)
