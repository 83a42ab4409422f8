from __future__ import annotations

import pytest
import torch
from worker_cases import (
    BLOCKS,
    CONTENT,
    HEADS,
    TOKENS,
    cache_tensors,
    chunk_layout,
    layer_names,
)

from maru_kv_ops.layouts import KVLayout
from maru_vllm.layout import LayoutRefused
from maru_vllm.worker.caches import register_caches


@pytest.mark.parametrize("layout", KVLayout)
def test_every_known_layout_registers_with_the_bytes_that_the_scheduler_reckons_with(
    layout: KVLayout,
) -> None:
    """B05: works or refuses, never silent."""
    described = chunk_layout(layout)
    caches = register_caches(described, cache_tensors(layout))
    assert caches.part_layout.chunk_bytes == described.part_bytes
    assert caches.part_layout.order is layout.object_order


def test_layers_are_paired_by_name_not_by_their_place_in_the_dictionary() -> None:
    """B19."""
    tensors = cache_tensors()
    backwards = dict(reversed(tensors.items()))
    forwards = register_caches(chunk_layout(), tensors)
    assert register_caches(chunk_layout(), backwards).planner.plan(
        forwards.part_layout, 0, [1], direction=0
    ) == forwards.planner.plan(forwards.part_layout, 0, [1], direction=0)


@pytest.mark.parametrize(
    "shape",
    [
        (BLOCKS, TOKENS, HEADS, CONTENT),  # token-major shape over what should be head-major
        (BLOCKS, HEADS, TOKENS, CONTENT + 8),
        (BLOCKS, HEADS + 1, TOKENS, CONTENT),
        (BLOCKS - 1, HEADS, TOKENS, CONTENT),
        (2, BLOCKS, TOKENS, HEADS, CONTENT // 2),  # K and V apart
        (BLOCKS, HEADS * TOKENS * CONTENT),
    ],
)
def test_an_unknown_shape_is_refused_with_what_was_expected_and_found(
    shape: tuple[int, ...],
) -> None:
    """B05."""
    tensors = cache_tensors()
    name = layer_names()[1]
    tensors[name] = torch.zeros(shape, dtype=torch.bfloat16)
    with pytest.raises(LayoutRefused) as refusal:
        register_caches(chunk_layout(), tensors)
    message = str(refusal.value)
    assert name in message
    assert f"{BLOCKS} blocks, {HEADS} heads, {TOKENS} tokens" in message
    assert str(shape) in message


def test_memory_order_other_than_the_resolved_layout_is_refused() -> None:
    with pytest.raises(LayoutRefused, match="LBNHC"):
        register_caches(chunk_layout(KVLayout.LBNHC), cache_tensors(KVLayout.LBHNC))


def test_a_missing_layer_and_a_layer_too_many_are_refused() -> None:
    tensors = cache_tensors()
    missing = dict(tensors)
    del missing[layer_names()[0]]
    with pytest.raises(LayoutRefused, match="registered nothing"):
        register_caches(chunk_layout(), missing)
    with pytest.raises(LayoutRefused, match=r"extra\.layer"):
        register_caches(
            chunk_layout(), tensors | {"extra.layer": torch.zeros_like(tensors[layer_names()[0]])}
        )


def test_a_layer_with_two_tensors_is_refused() -> None:
    """B25: one of the two would be left out."""
    tensors: dict[str, object] = dict(cache_tensors())
    tensors[layer_names()[0]] = [tensors[layer_names()[0]], tensors[layer_names()[1]]]
    with pytest.raises(LayoutRefused, match="list"):
        register_caches(chunk_layout(), tensors)  # type: ignore[arg-type]


def test_a_layer_that_shares_anothers_cache_adds_nothing() -> None:
    tensors = cache_tensors()
    shared = tensors | {"sharing.layer": tensors[layer_names()[2]]}
    assert register_caches(chunk_layout(), shared).part_layout.chunk_bytes == (
        chunk_layout().part_bytes
    )


def test_finer_kernel_blocks_are_taken_where_they_leave_the_bytes_alone() -> None:
    whole = register_caches(chunk_layout(KVLayout.LBNHC), cache_tensors(KVLayout.LBNHC))
    finer = register_caches(chunk_layout(KVLayout.LBNHC), cache_tensors(KVLayout.LBNHC, pieces=2))
    plans = [
        caches.planner.plan(caches.part_layout, 0, [3, 1], direction=0) for caches in (whole, finer)
    ]
    assert plans[0].copies == plans[1].copies


def test_finer_kernel_blocks_are_refused_where_they_would_reorder_the_tokens() -> None:
    with pytest.raises(LayoutRefused, match=f"--block-size {TOKENS // 2}"):
        register_caches(chunk_layout(), cache_tensors(KVLayout.LBHNC, pieces=2))
