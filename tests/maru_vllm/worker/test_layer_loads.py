"""Loads that the step itself needs: bytes, order, failures; on real threads and a real pool."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from worker_cases import (
    BLOCKS,
    BLOCKS_PER_CHUNK,
    CONTENT,
    LAYERS,
    TOKENS,
    ScriptedRunner,
    Store,
    block_bytes,
    cache_tensors,
    chunk_layout,
    layer_names,
    load_job,
    store_job,
    worker,
)

from maru_kv_ops import torch_ops
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.host_executor import host_module
from maru_kv_ops.layouts import KVLayout
from maru_kv_ops.plan import CopyPlan
from maru_kv_ops.torch_executor import TorchExecutor
from maru_shm.pool.reading import Verify
from maru_shm.types import Extent
from maru_vllm.kv_ops import CopyOperations
from maru_vllm.layout import ChunkLayout, LayerPage, LayoutRefused, PageLayout
from maru_vllm.metadata import JobOutcome, LoadJob, MaruConnectorMetadata
from maru_vllm.worker import layer_loads
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.layer_loads import LoadsWithinStep

CONTIGUOUS = [KVLayout.LBHNC, KVLayout.LBNHC, KVLayout.BLHNC, KVLayout.BLNHC]
ALL = sys.maxsize
BY_TORCH = cast(CopyOperations, torch_ops)
BY_HOST = cast("CopyOperations | None", host_module())
Started = list[WorkerHalf]


class GatedExecutor(TorchExecutor):
    """Copies layer after layer, each when the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = threading.Semaphore(0)
        self.fails_at: int | None = None
        self.calls = 0

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        assert self.allowed.acquire(timeout=20)
        self.calls += 1
        if self.calls - 1 == self.fails_at:
            raise OSError("the test lets this copy fail")
        return super().run(plan, memory)


@pytest.fixture
def started() -> Iterator[Started]:
    halves: Started = []
    yield halves
    for half in halves:
        half.shutdown()


def within(release_after: int, operations: CopyOperations = BY_TORCH) -> LoadsWithinStep:
    return LoadsWithinStep(release_after, lambda _: operations)


def stored_chunk(store: Store, source: dict[str, torch.Tensor], layout: ChunkLayout) -> Extent:
    """Blocks 3, 5, 7, 9 of ``source`` as a sealed object, stored by a worker."""
    extent = store.reserve(layout.object_bytes)
    runner = ScriptedRunner()
    half = worker(store, source, runner, layout)
    half.wait_for_save(MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),)))
    runner.run_all()
    half.transfer_results()
    meta = half.worker_meta()
    assert meta is not None
    (report,) = meta.stores
    assert report.checksum is not None
    store.commit(extent, (report.checksum,))
    half.shutdown()
    return extent


SOURCE = (3, 5, 7, 9)


def begin(half: WorkerHalf, store: Store, *jobs: LoadJob) -> None:
    half.start_load_kv(MaruConnectorMetadata(store.ref(), loads=jobs))


def forward(half: WorkerHalf) -> None:
    for name in layer_names():
        half.wait_for_layer_load(name)


def end(half: WorkerHalf, store: Store) -> tuple[set[int], dict[int, JobOutcome]]:
    """The hooks behind the forward: invalid blocks, and each job's outcome."""
    half.wait_for_save(MaruConnectorMetadata(store.ref()))
    reports = half.transfer_results()
    assert not reports.finished_recving, "vLLM asserts that it waits for a request so named"
    invalid = half.invalid_block_ids()
    meta = half.worker_meta()
    assert half.invalid_block_ids() == set(), "reported once"
    return invalid, {report.job_id: report.outcome for report in (meta.loads if meta else ())}


@pytest.mark.parametrize("layout", CONTIGUOUS)
@pytest.mark.parametrize("release_after", [0, 1, ALL])
@pytest.mark.parametrize("verify", [Verify.HEADER, Verify.FULL])
def test_blocks_hold_what_was_stored_and_others_what_they_held(
    store: Store, started: Started, layout: KVLayout, release_after: int, verify: Verify
) -> None:
    source, target = cache_tensors(layout, seed=1), cache_tensors(layout, seed=2)
    before = {block: block_bytes(target, block) for block in range(BLOCKS)}
    extent = stored_chunk(store, source, chunk_layout(layout))
    half = worker(
        store,
        target,
        ScriptedRunner(),
        chunk_layout(layout),
        verify=verify,
        within_step=within(release_after),
    )
    started.append(half)
    # All of the object for one request, its last two blocks for another.
    begin(
        half,
        store,
        load_job(1, extent, (8, 2, 11, 4), request="a"),
        load_job(2, extent, (14, 15), first_block=2, request="b"),
    )
    forward(half)
    assert end(half, store) == (set(), {1: JobOutcome.DONE, 2: JobOutcome.DONE})
    came_from = {8: 3, 2: 5, 11: 7, 4: 9, 14: 7, 15: 9}
    for block in range(BLOCKS):
        wanted = block_bytes(source, came_from[block]) if block in came_from else before[block]
        assert block_bytes(target, block) == wanted, f"block {block}"


def mla(layout: KVLayout) -> ChunkLayout:
    return ChunkLayout(
        pages=PageLayout(
            layout=layout,
            block_size=TOKENS,
            layers=tuple(
                LayerPage(name, 1, TOKENS, CONTENT * 2, "torch.bfloat16", "MLAAttentionSpec")
                for name in layer_names()
            ),
        ),
        num_blocks=BLOCKS,
        chunk_tokens=TOKENS * BLOCKS_PER_CHUNK,
        num_ranks=1,
        num_parts=1,
    )


@pytest.mark.parametrize(
    "operations",
    [
        BY_TORCH,
        pytest.param(BY_HOST, marks=pytest.mark.skipif(BY_HOST is None, reason="no _host")),
    ],
    ids=["torch", "host"],
)
@pytest.mark.parametrize("kind", ["token-major", "head-major", "latent", "latent, padded"])
def test_every_way_of_placing_is_done_alike_by_every_kind_of_operations(
    store: Store, started: Started, operations: CopyOperations, kind: str
) -> None:
    """MLA caches have one head, as an axis of their own; padding lies between blocks."""
    layout = {"token-major": chunk_layout(KVLayout.LBNHC), "head-major": chunk_layout()}.get(
        kind, mla(KVLayout.LBNHC)
    )

    def tensors(seed: int) -> dict[str, torch.Tensor]:
        if not kind.startswith("latent"):
            return cache_tensors(layout.pages.layout, seed)
        block = TOKENS * CONTENT + (32 if kind.endswith("padded") else 0)
        numbers = torch.Generator().manual_seed(seed)
        return {
            name: torch.randn(BLOCKS * block, generator=numbers)
            .to(torch.bfloat16)
            .as_strided((BLOCKS, 1, TOKENS, CONTENT), (block, TOKENS * CONTENT, CONTENT, 1))
            for name in layer_names()
        }

    source, target = tensors(1), tensors(2)
    untouched = block_bytes(target, 0)
    extent = stored_chunk(store, source, layout)
    half = worker(store, target, ScriptedRunner(), layout, within_step=within(1, operations))
    started.append(half)
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    forward(half)
    assert end(half, store) == (set(), {1: JobOutcome.DONE})
    for block, origin in zip((8, 2, 11, 4), SOURCE, strict=True):
        assert block_bytes(target, block) == block_bytes(source, origin)
    assert block_bytes(target, 0) == untouched


@pytest.mark.parametrize("layout", [KVLayout.LHBNC, KVLayout.BHLNC])
def test_layouts_whose_blocks_are_not_in_one_piece_are_refused_at_the_start(
    store: Store, layout: KVLayout
) -> None:
    with pytest.raises(LayoutRefused, match="maru_overlap_load_with_compute"):
        worker(
            store,
            cache_tensors(layout),
            ScriptedRunner(),
            chunk_layout(layout),
            within_step=within(1),
        )
    worker(store, cache_tensors(layout), ScriptedRunner(), chunk_layout(layout)).shutdown()


@pytest.fixture
def gated(store: Store, started: Started) -> Callable[[int], tuple[WorkerHalf, GatedExecutor]]:
    def make(release_after: int) -> tuple[WorkerHalf, GatedExecutor]:
        executor = GatedExecutor()
        half = worker(
            store,
            cache_tensors(seed=2),
            ScriptedRunner(),
            executor=executor,
            within_step=within(release_after),
        )
        started.append(half)
        return half, executor

    return make


Gated = Callable[[int], tuple[WorkerHalf, GatedExecutor]]


def test_the_forward_starts_when_the_first_layers_are_in_place_and_waits_for_each_other(
    store: Store, gated: Gated
) -> None:
    half, executor = gated(1)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    executor.allowed.release()  # one layer only: with two to wait for this would not return
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    half.wait_for_layer_load(layer_names()[0])
    waited = threading.Thread(target=half.wait_for_layer_load, args=(layer_names()[1],))
    waited.start()
    waited.join(0.05)
    assert waited.is_alive()
    executor.allowed.release(LAYERS)
    waited.join(20)
    assert not waited.is_alive()
    forward(half)
    assert end(half, store) == (set(), {1: JobOutcome.DONE})


@pytest.mark.parametrize("fails_at", range(LAYERS))
def test_a_copy_that_fails_makes_its_blocks_invalid_in_the_same_step(
    store: Store, gated: Gated, fails_at: int
) -> None:
    half, executor = gated(1)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    executor.fails_at = fails_at
    executor.allowed.release(2 * LAYERS)
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    forward(half)
    assert end(half, store) == ({8, 2, 11, 4}, {1: JobOutcome.FAILED})
    executor.fails_at = None
    begin(half, store, load_job(2, extent, (8, 2, 11, 4)))  # and the next one is as good as any
    forward(half)
    assert end(half, store) == (set(), {2: JobOutcome.DONE})


def test_a_copy_that_hangs_costs_its_deadline_and_keeps_the_mapping(
    store: Store, gated: Gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_loads, "DEADLINE_S", 0.05)
    half, executor = gated(1)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    forward(half)
    assert end(half, store) == ({8, 2, 11, 4}, {1: JobOutcome.FAILED})
    mapped = store.mapped[-1]
    assert mapped._jobs == 1
    executor.allowed.release(LAYERS)
    half.shutdown()
    assert mapped._jobs == 0


def test_a_layer_that_no_hook_asked_for_fails_the_load(store: Store, gated: Gated) -> None:
    """Its attention may have read the blocks before they were filled."""
    half, executor = gated(1)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    executor.allowed.release(LAYERS)
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    for name in (*layer_names()[:-1], "a layer that shares the memory of another"):
        half.wait_for_layer_load(name)
    assert end(half, store) == ({8, 2, 11, 4}, {1: JobOutcome.FAILED})


def test_an_object_that_is_gone_fails_its_own_job_only(store: Store, gated: Gated) -> None:
    half, executor = gated(ALL)
    gone = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    store.remove(gone)
    executor.allowed.release(LAYERS)
    begin(half, store, load_job(1, gone, (0, 1, 2, 3)), load_job(2, extent, (8, 9, 10, 11)))
    forward(half)
    invalid, outcomes = end(half, store)
    assert invalid == {0, 1, 2, 3}
    assert outcomes == {1: JobOutcome.STALE, 2: JobOutcome.DONE}
    assert executor.calls == LAYERS


def test_damaged_bytes_are_found_behind_the_forward_and_named(
    store: Store, started: Started
) -> None:
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    store.pool.payload(extent)[5] ^= 1
    half = worker(
        store,
        cache_tensors(seed=2),
        ScriptedRunner(),
        verify=Verify.FULL,
        within_step=within(1),
    )
    started.append(half)
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    forward(half)
    half.wait_for_save(MaruConnectorMetadata(store.ref()))
    meta = half.worker_meta()
    assert meta is not None
    (report,) = meta.loads
    assert report.outcome is JobOutcome.SUSPECT
    assert report.suspect_generations == (extent.generation,)
    assert half.invalid_block_ids() == {8, 2, 11, 4}


def test_without_a_pool_every_job_fails_at_once(store: Store, gated: Gated) -> None:
    half, _ = gated(1)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    half.start_load_kv(MaruConnectorMetadata(None, loads=(load_job(1, extent, (8, 2)),)))
    forward(half)
    assert end(half, store) == ({8, 2}, {1: JobOutcome.FAILED})


def test_with_a_draft_model_results_come_before_the_save(store: Store, gated: Gated) -> None:
    half, executor = gated(1)
    executor.allowed.release(LAYERS)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    store.remove(extent)
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    forward(half)
    half.transfer_results()
    assert half.invalid_block_ids() == {8, 2, 11, 4}


def test_a_step_that_loads_nothing_waits_for_nothing(store: Store, gated: Gated) -> None:
    half, _ = gated(1)
    begin(half, store)
    forward(half)
    assert end(half, store) == (set(), {})


def test_a_shutdown_in_the_middle_of_a_step_ends(store: Store, gated: Gated) -> None:
    half, executor = gated(1)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    executor.allowed.release()
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    executor.allowed.release(LAYERS)
    half.shutdown()
    assert store.mapped[-1]._jobs == 0


def test_a_layer_that_is_placed_keeps_no_staging_memory(store: Store, gated: Gated) -> None:
    """Otherwise a step would hold all that it loads twice."""
    half, executor = gated(ALL)
    executor.allowed.release(LAYERS)
    extent = stored_chunk(store, cache_tensors(seed=1), chunk_layout())
    begin(half, store, load_job(1, extent, (8, 2, 11, 4)))
    assert half._layer_loads is not None
    assert half._layer_loads._step is not None
    assert not half._layer_loads._step.staged
    assert len(half._layer_loads._step.spare) <= layer_loads.STAGED_AHEAD + 1
    forward(half)
    assert end(half, store) == (set(), {1: JobOutcome.DONE})
