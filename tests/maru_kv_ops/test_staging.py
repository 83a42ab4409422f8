"""Staged copies of one layer, replayed byte for byte against an oracle that knows only the rule
by which a chunk is ordered."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_kv_ops.errors import ViewError
from maru_kv_ops.formats import FORMATS, EngineKVFormat
from maru_kv_ops.layouts import CacheExtents, KVLayout, ObjectOrder, layout_strides
from maru_kv_ops.staging import PRODUCED, LayerStager, StagedBlocks, layer_rows
from maru_kv_ops.views import ONE, Axis, ObjectView, PagedView, object_view_for

LAYERS, HEADS, TOKENS, CONTENT = 3, 2, 4, 6
BLOCKS_PER_CHUNK = 8
PAGE = HEADS * TOKENS * CONTENT
FUSED = EngineKVFormat.NL_X_NB_BS_NH_CS
LATENT = EngineKVFormat.NL_X_NB_BS_HS
CONTIGUOUS = [KVLayout.LBHNC, KVLayout.LBNHC, KVLayout.BLHNC, KVLayout.BLNHC]


def views_of(layout: KVLayout, heads: int = HEADS, tokens: int = TOKENS) -> list[PagedView]:
    extents = CacheExtents(LAYERS, 16, heads, tokens, CONTENT)
    strides = layout_strides(layout, extents)
    return [
        PagedView(
            region=0,
            base_offset=layer * strides.layer,
            element_bytes=2,
            num_blocks=16,
            block_stride=strides.block,
            piece=ONE,
            plane=ONE,
            head=Axis(heads, strides.head),
            token=Axis(tokens, strides.token),
            run_bytes=CONTENT,
        )
        for layer in range(LAYERS)
    ]


def tagged(page_byte: int, layer: int, block: int, chunk: int) -> tuple[int, int, int, int]:
    """What one byte of an object is; unlike for every byte there is."""
    return (chunk, block, layer, page_byte)


@dataclass
class Objects:
    """Chunks in one memory, with gaps between them; every byte a tag of its own."""

    order: ObjectOrder
    offsets: list[int]
    page_bytes: int = PAGE

    def memory(self) -> dict[int, tuple[int, int, int, int]]:
        bytes_of: dict[int, tuple[int, int, int, int]] = {}
        for chunk, offset in enumerate(self.offsets):
            for layer in range(LAYERS):
                for block in range(BLOCKS_PER_CHUNK):
                    place = (
                        layer * BLOCKS_PER_CHUNK + block
                        if self.order is ObjectOrder.LAYER_OUTERMOST
                        else block * LAYERS + layer
                    )
                    start = offset + place * self.page_bytes
                    for byte in range(self.page_bytes):
                        bytes_of[start + byte] = tagged(byte, layer, block, chunk)
        return bytes_of


def part_of(views: list[PagedView], order: ObjectOrder) -> ObjectView:
    return object_view_for(views, BLOCKS_PER_CHUNK, order)


@dataclass(frozen=True)
class Piece:
    chunk: int
    first_block: int
    count: int


def replay(
    layout: KVLayout, pieces: list[Piece], offsets: list[int], layer: int
) -> list[tuple[int, int, int, int] | None]:
    """Stage one layer run by run; the staging tensor's bytes."""
    views = views_of(layout)
    objects = Objects(layout.object_order, offsets)
    memory = objects.memory()
    rows = layer_rows(views[layer], FUSED)
    num_blocks = sum(piece.count for piece in pieces)
    stager = LayerStager(views[layer], part_of(views, layout.object_order), layer, rows, num_blocks)
    staged = []
    for piece in pieces:
        position = sum(other.count for other in staged)
        staged.append(StagedBlocks(offsets[piece.chunk], piece.first_block, piece.count, position))
    plan = stager.plan(staged)
    staging: list[tuple[int, int, int, int] | None] = [None] * stager.num_bytes
    for run in plan.runs():
        assert run.region == 0
        assert run.object_offset + run.width <= plan.object_end
        for byte in range(run.width):
            assert staging[run.cache_offset + byte] is None, "a byte is written twice"
            staging[run.cache_offset + byte] = memory[run.object_offset + byte]
    assert plan.num_bytes == stager.num_bytes == num_blocks * PAGE
    return staging


def expected(pieces: list[Piece], layer: int) -> list[tuple[int, int, int, int]]:
    """Pages as they are, in the order of the pieces: rows of tokens are what a token-major page
    is made of, and a head-major page is one row."""
    return [
        tagged(byte, layer, piece.first_block + block, piece.chunk)
        for piece in pieces
        for block in range(piece.count)
        for byte in range(PAGE)
    ]


ONE_RUN_OVER_MANY_CHUNKS = [Piece(chunk, 0, BLOCKS_PER_CHUNK) for chunk in range(3)]
MANY_RUNS_OF_ONE_CHUNK = [Piece(1, first, 1) for first in (6, 0, 3, 5)]
SEVERAL_OF_SEVERAL_WITH_GAPS = [Piece(2, 1, 3), Piece(0, 0, 2), Piece(0, 4, 2), Piece(2, 6, 2)]


@pytest.mark.parametrize("layout", CONTIGUOUS)
@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize(
    "pieces",
    [ONE_RUN_OVER_MANY_CHUNKS, MANY_RUNS_OF_ONE_CHUNK, SEVERAL_OF_SEVERAL_WITH_GAPS],
    ids=["one run over many chunks", "many runs of one chunk", "several of several with gaps"],
)
def test_every_byte_of_a_layer_is_staged_once_and_in_its_place(
    layout: KVLayout, layer: int, pieces: list[Piece]
) -> None:
    chunk_bytes = LAYERS * BLOCKS_PER_CHUNK * PAGE
    offsets = [4096, 4096 + 256 + chunk_bytes, 64]  # a header between two, the third before them
    assert replay(layout, pieces, offsets, layer) == expected(pieces, layer)


@given(
    layout=st.sampled_from(CONTIGUOUS),
    layer=st.integers(0, LAYERS - 1),
    pieces=st.lists(
        st.builds(
            lambda chunk, first, count: Piece(chunk, first, min(count, BLOCKS_PER_CHUNK - first)),
            st.integers(0, 2),
            st.integers(0, BLOCKS_PER_CHUNK - 1),
            st.integers(1, BLOCKS_PER_CHUNK),
        ),
        min_size=1,
        max_size=6,
    ),
    gaps=st.lists(st.integers(0, 300), min_size=3, max_size=3),
    backwards=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_runs_of_any_chunks_are_staged_as_the_oracle_says(
    layout: KVLayout, layer: int, pieces: list[Piece], gaps: list[int], backwards: bool
) -> None:
    chunk_bytes = LAYERS * BLOCKS_PER_CHUNK * PAGE
    offsets = [sum(gaps[: i + 1]) + i * chunk_bytes for i in range(3)]
    if backwards:
        offsets.reverse()
    assert replay(layout, pieces, offsets, layer) == expected(pieces, layer)


@pytest.mark.parametrize("layout", [KVLayout.LBHNC, KVLayout.LBNHC])
def test_a_layers_blocks_that_follow_each_other_are_one_run_per_chunk(layout: KVLayout) -> None:
    """Layers outermost: the copy engine gets the longest runs that the object has."""
    views = views_of(layout)
    rows = layer_rows(views[1], FUSED)
    stager = LayerStager(views[1], part_of(views, layout.object_order), 1, rows, 16)
    plan = stager.plan([StagedBlocks(0, 0, 8, 0), StagedBlocks(9000, 0, 8, 8)])
    assert [run.width for run in plan.runs()] == [8 * PAGE, 8 * PAGE]


def test_two_planes_are_staged_apart() -> None:
    """``[2, tokens, width]`` from pages that hold K and then V."""
    run = 4
    view = PagedView(
        region=0,
        base_offset=0,
        element_bytes=2,
        num_blocks=5,
        block_stride=2 * TOKENS * HEADS * run,
        piece=ONE,
        plane=Axis(2, TOKENS * HEADS * run),
        head=Axis(HEADS, run),
        token=Axis(TOKENS, HEADS * run),
        run_bytes=run,
    )
    rows = layer_rows(view, FUSED)
    assert rows.format is EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
    assert (rows.planes, rows.rows_per_block, rows.row_bytes) == (2, TOKENS, HEADS * run)
    part = object_view_for([view], 4, ObjectOrder.LAYER_OUTERMOST)
    stager = LayerStager(view, part, 0, rows, 3)
    plan = stager.plan([StagedBlocks(0, 1, 3, 0)])
    half = TOKENS * HEADS * run
    staging: dict[int, int] = {}
    for copied in plan.runs():
        for byte in range(copied.width):
            staging[copied.cache_offset + byte] = copied.object_offset + byte
    assert staging == {
        plane * 3 * half + block * half + byte: (1 + block) * 2 * half + plane * half + byte
        for plane in range(2)
        for block in range(3)
        for byte in range(half)
    }


def test_token_major_pages_are_rows_of_tokens_and_head_major_ones_are_rows_themselves() -> None:
    token_major = layer_rows(views_of(KVLayout.BLNHC)[0], FUSED)
    assert (token_major.format, token_major.rows_per_block) == (FUSED, TOKENS)
    assert token_major.row_bytes == HEADS * CONTENT
    assert token_major.slots_of([3, 0]) == [12, 13, 14, 15, 0, 1, 2, 3]
    head_major = layer_rows(views_of(KVLayout.LBHNC)[0], FUSED)
    assert (head_major.format, head_major.rows_per_block) == (LATENT, 1)
    assert head_major.row_bytes == PAGE
    assert head_major.slots_of([3, 0]) == [3, 0]
    latent = layer_rows(views_of(KVLayout.LBHNC, heads=1)[0], LATENT)
    assert (latent.format, latent.rows_per_block, latent.row_bytes) == (LATENT, TOKENS, CONTENT)


@pytest.mark.parametrize("layout", [KVLayout.LHBNC, KVLayout.BHLNC])
def test_pages_whose_heads_lie_outside_the_blocks_are_refused(layout: KVLayout) -> None:
    with pytest.raises(ViewError, match="not contiguous"):
        layer_rows(views_of(layout)[0], FUSED)


def test_pages_with_holes_are_refused() -> None:
    view = views_of(KVLayout.LBNHC)[0]
    padded = replace(view, token=Axis(TOKENS, view.token.stride + 2), block_stride=1000)
    with pytest.raises(ViewError, match="not contiguous"):
        layer_rows(padded, FUSED)


def test_padding_between_blocks_is_no_hole() -> None:
    view = replace(views_of(KVLayout.LBNHC)[0], block_stride=PAGE + 64, num_blocks=2)
    assert layer_rows(view, FUSED).row_bytes == HEADS * CONTENT


def test_what_is_produced_are_rows_of_the_table_with_as_many_planes() -> None:
    for layout in CONTIGUOUS:
        for fused in (FUSED, LATENT):
            heads = 1 if fused is LATENT else HEADS
            rows = layer_rows(views_of(layout, heads=heads)[0], fused)
            assert rows.format in PRODUCED
            assert rows.planes == FORMATS[rows.format].kv_size
