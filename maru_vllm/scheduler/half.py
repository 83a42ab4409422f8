"""The scheduler half: one method per scheduler-side hook of vLLM, and the order of things in them.

It owns the engine's only session at the store and never sees a byte of KV. Everything here runs
on the scheduler's thread, returns at once, and turns whatever goes wrong into a miss.

A step, in vLLM's order:

    matched_tokens*          the answers to lookups become hits
    blocks_allocated*        a hit becomes a load job, or its lease goes back
    build_step_metadata      full chunks are reserved; granted ones become store jobs
    (the workers run the step)
    finished*                blocks that are still copied are kept
    take_worker_output       reports settle leases and reservations
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from maru_shm.control.plane import Connection, ControlPlane
from maru_shm.types import KEY_BYTES, Namespace
from maru_vllm.metadata import (
    JobOutcome,
    MaruConnectorMetadata,
    MaruWorkerMetadata,
    PoolRef,
    StoreJob,
)
from maru_vllm.once import OncePerKind
from maru_vllm.scheduler.loads import LoadEnd, Loads
from maru_vllm.scheduler.lookups import Grant, Lookups, Verdict
from maru_vllm.scheduler.outbox import Outbox
from maru_vllm.scheduler.ports import (
    BlockTable,
    ChunkKeys,
    Clock,
    EvictBlocks,
    SchedulerSettings,
)
from maru_vllm.scheduler.requests import Event, LoadPolicy, Phase, RequestState, StorePolicy
from maru_vllm.scheduler.shape import ChunkShape
from maru_vllm.scheduler.stores import Offer, Stores
from maru_vllm.settings import LoadMode
from maru_vllm.stats import Counter, MaruStats

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hit:
    """The answer to "how many tokens beyond the local hit?"."""

    num_tokens: int | None
    """None: ask again later."""
    loads_async: bool
    """Whether the load runs between steps; False when there is nothing to load."""

    def as_tuple(self) -> tuple[int | None, bool]:
        """The form that vLLM wants."""
        return self.num_tokens, self.loads_async


NO_HIT = Hit(0, False)
ASK_AGAIN = Hit(None, False)


class SchedulerHalf:
    """Scheduler-side hooks. Public methods never raise and never wait."""

    def __init__(
        self,
        plane: ControlPlane,
        keys: ChunkKeys,
        shape: ChunkShape,
        settings: SchedulerSettings,
        clock: Clock,
    ) -> None:
        self._plane = plane
        self._keys = keys
        self._shape = shape
        self._settings = settings
        self._clock = clock
        self._block_table: BlockTable | None = None
        self._evict_blocks: EvictBlocks | None = None
        self._stats = MaruStats()
        job_ids = count(1)
        self._outbox = Outbox(plane, self._stats)
        self._lookups = Lookups(
            plane, self._outbox, self._stats, clock, settings.lookup_timeout_ms / 1000
        )
        self._loads = Loads(plane, self._outbox, self._stats, shape, clock, job_ids)
        self._stores = Stores(plane, self._outbox, self._stats, shape, clock, job_ids)
        self._requests: dict[str, RequestState] = {}
        self._to_hold: set[str] = set()
        """Finished requests that the worker was not told to report yet."""
        self._connection: Connection | None = None
        """As of this step; everything that one step decides is decided on the same session."""
        self._pool: PoolRef | None = None
        """The last pool that was connected to."""
        self._step_began = False
        self._finished_in_step: list[Sequence[int]] = []
        """Blocks of requests that ended (aborted, say) while a step ran that loads into itself."""
        self._isolation = b""
        """Changes the namespace after ``reset_cache``."""
        self._once = OncePerKind(logger)

    # ------------------------------------------------------------------ hooks

    def bind_block_table(self, block_table: BlockTable, evict_blocks: EvictBlocks) -> None:
        """vLLM's block tables and prefix cache; called once, before the first request."""
        self._block_table = block_table
        self._evict_blocks = evict_blocks

    def on_new_request(self, request: Request) -> None:
        """A request was added: start its lookup at once."""
        self._guard("on_new_request", lambda: self._admit(request), None)

    def matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """``get_num_new_matched_tokens``; repeating it changes nothing but the time waited."""
        hit = self._guard(
            "get_num_new_matched_tokens", lambda: self._match(request, num_computed_tokens), NO_HIT
        )
        return hit.as_tuple()

    def blocks_allocated(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """``update_state_after_alloc``: ``blocks`` are all blocks that the request holds."""
        begun = self._guard(
            "update_state_after_alloc",
            lambda: self._allocated(request, blocks, num_external_tokens),
            None,
        )
        if begun is None and num_external_tokens > 0:
            # The engine counts on a load that could not be built: one that fails says so.
            none: Sequence[int] = ()
            block_ids = self._guard("block ids", lambda: blocks.get_block_ids()[0], none)
            self._loads.begin_failing(request.request_id, block_ids)

    def build_step_metadata(self, scheduler_output: SchedulerOutput) -> MaruConnectorMetadata:
        """``build_connector_meta``: everything the workers have to do in this step."""
        self._guard("poll", self._begin_step, None)
        self._finished_in_step.clear()
        if not self._guard("preemption", lambda: self._note_preemptions(scheduler_output), False):
            self._stores.distrust()
        stores: list[StoreJob] = []
        for state in self._stores.granted():
            jobs = self._guard("store", partial(self._emit, state), None)
            if jobs is None:
                self._stores.drop(state)
            else:
                stores += jobs
        self._guard("reserve", lambda: self._offer_full_chunks(scheduler_output), None)
        loads = self._loads.take_jobs()
        metadata = MaruConnectorMetadata(
            pool=self._pool if loads or stores or self._connection is not None else None,
            loads=loads,
            stores=tuple(stores),
            flush_stores=self._stores.take_flushes(),
            hold_requests=self._take_holds(),
        )
        self._guard("send", lambda: self._outbox.flush(self._connection), None)
        self._step_began = False
        return metadata

    def take_worker_output(self, output: KVConnectorOutput) -> None:
        """``update_connector_output``: what the workers did, before vLLM acts on it."""
        self._guard("update_connector_output", lambda: self._take_output(output), None)

    def finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """``request_finished``: whether the blocks have to be kept for stores."""
        keep = self._guard("request_finished", lambda: self._finish(request, block_ids), None)
        if keep is None:
            self._stores.distrust()
        return keep is True

    def has_pending_work(self) -> bool:
        """``has_pending_push_work``: whether the engine has to go on stepping for our sake.
        Never True only because a server is away."""
        return bool(
            self._stores.under_way
            or self._loads.under_way
            or self._to_hold
            or self._lookups.awaits_answer
            or self._outbox.awaits_answer
        )

    def reset_cache(self) -> bool:
        """From now on nothing that was stored before is found by this engine.

        The pool belongs to others too, so nothing is deleted: the engine moves to a namespace of
        its own, because after a reset (new weights, say) only it knows what its KV means.
        """
        return self._guard("reset_cache", self._reset, False)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """No KV events of our own so far."""
        return ()

    def take_stats(self) -> MaruStats | None:
        """Increments since the last call, or None."""
        return None if self._stats.is_empty() else self._stats.take()

    def shutdown(self) -> None:
        """Close the session; leases and reservations go with it."""
        self._guard("shutdown", self._plane.close, None)

    # ------------------------------------------------------------------ never in the way

    def _guard(self, what: str, action: Callable[[], T], otherwise: T) -> T:
        """What ``action`` returns, or ``otherwise`` if it raises: the engine never sees that."""
        with self._once.guard(what):
            return action()
        self._stats.count(Counter.INTERNAL_ERRORS)
        return otherwise

    # ------------------------------------------------------------------ requests

    def _namespace(self) -> Namespace | None:
        namespace = self._keys.namespace()
        if namespace is None or not self._isolation:
            return namespace
        digest = hashlib.blake2b(namespace + self._isolation, digest_size=KEY_BYTES)
        return Namespace(digest.digest())

    def _state(self, request: Request) -> RequestState | None:
        """None for requests whose tokens may be rewritten (streaming sessions): their chain of
        keys would name tokens that are no longer there."""
        if request.resumable:
            return None
        state = self._requests.get(request.request_id)
        if state is None:
            state = RequestState(request, preemptions=request.num_preemptions)
            self._requests[request.request_id] = state
        if state.keys is None and self._keys.namespace() is not None:
            state.keys = self._keys.for_request(request)
        return state

    def _forget(self, state: RequestState) -> None:
        self._requests.pop(state.request_id, None)
        self._to_hold.discard(state.request_id)

    def _admit(self, request: Request) -> None:
        self._plane.poll()
        state = self._state(request)
        if state is not None:
            self._ask_pool(state)

    def _ask_pool(self, state: RequestState) -> None:
        namespace = self._namespace()
        if namespace is None or state.load_policy is LoadPolicy.FORBIDDEN:
            return
        if state.request.skip_reading_prefix_cache:
            return
        connection = self._plane.connection()
        self._lookups.start(state.request_id, namespace, state.chain(), connection)

    # ------------------------------------------------------------------ hits and loads

    def _match(self, request: Request, num_computed_tokens: int) -> Hit:
        state = self._state(request)
        if state is None:
            return NO_HIT
        self._begin_step()
        self._note_preemption(state)
        state.asked_local_tokens = num_computed_tokens
        if (
            request.skip_reading_prefix_cache
            or state.load_policy is LoadPolicy.FORBIDDEN
            or self._connection is None
        ):
            return NO_HIT
        if self._lookups.is_stale(request.request_id, self._connection):
            self._lookups.drop(request.request_id)
        if not self._lookups.knows(request.request_id):
            self._ask_pool(state)
        match self._lookups.ask(request.request_id, self._connection):
            case Grant() as grant:
                state.present_chunks = len(grant.extents)
                return self._hit(request, grant, num_computed_tokens)
            case Verdict.ASK_AGAIN:
                return ASK_AGAIN
            case Verdict.NOTHING:
                return NO_HIT

    def _hit(self, request: Request, grant: Grant, num_computed_tokens: int) -> Hit:
        found = min(len(grant.extents) * self._shape.chunk_tokens, request.num_tokens)
        between_steps = self._settings.load_mode is LoadMode.BETWEEN_STEPS
        if not between_steps:
            # A step that loads synchronously must itself compute the last token.
            found = min(found, request.num_tokens - 1)
        found -= found % self._shape.block_size
        if found <= num_computed_tokens:
            return NO_HIT
        return Hit(found - num_computed_tokens, between_steps)

    def _allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> bool:
        state = self._requests.get(request.request_id)
        if num_external_tokens == 0:
            # Nothing of ours is loaded: no hit, a longer local one, or a sibling's.
            self._lookups.drop(request.request_id)
            return True
        grant = self._lookups.take(request.request_id)
        if state is None or grant is None:
            raise LookupError(
                f"{num_external_tokens} tokens allocated for {request.request_id}, but no lease"
            )
        if self._settings.load_mode is LoadMode.BETWEEN_STEPS:
            state.advance(Event.LOAD_BEGAN)
        first = state.asked_local_tokens
        (block_ids,) = blocks.get_block_ids()
        self._loads.begin(request.request_id, grant, block_ids, first, first + num_external_tokens)
        return True

    def _load_ended(self, end: LoadEnd | None) -> None:
        state = None if end is None else self._requests.get(end.request_id)
        if end is None or state is None:
            return
        if state.phase is Phase.LOADING:
            state.advance(Event.LOAD_ENDED)
        if end.outcome is not JobOutcome.DONE:
            state.load_policy = LoadPolicy.FORBIDDEN
            state.present_chunks = 0
        if self._settings.log_timing:
            logger.info("Maru: load for %s: %s", end.request_id, end.outcome.name.lower())

    # ------------------------------------------------------------------ stores

    def _note_preemptions(self, scheduler_output: SchedulerOutput) -> bool:
        preempted: Iterable[str] = scheduler_output.preempted_req_ids or ()
        for state in map(self._requests.get, preempted):
            if state is not None:
                self._note_preemption(state)
        return True

    def _note_preemption(self, state: RequestState) -> None:
        if not state.was_preempted():
            return
        self._stores.flush(state)
        self._stores.drop(state)
        state.preempt()

    def _emit(self, state: RequestState) -> list[StoreJob]:
        return self._stores.emit(state, self._blocks_of(state), self._connection)

    def _offer_full_chunks(self, scheduler_output: SchedulerOutput) -> None:
        offers: list[Offer] = []
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None:
                offers += self._scheduled(state, num_tokens)
        self._reserve(offers)

    def _reserve(self, offers: Sequence[Offer]) -> None:
        namespace = self._namespace()
        if namespace is not None and self._connection is not None:
            self._stores.reserve(offers, namespace, self._connection)

    def _scheduled(self, state: RequestState, num_scheduled_tokens: int) -> list[Offer]:
        self._note_preemption(state)
        state.advance(Event.SCHEDULED)
        request = state.request
        # Tokens behind request.num_tokens are drafts or placeholders: their KV is not final.
        state.computed_tokens = request.num_computed_tokens + num_scheduled_tokens
        return self._offers(state, min(state.computed_tokens, request.num_tokens))

    def _offers(self, state: RequestState, num_tokens: int) -> list[Offer]:
        if self._connection is None or self._namespace() is None:
            return []
        if not self._settings.store_decode:
            num_tokens = min(num_tokens, state.request.num_prompt_tokens)
        return self._stores.offers(state, num_tokens)

    def _blocks_of(self, state: RequestState) -> Sequence[int]:
        if state.phase is Phase.HELD:
            return state.held_blocks
        if state.phase is Phase.RUNNING and self._block_table is not None:
            return self._block_table(state.request_id)
        return ()

    def _finish(self, request: Request, block_ids: Sequence[int]) -> bool:
        self._lookups.drop(request.request_id)
        if self._settings.load_mode is not LoadMode.BETWEEN_STEPS:
            self._finished_in_step.append(tuple(block_ids))
        state = self._requests.get(request.request_id)
        if state is None:
            return False
        self._note_preemption(state)
        if state.phase is not Phase.RUNNING:
            # Nothing is stored from here. A load may still write: vLLM keeps the blocks for it.
            self._forget(state)
            return False
        # The last sampled token has no KV; everything before it went through a forward pass.
        final = min(state.computed_tokens, request.num_computed_tokens, request.num_tokens - 1)
        self._reserve(self._offers(state, final))
        if not self._stores.needs_blocks(request.request_id):
            self._forget(state)
            return False
        state.advance(Event.FINISHED_WITH_STORES)
        state.held_blocks = tuple(block_ids)
        self._to_hold.add(request.request_id)
        return True

    def _take_holds(self) -> frozenset[str]:
        """Held requests of which no further store can follow: the worker may report their end."""
        ready = frozenset(r for r in self._to_hold if not self._stores.is_wanted(r))
        self._to_hold -= ready
        return ready

    # ------------------------------------------------------------------ progress

    def _begin_step(self) -> None:
        """Take in what has arrived, once per step, before the first decision."""
        if self._step_began:
            return
        self._step_began = True
        self._progress()

    def _progress(self) -> None:
        self._plane.poll()
        self._connection = self._plane.connection()
        if self._connection is not None:
            pool, lock_path = self._connection.pool, self._connection.lock_path
            self._pool = PoolRef(
                pool.path, pool.medium, pool.uuid, pool.geometry.pool_bytes, lock_path
            )
        self._lookups.collect()
        self._stores.collect(self._connection)
        self._outbox.collect()
        self._loads.renew(self._connection)
        self._outbox.flush(self._connection)

    def _take_output(self, output: KVConnectorOutput) -> None:
        if output.invalid_block_ids:
            self._invalidate(frozenset(output.invalid_block_ids))
        worker = output.kv_connector_worker_meta
        if isinstance(worker, MaruWorkerMetadata):
            for store_report in worker.stores:
                self._stores.on_report(store_report)
            for load_report in worker.loads:
                self._load_ended(self._loads.on_report(load_report))
        for request_id in output.finished_recving or ():
            failed = request_id in output.failed_recving
            outcome = JobOutcome.FAILED if failed else JobOutcome.DONE
            self._load_ended(self._loads.on_engine_done(request_id, outcome))
        for state in map(self._requests.get, output.finished_sending or ()):
            if state is not None and state.phase is Phase.HELD:
                self._forget(state)
        self._progress()

    def _invalidate(self, block_ids: frozenset[int]) -> None:
        """These blocks, and what was computed on top of them, hold nothing of use.

        vLLM puts the blocks of a load into its own step into its prefix cache when it allocates
        them, and where it recomputes it leaves them there, found by others before that is done, or
        for ever if the request is aborted. So they are taken out here.
        """
        useless = set(block_ids)
        for state in self._requests.values():
            if state.phase not in (Phase.RUNNING, Phase.HELD):
                continue
            blocks = self._blocks_of(state)
            bad = _first_of(blocks, block_ids)
            if bad is not None:
                self._stores.invalidate_from(state, bad // self._shape.blocks_per_chunk)
                state.computed_tokens = min(state.computed_tokens, bad * self._shape.block_size)
                useless.update(blocks[bad:])
        for blocks in self._finished_in_step:
            bad = _first_of(blocks, block_ids)
            if bad is not None:
                useless.update(blocks[bad:])
        self._stores.invalidate_blocks(block_ids)
        if self._evict_blocks is not None:
            self._evict_blocks(useless)

    def _reset(self) -> bool:
        self._isolation = secrets.token_bytes(16)
        for state in self._requests.values():
            self._lookups.drop(state.request_id)
            self._stores.drop(state)
            state.present_chunks = 0
            if state.phase is not Phase.WAITING or state.request.num_computed_tokens > 0:
                state.store_policy = StorePolicy.FORBIDDEN
                state.load_policy = LoadPolicy.FORBIDDEN
        return True


def _first_of(blocks: Sequence[int], block_ids: frozenset[int]) -> int | None:
    """Position of the first block that is one of ``block_ids``."""
    return next((i for i, block in enumerate(blocks) if block in block_ids), None)
