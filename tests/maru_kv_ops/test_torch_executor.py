"""The torch executor against the counting oracle, on both of its routes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, cases, small_copy

from maru_kv_ops import torch_executor
from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.errors import MemoryMismatch
from maru_kv_ops.executors import CopyMemory, Executor
from maru_kv_ops.layouts import CacheExtents, KVLayout, ObjectOrder, layout_strides
from maru_kv_ops.plan import CopyPlan, PagePlanner, TransferDirection
from maru_kv_ops.rows import RowCopy, rows_and_runs
from maru_kv_ops.torch_executor import TorchExecutor, split_rows
from maru_kv_ops.views import object_view_for

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
DTYPES = {torch.uint8: 1, torch.bfloat16: 2, torch.float32: 4}

RunPlan = Callable[[CopyPlan, CopyMemory], None]


def on_the_host_route(plan: CopyPlan, memory: CopyMemory) -> None:
    TorchExecutor().run(plan, memory)


def on_the_device_route(plan: CopyPlan, memory: CopyMemory) -> None:
    """What the executor does for caches on a device; torch runs the same operators on the CPU."""
    rows, runs = rows_and_runs(plan.copies)
    for copy in rows:
        torch_executor.move_rows(copy, plan.direction, memory)
    for run in runs:
        torch_executor.move_run(run, plan.direction, memory)


def on_several_threads(plan: CopyPlan, memory: CopyMemory) -> None:
    executor = TorchExecutor(threads=3)
    try:
        executor.run(plan, memory)
    finally:
        executor.close()


def random_bytes(rng: random.Random, size: int) -> torch.Tensor:
    """Bytes in memory that is aligned to 64, as torch and the pool hand it out."""
    memory = torch.empty(size, dtype=torch.uint8)
    memory.copy_(torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8))
    return memory


def flat_bytes(memory: torch.Tensor) -> bytes:
    return memory.numpy().tobytes()


@pytest.mark.parametrize("run_plan", [on_the_host_route, on_the_device_route, on_several_threads])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("direction", list(TransferDirection))
def test_real_tensors_are_copied_byte_for_byte_and_nothing_else_is_touched(
    direction: TransferDirection,
    dtype: torch.dtype,
    run_plan: RunPlan,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_executor, "MIN_THREADED_BYTES", 1)

    @settings(max_examples=25)
    @given(cases(direction, unit=DTYPES[dtype]), st.integers(0, 2**32))
    def check(case: Case, seed: int) -> None:
        rng = random.Random(seed)
        storages = [random_bytes(rng, size) for size in case.region_bytes]
        objects = random_bytes(rng, case.object_base + case.chunk_bytes() + 7)
        before = [flat_bytes(storage) for storage in storages], flat_bytes(objects)
        expected = case.expected(*before, direction)

        tensors = [layer.tensor(storages[layer.region], dtype) for layer in case.layers]
        caches = paged_caches(tensors, num_blocks=case.layers[0].extents["B"])
        assert [view.end_offset for view in caches.views] == [
            layer.view().end_offset for layer in case.layers
        ]
        chunk = object_view_for(caches.views, case.blocks_per_chunk, case.order)
        place = chunk.at(case.object_base, chunk.chunk_bytes)
        plan = PagePlanner(caches.views, chunk).plan(
            place, case.first_block, case.block_ids, direction
        )
        run_plan(plan, CopyMemory(caches.regions, objects))

        assert [flat_bytes(storage) for storage in storages] == [bytes(r) for r in expected[0]]
        assert flat_bytes(objects) == bytes(expected[1])

    check()


# ---------------------------------------------------------------------------- sizes that matter


def bytes_like_an_indexer_cache(page_padding: int) -> list[CacheTensor]:
    """Two layers of rows of 132 bytes (128 values, 4 bytes of scales), 32 rows a page."""
    page = 32 * 132
    layers = []
    for _ in range(2):
        storage = torch.randint(0, 256, (9 * (page + page_padding),), dtype=torch.uint8)
        layers.append(
            CacheTensor(
                torch.as_strided(storage, (9, 32, 132), (page + page_padding, 132, 1)), "BNC"
            )
        )
    return layers


@pytest.mark.parametrize("page_padding", [0, 1, 4, 96, 4096 - 32 * 132 % 4096])
@pytest.mark.parametrize("run_plan", [on_the_host_route, on_the_device_route])
def test_rows_of_132_bytes_survive_a_round_trip(page_padding: int, run_plan: RunPlan) -> None:
    source = bytes_like_an_indexer_cache(page_padding)
    target = bytes_like_an_indexer_cache(page_padding)
    objects = torch.zeros(2 * 4 * 32 * 132, dtype=torch.uint8)

    for tensors, block_ids, direction in ((source, [8, 0, 1, 5], D2H), (target, [2, 7, 3, 4], H2D)):
        caches = paged_caches(tensors, num_blocks=9)
        chunk = object_view_for(caches.views, 4, ObjectOrder.LAYER_OUTERMOST)
        plan = PagePlanner(caches.views, chunk).plan(chunk, 0, block_ids, direction)
        run_plan(plan, CopyMemory(caches.regions, objects))

    for layer in range(2):
        expected = source[layer].tensor[[8, 0, 1, 5]]
        assert torch.equal(target[layer].tensor[[2, 7, 3, 4]], expected)
        assert torch.equal(objects.view(2, 4, 32, 132)[layer], expected)


@pytest.mark.parametrize("layout", list(KVLayout))
@pytest.mark.parametrize("run_plan", [on_the_host_route, on_the_device_route])
def test_a_chunk_holds_the_pages_of_the_engine_in_the_documented_order(
    layout: KVLayout, run_plan: RunPlan
) -> None:
    sizes = {"L": 3, "B": 7, "H": 2, "N": 16, "C": 24}
    shape = [sizes[letter] for letter in layout.value]
    physical = torch.randn(shape).to(torch.bfloat16)
    logical = physical.permute([layout.value.index(letter) for letter in "LBHNC"])
    block_ids = [5, 1, 2]

    caches = paged_caches([CacheTensor(logical[layer], "BHNC") for layer in range(3)], 7)
    chunk = object_view_for(caches.views, len(block_ids), layout.object_order)
    objects = torch.zeros(chunk.chunk_bytes, dtype=torch.uint8)
    plan = PagePlanner(caches.views, chunk).plan(chunk, 0, block_ids, D2H)
    run_plan(plan, CopyMemory(caches.regions, objects))

    pages = "HNC" if "HN" in layout.value.replace("L", "").replace("B", "") else "NHC"
    stored_order = layout.object_order.value + pages
    expected = logical[:, block_ids].permute(["LBHNC".index(letter) for letter in stored_order])
    stored = objects.view(torch.int16).view(expected.shape)
    assert torch.equal(stored, expected.contiguous().view(torch.int16))
    assert caches.views[0].block_stride == (
        layout_strides(layout, CacheExtents(3, 7, 2, 16, 48)).block
    )


def test_all_layers_of_one_storage_are_gathered_in_one_call() -> None:
    storage = torch.zeros(4, 20, 2, 16, 64, dtype=torch.bfloat16)
    caches = paged_caches([CacheTensor(storage[layer], "BHNC") for layer in range(4)], 20)
    chunk = object_view_for(caches.views, 8, ObjectOrder.LAYER_OUTERMOST)

    plan = PagePlanner(caches.views, chunk).plan(chunk, 0, [3, 4, 5, 9, 8, 7, 1, 2], D2H)
    rows, runs = rows_and_runs(plan.copies)

    assert len(plan.copies) == 3, "runs of one, two and three blocks"
    assert [copy.num_bytes for copy in rows] == [plan.num_bytes]
    assert runs == []


def test_pages_whose_strides_share_nothing_are_copied_run_by_run() -> None:
    caches = paged_caches(bytes_like_an_indexer_cache(page_padding=1), num_blocks=9)
    chunk = object_view_for(caches.views, 4, ObjectOrder.LAYER_OUTERMOST)

    plan = PagePlanner(caches.views, chunk).plan(chunk, 0, [8, 0, 1, 5], D2H)
    rows, runs = rows_and_runs(plan.copies)

    assert rows == []
    assert [run.width for run in runs] == [32 * 132] * 8


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=6), st.integers(1, 4))
def test_shares_of_threads_are_the_same_rows_in_the_same_order(
    sizes: list[tuple[int, int]], shares: int
) -> None:
    rows, start = [], 0
    for count, unit in sizes:
        rows.append(RowCopy(0, unit, 0, np.arange(start, start + count, dtype=np.int64), start))
        start += count * unit

    def every_row(copies: list[RowCopy]) -> list[tuple[int, int, int]]:
        return [
            (copy.unit, int(row), copy.object_offset + number * copy.unit)
            for copy in copies
            for number, row in enumerate(copy.rows)
        ]

    divided = split_rows(rows, shares)

    assert len(divided) == shares
    assert every_row([copy for share in divided for copy in share]) == every_row(rows)


def test_large_copies_are_shared_evenly() -> None:
    rows = [RowCopy(0, 4096, 0, np.arange(100, dtype=np.int64), 0)]

    assert [sum(copy.num_bytes for copy in share) for share in split_rows(rows, 4)] == [
        25 * 4096
    ] * 4


# ---------------------------------------------------------------------------- memories


@pytest.mark.parametrize("direction", list(TransferDirection))
def test_memory_smaller_than_the_plan_needs_is_refused_before_anything_moves(
    direction: TransferDirection,
) -> None:
    plan, memory = small_copy(direction)
    too_small: list[Any] = [
        CopyMemory((), memory.objects),
        CopyMemory((memory.regions[0][:-1],), memory.objects),
        CopyMemory(memory.regions, memory.objects[:-1]),
        CopyMemory(memory.regions, memory.objects.view(torch.int32)),
        CopyMemory(memory.regions, memory.objects.view(2, 16)),
        CopyMemory(memory.regions, memory.objects.repeat(4)[::2]),
        CopyMemory(memory.regions, torch.zeros(32, dtype=torch.uint8, device="meta")),
    ]

    for wrong in too_small:
        with pytest.raises(MemoryMismatch):
            TorchExecutor().run(plan, wrong)

    assert memory.regions[0].sum() == 0
    assert memory.objects.unique().tolist() == [7]


def test_the_torch_executor_is_an_executor_and_can_be_closed_twice() -> None:
    executor: Executor = TorchExecutor(threads=2)

    executor.run(*small_copy(H2D))
    executor.close()
    executor.close()

    assert executor.name == "torch"
    with pytest.raises(ValueError, match="0 threads"):
        TorchExecutor(threads=0)


def test_a_copy_leaves_the_threads_of_torch_alone() -> None:
    before = torch.get_num_threads()

    on_several_threads(*small_copy(D2H))

    assert torch.get_num_threads() == before
