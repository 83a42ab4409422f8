"""A pool of dictionaries for the index: every effect is applied, and checked as it is applied."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from maru_shm.control.messages import CommitItem, ReserveItem, ReserveOutcome
from maru_shm.index.answers import ReserveAnswer
from maru_shm.index.effects import (
    BindSegment,
    Effect,
    UnbindSegment,
    WriteFree,
    WriteReserved,
    WriteSealed,
)
from maru_shm.index.found import FoundObject, FoundSegment
from maru_shm.index.index import Index
from maru_shm.types import (
    Extent,
    Generation,
    Key,
    Namespace,
    OwnerToken,
    PoolGeometry,
    SessionId,
    SlotShape,
)

NS = Namespace(b"n" * 32)
OTHER_NS = Namespace(b"o" * 32)
KIB = 1024
MIB = 1024 * 1024


def key(name: object) -> Key:
    return Key(hashlib.sha256(str(name).encode()).digest())


def geometry(num_segments: int = 4, nominal: int = MIB) -> PoolGeometry:
    segment_bytes = nominal + nominal // 256
    first = 8192
    return PoolGeometry(first + num_segments * segment_bytes, segment_bytes, first, num_segments)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeMedium:
    """Segment table and headers, as a dead server would leave them; asserts what it is told."""

    geometry: PoolGeometry
    shapes: dict[int, SlotShape] = field(default_factory=dict)
    headers: dict[int, WriteReserved] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    """Slots whose header is in state sealed."""
    generations: set[Generation] = field(default_factory=set)

    def apply(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case BindSegment(segment, shape):
                    assert segment not in self.shapes, f"segment {segment} is bound already"
                    assert 0 <= segment < self.geometry.num_segments
                    assert not list(self.in_segment(segment)), "bound over headers"
                    self.shapes[segment] = shape
                case UnbindSegment(segment):
                    assert not list(self.in_segment(segment)), "unbound with headers in it"
                    del self.shapes[segment]
                case WriteReserved():
                    self._reserve(effect)
                case WriteSealed(slot_offset, generation):
                    assert self.headers[slot_offset].generation == generation
                    assert slot_offset not in self.sealed, "sealed twice"
                    self.sealed.add(slot_offset)
                case WriteFree(slot_offset):
                    assert slot_offset in self.headers, f"slot {slot_offset} is free already"
                    del self.headers[slot_offset]
                    self.sealed.discard(slot_offset)

    def _reserve(self, effect: WriteReserved) -> None:
        segment, inside = divmod(
            effect.slot_offset - self.geometry.first_segment_offset, self.geometry.segment_bytes
        )
        shape = self.shapes[segment]
        assert inside % shape.slot_bytes == 0, "not at a slot"
        assert inside + shape.slot_bytes <= self.geometry.segment_bytes, "beyond its segment"
        assert effect.payload_offset == effect.slot_offset + shape.payload_offset
        assert effect.length <= shape.slot_bytes - shape.payload_offset, "overlaps the next slot"
        assert effect.slot_offset not in self.headers, "granted before its header was cleared"
        assert effect.generation not in self.generations, "generation given out twice"
        self.generations.add(effect.generation)
        self.headers[effect.slot_offset] = effect

    def in_segment(self, segment: int) -> Iterable[int]:
        first = self.geometry.first_segment_offset + segment * self.geometry.segment_bytes
        end = first + self.geometry.segment_bytes
        return (offset for offset in self.headers if first <= offset < end)

    def scan(self) -> list[FoundSegment]:
        found = []
        for segment, shape in self.shapes.items():
            here = list(self.in_segment(segment))
            found.append(
                FoundSegment(
                    segment,
                    shape,
                    sealed=tuple(self.found(o) for o in here if o in self.sealed),
                    writing=tuple(self.found(o) for o in here if o not in self.sealed),
                )
            )
        return found

    def found(self, slot_offset: int) -> FoundObject:
        header = self.headers[slot_offset]
        return FoundObject(
            slot_offset,
            header.generation,
            header.namespace,
            header.key,
            header.parent,
            header.length,
            header.owner,
        )


class Rig:
    """An index over a fake medium, with one session of one owner open."""

    def __init__(self, pool: PoolGeometry | None = None, lease_term_s: float = 30.0) -> None:
        self.geometry = pool or geometry()
        self.clock = Clock()
        self.medium = FakeMedium(self.geometry)
        self.lease_term_s = lease_term_s
        self.epoch = 0
        self.living: set[OwnerToken] = set()
        self.owner = OwnerToken(7)
        self.start()

    def start(self) -> None:
        """A server's next life over the same pool."""
        self.epoch += 1
        self.index = Index(self.geometry, self.epoch, self.clock, lease_term_s=self.lease_term_s)
        self.medium.apply(
            self.index.restore(self.medium.scan(), lambda owner: owner in self.living)
        )
        self.session = self.open(self.owner)

    def open(self, owner: OwnerToken, number: int = 1) -> SessionId:
        session = SessionId(number)
        self.index.open_session(session, owner)
        return session

    def reserve(
        self, *items: ReserveItem, session: SessionId | None = None, ns: Namespace = NS
    ) -> ReserveAnswer:
        answer = self.index.reserve(session or self.session, ns, items)
        self.medium.apply(answer.effects)
        self.index.check_invariants()
        return answer

    def outcome(self, item: ReserveItem) -> ReserveOutcome:
        (result,) = self.reserve(item).results
        return result.outcome

    def grant(self, name: object, length: int, parent: object = None) -> Extent:
        (result,) = self.reserve(item(name, length, parent)).results
        assert result.extent is not None, result.outcome
        return result.extent

    def commit(self, *extents: Extent, session: SessionId | None = None) -> list[Generation]:
        items = [CommitItem(extent.generation, ()) for extent in extents]
        answer = self.index.commit(session or self.session, items)
        self.medium.apply(answer.effects)
        self.index.check_invariants()
        return answer.lost

    def store(self, name: object, length: int, parent: object = None) -> Extent:
        """Reserve and commit one object, a second after whatever came before."""
        self.clock.now += 1
        extent = self.grant(name, length, parent)
        assert self.commit(extent) == []
        return extent

    def store_chain(self, names: Sequence[object], length: int) -> list[Extent]:
        parents = [None, *names[:-1]]
        return [self.store(n, length, p) for n, p in zip(names, parents, strict=True)]

    def use(self, *names: object, ns: Namespace = NS) -> int:
        """Look a prefix up and release it, a second after whatever came before."""
        self.clock.now += 1
        lookup = self.index.lookup_prefix(self.session, ns, [key(name) for name in names])
        if lookup.lease is not None:
            self.index.release(self.session, [lookup.lease])
        return len(lookup.extents)

    def present(self, *names: object, ns: Namespace = NS) -> set[object]:
        """Which of these are sealed, without using them."""
        rows = self.index.list_objects(Generation(0), 1 << 30)
        known = {(row.namespace, row.key) for row in rows if row.state.name == "SEALED"}
        return {name for name in names if (ns, key(name)) in known}


def item(name: object, length: int, parent: object = None) -> ReserveItem:
    return ReserveItem(key(name), None if parent is None else key(parent), length)
