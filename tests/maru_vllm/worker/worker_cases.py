"""A worker's surroundings in small: a cache, a layout, a real pool with a server behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch

from maru_kv_ops.executors import Executor
from maru_kv_ops.layouts import CacheExtents, KVLayout, layout_strides
from maru_kv_ops.torch_executor import TorchExecutor
from maru_shm.control.local import LocalPlane
from maru_shm.control.messages import CommitItem, ReserveItem
from maru_shm.pool.checksum import part_checksum
from maru_shm.pool.pool import Pool, open_pool
from maru_shm.pool.reading import Verify
from maru_shm.types import Extent, Key, Namespace, PartChecksum
from maru_vllm.layout import ChunkLayout, LayerPage, PageLayout
from maru_vllm.metadata import ChunkCopy, JobOutcome, LoadJob, PoolRef, StoreJob
from maru_vllm.worker.copy_runner import CopyKind, CopyResult, CopyTask, run_task
from maru_vllm.worker.half import WorkerHalf
from maru_vllm.worker.layer_loads import LoadsWithinStep
from maru_vllm.worker.mapping import MappedPool, PoolMapping

NAMESPACE = Namespace(bytes(32))
LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 16, 2, 8, 24
BLOCKS_PER_CHUNK = 4


def layer_names() -> list[str]:
    return [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]


def chunk_layout(
    layout: KVLayout = KVLayout.LBHNC, num_ranks: int = 1, num_parts: int = 1
) -> ChunkLayout:
    return ChunkLayout(
        pages=PageLayout(
            layout=layout,
            block_size=TOKENS,
            layers=tuple(
                LayerPage(name, HEADS, TOKENS, CONTENT * 2, "torch.bfloat16", "FullAttentionSpec")
                for name in layer_names()
            ),
        ),
        num_blocks=BLOCKS,
        chunk_tokens=TOKENS * BLOCKS_PER_CHUNK,
        num_ranks=num_ranks,
        num_parts=num_parts,
    )


def cache_tensors(
    layout: KVLayout = KVLayout.LBHNC, seed: int = 0, pieces: int = 1
) -> dict[str, torch.Tensor]:
    """Tensors as vLLM registers them: views ``[block, head, token, content]`` of one storage."""
    extents = CacheExtents(LAYERS, BLOCKS * pieces, HEADS, TOKENS // pieces, CONTENT * 2)
    strides = layout_strides(layout, extents)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 255, (strides.total_bytes,), dtype=torch.uint8, generator=generator)
    elements = raw.view(torch.bfloat16)
    return {
        name: torch.as_strided(
            elements,
            (extents.blocks, HEADS, extents.tokens, CONTENT),
            (strides.block // 2, strides.head // 2, strides.token // 2, 1),
            storage_offset=index * strides.layer // 2,
        )
        for index, name in enumerate(layer_names())
    }


def block_bytes(caches: dict[str, torch.Tensor], block: int) -> bytes:
    """All KV of one block in logical order, whatever the layout."""
    return b"".join(
        caches[name][block].contiguous().view(torch.uint8).numpy().tobytes()
        for name in layer_names()
    )


class ScriptedRunner:
    """Runs tasks when a test says so, on the test's thread."""

    def __init__(self) -> None:
        self.queue: list[CopyTask] = []
        self._results: list[CopyResult] = []

    def submit(self, task: CopyTask) -> None:
        self.queue.append(task)

    def run_all(self) -> None:
        for task in sorted(self.queue, key=lambda task: task.kind):
            self._results.append(run_task(task))
        self.queue.clear()

    def fail_all(self) -> None:
        for task in self.queue:
            self._results.append(CopyResult(task.job_id, task.kind, JobOutcome.FAILED))
        self.queue.clear()

    def poll(self) -> list[CopyResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Collection[int], deadline_s: float) -> bool:
        wanted = [task for task in self.queue if task.job_id in job_ids]
        for task in wanted:
            self.queue.remove(task)
            self._results.append(run_task(task))
        return True

    def close(self, deadline_s: float) -> bool:
        self.fail_all()
        return True


class StuckRunner(ScriptedRunner):
    """Never finishes a job in time."""

    def wait(self, job_ids: Collection[int], deadline_s: float) -> bool:
        return False


@dataclass
class NoLock:
    closed: bool = False

    def close(self) -> None:
        self.closed = True


@dataclass
class Store:
    """A pool that a server keeps, seen by the scheduler's side of an engine."""

    pool: Pool
    plane: LocalPlane
    keys: int = 0
    mapped: list[MappedPool] = field(default_factory=list)

    def ref(self) -> PoolRef:
        return PoolRef(
            path=self.pool.path,
            medium=self.pool.medium.name,
            uuid=self.pool.uuid,
            pool_bytes=self.pool.geometry.pool_bytes,
            lock_path="none",
        )

    def map_pool(self, ref: PoolRef) -> MappedPool:
        mapped = MappedPool(open_pool(ref.path, ref.medium, expect_uuid=ref.uuid), NoLock())
        self.mapped.append(mapped)
        return mapped

    def reserve(self, length: int) -> Extent:
        self.keys += 1
        key = Key(self.keys.to_bytes(32, "little"))
        pending = self.plane.submit_reserve(NAMESPACE, [ReserveItem(key, None, length)], 1.0)
        self.plane.poll()
        extent = pending.take().results[0].extent
        assert extent is not None
        return extent

    def commit(self, extent: Extent, parts: tuple[PartChecksum, ...]) -> None:
        pending = self.plane.submit_commit([CommitItem(extent.generation, parts)], 1.0)
        self.plane.poll()
        assert pending.take().lost == ()

    def put(self, payload: bytes, num_parts: int = 1) -> Extent:
        """A sealed object."""
        extent = self.reserve(len(payload))
        view = self.pool.payload(extent)
        view[:] = payload
        size = len(payload) // num_parts
        self.commit(
            extent,
            tuple(part_checksum(view[i * size : (i + 1) * size]) for i in range(num_parts)),
        )
        return extent

    def remove(self, extent: Extent) -> None:
        """The object goes, as if it had been evicted."""
        self.plane.submit_suspect([extent.generation], 1.0)
        self.plane.poll()
        self.plane.poll()


def worker(
    store: Store,
    caches: dict[str, torch.Tensor],
    runner: ScriptedRunner,
    layout: ChunkLayout | None = None,
    rank: int = 0,
    verify: Verify = Verify.HEADER,
    map_pool: Callable[[PoolRef], MappedPool] | None = None,
    executor: Executor | None = None,
    within_step: LoadsWithinStep | None = None,
) -> WorkerHalf:
    half = WorkerHalf(
        layout=layout or chunk_layout(),
        rank=rank,
        verify=verify,
        runner=runner,
        executor=executor or TorchExecutor(threads=1),
        mapping=PoolMapping(map_pool or store.map_pool),
        within_step=within_step,
    )
    half.register_kv_caches(caches)
    return half


def load_job(
    job_id: int, extent: Extent, blocks: tuple[int, ...], first_block: int = 0, request: str = "r"
) -> LoadJob:
    return LoadJob(job_id, request, (ChunkCopy(extent, 0, first_block, blocks),))


def store_job(job_id: int, extent: Extent, blocks: tuple[int, ...], request: str = "r") -> StoreJob:
    return StoreJob(job_id, request, ChunkCopy(extent, 0, 0, blocks))


def result(
    job_id: int, kind: CopyKind = CopyKind.LOAD, outcome: JobOutcome = JobOutcome.DONE
) -> CopyResult:
    return CopyResult(job_id, kind, outcome)
