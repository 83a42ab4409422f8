"""One request's life as the scheduler half sees it: a phase, and what was learned on the way.

    WAITING --load begins--> LOADING --all ranks reported--> WAITING
    WAITING --scheduled--> RUNNING --preempted--> WAITING
    RUNNING --finished, stores under way--> HELD

A request that ends in any other way is forgotten at once; its load or its stores may outlive it
and are kept by their own modules. Only in RUNNING and HELD do the request's blocks hold KV that
may be stored: a waiting request's blocks are empty, loading, or gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import TYPE_CHECKING

from maru_shm.types import Key
from maru_vllm.scheduler.ports import RequestKeys

if TYPE_CHECKING:
    from vllm.v1.request import Request


@unique
class Phase(Enum):
    """Where a request stands; the table of moves is ``TRANSITIONS``."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    HELD = "held"


@unique
class Event(Enum):
    """What moves a request on."""

    LOAD_BEGAN = "load began"
    LOAD_ENDED = "load ended"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    FINISHED_WITH_STORES = "finished with stores"


TRANSITIONS: dict[tuple[Phase, Event], Phase] = {
    (Phase.WAITING, Event.LOAD_BEGAN): Phase.LOADING,
    (Phase.LOADING, Event.LOAD_ENDED): Phase.WAITING,
    (Phase.WAITING, Event.SCHEDULED): Phase.RUNNING,
    (Phase.RUNNING, Event.SCHEDULED): Phase.RUNNING,
    (Phase.RUNNING, Event.PREEMPTED): Phase.WAITING,
    (Phase.RUNNING, Event.FINISHED_WITH_STORES): Phase.HELD,
}


class IllegalTransition(Exception):
    """The engine called its hooks in an order that this table does not know."""


@unique
class LoadPolicy(Enum):
    """Whether a request may still be looked up."""

    ALLOWED = "allowed"
    FORBIDDEN = "forbidden"
    """A load failed once (no endless retry), or the engine's cache was reset under it."""


@unique
class StorePolicy(Enum):
    """Whether a request's further chunks are stored."""

    ALLOWED = "allowed"
    STOPPED = "stopped"
    """A chunk found no space: what would follow it could not be reached by a prefix."""
    FORBIDDEN = "forbidden"
    """Its KV does not belong to the namespace that stands now."""


@dataclass(slots=True)
class RequestState:
    """Owned by the scheduler's thread."""

    request: Request
    preemptions: int
    """``request.num_preemptions`` when last looked at; another value means its blocks are gone."""
    phase: Phase = Phase.WAITING
    keys: RequestKeys | None = None
    """None until the identity is known."""
    load_policy: LoadPolicy = LoadPolicy.ALLOWED
    store_policy: StorePolicy = StorePolicy.ALLOWED
    computed_tokens: int = 0
    """Tokens whose KV is in the request's blocks after the last step that scheduled it."""
    present_chunks: int = 0
    """Leading chunks that a lookup found sealed; they are not stored again."""
    next_chunk: int = 0
    """First chunk that has not been offered to the store yet."""
    asked_local_tokens: int = 0
    """The local hit that the last question about external tokens came with."""
    held_blocks: Sequence[int] = field(default=())
    """Block ids in phase HELD."""

    @property
    def request_id(self) -> str:
        """The engine's name of the request."""
        return self.request.request_id

    def advance(self, event: Event) -> None:
        """Change phase; raises IllegalTransition and changes nothing where there is no such row."""
        after = TRANSITIONS.get((self.phase, event))
        if after is None:
            raise IllegalTransition(
                f"request {self.request_id} is {self.phase.value}, but {event.value} was reported"
            )
        self.phase = after

    def preempt(self) -> None:
        """The blocks are gone: everything has to be computed, or looked up, again."""
        self.advance(Event.PREEMPTED)
        self.preemptions = self.request.num_preemptions
        self.computed_tokens = 0
        if self.store_policy is StorePolicy.FORBIDDEN:
            self.store_policy = StorePolicy.ALLOWED

    def was_preempted(self) -> bool:
        """Whether the engine took the blocks of this running request away meanwhile."""
        return self.phase is Phase.RUNNING and self.request.num_preemptions != self.preemptions

    def chain(self) -> Sequence[Key]:
        """Keys of all full chunks known so far; empty while the identity is not known."""
        return () if self.keys is None else self.keys.extend()
