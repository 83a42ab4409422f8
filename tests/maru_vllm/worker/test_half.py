"""The worker half end to end on a real pool: what is copied, checked, and reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from worker_cases import (
    BLOCKS,
    BLOCKS_PER_CHUNK,
    CONTENT,
    HEADS,
    LAYERS,
    TOKENS,
    ScriptedRunner,
    Store,
    StuckRunner,
    block_bytes,
    cache_tensors,
    chunk_layout,
    load_job,
    store_job,
    worker,
)

from maru_kv_ops.layouts import KVLayout
from maru_shm.errors import MaruError
from maru_shm.pool.checksum import part_checksum
from maru_shm.pool.reading import Verify
from maru_shm.types import Extent, Generation
from maru_vllm.metadata import (
    ChunkCopy,
    JobOutcome,
    LoadJob,
    MaruConnectorMetadata,
    MaruWorkerMetadata,
    StoreReport,
)
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.mapping import MappedPool

OBJECT_BYTES = LAYERS * BLOCKS_PER_CHUNK * HEADS * TOKENS * CONTENT * 2
SOURCE = (9, 2, 3, 14)
TARGET = (1, 8, 7, 11)


def step(half: WorkerHalf, runner: ScriptedRunner, metadata: MaruConnectorMetadata) -> None:
    half.handle_preemptions(metadata)
    half.start_load_kv(metadata)
    half.wait_for_save(metadata)
    runner.run_all()


def stored(half: WorkerHalf) -> tuple[StoreReport, ...]:
    half.transfer_results()
    meta = half.worker_meta()
    assert isinstance(meta, MaruWorkerMetadata)
    return meta.stores


def put_chunk(store: Store, caches: dict[str, torch.Tensor], layout: KVLayout) -> Extent:
    """Store ``SOURCE`` as one engine and return the sealed object."""
    runner = ScriptedRunner()
    half = worker(store, caches, runner, chunk_layout(layout))
    extent = store.reserve(OBJECT_BYTES)
    step(half, runner, MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),)))
    (report,) = stored(half)
    assert report.outcome is JobOutcome.DONE
    assert report.checksum is not None
    assert report.checksum == part_checksum(store.pool.payload(extent))
    store.commit(extent, (report.checksum,))
    return extent


@pytest.mark.parametrize("layout", KVLayout)
def test_what_one_engine_stores_another_loads_into_other_blocks(
    store: Store, layout: KVLayout
) -> None:
    source, target = cache_tensors(layout, seed=1), cache_tensors(layout, seed=2)
    untouched = {block: block_bytes(target, block) for block in range(BLOCKS)}
    extent = put_chunk(store, source, layout)
    runner = ScriptedRunner()
    half = worker(store, target, runner, chunk_layout(layout), verify=Verify.FULL)
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=(load_job(1, extent, TARGET),)))
    reports = half.transfer_results()
    assert reports.finished_recving == {"r"}
    assert not reports.failed_recving
    for from_block, to_block in zip(SOURCE, TARGET, strict=True):
        assert block_bytes(target, to_block) == block_bytes(source, from_block)
    for block in set(range(BLOCKS)) - set(TARGET):
        assert block_bytes(target, block) == untouched[block]


def test_a_load_may_start_inside_a_chunk(store: Store) -> None:
    source, target = cache_tensors(seed=1), cache_tensors(seed=2)
    before = block_bytes(target, 0)
    extent = put_chunk(store, source, KVLayout.LBHNC)
    runner = ScriptedRunner()
    half = worker(store, target, runner)
    jobs = (load_job(1, extent, (5, 6), first_block=2),)
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=jobs))
    assert half.transfer_results().finished_recving == {"r"}
    assert block_bytes(target, 5) == block_bytes(source, SOURCE[2])
    assert block_bytes(target, 6) == block_bytes(source, SOURCE[3])
    assert block_bytes(target, 0) == before


def test_a_store_takes_the_bytes_that_stand_there_when_it_runs_not_when_it_was_submitted(
    store: Store,
) -> None:
    """B01, the worker's half of it: stores are submitted behind the forward and read later."""
    caches = cache_tensors(seed=1)
    runner = ScriptedRunner()
    half = worker(store, caches, runner)
    extent = store.reserve(OBJECT_BYTES)
    metadata = MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),))
    half.start_load_kv(metadata)
    assert not runner.queue
    for tensor in caches.values():
        tensor.fill_(1.5)
    half.wait_for_save(metadata)
    runner.run_all()
    assert (
        bytes(store.pool.payload(extent))
        == torch.full((OBJECT_BYTES // 2,), 1.5, dtype=torch.bfloat16)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def test_ranks_write_and_read_their_own_parts(store: Store) -> None:
    layout = chunk_layout(num_ranks=2, num_parts=2)
    sources = [cache_tensors(seed=1), cache_tensors(seed=2)]
    targets = [cache_tensors(seed=3), cache_tensors(seed=4)]
    extent = store.reserve(2 * OBJECT_BYTES)
    checksums = []
    for rank in (0, 1):
        runner = ScriptedRunner()
        half = worker(store, sources[rank], runner, layout, rank)
        step(
            half, runner, MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),))
        )
        (report,) = stored(half)
        assert report.part == rank
        assert report.checksum is not None
        checksums.append(report.checksum)
    store.commit(extent, tuple(checksums))
    for rank in (0, 1):
        runner = ScriptedRunner()
        half = worker(store, targets[rank], runner, layout, rank, verify=Verify.FULL)
        step(half, runner, MaruConnectorMetadata(store.ref(), loads=(load_job(1, extent, TARGET),)))
        assert not half.transfer_results().failed_recving
        for from_block, to_block in zip(SOURCE, TARGET, strict=True):
            assert block_bytes(targets[rank], to_block) == block_bytes(sources[rank], from_block)


def test_of_ranks_with_the_same_kv_one_writes_and_all_report(store: Store) -> None:
    layout = chunk_layout(num_ranks=2, num_parts=1)
    extent = store.reserve(OBJECT_BYTES)
    before = bytes(store.pool.payload(extent))
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=1), runner, layout, rank=1)
    step(half, runner, MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),)))
    (report,) = stored(half)
    assert (report.outcome, report.checksum, report.part) == (JobOutcome.DONE, None, 0)
    assert bytes(store.pool.payload(extent)) == before


# ---------------------------------------------------------------------------- failures


def evict_before(store: Store, extent: Extent) -> None:
    store.remove(extent)


def replace_by_another(store: Store, extent: Extent) -> None:
    store.remove(extent)
    assert store.reserve(OBJECT_BYTES).offset == extent.offset


def flip_payload(store: Store, extent: Extent) -> None:
    store.pool.payload(extent)[100] ^= 1


def flip_header(store: Store, extent: Extent) -> None:
    place = store.pool.table.place(extent.offset)
    assert place is not None
    store.pool.mapping.buffer[place.slot_offset + 40] ^= 1


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        (evict_before, JobOutcome.STALE),
        (replace_by_another, JobOutcome.STALE),
        (flip_payload, JobOutcome.SUSPECT),
        (flip_header, JobOutcome.SUSPECT),
    ],
)
def test_an_object_that_is_not_what_was_leased_ends_in_a_failed_load(
    store: Store, damage: Callable[[Store, Extent], None], outcome: JobOutcome
) -> None:
    """B10: a load that found nothing is never a success."""
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)
    damage(store, extent)
    caches = cache_tensors(seed=2)
    before = [block_bytes(caches, block) for block in TARGET]
    runner = ScriptedRunner()
    half = worker(store, caches, runner, verify=Verify.FULL)
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=(load_job(1, extent, TARGET),)))
    reports = half.transfer_results()
    assert reports.finished_recving == reports.failed_recving == {"r"}
    (report,) = reports.loads
    assert report.outcome is outcome
    suspects = (int(extent.generation),) if outcome is JobOutcome.SUSPECT else ()
    assert report.suspect_generations == suspects
    if damage is not flip_payload:  # The others are found before anything is copied.
        assert [block_bytes(caches, block) for block in TARGET] == before


def test_all_damaged_objects_of_a_load_are_named_and_no_sound_one(store: Store) -> None:
    extents = [put_chunk(store, cache_tensors(seed=i), KVLayout.LBHNC) for i in range(3)]
    flip_payload(store, extents[0])
    flip_payload(store, extents[2])
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=9), runner, verify=Verify.SAMPLE)
    chunks = tuple(
        ChunkCopy(extent, 0, 0, tuple(range(i * 4, i * 4 + 4))) for i, extent in enumerate(extents)
    )
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=(LoadJob(1, "r", chunks),)))
    (report,) = half.transfer_results().loads
    assert report.outcome is JobOutcome.SUSPECT
    assert report.suspect_generations == (extents[0].generation, extents[2].generation)


def test_an_object_that_is_replaced_during_the_copy_is_a_failed_load(store: Store) -> None:
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=2), runner)

    class EvictingExecutor:
        name = "evicting"

        def run(self, plan: object, memory: object) -> None:
            replace_by_another(store, extent)

        def close(self) -> None: ...

    half._executor = EvictingExecutor()  # type: ignore[assignment]
    half.register_kv_caches(cache_tensors(seed=2))
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=(load_job(1, extent, TARGET),)))
    reports = half.transfer_results()
    assert reports.failed_recving == {"r"}
    assert reports.loads[0].outcome is JobOutcome.STALE


def test_a_flipped_payload_byte_passes_where_only_headers_are_checked(store: Store) -> None:
    """Shows that the checks above find what they claim to find, and what `header` leaves out."""
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)
    flip_payload(store, extent)
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=2), runner, verify=Verify.HEADER)
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=(load_job(1, extent, TARGET),)))
    assert not half.transfer_results().failed_recving


def test_space_that_is_not_reserved_any_more_is_not_written(store: Store) -> None:
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)
    before = bytes(store.pool.payload(extent))
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=2), runner)
    step(half, runner, MaruConnectorMetadata(store.ref(), stores=(store_job(2, extent, SOURCE),)))
    (report,) = stored(half)
    assert report.outcome is JobOutcome.STALE
    assert bytes(store.pool.payload(extent)) == before


def test_jobs_without_a_pool_fail_at_once(store: Store) -> None:
    def refuse(ref: object) -> MappedPool:
        raise MaruError("no pool today")

    runner = ScriptedRunner()
    half = worker(store, cache_tensors(), runner, map_pool=refuse)
    extent = Extent(4096, OBJECT_BYTES, Generation(1))
    metadata = MaruConnectorMetadata(
        store.ref(),
        loads=(load_job(1, extent, TARGET),),
        stores=(store_job(2, extent, SOURCE, request="s"),),
        hold_requests=frozenset({"s"}),
    )
    half.start_load_kv(metadata)
    half.wait_for_save(metadata)
    assert not runner.queue
    reports = half.transfer_results()
    assert reports.failed_recving == {"r"}
    assert reports.finished_sending == {"s"}
    assert [report.outcome for report in reports.stores] == [JobOutcome.FAILED]


def test_a_load_that_is_bound_to_fail_does(store: Store) -> None:
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(), runner)
    job = LoadJob(1, "r", (ChunkCopy(Extent(0, 0, Generation(0)), 0, 0, ()),))
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=(job,)))
    reports = half.transfer_results()
    assert reports.failed_recving == {"r"}
    assert reports.loads[0].suspect_generations == ()


def test_bad_block_ids_fail_the_job_and_move_nothing(store: Store) -> None:
    caches = cache_tensors(seed=2)
    before = [block_bytes(caches, block) for block in range(BLOCKS)]
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)
    runner = ScriptedRunner()
    half = worker(store, caches, runner)
    jobs = (load_job(1, extent, (1, 2, 3, BLOCKS)), load_job(2, extent, (1, 1, 2, 3), request="q"))
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=jobs))
    assert half.transfer_results().failed_recving == {"r", "q"}
    assert [block_bytes(caches, block) for block in range(BLOCKS)] == before


def test_a_runner_that_raises_fails_that_job_and_not_the_others(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)

    class Moody(ScriptedRunner):
        def submit(self, task):  # type: ignore[no-untyped-def]
            if task.job_id == 1:
                raise RuntimeError("not today")
            super().submit(task)

    runner = Moody()
    half = worker(store, cache_tensors(seed=2), runner)
    jobs = (load_job(1, extent, TARGET), load_job(2, extent, SOURCE, request="q"))
    step(half, runner, MaruConnectorMetadata(store.ref(), loads=jobs))
    reports = half.transfer_results()
    assert reports.finished_recving == {"r", "q"}
    assert reports.failed_recving == {"r"}
    assert "not today" in caplog.text


# ---------------------------------------------------------------------------- waiting, ending


def test_flushed_stores_are_finished_before_their_blocks_are_reused(store: Store) -> None:
    caches = cache_tensors(seed=1)
    expected = [block_bytes(caches, block) for block in SOURCE]
    runner = ScriptedRunner()
    half = worker(store, caches, runner)
    extent, other = store.reserve(OBJECT_BYTES), store.reserve(OBJECT_BYTES)
    half.wait_for_save(
        MaruConnectorMetadata(
            store.ref(), stores=(store_job(1, extent, SOURCE), store_job(2, other, SOURCE))
        )
    )
    half.handle_preemptions(MaruConnectorMetadata(store.ref(), flush_stores=frozenset({1, 99})))
    for tensor in caches.values():
        tensor.zero_()
    assert [task.job_id for task in runner.queue] == [2]
    (report,) = stored(half)
    assert report.outcome is JobOutcome.DONE
    store.commit(extent, (report.checksum,) if report.checksum else ())
    target = cache_tensors(seed=5)
    reader_runner = ScriptedRunner()
    reader = worker(store, target, reader_runner)
    jobs = (load_job(1, extent, TARGET),)
    step(reader, reader_runner, MaruConnectorMetadata(store.ref(), loads=jobs))
    assert [block_bytes(target, block) for block in TARGET] == expected


def test_a_store_that_cannot_be_flushed_in_time_is_void(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    runner = StuckRunner()
    half = worker(store, cache_tensors(seed=1), runner)
    extent = store.reserve(OBJECT_BYTES)
    half.wait_for_save(MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),)))
    half.handle_preemptions(MaruConnectorMetadata(store.ref(), flush_stores=frozenset({1})))
    assert "did not finish" in caplog.text
    runner.run_all()
    (report,) = stored(half)
    assert (report.outcome, report.checksum) == (JobOutcome.FAILED, None)


def test_a_step_with_nothing_to_say_has_no_worker_metadata(store: Store) -> None:
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(), runner)
    step(half, runner, MaruConnectorMetadata())
    half.transfer_results()
    assert half.worker_meta() is None


def test_a_job_that_ends_between_two_looks_is_reported_with_its_request_not_before(
    store: Store,
) -> None:
    """The scheduler half must not hear of a load's end in a step before vLLM does."""
    extent = put_chunk(store, cache_tensors(seed=1), KVLayout.LBHNC)
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=2), runner)
    metadata = MaruConnectorMetadata(store.ref(), loads=(load_job(1, extent, TARGET),))
    half.start_load_kv(metadata)
    assert not half.transfer_results().finished_recving
    runner.run_all()
    assert half.worker_meta() is None
    assert half.transfer_results().finished_recving == {"r"}
    meta = half.worker_meta()
    assert meta is not None
    assert [report.job_id for report in meta.loads] == [1]


def test_shutdown_drops_what_has_not_begun_and_gives_the_pool_up(store: Store) -> None:
    runner = ScriptedRunner()
    half = worker(store, cache_tensors(seed=1), runner)
    extent = store.reserve(OBJECT_BYTES)
    half.wait_for_save(MaruConnectorMetadata(store.ref(), stores=(store_job(1, extent, SOURCE),)))
    half.shutdown()
    half.shutdown()
    assert not runner.queue
    assert all(not hasattr(mapped, "objects") for mapped in store.mapped)
