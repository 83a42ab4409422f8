"""Where KV bytes lie: in an engine's paged cache, and in a stored chunk.

Both are described by the same axes, in bytes:

    block   one page of the engine's block table
    piece   kernel blocks inside a manager block (an engine may cut its pages finer than its table)
    plane   K and V where they are apart
    head    KV head
    token   token inside the piece
    run     the contiguous bytes innermost

A ``PagedView`` is one tensor of one layer's cache, an ``ObjectView`` one stored chunk of all of
them. Memory is named by region: the n-th flat memory that an executor is given. Tensors that
share storage share a region, which lets copies run across layers.

How a chunk is ordered
----------------------
A chunk keeps the engine's page bytes: inside a page the axes stand in the order in which they
lie in the engine's memory (larger stride first), with every hole between them closed. Pages are
stored ``[layer][block][page]`` or ``[block][layer][page]`` (``ObjectOrder``), layers in the order
in which the caller lists the views, each with its own page size. So the meaning of an object's
bytes depends on: the layout's name, the order and page sizes of the layers, block and chunk size,
the kernel block size, and the packing of the attention backend; all of these belong in the
namespace. It does not depend on how the engine allocated: padding, storage offsets and which layers
share a storage leave no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maru_kv_ops.errors import ViewError
from maru_kv_ops.layouts import ObjectOrder


@dataclass(frozen=True, slots=True)
class Axis:
    """One index of a strided view."""

    extent: int
    stride: int
    """Bytes from one index to the next; without meaning where ``extent`` is 1."""


ONE = Axis(extent=1, stride=0)
"""An axis that a cache does not have."""


@dataclass(frozen=True, slots=True)
class PagedView:
    """One tensor of one layer's paged cache, by its real strides.

    Raises ``ViewError`` if an extent or stride is not positive or two indices share a byte.
    """

    region: int
    """Which of the executor's memories the offsets count in."""
    base_offset: int
    """Bytes from the region's start to the first byte of block 0."""
    element_bytes: int
    num_blocks: int
    """Blocks that the engine's block table can name."""
    block_stride: int
    piece: Axis
    plane: Axis
    head: Axis
    token: Axis
    run_bytes: int
    """Contiguous bytes innermost."""

    def __post_init__(self) -> None:
        if self.region < 0 or self.base_offset < 0:
            raise ViewError(
                f"paged view: region {self.region}, base offset {self.base_offset}: "
                "both must be 0 or more"
            )
        if self.element_bytes < 1 or self.run_bytes < 1 or self.run_bytes % self.element_bytes:
            raise ViewError(
                f"paged view: a run of {self.run_bytes} bytes is not a positive number of elements "
                f"of {self.element_bytes} bytes"
            )
        occupied = self.run_bytes
        axes = (Axis(self.num_blocks, self.block_stride), *self.page_axes())
        for axis in sorted(axes, key=lambda axis: axis.stride):
            if axis.extent < 1:
                raise ViewError(f"paged view: an axis of {axis.extent} entries in {self}")
            if axis.extent > 1 and axis.stride < occupied:
                raise ViewError(
                    f"paged view: a stride of {axis.stride} bytes is less than the {occupied} "
                    f"bytes that one of its {axis.extent} entries covers, so entries would share "
                    f"bytes: {self}"
                )
            if axis.extent > 1:
                occupied = (axis.extent - 1) * axis.stride + occupied

    def page_axes(self) -> tuple[Axis, Axis, Axis, Axis]:
        """The axes inside a page: piece, plane, head, token."""
        return (self.piece, self.plane, self.head, self.token)

    @property
    def page_bytes(self) -> int:
        """KV bytes of one block in this tensor, holes not counted."""
        size = self.run_bytes
        for axis in self.page_axes():
            size *= axis.extent
        return size

    @property
    def end_offset(self) -> int:
        """Bytes from the region's start to behind the last byte of the last block."""
        end = self.base_offset + (self.num_blocks - 1) * self.block_stride + self.run_bytes
        for axis in self.page_axes():
            end += (axis.extent - 1) * axis.stride
        return end


@dataclass(frozen=True, slots=True)
class StoredPages:
    """Where the pages of one ``PagedView`` stand in a chunk. All in bytes."""

    offset: int
    """From the chunk's start to the page of its first block."""
    block_stride: int
    piece_stride: int
    plane_stride: int
    head_stride: int
    token_stride: int

    def page_strides(self) -> tuple[int, int, int, int]:
        """Strides in the order of ``PagedView.page_axes``."""
        return (self.piece_stride, self.plane_stride, self.head_stride, self.token_stride)


@dataclass(frozen=True, slots=True)
class ObjectView:
    """One stored chunk (one rank's part of it): which byte is which index of which layer."""

    base_offset: int
    """Bytes from the start of the object memory (the pool's mapping) to the chunk."""
    available_bytes: int
    """Bytes that belong to the chunk there; planning refuses fewer than ``chunk_bytes``."""
    chunk_bytes: int
    """Bytes of one full chunk."""
    blocks: int
    """Blocks of one full chunk."""
    order: ObjectOrder
    pages: tuple[StoredPages, ...]
    """One for each paged view, in the same order."""

    def at(self, base_offset: int, available_bytes: int) -> ObjectView:
        """Return the same chunk layout at another place of the object memory."""
        return ObjectView(
            base_offset=base_offset,
            available_bytes=available_bytes,
            chunk_bytes=self.chunk_bytes,
            blocks=self.blocks,
            order=self.order,
            pages=self.pages,
        )


def object_view_for(
    layers: Sequence[PagedView], blocks_per_chunk: int, order: ObjectOrder
) -> ObjectView:
    """Lay out a chunk of ``blocks_per_chunk`` blocks of all ``layers``, at offset 0.

    The rule stands in the module's docstring. ``order`` comes from the engine's layout name
    (``KVLayout(name).object_order``) and not from the strides: with one layer, or one block,
    strides cannot tell the two orders apart, and engines of one namespace must agree.

    Raises ``ViewError`` if there is no layer or no block.
    """
    if not layers or blocks_per_chunk < 1:
        raise ViewError(
            f"object layout: {len(layers)} layers and {blocks_per_chunk} blocks per chunk; "
            "both must be 1 or more"
        )
    all_pages_bytes = sum(view.page_bytes for view in layers)
    pages = []
    offset = 0
    for view in layers:
        if order is ObjectOrder.BLOCK_OUTERMOST:
            pages.append(_tight_pages(view, offset, block_stride=all_pages_bytes))
            offset += view.page_bytes
        else:
            pages.append(_tight_pages(view, offset, block_stride=view.page_bytes))
            offset += view.page_bytes * blocks_per_chunk
    chunk_bytes = all_pages_bytes * blocks_per_chunk
    return ObjectView(
        base_offset=0,
        available_bytes=chunk_bytes,
        chunk_bytes=chunk_bytes,
        blocks=blocks_per_chunk,
        order=order,
        pages=tuple(pages),
    )


def _tight_pages(view: PagedView, offset: int, block_stride: int) -> StoredPages:
    """Close the holes of a page, its axes in the order of the engine's memory."""
    axes = view.page_axes()
    strides = [0] * len(axes)
    step = view.run_bytes
    innermost_first = sorted(range(len(axes)), key=lambda i: (axes[i].stride, -i))
    for i in innermost_first:
        if axes[i].extent > 1:
            strides[i] = step
            step *= axes[i].extent
    return StoredPages(offset, block_stride, *strides)
