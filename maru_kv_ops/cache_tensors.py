"""Views of an engine's cache tensors, by their real strides.

Views are taken from ``data_ptr``, strides and storage, never from a shape alone: a logical
``[block, head, token, content]`` tensor over head-major memory is described as what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from maru_kv_ops.errors import ViewError
from maru_kv_ops.views import ONE, Axis, PagedView


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of a layer's paged cache, and what its dimensions are."""

    tensor: torch.Tensor
    axes: str
    """A letter per logical dimension: B block, P plane (K/V), H head, N token, C content. B and C
    are required; C is contiguous. vLLM 0.26 and later hands out ``BHNC``."""


@dataclass(frozen=True, slots=True)
class PagedCaches:
    """A set of layers, ready for planning and for copying."""

    views: tuple[PagedView, ...]
    """One for each tensor, in the order given."""
    regions: tuple[torch.Tensor, ...]
    """The storages behind them as flat uint8 tensors, for ``CopyMemory.regions``."""


def paged_caches(tensors: Sequence[CacheTensor], num_blocks: int) -> PagedCaches:
    """Describe a set of layers' cache tensors; tensors that share storage share a region.

    The order is the caller's and becomes the order of layers in stored chunks, so it must be the
    same in every engine of a namespace: by layer name, never by position. ``num_blocks`` is the
    number of manager blocks: a first dimension that is a multiple of it means finer kernel blocks.

    Raises ``ViewError`` with the expected and the found shape for tensors that do not fit, and if
    they lie on different devices.
    """
    views: list[PagedView] = []
    regions: list[torch.Tensor] = []
    region_of_storage: dict[int, int] = {}
    for cache in tensors:
        if cache.tensor.device != tensors[0].tensor.device:
            raise ViewError(
                f"paged cache: tensors on {tensors[0].tensor.device} and {cache.tensor.device}; "
                "one worker's cache lies on one device"
            )
        storage = cache.tensor.untyped_storage()
        region = region_of_storage.setdefault(storage.data_ptr(), len(regions))
        if region == len(regions):
            regions.append(_flat_bytes(cache.tensor))
        views.append(paged_view(cache, num_blocks, region))
    return PagedCaches(views=tuple(views), regions=tuple(regions))


def paged_view(cache: CacheTensor, num_blocks: int, region: int) -> PagedView:
    """Describe one tensor by its strides; offsets count from the start of its storage.

    Raises ``ViewError`` if dimensions and ``axes`` do not match, the content is not contiguous, the
    first dimension is no multiple of ``num_blocks``, or entries share bytes.
    """
    tensor, axes = cache.tensor, cache.axes
    found = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
    if (
        len(axes) != tensor.dim()
        or len(set(axes)) != len(axes)
        or not set("BC") <= set(axes) <= set("BPHNC")
    ):
        raise ViewError(
            f"paged cache: expected a dimension for each of '{axes}' (letters of BPHNC, each once, "
            f"with B and C), found {found}"
        )
    size = dict(zip(axes, tensor.shape, strict=True))
    stride = dict(zip(axes, tensor.stride(), strict=True))
    element_bytes = tensor.element_size()
    if min(size.values()) < 1 or (size["C"] > 1 and stride["C"] != 1):
        raise ViewError(
            f"paged cache: expected a contiguous content dimension (C of '{axes}') and no empty "
            f"one, found {found}"
        )
    if num_blocks < 1 or size["B"] % num_blocks:
        raise ViewError(
            f"paged cache: expected a multiple of {num_blocks} blocks in dimension B of '{axes}', "
            f"found {found}"
        )

    def axis(letter: str) -> Axis:
        if letter not in size:
            return ONE
        return Axis(size[letter], stride[letter] * element_bytes)

    pieces = size["B"] // num_blocks
    return PagedView(
        region=region,
        base_offset=int(tensor.storage_offset()) * element_bytes,
        element_bytes=element_bytes,
        num_blocks=num_blocks,
        block_stride=stride["B"] * element_bytes * pieces,
        piece=Axis(pieces, stride["B"] * element_bytes),
        plane=axis("P"),
        head=axis("H"),
        token=axis("N"),
        run_bytes=size["C"] * element_bytes,
    )


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())
