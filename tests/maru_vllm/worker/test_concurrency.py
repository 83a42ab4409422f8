"""Many copies at once, over blocks and objects that change hands all the time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from worker_cases import (
    BLOCKS,
    BLOCKS_PER_CHUNK,
    Store,
    block_bytes,
    cache_tensors,
    load_job,
    store_job,
    worker,
)

from maru_kv_ops.executors import CopyPath, Executor
from maru_kv_ops.host_executor import HostExecutor
from maru_kv_ops.torch_executor import TorchExecutor
from maru_shm.pool.reading import Verify
from maru_shm.types import Extent
from maru_vllm.metadata import JobOutcome, LoadReport, MaruConnectorMetadata, MaruWorkerMetadata
from maru_vllm.worker.copy_runner import ThreadCopyRunner
from maru_vllm.worker.half import WorkerHalf

ENGINES = 16
THREADS_PER_ENGINE = 4
ROUNDS = 12
OBJECTS_KEPT = 24
"""More than are loaded in one round, few enough that space is given out again and again."""
DEADLINE_S = 60.0


@dataclass
class _Engine:
    half: WorkerHalf
    caches: dict[str, torch.Tensor]
    expected: dict[int, bytes] = field(default_factory=dict)
    """What each block must hold when the round is over."""

    def refill(self, source: random.Random) -> None:
        """The engine computes: every block holds something new."""
        storage = next(iter(self.caches.values())).untyped_storage()
        everything = torch.empty(0, dtype=torch.uint8).set_(storage)
        everything.random_(generator=torch.Generator().manual_seed(source.randrange(1 << 60)))
        self.expected = {block: block_bytes(self.caches, block) for block in range(BLOCKS)}


@pytest.mark.parametrize(
    ("executor", "path"),
    [(TorchExecutor, CopyPath.TORCH), (HostExecutor, CopyPath.HOST)],
    ids=lambda value: str(value) if isinstance(value, CopyPath) else "",
)
def test_no_byte_goes_astray_when_64_threads_store_and_load(
    store: Store, executor: Callable[[], Executor], path: CopyPath
) -> None:
    """B02: random reuse of blocks and of space, every byte against an oracle."""
    source = random.Random(2)
    engines: list[_Engine] = []
    for seed in range(ENGINES):
        caches = cache_tensors(seed=seed)
        runner = ThreadCopyRunner(THREADS_PER_ENGINE)
        half = worker(store, caches, runner, verify=Verify.FULL, executor=executor())
        engines.append(_Engine(half, caches))
    objects: dict[Extent, list[bytes]] = {}
    object_bytes = sum(len(block_bytes(engines[0].caches, b)) for b in range(BLOCKS_PER_CHUNK))
    for round_number in range(ROUNDS):
        stores: dict[int, tuple[Extent, list[bytes]]] = {}
        loads = 0
        for number, engine in enumerate(engines):
            engine.refill(source)
            blocks = source.sample(range(BLOCKS), BLOCKS)
            load_jobs, store_jobs = [], []
            for slot in range(BLOCKS // BLOCKS_PER_CHUNK):
                ids = tuple(blocks[slot * BLOCKS_PER_CHUNK : (slot + 1) * BLOCKS_PER_CHUNK])
                job_id = (round_number * ENGINES + number) * 10 + slot
                if objects and source.random() < 0.6:
                    extent = source.choice(list(objects))
                    load_jobs.append(load_job(job_id, extent, ids, request=f"r{job_id}"))
                    engine.expected.update(zip(ids, objects[extent], strict=True))
                else:
                    extent = store.reserve(object_bytes)
                    stores[job_id] = (extent, [engine.expected[block] for block in ids])
                    store_jobs.append(store_job(job_id, extent, ids))
            loads += len(load_jobs)
            metadata = MaruConnectorMetadata(
                store.ref(), loads=tuple(load_jobs), stores=tuple(store_jobs)
            )
            engine.half.start_load_kv(metadata)
            engine.half.wait_for_save(metadata)
        loaded = _finish_round(store, engines, stores, loads)
        assert all(report.outcome is JobOutcome.DONE for report in loaded)
        assert all(report.path is path for report in loaded)
        for engine in engines:
            for block, content in engine.expected.items():
                assert block_bytes(engine.caches, block) == content
        objects.update(stores.values())
        for extent in source.sample(list(objects), max(0, len(objects) - OBJECTS_KEPT)):
            store.remove(extent)
            del objects[extent]
    for engine in engines:
        engine.half.shutdown()


def _finish_round(
    store: Store,
    engines: list[_Engine],
    stores: dict[int, tuple[Extent, list[bytes]]],
    loads: int,
) -> list[LoadReport]:
    """Wait for every job of the round; commit what was stored, return how the loads ended."""
    left = set(stores)
    loaded: list[LoadReport] = []
    give_up = time.monotonic() + DEADLINE_S
    while left or len(loaded) < loads:
        assert time.monotonic() < give_up, "copies did not finish"
        for engine in engines:
            engine.half.transfer_results()
            meta = engine.half.worker_meta()
            if not isinstance(meta, MaruWorkerMetadata):
                continue
            loaded += meta.loads
            for report in meta.stores:
                assert report.outcome is JobOutcome.DONE
                assert report.checksum is not None
                store.commit(stores[report.job_id][0], (report.checksum,))
                left.discard(report.job_id)
        time.sleep(0.001)  # leaves the cores to the copy threads
    return loaded
