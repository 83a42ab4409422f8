"""What the connector's two halves tell each other, once per engine step.

The scheduler half turns keys and leases into extents and block ids; the worker half copies
exactly those and reports by job id. Both directions cross process boundaries inside vLLM's own
messages, so these are plain dataclasses of ints, strings and tuples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, unique

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from maru_kv_ops.executors import CopyPath
from maru_shm.types import Extent, PartChecksum


@dataclass(frozen=True, slots=True)
class PoolRef:
    """The pool that this step's extents lie in; the worker maps it again when the uuid changes."""

    path: str
    medium: str
    uuid: bytes
    pool_bytes: int
    lock_path: str
    """The session's lock file: a worker holds a shared lock on it while it may write to the pool,
    so that the server frees a dead engine's reservations only when no writer is left."""


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """One object's share in a job: which of its blocks go to, or come from, which block ids."""

    extent: Extent
    """The whole object, all ranks; the worker finds its own part by its rank."""
    group: int
    """Index of the KV cache group."""
    first_block: int
    """Position inside the chunk of the block that ``block_ids[0]`` stands for; loads may start
    inside a chunk, stores start at 0 and cover all of it."""
    block_ids: tuple[int, ...]
    """Manager block ids, consecutive positions of the chunk."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Load ``chunks`` for ``request_id``; the request waits for it and is reported exactly once."""

    job_id: int
    request_id: str
    chunks: tuple[ChunkCopy, ...]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Store one chunk after this step's forward. ``job_id`` is reported exactly once."""

    job_id: int
    request_id: str
    chunk: ChunkCopy


@dataclass
class MaruConnectorMetadata(KVConnectorMetadata):
    """Scheduler half to worker half, one per step."""

    pool: PoolRef | None = None
    """None while no server is reachable; then ``loads`` and ``stores`` are empty."""
    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    flush_stores: frozenset[int] = frozenset()
    """Job ids of earlier steps whose source blocks this step may overwrite (preemption, a
    window that slid): the worker finishes them before it returns from ``handle_preemptions``."""
    hold_requests: frozenset[str] = frozenset()
    """Finished requests whose blocks are still being stored; the worker reports each as
    ``finished_sending`` once its last store job is done."""


@unique
class JobOutcome(Enum):
    """How a job ended on one rank."""

    DONE = 0
    FAILED = 1
    """The copy could not be made (mapping gone, I/O error). Nothing is known about the object."""
    SUSPECT = 2
    """The object's header or checksum was wrong, or its generation changed under the copy."""
    STALE = 3
    """The header names another generation already: the object was evicted before the load."""


@dataclass(frozen=True, slots=True)
class StoreReport:
    """One rank's word on one store job."""

    job_id: int
    outcome: JobOutcome
    part: int
    """Which part of the object this rank wrote."""
    checksum: PartChecksum | None
    """None where the copy failed."""
    path: CopyPath | None = None
    """What copied; None where nothing did."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One rank's word on one load job."""

    job_id: int
    outcome: JobOutcome
    suspect_generations: tuple[int, ...] = ()
    path: CopyPath | None = None
    """What copied; None where nothing did."""


@dataclass
class MaruWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker half to scheduler half. Aggregation concatenates; the scheduler half counts ranks."""

    stores: tuple[StoreReport, ...] = ()
    loads: tuple[LoadReport, ...] = ()
    populated_bytes: int = field(default=0)
    """How much of this worker's mapping is populated; the least over the ranks."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> MaruWorkerMetadata:
        """One rank's word after another's; vLLM calls this once per further rank."""
        assert isinstance(other, MaruWorkerMetadata)
        return MaruWorkerMetadata(
            stores=self.stores + other.stores,
            loads=self.loads + other.loads,
            populated_bytes=min(self.populated_bytes, other.populated_bytes),
        )
