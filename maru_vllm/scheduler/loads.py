"""Loads under way: which leases they read under, and who has still to report.

A load job is emitted in the step that allocated its blocks. The lease is renewed until every rank
has reported, and then given back; objects that failed a check are reported to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from maru_shm.control.messages import Renewed
from maru_shm.control.plane import Connection, ControlPlane, Pending
from maru_shm.types import Extent, Generation
from maru_vllm.metadata import ChunkCopy, JobOutcome, LoadJob, LoadReport
from maru_vllm.scheduler.lookups import Grant
from maru_vllm.scheduler.outbox import REPLY_TIMEOUT_S, Outbox, same_session
from maru_vllm.scheduler.ports import Clock
from maru_vllm.scheduler.shape import ChunkShape
from maru_vllm.stats import LOADS_BY, Counter, MaruStats

RENEW_AGE_OF_TERM = 1 / 2
"""Leases are renewed when this part of their term is over, well before a third is left."""

GROUP = 0
"""The only KV cache group that is supported so far."""

UNLOADABLE = Extent(offset=0, length=0, generation=Generation(0))
"""No object has generation 0: a load of it fails its check and the request is recomputed."""


class BlocksMismatch(Exception):
    """The engine allocated fewer blocks than the tokens that it was promised."""


@dataclass(slots=True)
class _Load:
    job_id: int
    request_id: str
    grant: Grant | None
    """None for a load that is bound to fail."""
    num_tokens: int
    num_bytes: int
    began_at: float
    renewed_at: float
    ranks_left: int
    outcome: JobOutcome = JobOutcome.DONE
    suspects: set[Generation] = field(default_factory=set)
    renewing: Pending[Renewed] | None = None


@dataclass(frozen=True, slots=True)
class LoadEnd:
    """All ranks have reported: nobody writes to the request's blocks any more."""

    request_id: str
    outcome: JobOutcome
    """DONE only if every rank said so."""


def chunk_copies(
    shape: ChunkShape,
    extents: Sequence[Extent],
    block_ids: Sequence[int],
    first_token: int,
    end_token: int,
) -> tuple[ChunkCopy, ...]:
    """Pair the objects that cover ``[first_token, end_token)`` with the request's blocks.

    Both bounds are block-aligned; the first chunk may start inside and the last may end inside.
    """
    if first_token % shape.block_size or end_token % shape.block_size:
        raise BlocksMismatch(
            f"tokens [{first_token}, {end_token}) do not lie on blocks of {shape.block_size}"
        )
    first_block, end_block = first_token // shape.block_size, end_token // shape.block_size
    if end_block > len(block_ids) or end_token > len(extents) * shape.chunk_tokens:
        raise BlocksMismatch(
            f"{end_block} blocks to load, but {len(block_ids)} allocated and "
            f"{len(extents)} chunks leased"
        )
    copies: list[ChunkCopy] = []
    block = first_block
    while block < end_block:
        chunk = block // shape.blocks_per_chunk
        chunk_end = min((chunk + 1) * shape.blocks_per_chunk, end_block)
        copies.append(
            ChunkCopy(
                extent=extents[chunk],
                group=GROUP,
                first_block=block - chunk * shape.blocks_per_chunk,
                block_ids=tuple(block_ids[block:chunk_end]),
            )
        )
        block = chunk_end
    return tuple(copies)


class Loads:
    """Owned by the scheduler's thread."""

    def __init__(
        self,
        plane: ControlPlane,
        outbox: Outbox,
        stats: MaruStats,
        shape: ChunkShape,
        clock: Clock,
        job_ids: count[int],
    ) -> None:
        self._plane = plane
        self._outbox = outbox
        self._stats = stats
        self._shape = shape
        self._clock = clock
        self._job_ids = job_ids
        self._loads: dict[int, _Load] = {}
        self._queued: list[LoadJob] = []

    def begin(
        self,
        request_id: str,
        grant: Grant,
        block_ids: Sequence[int],
        first_token: int,
        end_token: int,
    ) -> None:
        """Load ``[first_token, end_token)``; owns the grant from now on, also if this raises."""
        try:
            copies = chunk_copies(self._shape, grant.extents, block_ids, first_token, end_token)
        except BlocksMismatch:
            self._outbox.release(grant.lease, grant.origin)
            raise
        now = self._clock()
        block_bytes = self._shape.object_bytes // self._shape.blocks_per_chunk
        load = _Load(
            job_id=next(self._job_ids),
            request_id=request_id,
            grant=grant,
            num_tokens=end_token - first_token,
            num_bytes=sum(len(copy.block_ids) for copy in copies) * block_bytes,
            began_at=now,
            renewed_at=grant.taken_at,
            ranks_left=self._shape.num_ranks,
        )
        self._loads[load.job_id] = load
        self._queued.append(LoadJob(load.job_id, request_id, copies))

    def begin_failing(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The engine counts on a load that cannot be made: let it recompute ``block_ids``."""
        now = self._clock()
        load = _Load(
            job_id=next(self._job_ids),
            request_id=request_id,
            grant=None,
            num_tokens=0,
            num_bytes=0,
            began_at=now,
            renewed_at=now,
            ranks_left=self._shape.num_ranks,
        )
        self._loads[load.job_id] = load
        copy = ChunkCopy(UNLOADABLE, GROUP, 0, tuple(block_ids))
        self._queued.append(LoadJob(load.job_id, request_id, (copy,)))

    def take_jobs(self) -> tuple[LoadJob, ...]:
        """The loads that this step begins."""
        jobs = tuple(self._queued)
        self._queued.clear()
        return jobs

    def on_report(self, report: LoadReport) -> LoadEnd | None:
        """One rank's word; returns the end when it was the last rank's."""
        load = self._loads.get(report.job_id)
        if load is None:
            return None
        load.ranks_left -= 1
        if report.path is not None:
            self._stats.count(LOADS_BY[report.path])
        load.suspects.update(Generation(g) for g in report.suspect_generations)
        if report.outcome is not JobOutcome.DONE and load.outcome is not JobOutcome.SUSPECT:
            load.outcome = report.outcome
        return self._end(load) if load.ranks_left == 0 else None

    def on_engine_done(self, request_id: str, outcome: JobOutcome) -> LoadEnd | None:
        """The engine says that no rank loads for this request any more, whatever was reported."""
        for load in self._loads.values():
            if load.request_id == request_id:
                if load.outcome is JobOutcome.DONE:
                    load.outcome = outcome
                return self._end(load)
        return None

    def _end(self, load: _Load) -> LoadEnd:
        del self._loads[load.job_id]
        if load.grant is not None:
            if load.suspects:
                self._outbox.suspect(sorted(load.suspects), load.grant.origin)
            self._outbox.release(load.grant.lease, load.grant.origin)
        if load.outcome is JobOutcome.DONE:
            self._stats.count(Counter.LOADED_TOKENS, load.num_tokens)
            self._stats.count(Counter.LOADED_BYTES, load.num_bytes)
            self._stats.add_seconds(Counter.LOAD_SECONDS, self._clock() - load.began_at)
        else:
            self._stats.count(_FAILURES[load.outcome])
        return LoadEnd(load.request_id, load.outcome)

    def renew(self, connection: Connection | None) -> None:
        """Ask for more time for loads that take long. A lease that is lost costs nothing but the
        load: the worker's check of the generation decides."""
        now = self._clock()
        due: list[_Load] = []
        for load in self._loads.values():
            if load.renewing is not None and load.renewing.done():
                load.renewing = None
            if (
                load.grant is not None
                and load.renewing is None
                and same_session(load.grant.origin, connection)
                and now - load.renewed_at > load.grant.origin.lease_term_s * RENEW_AGE_OF_TERM
            ):
                due.append(load)
        if not due:
            return
        leases = [load.grant.lease for load in due if load.grant is not None]
        pending = self._plane.submit_renew(leases, REPLY_TIMEOUT_S)
        for load in due:
            load.renewing = pending
            load.renewed_at = now

    @property
    def under_way(self) -> int:
        """Loads that some rank has not reported."""
        return len(self._loads)


_FAILURES = {
    JobOutcome.FAILED: Counter.LOADS_FAILED,
    JobOutcome.SUSPECT: Counter.LOADS_SUSPECT,
    JobOutcome.STALE: Counter.LOADS_STALE,
}
