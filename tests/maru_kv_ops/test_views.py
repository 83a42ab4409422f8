"""What views and object layouts say about themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from maru_kv_ops.errors import ViewError
from maru_kv_ops.layouts import KVLayout, ObjectOrder
from maru_kv_ops.views import ONE, Axis, PagedView, object_view_for

PAGE = PagedView(
    region=0,
    base_offset=128,
    element_bytes=2,
    num_blocks=5,
    block_stride=1000,
    piece=ONE,
    plane=ONE,
    head=Axis(2, 400),
    token=Axis(3, 100),
    run_bytes=64,
)


def test_a_view_knows_its_page_and_its_end() -> None:
    assert PAGE.page_bytes == 2 * 3 * 64
    assert PAGE.end_offset == 128 + 4 * 1000 + 400 + 2 * 100 + 64


def test_heads_outside_blocks_are_a_view_like_any_other() -> None:
    heads_outermost = replace(PAGE, block_stride=300, head=Axis(2, 1500))

    assert heads_outermost.page_bytes == PAGE.page_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"run_bytes": 0},
        {"run_bytes": 63},
        {"run_bytes": 101},  # longer than from one token to the next
        {"token": Axis(3, 0)},
        {"token": Axis(3, -100)},
        {"token": Axis(0, 100)},
        {"head": Axis(2, 250)},  # the second head starts inside the first
        {"block_stride": 600},
        {"num_blocks": 0},
        {"base_offset": -1},
        {"region": -1},
    ],
)
def test_a_view_whose_entries_share_bytes_or_do_not_exist_is_refused(
    wrong: dict[str, object],
) -> None:
    with pytest.raises(ViewError):
        replace(PAGE, element_bytes=1, **wrong) if wrong == {"run_bytes": 101} else replace(
            PAGE, **wrong
        )


def test_layers_of_unlike_pages_stand_behind_each_other_in_the_callers_order() -> None:
    small = replace(PAGE, base_offset=0, head=ONE)
    layers = [PAGE, small]

    by_layer = object_view_for(layers, 4, ObjectOrder.LAYER_OUTERMOST)
    by_block = object_view_for(layers, 4, ObjectOrder.BLOCK_OUTERMOST)

    assert by_layer.chunk_bytes == by_block.chunk_bytes == 4 * (384 + 192)
    assert [(p.offset, p.block_stride) for p in by_layer.pages] == [(0, 384), (4 * 384, 192)]
    assert [(p.offset, p.block_stride) for p in by_block.pages] == [(0, 576), (384, 576)]


def test_padding_and_place_leave_no_trace_in_a_chunk() -> None:
    tight = replace(PAGE, base_offset=0, block_stride=384, head=Axis(2, 192), token=Axis(3, 64))
    for order in ObjectOrder:
        assert object_view_for([PAGE], 4, order) == object_view_for([tight], 4, order)


def test_the_order_inside_a_page_is_that_of_the_engines_memory() -> None:
    token_major = replace(PAGE, head=Axis(2, 64), token=Axis(3, 128))

    head_major_pages = object_view_for([PAGE], 1, ObjectOrder.LAYER_OUTERMOST).pages[0]
    token_major_pages = object_view_for([token_major], 1, ObjectOrder.LAYER_OUTERMOST).pages[0]

    assert (head_major_pages.head_stride, head_major_pages.token_stride) == (192, 64)
    assert (token_major_pages.head_stride, token_major_pages.token_stride) == (64, 128)


def test_a_chunk_without_layers_or_blocks_is_refused() -> None:
    with pytest.raises(ViewError):
        object_view_for([], 4, ObjectOrder.LAYER_OUTERMOST)
    with pytest.raises(ViewError):
        object_view_for([PAGE], 0, ObjectOrder.LAYER_OUTERMOST)


def test_block_outermost_layouts_are_those_whose_names_begin_with_b() -> None:
    assert [layout.name for layout in KVLayout if layout.object_order.value == "BL"] == [
        "BLHNC",
        "BLNHC",
        "BHLNC",
    ]
