"""The native host executor against the counting oracle, with its threads, and across a fork."""

from __future__ import annotations

import multiprocessing
import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import Case, cases, small_copy

from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.errors import MemoryMismatch
from maru_kv_ops.executors import CopyMemory, CopyPath, Executor
from maru_kv_ops.host_executor import HostExecutor, host_import_error
from maru_kv_ops.layouts import ObjectOrder
from maru_kv_ops.plan import PagePlanner, TransferDirection
from maru_kv_ops.views import object_view_for

pytestmark = pytest.mark.skipif(host_import_error() is not None, reason=str(host_import_error()))

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
MIB = 2**20


def random_bytes(seed: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("direction", list(TransferDirection))
def test_plans_move_every_byte_and_nothing_else_is_touched(
    direction: TransferDirection, threads: int
) -> None:
    executor = HostExecutor(threads)

    @settings(max_examples=60, deadline=None)
    @given(cases(direction), st.integers(0, 2**32))
    def check(case: Case, seed: int) -> None:
        storages = [random_bytes(seed + i, size) for i, size in enumerate(case.region_bytes)]
        objects = random_bytes(seed - 1, case.object_base + case.chunk_bytes() + 7)
        before = [bytes(storage.numpy()) for storage in storages], bytes(objects.numpy())
        expected = case.expected(*before, direction)
        tensors = [layer.tensor(storages[layer.region], torch.uint8) for layer in case.layers]
        caches = paged_caches(tensors, num_blocks=case.layers[0].extents["B"])
        chunk = object_view_for(caches.views, case.blocks_per_chunk, case.order)
        place = chunk.at(case.object_base, chunk.chunk_bytes)
        plan = PagePlanner(caches.views, chunk).plan(
            place, case.first_block, case.block_ids, direction
        )

        assert executor.run(plan, CopyMemory(caches.regions, objects)) is CopyPath.HOST

        assert [bytes(storage.numpy()) for storage in storages] == expected[0]
        assert bytes(objects.numpy()) == expected[1]

    check()


# ---------------------------------------------------------------------------- large copies


class LargeCopy:
    """Whole pages between one layer's cache and one chunk, and what has to come out of it."""

    def __init__(
        self,
        direction: TransferDirection,
        page_bytes: int,
        num_bytes: int,
        *,
        gap: int = 64,
        cache_shift: int = 0,
        object_shift: int = 0,
        seed: int = 0,
    ) -> None:
        blocks = num_bytes // page_bytes
        self.executed = 0
        pitch = page_bytes + gap
        storage = random_bytes(2 * seed, cache_shift + blocks * pitch)
        # The bytes behind the last page's gap belong to nobody; the view ends with the page.
        pages = torch.as_strided(storage, (blocks, 1, page_bytes), (pitch, page_bytes, 1))
        pages = torch.as_strided(pages, pages.shape, pages.stride(), cache_shift)
        caches = paged_caches([CacheTensor(pages, "BNC")], blocks)
        chunk = object_view_for(caches.views, blocks, ObjectOrder.LAYER_OUTERMOST)
        objects = random_bytes(2 * seed + 1, object_shift + blocks * page_bytes + 5)
        ids = list(range(blocks))
        random.Random(seed).shuffle(ids)
        self.plan = PagePlanner(caches.views, chunk).plan(
            chunk.at(object_shift, chunk.chunk_bytes), 0, ids, direction
        )
        self.memory = CopyMemory(caches.regions, objects)
        self.storage, self.objects = storage, objects
        self.expected_storage, self.expected_objects = storage.clone(), objects.clone()
        stored = slice(object_shift, object_shift + blocks * page_bytes)
        if direction is D2H:
            self.expected_objects[stored] = pages[ids].flatten()
        else:
            there = torch.as_strided(
                self.expected_storage, (blocks, page_bytes), (pitch, 1), cache_shift
            )
            there[ids] = objects[stored].view(blocks, page_bytes)

    def check(self) -> None:
        assert torch.equal(self.storage, self.expected_storage)
        assert torch.equal(self.objects, self.expected_objects)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [5 * MIB, 17 * MIB], ids=str)
@pytest.mark.parametrize("direction", list(TransferDirection))
def test_calls_that_are_shared_or_stream_past_the_caches_move_the_same_bytes(
    direction: TransferDirection, num_bytes: int, threads: int
) -> None:
    executor = HostExecutor(threads)
    for page_bytes in (1000, 5001):
        copy = LargeCopy(direction, page_bytes, num_bytes)
        executor.run(copy.plan, copy.memory)
        copy.check()


@pytest.mark.parametrize("direction", list(TransferDirection))
@pytest.mark.parametrize(("cache_shift", "object_shift"), [(0, 1), (3, 0), (31, 33), (63, 8)])
def test_memories_may_begin_at_any_byte(
    direction: TransferDirection, cache_shift: int, object_shift: int
) -> None:
    executor = HostExecutor(2)
    for gap in (7, 64):
        copy = LargeCopy(
            direction,
            4096,
            17 * MIB,
            gap=gap,
            cache_shift=cache_shift,
            object_shift=object_shift,
        )
        executor.run(copy.plan, copy.memory)
        copy.check()


def test_several_threads_share_one_executor() -> None:
    executor = HostExecutor(3)
    copies = [
        LargeCopy((H2D, D2H)[i % 2], 4096 + 32 * i, 5 * MIB, object_shift=i, seed=i)
        for i in range(4)
    ]
    together = threading.Barrier(len(copies))

    def run(copy: LargeCopy) -> None:
        together.wait()
        for _ in range(5):
            executor.run(copy.plan, copy.memory)
        copy.executed = 5

    callers = [threading.Thread(target=run, args=(copy,)) for copy in copies]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()

    for copy in copies:
        assert copy.executed == 5
        copy.check()


# ---------------------------------------------------------------------------- processes


def in_a_child(what: Callable[[], None]) -> None:
    """Fork, as engines with a fork start method do, and expect the child to end well."""
    child = multiprocessing.get_context("fork").Process(target=what)
    child.start()
    child.join(timeout=60)
    ended = child.exitcode
    if ended is None:
        child.kill()
        child.join()
    assert ended == 0, "the child hung" if ended is None else "the child failed; see its output"


def num_threads_here() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_copies_and_its_parent_goes_on() -> None:
    executor = HostExecutor(3)
    first = LargeCopy(D2H, 4096, 5 * MIB)
    executor.run(first.plan, first.memory)
    second, third = LargeCopy(H2D, 4096, 5 * MIB, seed=1), LargeCopy(D2H, 5000, 5 * MIB, seed=2)

    def child() -> None:
        before = num_threads_here()
        executor.run(second.plan, second.memory)
        executor.run(second.plan, second.memory)
        assert num_threads_here() == before + 2
        copied = second.storage.numpy().tobytes() == second.expected_storage.numpy().tobytes()
        assert copied

    in_a_child(child)
    executor.run(third.plan, third.memory)
    third.check()
    in_a_child(lambda: None)  # nothing is left that a child's end would wait for


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_threads_that_the_system_refuses_are_done_without() -> None:
    copy = LargeCopy(D2H, 4096, 5 * MIB)

    def child() -> None:
        executor = HostExecutor(64)
        before = num_threads_here()
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # Room for two of 63 stacks.
        room = 2 * resource.getrlimit(resource.RLIMIT_STACK)[0] + 4 * MIB
        limit = pages * resource.getpagesize() + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        executor.run(copy.plan, copy.memory)
        assert num_threads_here() < before + 63
        copied = copy.objects.numpy().tobytes() == copy.expected_objects.numpy().tobytes()
        assert copied

    in_a_child(child)


def test_threads_end_with_their_executor() -> None:
    before = num_threads_here()
    executor = HostExecutor(3)
    assert num_threads_here() == before, "threads start with the first call that is worth it"
    small, large = LargeCopy(D2H, 4096, MIB), LargeCopy(D2H, 4096, 5 * MIB)
    executor.run(small.plan, small.memory)
    assert num_threads_here() == before
    executor.run(large.plan, large.memory)
    assert num_threads_here() == before + 2
    executor.close()
    del executor
    assert num_threads_here() == before


# ---------------------------------------------------------------------------- memories


@pytest.mark.parametrize("direction", list(TransferDirection))
def test_memory_smaller_than_the_plan_needs_is_refused_before_anything_moves(
    direction: TransferDirection,
) -> None:
    plan, memory = small_copy(direction)
    elsewhere = torch.zeros(64, dtype=torch.uint8, device="meta")
    wrong: list[Any] = [
        CopyMemory((), memory.objects),
        CopyMemory((memory.regions[0][:-1],), memory.objects),
        CopyMemory((elsewhere,), memory.objects),
        CopyMemory(memory.regions, memory.objects[:-1]),
        CopyMemory(memory.regions, memory.objects.view(torch.int32)),
        CopyMemory(memory.regions, memory.objects.repeat(4)[::2]),
        CopyMemory(memory.regions, elsewhere),
    ]

    for one in wrong:
        with pytest.raises(MemoryMismatch):
            HostExecutor().run(plan, one)

    assert memory.regions[0].sum() == 0
    assert set(memory.objects.tolist()) == {7}


def test_the_host_executor_is_an_executor_and_can_be_closed_twice() -> None:
    executor: Executor = HostExecutor(threads=2)

    executor.run(*small_copy(H2D))
    executor.close()
    executor.close()

    assert executor.name == "host"
    with pytest.raises(ValueError, match="0 threads"):
        HostExecutor(threads=0)
