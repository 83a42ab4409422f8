"""Stores under way: from a chunk that is full to an object that is visible.

    full in a running request  --reserve-->  granted  --emitted-->  copying  --all ranks-->  settled

Reserving is asked in the step that completes a chunk, and the copy is emitted in the first later
step that finds it granted, while the request still holds the blocks. What a request has that is
not emitted yet is dropped when its blocks go; what is emitted is copied by then (the worker
finishes it in ``handle_preemptions``) or keeps the finished request's blocks.

A reservation is committed only when every rank wrote its part, and given back only when every rank
has reported, so that nobody writes into space that has another owner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from maru_shm.control.errors import ControlError
from maru_shm.control.messages import (
    CommitItem,
    Reserved,
    ReserveItem,
    ReserveOutcome,
    ReserveResult,
)
from maru_shm.control.plane import Connection, ControlPlane, Pending
from maru_shm.types import Extent, Key, Namespace, PartChecksum
from maru_vllm.metadata import ChunkCopy, JobOutcome, StoreJob, StoreReport
from maru_vllm.scheduler.loads import GROUP
from maru_vllm.scheduler.outbox import REPLY_TIMEOUT_S, Outbox, same_session
from maru_vllm.scheduler.ports import Clock
from maru_vllm.scheduler.requests import RequestState, StorePolicy
from maru_vllm.scheduler.shape import ChunkShape
from maru_vllm.stats import STORES_BY, Counter, MaruStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Space granted for a chunk, and the session that it was granted to."""

    extent: Extent
    origin: Connection


@dataclass(slots=True)
class _Wanted:
    """A chunk that is full in its request's blocks and not emitted yet."""

    state: RequestState
    chunk: int
    reservation: _Reservation | None = None
    """None while the answer is out."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A chunk to ask space for."""

    state: RequestState
    chunk: int
    key: Key
    parent: Key | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """One reserve request under way."""

    wanted: tuple[_Wanted, ...]
    origin: Connection
    pending: Pending[Reserved]


@dataclass(slots=True)
class _Job:
    """One emitted copy that not every rank has reported."""

    job_id: int
    request_id: str
    chunk: int
    extent: Extent
    origin: Connection
    block_ids: tuple[int, ...]
    began_at: float
    ranks_left: int
    outcome: JobOutcome = JobOutcome.DONE
    checksums: dict[int, PartChecksum] = field(default_factory=dict)
    flushed: bool = False
    """The worker was told to finish it before the blocks are used again."""
    invalid: bool = False
    """Its blocks turned out not to hold the KV that they were thought to hold."""


class Stores:
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
        self._wanted: dict[str, dict[int, _Wanted]] = {}
        self._batches: list[_Batch] = []
        self._jobs: dict[int, _Job] = {}
        self._to_flush: set[int] = set()

    # ------------------------------------------------------------------ reserving

    def offers(self, state: RequestState, num_tokens: int) -> list[Offer]:
        """Chunks of ``state`` that are full within ``num_tokens`` and were not offered yet."""
        end = self._shape.full_chunks(num_tokens)
        begin = max(state.next_chunk, state.present_chunks)
        if end <= begin or state.store_policy is not StorePolicy.ALLOWED:
            return []
        keys = state.chain()
        end = min(end, len(keys))
        wanted = self._wanted.get(state.request_id, {})
        state.next_chunk = max(begin, end)
        return [
            Offer(state, chunk, keys[chunk], keys[chunk - 1] if chunk else None)
            for chunk in range(begin, end)
            if chunk not in wanted
        ]

    def reserve(
        self, offers: Sequence[Offer], namespace: Namespace, connection: Connection
    ) -> None:
        """Ask for space for all of one step's chunks at once."""
        if not offers:
            return
        pending = self._plane.submit_reserve(
            namespace,
            [ReserveItem(o.key, o.parent, self._shape.object_bytes) for o in offers],
            REPLY_TIMEOUT_S,
        )
        wanted = tuple(_Wanted(offer.state, offer.chunk) for offer in offers)
        for entry in wanted:
            self._wanted.setdefault(entry.state.request_id, {})[entry.chunk] = entry
        self._batches.append(_Batch(wanted, connection, pending))

    def collect(self, connection: Connection | None) -> None:
        """Take in the answers."""
        still: list[_Batch] = []
        for batch in self._batches:
            if not batch.pending.done():
                still.append(batch)
                continue
            try:
                reply = batch.pending.take()
            except ControlError as error:
                logger.debug("reserve of %d chunks unanswered: %s", len(batch.wanted), error)
                for entry in batch.wanted:
                    self._offer_again(entry)
                continue
            usable = reply.epoch == batch.origin.epoch and same_session(batch.origin, connection)
            for entry, result in zip(batch.wanted, reply.results, strict=True):
                self._take_result(entry, result, batch.origin, usable)
        self._batches = still

    def _take_result(
        self, entry: _Wanted, result: ReserveResult, origin: Connection, usable: bool
    ) -> None:
        state = entry.state
        if result.outcome in (ReserveOutcome.NO_SPACE, ReserveOutcome.TOO_LARGE):
            self._stats.count(Counter.STORES_NO_SPACE)
            if self._stands(entry) and state.store_policy is StorePolicy.ALLOWED:
                state.store_policy = StorePolicy.STOPPED
        if result.extent is None:
            self._forget(entry)
        elif not self._stands(entry) or state.store_policy is not StorePolicy.ALLOWED:
            self._forget(entry)
            self._outbox.abort(result.extent.generation, origin)
        elif not usable:
            self._offer_again(entry)
            self._outbox.abort(result.extent.generation, origin)
        else:
            entry.reservation = _Reservation(result.extent, origin)

    def _stands(self, entry: _Wanted) -> bool:
        return self._wanted.get(entry.state.request_id, {}).get(entry.chunk) is entry

    def _forget(self, entry: _Wanted) -> None:
        if not self._stands(entry):
            return
        chunks = self._wanted[entry.state.request_id]
        del chunks[entry.chunk]
        if not chunks:
            del self._wanted[entry.state.request_id]

    def _offer_again(self, entry: _Wanted) -> None:
        """Nothing came of it; if the request still holds the chunk, a later step asks anew."""
        if self._stands(entry):
            self._forget(entry)
            entry.state.next_chunk = min(entry.state.next_chunk, entry.chunk)

    # ------------------------------------------------------------------ emitting

    def granted(self) -> list[RequestState]:
        """Requests that have a granted chunk to be emitted."""
        states: list[RequestState] = []
        for chunks in self._wanted.values():
            entry = next((e for e in chunks.values() if e.reservation is not None), None)
            if entry is not None:
                states.append(entry.state)
        return states

    def emit(
        self, state: RequestState, block_ids: Sequence[int], connection: Connection | None
    ) -> list[StoreJob]:
        """Jobs for the granted chunks of a request that holds ``block_ids`` now."""
        jobs: list[StoreJob] = []
        per_chunk = self._shape.blocks_per_chunk
        for entry in self._of(state.request_id):
            reservation = entry.reservation
            if reservation is None:
                continue
            blocks = tuple(block_ids[entry.chunk * per_chunk : (entry.chunk + 1) * per_chunk])
            if len(blocks) != per_chunk or not same_session(reservation.origin, connection):
                self._offer_again(entry)
                self._outbox.abort(reservation.extent.generation, reservation.origin)
                continue
            self._forget(entry)
            job = _Job(
                job_id=next(self._job_ids),
                request_id=state.request_id,
                chunk=entry.chunk,
                extent=reservation.extent,
                origin=reservation.origin,
                block_ids=blocks,
                began_at=self._clock(),
                ranks_left=self._shape.num_ranks,
            )
            self._jobs[job.job_id] = job
            copy = ChunkCopy(reservation.extent, GROUP, first_block=0, block_ids=blocks)
            jobs.append(StoreJob(job.job_id, state.request_id, copy))
        return jobs

    def _of(self, request_id: str) -> list[_Wanted]:
        return sorted(self._wanted.get(request_id, {}).values(), key=lambda entry: entry.chunk)

    # ------------------------------------------------------------------ blocks that go away

    def drop(self, state: RequestState, first_chunk: int = 0) -> None:
        """The blocks from ``first_chunk`` on no longer hold the request's KV: what is not emitted
        never will be. The chunks are offered again when they are computed again."""
        for entry in self._of(state.request_id):
            if entry.chunk < first_chunk:
                continue
            self._offer_again(entry)
            if entry.reservation is not None:
                self._outbox.abort(entry.reservation.extent.generation, entry.reservation.origin)

    def flush(self, state: RequestState) -> None:
        """The request was preempted: its emitted copies end before its blocks are used again."""
        for job in self._jobs.values():
            if job.request_id == state.request_id and not job.flushed:
                job.flushed = True
                self._to_flush.add(job.job_id)

    def take_flushes(self) -> frozenset[int]:
        """Job ids that the worker has to finish first in this step."""
        flushes = frozenset(self._to_flush & self._jobs.keys())
        self._to_flush.clear()
        return flushes

    def invalidate_from(self, state: RequestState, first_chunk: int) -> None:
        """The engine found that blocks of this request were never filled (a sibling's load failed):
        copies from that chunk on, and of what was computed on top of it, must not be sealed."""
        for job in self._jobs.values():
            if job.request_id == state.request_id and job.chunk >= first_chunk:
                job.invalid = True
        self.drop(state, first_chunk)
        state.next_chunk = min(state.next_chunk, first_chunk)

    def invalidate_blocks(self, block_ids: frozenset[int]) -> None:
        """The same for copies whose request no longer holds the blocks."""
        for job in self._jobs.values():
            if not block_ids.isdisjoint(job.block_ids):
                job.invalid = True

    def distrust(self) -> None:
        """An error left it open whose blocks are still whose: seal nothing that is being copied."""
        for job in self._jobs.values():
            job.invalid = True

    # ------------------------------------------------------------------ ends

    def on_report(self, report: StoreReport) -> None:
        """One rank's word; the last rank's settles the reservation."""
        job = self._jobs.get(report.job_id)
        if job is None:
            return
        job.ranks_left -= 1
        if report.path is not None:
            self._stats.count(STORES_BY[report.path])
        if report.outcome is not JobOutcome.DONE:
            job.outcome = report.outcome
        elif report.checksum is not None:
            job.checksums[report.part] = report.checksum
        if job.ranks_left:
            return
        del self._jobs[job.job_id]
        parts = tuple(job.checksums[part] for part in sorted(job.checksums))
        if job.invalid:
            self._stats.count(Counter.STORES_DISCARDED)
            self._outbox.abort(job.extent.generation, job.origin)
        elif job.outcome is not JobOutcome.DONE or len(parts) != self._shape.num_parts:
            self._stats.count(Counter.STORES_FAILED)
            self._outbox.abort(job.extent.generation, job.origin)
        else:
            self._stats.count(Counter.STORED_BYTES, job.extent.length)
            self._stats.add_seconds(Counter.STORE_SECONDS, self._clock() - job.began_at)
            self._outbox.commit(CommitItem(job.extent.generation, parts), job.origin)

    def needs_blocks(self, request_id: str) -> bool:
        """Whether a chunk of this request is wanted, or copied from blocks that it still holds."""
        return self.is_wanted(request_id) or any(
            job.request_id == request_id and not job.flushed for job in self._jobs.values()
        )

    def is_wanted(self, request_id: str) -> bool:
        """Whether a chunk of this request may still be emitted."""
        return request_id in self._wanted

    @property
    def under_way(self) -> int:
        """Copies and answers that are still out; bounded by the workers' and the plane's limits."""
        return len(self._jobs) + len(self._batches)
