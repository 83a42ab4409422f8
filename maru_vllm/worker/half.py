"""The worker half: what vLLM's worker-side hooks do.

One object per worker process, called by the worker's one thread in this order every step:

    handle_preemptions    finish the stores whose source blocks this step overwrites
    start_load_kv         submit this step's loads
    wait_for_layer_load   only where loads run ahead of each layer (``layer_loads``)
    wait_for_save         submit this step's stores, behind its forward
    transfer_results      what has finished; taken once per step
    invalid_block_ids     blocks that this step counted on and that were not loaded
    worker_meta           the same for the scheduler half

Copies run beside it (``CopyRunner``). Nothing here waits except ``handle_preemptions``,
``shutdown`` and loads that the step itself needs, all bounded. Nothing raises into the engine
except ``register_kv_caches``, which runs once at start-up and must refuse a cache that it does not
understand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from maru_kv_ops.executors import CopyPath, Executor
from maru_shm.pool.reading import Verify
from maru_vllm.layout import ChunkLayout
from maru_vllm.metadata import (
    JobOutcome,
    LoadJob,
    LoadReport,
    MaruConnectorMetadata,
    MaruWorkerMetadata,
    StoreJob,
    StoreReport,
)
from maru_vllm.once import OncePerKind
from maru_vllm.worker.caches import register_caches
from maru_vllm.worker.copy_runner import CopyKind, CopyResult, CopyRunner, CopyTask
from maru_vllm.worker.device_order import DeviceOrder, Mark, order_for
from maru_vllm.worker.jobs import JobBook, Reports
from maru_vllm.worker.layer_loads import LayerLoads, LoadedJob, LoadsWithinStep, layer_places
from maru_vllm.worker.loads import CopyContext, run_load
from maru_vllm.worker.mapping import MappedPool, PoolMapping
from maru_vllm.worker.stores import run_store

logger = logging.getLogger(__name__)

FLUSH_DEADLINE_S = 30.0
"""A store of the largest chunk takes well under a second; a thread that needs this long hangs, and
from then on its result is void rather than the engine stuck."""
SHUTDOWN_DEADLINE_S = 10.0

_NOTHING = Reports((), (), frozenset(), frozenset(), frozenset())


class WorkerHalf:
    """See the module. Needs no vLLM configuration object, so a simulation can make one."""

    def __init__(
        self,
        layout: ChunkLayout,
        rank: int,
        verify: Verify,
        runner: CopyRunner,
        executor: Executor,
        mapping: PoolMapping,
        job_log_level: int = logging.DEBUG,
        within_step: LoadsWithinStep | None = None,
    ) -> None:
        """``rank``: this worker's tensor-parallel rank. Owns runner, executor and mapping.

        ``within_step``: None where loads run between steps.
        ``job_log_level``: each job's end is logged with its duration at this level.
        """
        self._layout = layout
        self._share = layout.share_of(rank)
        self._verify = verify
        self._runner = runner
        self._executor = executor
        self._mapping = mapping
        self._job_log_level = job_log_level
        self._book = JobBook(self._share.part)
        self._once = OncePerKind(logger)
        self._context: CopyContext | None = None
        self._order: DeviceOrder | None = None
        self._in_use: dict[tuple[CopyKind, int], MappedPool] = {}
        self._within_step = within_step
        self._layer_loads: LayerLoads | None = None
        self._awaited: dict[int, LoadJob] = {}
        """Jobs that this step counts on and that are not known to be done."""
        self._invalid_block_ids: set[int] = set()
        self._load_reports: tuple[LoadReport, ...] = ()
        self._store_reports: tuple[StoreReport, ...] = ()
        self._populated_bytes = 0

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the engine's cache tensors ``[block, head, token, content]``, by layer name.

        May be called again with other tensors while no job is under way. Raises LayoutRefused: the
        engine must not start with a cache that Maru does not understand.
        """
        caches = register_caches(self._layout, kv_caches)
        self._order = order_for(caches.device)
        self._context = CopyContext(
            layout=self._layout,
            share=self._share,
            caches=caches,
            executor=self._executor,
            verify=self._verify,
        )
        if self._within_step is not None:
            self._layer_loads = LayerLoads(
                context=self._context,
                order=self._order,
                places=layer_places(self._context),
                operations=self._within_step.operations_for(caches.device),
                release_after=self._within_step.release_after_layers,
            )

    def handle_preemptions(self, metadata: MaruConnectorMetadata) -> None:
        """Return when no store reads the blocks of ``flush_stores`` any more.

        A store that does not finish in time is reported as failed whatever it says later, for its
        source may have been overwritten while it read.
        """
        with self._once.guard("handle_preemptions"):
            pending = self._book.stores_under_way(metadata.flush_stores)
            if pending and not self._runner.wait(pending, FLUSH_DEADLINE_S):
                self._take_results()
                late = self._book.stores_under_way(pending)
                self._book.spoil(late)
                logger.error(
                    "Maru: store jobs %s did not finish within %.0f s before their blocks are "
                    "reused; what they write is dropped",
                    sorted(late),
                    FLUSH_DEADLINE_S,
                )

    def start_load_kv(self, metadata: MaruConnectorMetadata) -> None:
        """Submit this step's loads; those that the step itself needs begin at once."""
        if self._within_step is not None:
            self._awaited = {job.job_id: job for job in metadata.loads}
            with self._once.guard("start_load_kv"):
                mapped = self._mapping.get(metadata.pool)
                if metadata.loads and self._layer_loads is not None:
                    self._layer_loads.begin(metadata.loads, mapped)
            return
        with self._once.guard("start_load_kv"):
            if not metadata.loads:
                # Map before the first job, so that populating is done when it comes.
                self._mapping.get(metadata.pool)
                return
            mapped = self._mapping.get(metadata.pool)
            for job in metadata.loads:
                if self._book.begin_load(job):
                    self._submit(job.job_id, CopyKind.LOAD, mapped, _load_of(job))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when this layer's loads are in place or have failed; bounded."""
        if self._layer_loads is not None:
            with self._once.guard("wait_for_layer_load"):
                self._layer_loads.wait_for(layer_name)

    def wait_for_save(self, metadata: MaruConnectorMetadata) -> None:
        """Submit this step's stores; its forward has been submitted before."""
        self._end_awaited_loads()
        with self._once.guard("wait_for_save"):
            mapped = self._mapping.get(metadata.pool) if metadata.stores else None
            for job in metadata.stores:
                if self._book.begin_store(job):
                    self._submit(job.job_id, CopyKind.STORE, mapped, _store_of(job))
            self._book.hold(metadata.hold_requests)

    def transfer_results(self) -> Reports:
        """What finished since the last call: once per step, before ``worker_meta``."""
        self._end_awaited_loads()  # with a draft model this comes before wait_for_save
        reports = _NOTHING
        with self._once.guard("transfer_results"):
            self._take_results()
            reports = self._book.take()
            self._load_reports += reports.loads
            self._store_reports += reports.stores
        return reports

    def invalid_block_ids(self) -> set[int]:
        """Blocks that this step counted on and that hold nothing of use; taken once per step."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def worker_meta(self) -> MaruWorkerMetadata | None:
        """What the scheduler half is to know of this step; None if that is nothing new."""
        populated = self._mapping.populated_bytes
        if not (self._load_reports or self._store_reports or populated != self._populated_bytes):
            return None
        meta = MaruWorkerMetadata(
            stores=self._store_reports, loads=self._load_reports, populated_bytes=populated
        )
        self._load_reports, self._store_reports = (), ()
        self._populated_bytes = populated
        return meta

    def shutdown(self) -> None:
        """Drop what has not begun, wait (bounded) for what runs, give the pool up. Idempotent."""
        with self._once.guard("shutdown"):
            finished = self._runner.close(SHUTDOWN_DEADLINE_S)
            self._take_results()
            if self._layer_loads is not None:
                self._layer_loads.close(SHUTDOWN_DEADLINE_S)
            self._mapping.close()
            if finished:
                self._executor.close()
                return
            # Its task holds cache tensors, mapping and lock: it cannot touch freed memory.
            logger.error(
                "Maru: %d copies still run %.0f s after shutdown began; they are left alone",
                len(self._in_use),
                SHUTDOWN_DEADLINE_S,
            )

    def _submit(
        self,
        job_id: int,
        kind: CopyKind,
        mapped: MappedPool | None,
        copy: Callable[[MappedPool, CopyContext, Mark], CopyResult],
    ) -> None:
        """Submit a job that is in the book; whatever goes wrong, it gets a result."""
        context, order = self._context, self._order
        if mapped is None or context is None or order is None:
            self._once.warn(
                "unready",
                "Maru: copies fail at once: %s",
                "the pool is not mapped" if mapped is None else "no KV cache is registered",
            )
            self._book.finish(CopyResult(job_id, kind, JobOutcome.FAILED))
            return
        is_submitted = False
        with self._once.guard(f"submit {kind.name.lower()}"):
            mark = order.mark()
            self._runner.submit(CopyTask(job_id, kind, lambda: copy(mapped, context, mark)))
            is_submitted = True
        if not is_submitted:
            self._book.finish(CopyResult(job_id, kind, JobOutcome.FAILED))
            return
        mapped.begin_job()
        self._in_use[kind, job_id] = mapped

    def _end_awaited_loads(self) -> None:
        """What became of this step's own loads. A job of which nothing good is known has failed."""
        if self._layer_loads is not None:
            with self._once.guard("finish layer loads"):
                for ended in self._layer_loads.finish():
                    if self._awaited.pop(ended.job.job_id, None) is None:
                        continue
                    self._note_path(CopyKind.LOAD, ended.path)
                    self._report_load(ended)
        for job in self._awaited.values():
            self._report_load(LoadedJob(job, JobOutcome.FAILED))
        self._awaited = {}

    def _report_load(self, ended: LoadedJob) -> None:
        if ended.outcome is not JobOutcome.DONE:
            self._invalid_block_ids |= ended.block_ids()
        report = LoadReport(
            ended.job.job_id, ended.outcome, ended.suspect_generations, path=ended.path
        )
        self._load_reports = (*self._load_reports, report)

    def _note_path(self, kind: CopyKind, path: CopyPath | None) -> None:
        if path is not None:
            self._once.say(
                f"{kind.name} by {path}", "Maru: %ss go through: %s", kind.name.lower(), path
            )

    def _take_results(self) -> None:
        for result in self._runner.poll():
            logger.log(
                self._job_log_level,
                "Maru: %s job %d: %s after %.2f ms",
                result.kind.name.lower(),
                result.job_id,
                result.outcome.name.lower(),
                result.seconds * 1e3,
            )
            self._note_path(result.kind, result.path)
            self._book.finish(result)
            mapped = self._in_use.pop((result.kind, result.job_id), None)
            if mapped is not None:
                mapped.end_job()


def _load_of(job: LoadJob) -> Callable[[MappedPool, CopyContext, Mark], CopyResult]:
    return lambda mapped, context, mark: run_load(job, mapped, context, mark)


def _store_of(job: StoreJob) -> Callable[[MappedPool, CopyContext, Mark], CopyResult]:
    return lambda mapped, context, mark: run_store(job, mapped, context, mark)
