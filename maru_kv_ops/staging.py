"""One layer's KV on its way from objects to pages: which bytes stand where in a staging tensor.

A layer that is loaded ahead of its forward takes two steps. First its bytes are copied out of every
object into one staging tensor on the cache's device, in runs as long as the objects allow (copy
engine); then one call places all of them: ``single_layer_kv_transfer(staging, cache, slots, H2D,
format)``. This module says, without tensors, how the staging tensor is laid out and makes the plan
of the first step.

    token-major pages, MLA   [planes, tokens, width] (one plane: [tokens, width]), slots are tokens
    head-major pages         [blocks, page]: a page is one opaque row and its block's id its slot

The second form is for pages whose inside need not be known to be moved (the CPU backend packs them
for its instruction set); as a format it is ``NL_X_NB_BS_HS`` with one token of a page's width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maru_kv_ops.errors import ViewError
from maru_kv_ops.formats import EngineKVFormat
from maru_kv_ops.plan import CopyPlan, PagePlanner, TransferDirection, join_plans
from maru_kv_ops.views import ONE, Axis, ObjectView, PagedView


@dataclass(frozen=True, slots=True)
class LayerRows:
    """How one layer is staged and placed."""

    format: EngineKVFormat
    """For the placing call."""
    planes: int
    rows_per_block: int
    """Rows, and slots, of one manager block in each plane."""
    row_bytes: int

    @property
    def opaque_pages(self) -> bool:
        """Whether a row is a whole page."""
        return self.rows_per_block == 1 and self.format is EngineKVFormat.NL_X_NB_BS_HS

    def slots_of(self, block_ids: Sequence[int]) -> list[int]:
        """The slots of whole blocks, in the order of the staging tensor's rows."""
        return [
            block_id * self.rows_per_block + row
            for block_id in block_ids
            for row in range(self.rows_per_block)
        ]


PRODUCED = (
    EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
    EngineKVFormat.NL_X_NB_TWO_BS_NH_HS,
    EngineKVFormat.NL_X_NB_BS_HS,
    EngineKVFormat.NL_X_NB_BS_NH_CS,
)
"""Every format that ``layer_rows`` can name."""


def layer_rows(view: PagedView, fused: EngineKVFormat) -> LayerRows:
    """Decide how a layer's pages are staged, from its real strides.

    ``fused``: the format of token-major pages of one plane, ``NL_X_NB_BS_HS`` for MLA or
    ``NL_X_NB_BS_NH_CS``. Raises ``ViewError`` for pages that no placing call can address: heads
    outside the blocks, or a page with holes.
    """
    if _is_one_piece(view):
        if view.plane.extent == 1 and (view.head.extent == 1 or _heads_inside(view)):
            tokens = view.piece.extent * view.token.extent
            return LayerRows(fused, 1, tokens, view.head.extent * view.run_bytes)
        if view.plane.extent == 1:
            return LayerRows(EngineKVFormat.NL_X_NB_BS_HS, 1, 1, view.page_bytes)
    if view.plane.extent == 2 and view.piece.extent == 1 and _heads_inside(view):
        outside = view.plane.stride > view.block_stride
        two_planes = (
            EngineKVFormat.NL_X_TWO_NB_BS_NH_HS if outside else EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
        )
        return LayerRows(two_planes, 2, view.token.extent, view.head.extent * view.run_bytes)
    raise ViewError(
        f"staging: the pages of {view} are not contiguous, so a layer cannot be placed in one call"
    )


def _heads_inside(view: PagedView) -> bool:
    """Whether a token's heads follow each other."""
    return view.head.extent == 1 or view.head.stride == view.run_bytes


def _is_one_piece(view: PagedView) -> bool:
    """Whether a page has no holes."""
    occupied = view.run_bytes
    for axis in sorted(view.page_axes(), key=lambda axis: axis.stride):
        if axis.extent > 1:
            if axis.stride != occupied:
                return False
            occupied *= axis.extent
    return True


@dataclass(frozen=True, slots=True)
class StagedBlocks:
    """Blocks of one object, and where they stand among the blocks that are staged."""

    part_offset: int
    """Bytes from the object memory's start to this rank's part of the object."""
    first_block: int
    """Position in the chunk of the first of them."""
    count: int
    position: int
    """Of the first of them, counted in blocks from the staging tensor's start."""


class LayerStager:
    """Plans the first step for one layer and ``num_blocks`` staged blocks. Immutable."""

    def __init__(
        self, view: PagedView, part: ObjectView, layer: int, rows: LayerRows, num_blocks: int
    ) -> None:
        """``part``: layout of one part of an object; ``layer``: the view's number in it."""
        staged = _staged_view(view, rows, num_blocks)
        self.num_bytes = staged.end_offset
        """Bytes of the staging tensor; it has no holes."""
        self._layout = replace(part, pages=(part.pages[layer],))
        self._planner = PagePlanner((staged,), self._layout)

    def plan(self, blocks: Sequence[StagedBlocks]) -> CopyPlan:
        """The copies out of all objects, as a load whose cache is the staging tensor (region 0)."""
        plans = [
            self._planner.plan(
                self._layout.at(piece.part_offset, self._layout.chunk_bytes),
                piece.first_block,
                range(piece.position, piece.position + piece.count),
                TransferDirection.H2D,
            )
            for piece in blocks
        ]
        return join_plans(plans)


def _staged_view(view: PagedView, rows: LayerRows, num_blocks: int) -> PagedView:
    """The staging tensor, described like a cache that has the staged blocks only."""
    block_bytes = rows.rows_per_block * rows.row_bytes
    plane = ONE
    if rows.planes == 2:
        plane = Axis(2, num_blocks * block_bytes)
    piece, head, token = view.piece, view.head, view.token
    if not rows.opaque_pages:
        token = Axis(view.token.extent, rows.row_bytes)
        piece = Axis(view.piece.extent, view.token.extent * rows.row_bytes)
        head = Axis(view.head.extent, view.run_bytes)
    return PagedView(
        region=0,
        base_offset=0,
        element_bytes=1,
        num_blocks=num_blocks,
        block_stride=block_bytes,
        piece=piece,
        plane=plane,
        head=head,
        token=token,
        run_bytes=view.run_bytes,
    )
