"""The plan's arithmetic, replayed byte by byte against an oracle that counts."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paged_cases import Case, Layer, cases

from maru_kv_ops.errors import BlockOutOfRange, DuplicateBlock, ObjectTooSmall, ViewError
from maru_kv_ops.layouts import CacheExtents, KVLayout, ObjectOrder, layout_strides
from maru_kv_ops.plan import CopyPlan, PagePlanner, Run, TransferDirection, plan_pages
from maru_kv_ops.views import ONE, Axis, ObjectView, PagedView, object_view_for

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H


def plan_of(case: Case, direction: TransferDirection) -> CopyPlan:
    views = [layer.view() for layer in case.layers]
    chunk = object_view_for(views, case.blocks_per_chunk, case.order)
    assert chunk.chunk_bytes == case.chunk_bytes()
    place = chunk.at(case.object_base, chunk.chunk_bytes)
    return plan_pages(views, place, case.first_block, case.block_ids, direction)


def replay(
    plan: CopyPlan, regions: list[bytes], objects: bytes
) -> tuple[list[bytearray], bytearray, Counter[tuple[int, int]]]:
    """Run a plan one byte at a time; also count how often each destination byte is written."""
    regions_after = [bytearray(region) for region in regions]
    objects_after = bytearray(objects)
    written: Counter[tuple[int, int]] = Counter()
    for run in plan.runs():
        for byte in range(run.width):
            cache, stored = run.cache_offset + byte, run.object_offset + byte
            if plan.direction is D2H:
                objects_after[stored] = regions[run.region][cache]
                written[-1, stored] += 1
            else:
                regions_after[run.region][cache] = objects[stored]
                written[run.region, cache] += 1
    return regions_after, objects_after, written


@pytest.mark.parametrize("direction", list(TransferDirection))
def test_a_plan_moves_exactly_the_bytes_of_its_blocks(direction: TransferDirection) -> None:
    @given(cases(direction), st.integers(0, 2**32))
    def check(case: Case, seed: int) -> None:
        rng = random.Random(seed)
        regions = [rng.randbytes(size) for size in case.region_bytes]
        objects = rng.randbytes(case.object_base + case.chunk_bytes() + 7)
        plan = plan_of(case, direction)

        regions_after, objects_after, written = replay(plan, regions, objects)

        assert (regions_after, objects_after) == case.expected(regions, objects, direction)
        assert max(written.values(), default=1) == 1
        assert plan.num_bytes == written.total() == sum(1 for _ in case.pairs())
        for run in plan.runs():
            assert run.cache_offset >= 0
            assert run.cache_offset + run.width <= plan.region_ends[run.region]
            assert case.object_base <= run.object_offset
            assert run.object_offset + run.width <= plan.object_end
        for copy in plan.copies:
            assert copy.num_runs == sum(1 for _ in copy.runs())

    check()


def layer(base: int, region: int = 0, **strides: int) -> Layer:
    """A layer of 5 blocks, 2 heads and 2 tokens of 4 bytes, tight unless strides say otherwise."""
    extents = {"B": 5, "K": 1, "P": 1, "H": 2, "N": 2}
    tight = {"B": 16, "K": 16, "P": 16, "H": 8, "N": 4}
    return Layer(region, base, extents, tight | strides, run=4, element=1)


ALMOST_ALIKE = {
    "heads further apart": (layer(0, B=48, H=16), layer(240, B=48, H=24)),
    "tokens further apart": (layer(0, B=32, H=16), layer(160, B=32, H=16, N=8)),
    "blocks further apart": (layer(0), layer(80, B=24)),
    "a third layer out of step": (layer(0), layer(80), layer(176)),
    "a third layer in another region": (layer(0), layer(80), layer(160, region=1)),
    "one layer in each region": (layer(0), layer(80, region=1), layer(3, region=2)),
}


@pytest.mark.parametrize("direction", list(TransferDirection))
@pytest.mark.parametrize("order", list(ObjectOrder))
@pytest.mark.parametrize("layers", ALMOST_ALIKE.values(), ids=ALMOST_ALIKE.keys())
def test_layers_that_are_almost_alike_are_not_taken_for_alike(
    layers: tuple[Layer, ...], order: ObjectOrder, direction: TransferDirection
) -> None:
    case = Case(layers, (512, 512, 512), order, 4, 1, (1, 2, 4), object_base=5)
    rng = random.Random(1)
    regions = [rng.randbytes(size) for size in case.region_bytes]
    objects = rng.randbytes(5 + case.chunk_bytes())

    regions_after, objects_after, _ = replay(plan_of(case, direction), regions, objects)

    assert (regions_after, objects_after) == case.expected(regions, objects, direction)


# ---------------------------------------------------------------------------- lengths of runs

EXTENTS = CacheExtents(layers=4, blocks=10, heads=3, tokens=16, content_bytes=64)
PAGE = 3 * 16 * 64


def layers_of(layout: KVLayout) -> list[PagedView]:
    strides = layout_strides(layout, EXTENTS)
    return [
        PagedView(
            region=0,
            base_offset=layer * strides.layer,
            element_bytes=2,
            num_blocks=EXTENTS.blocks,
            block_stride=strides.block,
            piece=ONE,
            plane=ONE,
            head=Axis(EXTENTS.heads, strides.head),
            token=Axis(EXTENTS.tokens, strides.token),
            run_bytes=EXTENTS.content_bytes,
        )
        for layer in range(EXTENTS.layers)
    ]


def chunk_of(layout: KVLayout, blocks: int = 4) -> tuple[list[PagedView], ObjectView]:
    layers = layers_of(layout)
    return layers, object_view_for(layers, blocks, layout.object_order)


@pytest.mark.parametrize(
    ("layout", "run_bytes", "num_runs"),
    [
        (KVLayout.LBHNC, PAGE, 4 * 4),
        (KVLayout.LBNHC, PAGE, 4 * 4),
        (KVLayout.LHBNC, 16 * 64, 4 * 4 * 3),
        (KVLayout.BLHNC, 4 * PAGE, 4),
        (KVLayout.BLNHC, 4 * PAGE, 4),
        (KVLayout.BHLNC, 16 * 64, 4 * 4 * 3),
    ],
)
def test_scattered_blocks_move_in_the_longest_runs_that_the_layout_has(
    layout: KVLayout, run_bytes: int, num_runs: int
) -> None:
    layers, chunk = chunk_of(layout)

    plan = plan_pages(layers, chunk, 0, [7, 2, 9, 4], D2H)

    assert {run.width for run in plan.runs()} == {run_bytes}
    assert sum(1 for _ in plan.runs()) == num_runs
    assert len(plan.copies) == 1, "all layers and blocks are one strided copy"


@pytest.mark.parametrize("layout", [KVLayout.LBHNC, KVLayout.LBNHC])
def test_neighbouring_blocks_of_a_layer_melt_into_one_run(layout: KVLayout) -> None:
    layers, chunk = chunk_of(layout)

    plan = plan_pages(layers, chunk, 0, [5, 6, 7, 1], D2H)

    assert sorted(run.width for run in plan.runs()) == [PAGE] * 4 + [3 * PAGE] * 4


@pytest.mark.parametrize("layout", [KVLayout.BLHNC, KVLayout.BLNHC])
def test_neighbouring_blocks_of_all_layers_melt_into_one_run(layout: KVLayout) -> None:
    layers, chunk = chunk_of(layout)

    plan = plan_pages(layers, chunk.at(640, chunk.chunk_bytes), 0, [3, 4, 5, 6], H2D)

    block = 4 * PAGE
    assert list(plan.runs()) == [Run(0, cache_offset=3 * block, object_offset=640, width=4 * block)]


def test_consecutive_ids_at_positions_apart_do_not_melt() -> None:
    layers, chunk = chunk_of(KVLayout.BLHNC)

    plan = plan_pages(layers, chunk, 0, [3, -1, 4, 5], D2H)

    assert sorted(run.width // PAGE for run in plan.runs()) == [4, 8]


def test_layers_listed_against_their_memory_order_are_still_one_strided_copy() -> None:
    layers = list(reversed(layers_of(KVLayout.LBHNC)))
    chunk = object_view_for(layers, 2, ObjectOrder.LAYER_OUTERMOST)

    plan = plan_pages(layers, chunk, 0, [8, 1], D2H)

    assert len(plan.copies) == 1
    first = next(iter(plan.runs()))
    assert first.cache_offset == layers[0].base_offset + 8 * PAGE
    assert first.object_offset == 0


def test_offsets_beyond_32_bits_are_exact() -> None:
    view = replace(layers_of(KVLayout.LBHNC)[0], num_blocks=2**28, base_offset=2**40)
    chunk = object_view_for([view], 1, ObjectOrder.LAYER_OUTERMOST)

    plan = plan_pages([view], chunk.at(2**41, chunk.chunk_bytes), 0, [2**28 - 1], D2H)

    assert list(plan.runs()) == [Run(0, 2**40 + (2**28 - 1) * PAGE, 2**41, PAGE)]


def test_nothing_to_move_is_an_empty_plan() -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)

    for block_ids in ([], [-1, -1]):
        plan = plan_pages(layers, chunk, 1, block_ids, H2D)
        assert plan.copies == ()
        assert plan.num_bytes == 0


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("direction", list(TransferDirection))
@pytest.mark.parametrize(
    ("first_block", "block_ids"),
    [(0, [10]), (0, [1, 2**40]), (1, [0, 1, 2, 3]), (-1, [0]), (5, [])],
)
def test_a_block_that_does_not_exist_is_refused(
    first_block: int, block_ids: list[int], direction: TransferDirection
) -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)

    with pytest.raises(BlockOutOfRange):
        plan_pages(layers, chunk, first_block, block_ids, direction)


def test_a_negative_object_offset_is_refused() -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)

    with pytest.raises(BlockOutOfRange):
        plan_pages(layers, chunk.at(-64, chunk.chunk_bytes), 0, [1], D2H)


def test_an_object_one_byte_too_small_is_refused() -> None:
    layers, chunk = chunk_of(KVLayout.BLHNC)

    with pytest.raises(ObjectTooSmall, match=str(chunk.chunk_bytes)):
        plan_pages(layers, chunk.at(0, chunk.chunk_bytes - 1), 0, [1], D2H)


def test_a_load_into_one_block_twice_is_refused_but_a_store_from_it_is_not() -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)

    with pytest.raises(DuplicateBlock, match=r"\[3\]"):
        plan_pages(layers, chunk, 0, [3, 1, 3], H2D)
    assert plan_pages(layers, chunk, 0, [3, 1, 3], D2H).num_bytes == 3 * 4 * PAGE


def test_an_object_of_another_layout_is_refused() -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)
    other = object_view_for(layers, 4, ObjectOrder.BLOCK_OUTERMOST)

    with pytest.raises(ViewError):
        PagePlanner(layers, chunk).plan(other, 0, [1], D2H)
    with pytest.raises(ViewError):
        PagePlanner(layers[1:], chunk)


def test_layers_of_unlike_block_counts_are_refused() -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)
    layers[2] = replace(layers[2], num_blocks=9)

    with pytest.raises(ViewError, match=r"\[9, 10\]"):
        PagePlanner(layers, chunk)


def test_one_tensor_listed_as_two_layers_is_refused() -> None:
    layers, chunk = chunk_of(KVLayout.LBHNC)
    layers[3] = layers[1]

    with pytest.raises(ViewError, match="views 1 and 3"):
        PagePlanner(layers, chunk)


def test_offsets_beyond_63_bits_are_refused() -> None:
    view = replace(layers_of(KVLayout.LBHNC)[0], base_offset=2**63 - PAGE)
    chunk = object_view_for([view], 1, ObjectOrder.LAYER_OUTERMOST)

    with pytest.raises(ViewError, match="63 bits"):
        PagePlanner([view], chunk)
