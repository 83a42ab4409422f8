"""What copied is in the worker's reports, and is said once for each path and direction."""

from __future__ import annotations

import logging

import pytest
from worker_cases import (
    BLOCKS_PER_CHUNK,
    CONTENT,
    HEADS,
    LAYERS,
    TOKENS,
    ScriptedRunner,
    Store,
    cache_tensors,
    chunk_layout,
    load_job,
    store_job,
)

from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.plan import CopyPlan
from maru_kv_ops.torch_executor import TorchExecutor
from maru_shm.pool.reading import Verify
from maru_vllm.metadata import JobOutcome, LoadReport, MaruConnectorMetadata, StoreReport
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.mapping import PoolMapping

OBJECT_BYTES = LAYERS * BLOCKS_PER_CHUNK * HEADS * TOKENS * CONTENT * 2
BLOCKS = (9, 2, 3, 14)


class Disguised(TorchExecutor):
    """Copies, and says that it went by whatever path the test likes."""

    path = CopyPath.HOST

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        super().run(plan, memory)
        return self.path


class Worker:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.runner = ScriptedRunner()
        self.executor = Disguised(threads=1)
        self.half = WorkerHalf(
            layout=chunk_layout(),
            rank=0,
            verify=Verify.HEADER,
            runner=self.runner,
            executor=self.executor,
            mapping=PoolMapping(store.map_pool),
        )
        self.half.register_kv_caches(cache_tensors())

    def step(
        self, metadata: MaruConnectorMetadata
    ) -> tuple[tuple[LoadReport, ...], tuple[StoreReport, ...]]:
        self.half.start_load_kv(metadata)
        self.half.wait_for_save(metadata)
        self.runner.run_all()
        self.half.transfer_results()
        reported = self.half.worker_meta()
        assert reported is not None
        return reported.loads, reported.stores


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "go through" in r.getMessage()]


def test_each_path_is_reported_every_time_and_said_once(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(store)
    extent = store.put(bytes(OBJECT_BYTES))
    jobs = iter(range(100))
    with caplog.at_level(logging.INFO, "maru_vllm"):
        for path in (CopyPath.KERNEL, CopyPath.COPY_ENGINE, CopyPath.KERNEL):
            worker.executor.path = path
            load = load_job(next(jobs), extent, BLOCKS)
            (loaded,), _ = worker.step(MaruConnectorMetadata(store.ref(), loads=(load,)))
            assert (loaded.outcome, loaded.path) == (JobOutcome.DONE, path)

            space = store.reserve(OBJECT_BYTES)
            job = store_job(next(jobs), space, BLOCKS)
            _, (done,) = worker.step(MaruConnectorMetadata(store.ref(), stores=(job,)))
            assert (done.outcome, done.path) == (JobOutcome.DONE, path)
    assert said(caplog) == [
        "Maru: loads go through: kernel",
        "Maru: stores go through: kernel",
        "Maru: loads go through: copy_engine",
        "Maru: stores go through: copy_engine",
    ]


def test_a_job_that_copies_nothing_names_no_path(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(store)
    extent = store.put(bytes(OBJECT_BYTES))
    store.remove(extent)
    with caplog.at_level(logging.INFO, "maru_vllm"):
        load = load_job(1, extent, BLOCKS)
        (report,), _ = worker.step(MaruConnectorMetadata(store.ref(), loads=(load,)))
    assert (report.outcome, report.path) == (JobOutcome.STALE, None)
    assert said(caplog) == []
