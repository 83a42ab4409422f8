"""Copies between paged caches and stored chunks as pure arithmetic.

A wrong number here copies the neighbour's bytes and still reports success. So planning stands
alone: no tensors, no memory, only integers, replayed against a slow oracle in the tests.

Planning has two steps. ``PagePlanner`` pairs the axes of both sides once for a set of layers: axes
that are contiguous on both sides melt into the run, axes that continue each other on both sides
become one, and layers that lie a constant distance apart on both sides become an axis of their own.
``PagePlanner.plan`` then only places blocks, so it costs microseconds per chunk.

All offsets are in bytes. Python's integers do not overflow; a plan never holds an offset of 2**63
or more, because every one of them lies inside a view that passed the planner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from itertools import product

from maru_kv_ops.errors import BlockOutOfRange, DuplicateBlock, ObjectTooSmall, ViewError
from maru_kv_ops.views import ObjectView, PagedView, StoredPages

_MAX_OFFSET = 2**63 - 1
"""Executors and kernels hold offsets as signed 64-bit integers."""


@unique
class TransferDirection(IntEnum):
    """Which side is written. The values are those that the field's copy operations use."""

    H2D = 0
    """Load: object into engine pages."""
    D2H = 1
    """Store: engine pages into object."""


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same copy again, ``count`` times, each time this many bytes further."""

    count: int
    cache_stride: int
    """May be negative: layers need not lie in the order in which they are listed."""
    object_stride: int


@dataclass(frozen=True, slots=True)
class Run:
    """One contiguous piece of memory on both sides."""

    region: int
    cache_offset: int
    object_offset: int
    width: int


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Runs of one width in one region: every start, repeated along every ``repeats``."""

    region: int
    width: int
    """Bytes of one run."""
    repeats: tuple[Repeat, ...]
    """Outermost on the object's side first."""
    cache_starts: tuple[int, ...]
    """Bytes from the region's start, one per block or per run of neighbouring blocks."""
    object_starts: tuple[int, ...]
    """Bytes from the object memory's start, ascending, one for each of ``cache_starts``."""

    @property
    def num_runs(self) -> int:
        """How many contiguous pieces move."""
        runs = len(self.cache_starts)
        for repeat in self.repeats:
            runs *= repeat.count
        return runs

    def runs(self) -> Iterator[Run]:
        """Yield every contiguous piece; slow, for tests and for executors without strides."""
        for indices in product(*(range(repeat.count) for repeat in self.repeats)):
            cache_shift = sum(
                i * repeat.cache_stride for i, repeat in zip(indices, self.repeats, strict=True)
            )
            object_shift = sum(
                i * repeat.object_stride for i, repeat in zip(indices, self.repeats, strict=True)
            )
            for cache_start, object_start in zip(
                self.cache_starts, self.object_starts, strict=True
            ):
                yield Run(
                    region=self.region,
                    cache_offset=cache_start + cache_shift,
                    object_offset=object_start + object_shift,
                    width=self.width,
                )


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """What to move. Every byte of the destination is named at most once."""

    direction: TransferDirection
    copies: tuple[StridedCopy, ...]
    region_ends: tuple[int, ...]
    """Per region the bytes it must have; an executor checks this against the memory it is given."""
    object_end: int
    """Bytes that the object memory must have."""
    num_bytes: int
    """Bytes that move."""

    def runs(self) -> Iterator[Run]:
        """Yield every contiguous piece of every copy."""
        for copy in self.copies:
            yield from copy.runs()


@dataclass(frozen=True, slots=True)
class _PageShape:
    """One or several layers' pages of one block, both sides paired; starts still missing."""

    region: int
    width: int
    repeats: tuple[Repeat, ...]
    cache_base: int
    cache_block_stride: int
    object_base: int
    object_block_stride: int

    @property
    def blocks_are_neighbours(self) -> bool:
        """Whether blocks with consecutive ids make one longer run."""
        return self.cache_block_stride == self.object_block_stride == self.width


class PagePlanner:
    """Plans copies of whole blocks between one set of layers and chunks of one layout.

    Immutable after construction; ``plan`` may be called from any thread.
    """

    def __init__(self, layers: Sequence[PagedView], layout: ObjectView) -> None:
        """Pair ``layers`` with the pages of ``layout`` (its place in memory does not matter here).

        Raises ``ViewError`` if the two do not belong together: another number of layers, layers of
        different block counts, one tensor listed twice, or offsets beyond 63 bits.
        """
        if len(layers) != len(layout.pages):
            raise ViewError(
                f"plan: {len(layers)} paged views, but the object has pages for "
                f"{len(layout.pages)}; list the same layers for both"
            )
        block_counts = sorted({view.num_blocks for view in layers})
        if len(block_counts) != 1:
            raise ViewError(
                f"plan: layers of {block_counts} blocks; one block table serves all layers, so "
                "their block counts must be equal"
            )
        seen: dict[tuple[int, int], int] = {}
        for index, view in enumerate(layers):
            first = seen.setdefault((view.region, view.base_offset), index)
            if first != index:
                raise ViewError(
                    f"plan: views {first} and {index} start at the same byte (region "
                    f"{view.region}, offset {view.base_offset}); layers that share a cache are "
                    "listed once"
                )
        region_ends = [0] * (1 + max(view.region for view in layers))
        for view in layers:
            region_ends[view.region] = max(region_ends[view.region], view.end_offset)
        if max(region_ends) > _MAX_OFFSET:
            raise ViewError(f"plan: offsets up to {max(region_ends)} do not fit into 63 bits")

        self._num_blocks = block_counts[0]
        self._layout = layout
        self._page_bytes = sum(view.page_bytes for view in layers)
        self._region_ends = tuple(region_ends)
        paired = [_pair(view, pages) for view, pages in zip(layers, layout.pages, strict=True)]
        self._shapes = tuple(_join_layers(paired))

    def plan(
        self,
        object_view: ObjectView,
        first_block: int,
        block_ids: Sequence[int],
        direction: TransferDirection,
    ) -> CopyPlan:
        """Plan the blocks ``first_block ..`` of one chunk against the pages ``block_ids``.

        ``block_ids[i]`` belongs to position ``first_block + i`` of the chunk; a negative id skips
        that position in every layer.

        Raises, before anything moves: ``ViewError`` (the object is of another layout),
        ``ObjectTooSmall``, ``BlockOutOfRange``, and for loads ``DuplicateBlock``.
        """
        self._check(object_view, first_block, block_ids, direction)
        blocks = [
            _BlockSpan(position, block_id, 1)
            for position, block_id in enumerate(block_ids, start=first_block)
            if block_id >= 0
        ]
        spans = _join_neighbours(blocks)
        copies: list[StridedCopy] = []
        for shape in self._shapes:
            if shape.blocks_are_neighbours:
                for length in sorted({span.length for span in spans}):
                    same = [span for span in spans if span.length == length]
                    copies.append(_place(shape, object_view.base_offset, same, length))
            elif blocks:
                copies.append(_place(shape, object_view.base_offset, blocks, 1))
        return CopyPlan(
            direction=direction,
            copies=tuple(copies),
            region_ends=self._region_ends,
            object_end=object_view.base_offset + object_view.chunk_bytes,
            num_bytes=len(blocks) * self._page_bytes,
        )

    def _check(
        self,
        object_view: ObjectView,
        first_block: int,
        block_ids: Sequence[int],
        direction: TransferDirection,
    ) -> None:
        layout = self._layout
        if object_view.pages is not layout.pages and object_view.pages != layout.pages:
            raise ViewError(
                "plan: the object is not of the layout that this planner was made for; make its "
                "view with `.at(offset, bytes)` of that layout"
            )
        if object_view.available_bytes < layout.chunk_bytes:
            raise ObjectTooSmall(
                f"plan: the object has {object_view.available_bytes} bytes at offset "
                f"{object_view.base_offset}, a chunk needs {layout.chunk_bytes}; nothing was moved"
            )
        if not 0 <= object_view.base_offset <= _MAX_OFFSET - layout.chunk_bytes:
            raise BlockOutOfRange(
                f"plan: object offset {object_view.base_offset} is negative or beyond 63 bits"
            )
        if first_block < 0 or first_block + len(block_ids) > layout.blocks:
            raise BlockOutOfRange(
                f"plan: blocks {first_block} to {first_block + len(block_ids)} of a chunk of "
                f"{layout.blocks} blocks; nothing was moved"
            )
        if block_ids and max(block_ids) >= self._num_blocks:
            raise BlockOutOfRange(
                f"plan: block id {max(block_ids)}, but the cache has blocks 0 to "
                f"{self._num_blocks - 1}; nothing was moved"
            )
        if direction is TransferDirection.H2D:
            used = [block_id for block_id in block_ids if block_id >= 0]
            if len(set(used)) != len(used):
                twice = sorted({block_id for block_id in used if used.count(block_id) > 1})
                raise DuplicateBlock(
                    f"plan: a load into block ids {twice} twice would leave whichever came last; "
                    "nothing was moved"
                )


def plan_pages(
    layers: Sequence[PagedView],
    object_view: ObjectView,
    first_block: int,
    block_ids: Sequence[int],
    direction: TransferDirection,
) -> CopyPlan:
    """Plan one chunk without keeping the planner: ``PagePlanner(layers, …).plan(…)``."""
    return PagePlanner(layers, object_view).plan(object_view, first_block, block_ids, direction)


def join_plans(plans: Sequence[CopyPlan]) -> CopyPlan:
    """One plan for several chunks, so that an executor can share the whole among threads.

    The caller sees to it that no byte is named twice.
    """
    return CopyPlan(
        direction=plans[0].direction,
        copies=tuple(copy for plan in plans for copy in plan.copies),
        region_ends=plans[0].region_ends,
        object_end=max(plan.object_end for plan in plans),
        num_bytes=sum(plan.num_bytes for plan in plans),
    )


@dataclass(frozen=True, slots=True)
class _BlockSpan:
    """``length`` consecutive block ids at consecutive positions of the chunk."""

    position: int
    block_id: int
    length: int


def _join_neighbours(blocks: Sequence[_BlockSpan]) -> list[_BlockSpan]:
    spans: list[_BlockSpan] = []
    for block in blocks:
        if spans:
            last = spans[-1]
            if (
                block.position == last.position + last.length
                and block.block_id == last.block_id + last.length
            ):
                spans[-1] = _BlockSpan(last.position, last.block_id, last.length + block.length)
                continue
        spans.append(block)
    return spans


def _place(
    shape: _PageShape, object_offset: int, spans: Sequence[_BlockSpan], length: int
) -> StridedCopy:
    object_base = object_offset + shape.object_base
    return StridedCopy(
        region=shape.region,
        width=shape.width * length,
        repeats=shape.repeats,
        cache_starts=tuple(
            [shape.cache_base + span.block_id * shape.cache_block_stride for span in spans]
        ),
        object_starts=tuple(
            [object_base + span.position * shape.object_block_stride for span in spans]
        ),
    )


def _pair(view: PagedView, pages: StoredPages) -> _PageShape:
    """Pair one layer's page with its stored form, with as few and as long runs as possible."""
    repeats = [
        Repeat(axis.extent, axis.stride, object_stride)
        for axis, object_stride in zip(view.page_axes(), pages.page_strides(), strict=True)
        if axis.extent > 1
    ]
    width, reduced = _reduce(view.run_bytes, repeats)
    return _PageShape(
        region=view.region,
        width=width,
        repeats=reduced,
        cache_base=view.base_offset,
        cache_block_stride=view.block_stride,
        object_base=pages.offset,
        object_block_stride=pages.block_stride,
    )


def _reduce(width: int, repeats: Sequence[Repeat]) -> tuple[int, tuple[Repeat, ...]]:
    """Order repeats by the object's stride, melt what is contiguous on both sides."""
    inner_first = sorted(repeats, key=lambda repeat: repeat.object_stride)
    reduced: list[Repeat] = []
    for repeat in inner_first:
        if not reduced and repeat.cache_stride == repeat.object_stride == width:
            width *= repeat.count
        elif (
            reduced
            and repeat.cache_stride == reduced[-1].count * reduced[-1].cache_stride
            and repeat.object_stride == reduced[-1].count * reduced[-1].object_stride
        ):
            last = reduced[-1]
            reduced[-1] = Repeat(last.count * repeat.count, last.cache_stride, last.object_stride)
        else:
            reduced.append(repeat)
    return width, tuple(reversed(reduced))


def _join_layers(shapes: Sequence[_PageShape]) -> Iterator[_PageShape]:
    """Turn layers that lie a constant distance apart on both sides into one more repeat."""
    start = 0
    while start < len(shapes):
        first = shapes[start]
        end = start + 1
        cache_step = object_step = 0
        while end < len(shapes) and _alike(first, shapes[end]):
            cache_delta = shapes[end].cache_base - shapes[end - 1].cache_base
            object_delta = shapes[end].object_base - shapes[end - 1].object_base
            if end == start + 1:
                cache_step, object_step = cache_delta, object_delta
            elif (cache_delta, object_delta) != (cache_step, object_step):
                break
            end += 1
        if end - start == 1:
            yield first
        else:
            layer = Repeat(end - start, cache_step, object_step)
            width, repeats = _reduce(first.width, (layer, *first.repeats))
            yield _PageShape(
                region=first.region,
                width=width,
                repeats=repeats,
                cache_base=first.cache_base,
                cache_block_stride=first.cache_block_stride,
                object_base=first.object_base,
                object_block_stride=first.object_block_stride,
            )
        start = end


def _alike(one: _PageShape, other: _PageShape) -> bool:
    return (
        one.region == other.region
        and one.width == other.width
        and one.repeats == other.repeats
        and one.cache_block_stride == other.cache_block_stride
        and one.object_block_stride == other.object_block_stride
    )
