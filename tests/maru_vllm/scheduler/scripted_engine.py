"""A scripted control plane, and the few lines of an engine that a scheduler half needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from maru_shm.control.errors import ControlError, Unreachable
from maru_shm.control.messages import (
    CommitItem,
    Committed,
    Done,
    LeaseGrant,
    PoolInfo,
    Renewed,
    Reserved,
    ReserveItem,
    ReserveOutcome,
    ReserveResult,
)
from maru_shm.control.plane import Connection
from maru_shm.types import (
    Extent,
    Generation,
    Key,
    LeaseId,
    Namespace,
    PartChecksum,
    PoolGeometry,
)
from maru_vllm.metadata import (
    JobOutcome,
    LoadReport,
    MaruConnectorMetadata,
    MaruWorkerMetadata,
    StoreReport,
)
from maru_vllm.scheduler.half import SchedulerHalf
from maru_vllm.scheduler.shape import ChunkShape
from maru_vllm.settings import LoadMode

NAMESPACE = Namespace(b"n" * 32)
SHAPE = ChunkShape(chunk_tokens=8, block_size=4, object_bytes=1024, num_parts=1, num_ranks=1)
GEOMETRY = PoolGeometry(1 << 20, 1 << 16, 4096, 15)


class ScriptedPending:
    """Answered by the test."""

    def __init__(self, request: Any) -> None:
        self.request = request
        self._reply: Any = None
        self._done = False

    def answer(self, reply: Any) -> None:
        self._reply, self._done = reply, True

    def done(self) -> bool:
        return self._done

    def take(self) -> Any:
        if not self._done:
            raise RuntimeError("not done")
        if isinstance(self._reply, ControlError):
            raise self._reply
        return self._reply


@dataclass
class ScriptedPlane:
    """Keeps every request; answers those kinds at once that ``automatic`` holds."""

    standing: Connection | None
    found: int = 0
    """How many leading keys a lookup finds."""
    automatic: set[str] = field(
        default_factory=lambda: {
            "lookup", "reserve", "commit", "abort", "suspect", "renew", "release",
        }
    )  # fmt: skip
    outcome: ReserveOutcome = ReserveOutcome.GRANTED
    sent: dict[str, list[ScriptedPending]] = field(default_factory=dict)
    generation: int = 0
    leases: int = 0
    closed: bool = False

    @property
    def epoch(self) -> int:
        return 0 if self.standing is None else self.standing.epoch

    def _submit(self, kind: str, request: Any) -> ScriptedPending:
        pending = ScriptedPending(request)
        self.sent.setdefault(kind, []).append(pending)
        if self.standing is None:
            pending.answer(Unreachable("no server"))
        elif kind in self.automatic:
            pending.answer(self.reply(kind, request))
        return pending

    def extent(self) -> Extent:
        self.generation += 1
        return Extent(4096 * self.generation, SHAPE.object_bytes, Generation(self.generation))

    def reply(self, kind: str, request: Any) -> Any:
        if kind == "lookup":
            extents = tuple(self.extent() for _ in range(min(self.found, len(request))))
            self.leases += 1
            return LeaseGrant(self.epoch, LeaseId(self.leases) if extents else None, extents)
        if kind == "reserve":
            granted = self.outcome is ReserveOutcome.GRANTED
            return Reserved(
                self.epoch,
                tuple(
                    ReserveResult(self.outcome, self.extent() if granted else None) for _ in request
                ),
            )
        if kind == "commit":
            return Committed(self.epoch, ())
        if kind == "renew":
            return Renewed(self.epoch, ())
        return Done(self.epoch, len(request))

    def answer(self, kind: str) -> None:
        """Answer all open requests of a kind now."""
        for pending in self.sent.get(kind, []):
            if not pending.done():
                pending.answer(self.reply(kind, pending.request))

    def requests(self, kind: str) -> list[Any]:
        return [pending.request for pending in self.sent.get(kind, [])]

    def all_items(self, kind: str) -> list[Any]:
        return [item for request in self.requests(kind) for item in request]

    def restart(self) -> None:
        """Another incarnation of the server over the same pool."""
        assert self.standing is not None
        self.standing = replace(
            self.standing, session=self.standing.session + 1, epoch=self.standing.epoch + 1
        )

    # ControlPlane

    def poll(self) -> None:
        return

    def connection(self) -> Connection | None:
        return self.standing

    def submit_lookup_prefix(
        self, namespace: Namespace, keys: Sequence[Key], timeout_s: float
    ) -> ScriptedPending:
        return self._submit("lookup", tuple(keys))

    def submit_reserve(
        self, namespace: Namespace, items: Sequence[ReserveItem], timeout_s: float
    ) -> ScriptedPending:
        return self._submit("reserve", tuple(items))

    def submit_commit(self, items: Sequence[CommitItem], timeout_s: float) -> ScriptedPending:
        return self._submit("commit", tuple(items))

    def submit_abort(self, generations: Sequence[Generation], timeout_s: float) -> ScriptedPending:
        return self._submit("abort", tuple(generations))

    def submit_suspect(
        self, generations: Sequence[Generation], timeout_s: float
    ) -> ScriptedPending:
        return self._submit("suspect", tuple(generations))

    def submit_renew(self, leases: Sequence[LeaseId], timeout_s: float) -> ScriptedPending:
        return self._submit("renew", tuple(leases))

    def submit_release(self, leases: Sequence[LeaseId], timeout_s: float) -> ScriptedPending:
        return self._submit("release", tuple(leases))

    def close(self) -> None:
        self.closed = True


class CountingKeys:
    """Keys that show which chunk they name; the tokens do not matter here."""

    def __init__(self) -> None:
        self.known: Namespace | None = NAMESPACE

    def namespace(self) -> Namespace | None:
        return self.known

    def for_request(self, request: Request) -> RequestKeysOf:
        return RequestKeysOf(request)


class RequestKeysOf:
    def __init__(self, request: Request) -> None:
        self._request = request

    def extend(self) -> Sequence[Key]:
        full = SHAPE.full_chunks(self._request.num_tokens)
        return [Key(i.to_bytes(32, "little")) for i in range(full)]


@dataclass
class Settings:
    load_mode: LoadMode = LoadMode.BETWEEN_STEPS
    store_decode: bool = True
    lookup_timeout_ms: float = 20.0
    log_timing: bool = False


@dataclass(frozen=True)
class Blocks:
    """``KVCacheBlocks`` as far as the half looks at it."""

    block_ids: tuple[int, ...]

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (list(self.block_ids),)


class Engine:
    """Calls the hooks in vLLM's order, for requests whose blocks are numbered from 100 on."""

    def __init__(self, shape: ChunkShape = SHAPE, settings: Settings | None = None) -> None:
        pool = PoolInfo("/dev/shm/p", "tmpfs", b"u" * 16, GEOMETRY)
        self.plane = ScriptedPlane(Connection(7, 1, 30.0, pool, "/run/owner.lock"))
        self.keys = CountingKeys()
        self.now = 1000.0
        self.shape = shape
        self.half = SchedulerHalf(
            self.plane, self.keys, shape, settings or Settings(), lambda: self.now
        )
        self.tables: dict[str, list[int]] = {}
        self.evicted: set[int] = set()
        self.half.bind_block_table(lambda request_id: self.tables[request_id], self.evicted.update)

    def request(self, name: str, num_tokens: int, max_tokens: int = 8) -> Request:
        request = Request(
            name, list(range(num_tokens)), SamplingParams(max_tokens=max_tokens), None
        )
        self.half.on_new_request(request)
        return request

    def allocate(self, request: Request, external: int, num_blocks: int = 8) -> None:
        table = self.tables.setdefault(request.request_id, [100 + i for i in range(num_blocks)])
        self.half.blocks_allocated(request, Blocks(tuple(table)), external)  # type: ignore[arg-type]

    def step(
        self, scheduled: dict[Request, int] | None = None, preempted: Sequence[Request] = ()
    ) -> MaruConnectorMetadata:
        """Schedule; then move the requests on as vLLM does after building the metadata."""
        output = SchedulerOutput.make_empty()
        scheduled = scheduled or {}
        output.num_scheduled_tokens = {r.request_id: n for r, n in scheduled.items()}
        output.preempted_req_ids = {r.request_id for r in preempted}
        metadata = self.half.build_step_metadata(output)
        for request, num_tokens in scheduled.items():
            request.num_computed_tokens += num_tokens
        return metadata

    def preempt(self, request: Request) -> None:
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self.tables.pop(request.request_id, None)

    def output(
        self,
        stores: Sequence[StoreReport] = (),
        loads: Sequence[LoadReport] = (),
        **other: Any,
    ) -> None:
        worker = MaruWorkerMetadata(stores=tuple(stores), loads=tuple(loads))
        self.half.take_worker_output(KVConnectorOutput(kv_connector_worker_meta=worker, **other))


def stored(job_id: int, part: int = 0, outcome: JobOutcome = JobOutcome.DONE) -> StoreReport:
    checksum = PartChecksum(part + 1, part + 2) if outcome is JobOutcome.DONE else None
    return StoreReport(job_id, outcome, part, checksum)
