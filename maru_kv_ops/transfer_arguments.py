"""Arguments of the three copy operations, read and refused.

The baseline's counterpart of ``binding/``: what a caller may pass is the same in torch and in the
native modules, and so is what is refused. Messages say which argument, what was expected and what
was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import index
from typing import SupportsIndex, SupportsInt

import torch

from maru_kv_ops.errors import TransferRefused
from maru_kv_ops.formats import FORMATS, EngineKVFormat, FormatFacts, PageBufferShapeDesc
from maru_kv_ops.geometry import TensorShape, check_rows
from maru_kv_ops.plan import TransferDirection


def format_argument(value: object) -> FormatFacts:
    """Return the row of a format: a number, or a member of any module's enumeration."""
    number = _number("engine_kv_format", value)
    if number not in FORMATS:
        raise TransferRefused(
            f"engine_kv_format: {number} is no known format; they are 0 to {len(FORMATS) - 1}"
        )
    return FORMATS[EngineKVFormat(number)]


def direction_argument(value: object) -> TransferDirection:
    """Return the direction: 0 or 1, or a member of any module's enumeration."""
    number = _number("direction", value)
    if number not in (0, 1):
        raise TransferRefused(f"direction: {number} is neither H2D (0) nor D2H (1)")
    return TransferDirection(number)


def shape_argument(value: object) -> PageBufferShapeDesc:
    """Return a copy of a shape description of any module: what counts is its attributes."""
    shape = PageBufferShapeDesc()
    for field in fields(PageBufferShapeDesc):
        found: object = getattr(value, field.name, None)
        if not isinstance(found, SupportsIndex):
            raise TypeError(
                f"shape_desc: expected a PageBufferShapeDesc, found {type(value).__name__} with "
                f"{field.name} {found!r}"
            )
        setattr(shape, field.name, index(found))
    return shape


def rows_argument(name: str, value: object) -> TensorShape:
    """Return sizes and strides of an object or staging tensor; its rows must not overlap."""
    shape = tensor_shape(tensor_argument(name, value))
    if not shape.sizes:
        raise TransferRefused(f"{name}: expected rows of tokens, found {shape}")
    check_rows(name, shape)
    return shape


def tensor_argument(name: str, value: object) -> torch.Tensor:
    """Return the tensor. Raises ``TypeError`` if it is none."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, found {type(value).__name__}")
    return value


def tensor_shape(tensor: torch.Tensor) -> TensorShape:
    """Sizes and strides as numbers."""
    return TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())


def addresses_argument(
    name: str, value: object, facts: FormatFacts, layers: int
) -> tuple[int, ...]:
    """Return the addresses of the tensors of ``layers`` layers."""
    addresses = ids_argument(name, value)
    expected = facts.num_pointers(layers)
    if len(addresses) != expected:
        raise TransferRefused(
            f"{name}: {facts.format.name} with {layers} layers has {expected} addresses, found "
            f"{len(addresses)}"
        )
    if 0 in addresses:
        raise TransferRefused(f"{name}: a null address at position {addresses.index(0)}")
    return addresses


def ids_argument(name: str, value: object) -> tuple[int, ...]:
    """Return int64 numbers; those on a device are read back, which waits for it."""
    tensor = tensor_argument(name, value)
    if tensor.dtype is not torch.int64:
        raise TypeError(f"{name}: expected int64, found {tensor.dtype}")
    if tensor.dim() != 1 or (tensor.numel() > 1 and tensor.stride(0) != 1):
        raise TransferRefused(
            f"{name}: expected one contiguous dimension of int64, found {tensor_shape(tensor)}"
        )
    return tuple(int(number) for number in tensor.tolist())


def slots_argument(value: object, tokens: int) -> tuple[int, ...]:
    """Return a slot for each token."""
    slots = ids_argument("slot_mapping", value)
    if len(slots) != tokens:
        raise TransferRefused(
            f"slot_mapping: expected a slot for each of {tokens} tokens, found {len(slots)}"
        )
    return slots


def check_range(ids: Sequence[int], limit: int, what: str, first: int) -> None:
    """Refuse ids from position ``first`` on that the cache does not have; negative ones skip."""
    for position in range(first, len(ids)):
        if ids[position] >= limit:
            raise TransferRefused(
                f"{what} {ids[position]} at position {position}: the cache has {what}s 0 to "
                f"{limit - 1}; nothing was moved"
            )


def _number(name: str, value: object) -> int:
    if not isinstance(value, SupportsInt):
        raise TypeError(
            f"{name}: expected a member of its enumeration, found {type(value).__name__}"
        )
    return int(value)
