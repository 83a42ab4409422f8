"""What a load job does: from sealed objects into blocks, and never a wrong byte into use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from maru_kv_ops.executors import CopyMemory, CopyPath, Executor
from maru_kv_ops.plan import TransferDirection, join_plans
from maru_shm.pool import reading
from maru_shm.pool.pool import Pool
from maru_shm.pool.reading import Verdict, Verify
from maru_vllm.layout import ChunkLayout, RankShare
from maru_vllm.metadata import ChunkCopy, JobOutcome, LoadJob
from maru_vllm.worker.caches import RegisteredCaches
from maru_vllm.worker.copy_runner import CopyKind, CopyResult
from maru_vllm.worker.device_order import Mark
from maru_vllm.worker.mapping import MappedPool


@dataclass(frozen=True, slots=True)
class CopyContext:
    """What all jobs of one worker share."""

    layout: ChunkLayout
    share: RankShare
    caches: RegisteredCaches
    executor: Executor
    verify: Verify

    def part_offset(self, chunk: ChunkCopy) -> int:
        """Bytes from the pool's start to this rank's part of the chunk's object."""
        return chunk.extent.offset + self.share.part * self.layout.part_bytes


def run_load(job: LoadJob, mapped: MappedPool, context: CopyContext, mark: Mark) -> CopyResult:
    """Copy all chunks of the job; called on a copy thread.

    Every object's header is checked before the copies and again when they are complete, so DONE
    means that the blocks hold what was stored under those generations. With any other outcome the
    blocks hold nothing of use, and all objects found damaged are named, not only the first: the
    next request for them must not fail again.
    """
    path: CopyPath | None = None
    found = [check_before(mapped.pool, chunk, context) for chunk in job.chunks]
    if all(outcome is JobOutcome.DONE for outcome in found):
        plans = [
            context.caches.plan(
                context.part_offset(chunk),
                chunk.first_block,
                chunk.block_ids,
                TransferDirection.H2D,
            )
            for chunk in job.chunks
        ]
        with mark.behind():
            if plans:
                path = context.executor.run(
                    join_plans(plans), CopyMemory(context.caches.regions, mapped.objects)
                )
        found = [check_after(mapped.pool, chunk, context) for chunk in job.chunks]
    return CopyResult(
        job_id=job.job_id,
        kind=CopyKind.LOAD,
        outcome=worst(found),
        suspect_generations=tuple(
            int(chunk.extent.generation)
            for chunk, outcome in zip(job.chunks, found, strict=True)
            if outcome is JobOutcome.SUSPECT
        ),
        path=path,
    )


def worst(found: Sequence[JobOutcome]) -> JobOutcome:
    """A job of several chunks ends as the worst of them; DONE if there is none."""
    return max(found, key=_SEVERITY.index, default=JobOutcome.DONE)


def check_before(pool: Pool, chunk: ChunkCopy, context: CopyContext) -> JobOutcome:
    """Whether the object may be read: DONE, or how the load ends."""
    if chunk.extent.length != context.layout.object_bytes:
        # Not an object of this engine; the scheduler half also asks so for loads that must fail.
        return JobOutcome.FAILED
    return _OUTCOME[reading.begin_read(pool, chunk.extent)]


def check_after(pool: Pool, chunk: ChunkCopy, context: CopyContext) -> JobOutcome:
    """Whether what was copied is what was stored, the copy being complete."""
    matches = True
    if context.verify is not Verify.HEADER:
        if reading.check(pool, chunk.extent) is not Verdict.OK:
            return _OUTCOME[reading.end_read(pool, chunk.extent)]
        matches = reading.payload_matches(
            pool, chunk.extent, context.verify, part=context.share.part
        )
    outcome = _OUTCOME[reading.end_read(pool, chunk.extent)]
    if outcome is JobOutcome.DONE and not matches:
        return JobOutcome.SUSPECT
    return outcome


_OUTCOME = {
    Verdict.OK: JobOutcome.DONE,
    Verdict.STALE: JobOutcome.STALE,
    Verdict.TORN: JobOutcome.SUSPECT,
}

_SEVERITY = (JobOutcome.DONE, JobOutcome.STALE, JobOutcome.FAILED, JobOutcome.SUSPECT)
