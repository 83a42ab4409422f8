"""What a store job does: from blocks into reserved space, with checksums of what was written."""

from __future__ import annotations

from maru_kv_ops.executors import CopyMemory
from maru_kv_ops.plan import TransferDirection
from maru_shm.pool.checksum import part_checksum
from maru_shm.pool.format import SlotState
from maru_shm.pool.pool import Pool
from maru_shm.types import Extent
from maru_vllm.metadata import JobOutcome, StoreJob
from maru_vllm.worker.copy_runner import CopyKind, CopyResult
from maru_vllm.worker.device_order import Mark
from maru_vllm.worker.loads import CopyContext
from maru_vllm.worker.mapping import MappedPool


def run_store(job: StoreJob, mapped: MappedPool, context: CopyContext, mark: Mark) -> CopyResult:
    """Write this rank's part of the chunk; called on a copy thread.

    DONE means that the part's bytes are on the medium, visible to every process. A rank whose KV
    another rank stores is done without copying, and has no checksum. Space that is not reserved
    under the extent's generation any more is not touched: STALE.
    """
    chunk, layout = job.chunk, context.layout
    if chunk.extent.length != layout.object_bytes or chunk.first_block != 0:
        raise ValueError(
            f"store job {job.job_id}: an object of {chunk.extent.length} bytes from block "
            f"{chunk.first_block} on; expected {layout.object_bytes} bytes from block 0"
        )
    if len(chunk.block_ids) != layout.blocks_per_chunk or min(chunk.block_ids) < 0:
        raise ValueError(
            f"store job {job.job_id}: blocks {chunk.block_ids}; expected {layout.blocks_per_chunk} "
            "block ids of 0 or more, for a chunk is stored whole"
        )
    if not context.share.writes:
        return CopyResult(job_id=job.job_id, kind=CopyKind.STORE, outcome=JobOutcome.DONE)
    if not _is_reserved(mapped.pool, chunk.extent):
        return CopyResult(job_id=job.job_id, kind=CopyKind.STORE, outcome=JobOutcome.STALE)
    part = Extent(
        offset=context.part_offset(chunk),
        length=layout.part_bytes,
        generation=chunk.extent.generation,
    )
    plan = context.caches.plan(part.offset, 0, chunk.block_ids, TransferDirection.D2H)
    with mark.behind():
        path = context.executor.run(plan, CopyMemory(context.caches.regions, mapped.objects))
    checksum = part_checksum(mapped.pool.payload(part))
    mapped.pool.write_back(part)
    return CopyResult(
        job_id=job.job_id,
        kind=CopyKind.STORE,
        outcome=JobOutcome.DONE,
        checksum=checksum,
        path=path,
    )


def _is_reserved(pool: Pool, extent: Extent) -> bool:
    place = pool.table.place(extent.offset)
    header = None if place is None else pool.table.header(place)
    return (
        header is not None
        and header.state is SlotState.WRITING
        and header.generation == extent.generation
    )
