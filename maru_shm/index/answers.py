"""What the index answers: plain values, with the effects that the service must apply first."""

from __future__ import annotations

from dataclasses import dataclass

from maru_shm.control.messages import ReserveResult
from maru_shm.extents import Extents
from maru_shm.index.effects import Effect
from maru_shm.types import Generation, LeaseId, SessionId


@dataclass(frozen=True, slots=True)
class Lookup:
    """What was found and leased, in the order of the keys asked for."""

    lease: LeaseId | None
    """None when nothing was found."""
    extents: Extents
    """The found prefix only (``lookup_prefix``), or one per key (``lookup_each``)."""


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """Answer to ``reserve``."""

    results: list[ReserveResult]
    """One per item, in order."""
    effects: list[Effect]


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """Answer to ``commit``."""

    lost: list[Generation]
    """Generations that were no reservation of this session; their bytes are dropped."""
    effects: list[Effect]


@dataclass(frozen=True, slots=True)
class CountAnswer:
    """Answer to ``abort``, ``suspect`` and ``delete``."""

    count: int
    """How many of the items took effect."""
    effects: list[Effect]


@dataclass(frozen=True, slots=True)
class IndexCounts:
    """The index at one moment. Field names are those of ``control.messages.Stats``."""

    used_bytes: int
    """Bytes of slots that hold a sealed, reserved or quarantined object, or a suspect one that
    somebody still leases."""
    objects: int
    reservations: int
    quarantined: int
    leases: int
    lookups: int
    lookup_keys: int
    hit_keys: int
    reserved_total: int
    committed_total: int
    aborted_total: int
    evicted_total: int
    suspect_total: int
    no_space_total: int


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """What one session holds at this moment."""

    session: SessionId
    leases: int
    reservations: int
