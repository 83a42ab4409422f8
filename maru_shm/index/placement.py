"""Room for a new object: from its class, from the common store, or by eviction.

In this order: a free slot of the class; a segment from the common store; the class's coldest
leaf, or a segment of another class in which nothing was used since that leaf was. Emptying a
segment takes along what continues its objects in other segments, deepest first, because a
prefix is never evicted before its continuations; a segment is therefore as warm as the warmest
of all that would go. Of equally cold segments the one that costs the fewest objects goes. A
class that has nothing to evict takes the coldest segment of any class that holds nothing in use.

Cost: constant, but for emptying a segment, which costs its objects and what continues them. A
colder segment that turns out to be in use counts as used just now: it is not looked at again for
the next object. Only where nothing at all can be evicted in the class are all segments looked at.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, takewhile

from maru_shm.index.catalog import Catalog
from maru_shm.index.effects import Effect
from maru_shm.index.entries import Entry
from maru_shm.index.segments import Segment, SizeClass

_LOOKS = 4
"""How many of the coldest segments of other classes are weighed for one object. Enough to find
the segment of a chain's tail rather than that of its head; any small number works."""

_IN_USE = float("inf")


@dataclass(frozen=True, slots=True)
class _Toll:
    """What emptying a segment would cost."""

    segment: Segment
    last_use: float
    """Latest use of anything that would go; ``_IN_USE`` if something in it must stay."""
    objects: int


class Placement:
    """Finds slots in one catalog's segments."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._segments = catalog.segments
        self.evicted_total = 0

    def room(self, size_class: SizeClass, now: float, effects: list[Effect]) -> Segment | None:
        """A segment of the class with a free slot; None if everything is in use."""
        segment = self._segments.with_room(size_class, effects)
        if segment is not None:
            return segment
        victim = size_class.policy.victim()
        if victim is None:
            coldest = self._coldest_of_all()
        else:
            coldest = self._colder_elsewhere(size_class, victim.stamp, now)
        if coldest is not None:
            self._empty(coldest, effects)
        elif victim is not None:
            self._evict(victim, effects)
        else:
            return None
        return self._segments.with_room(size_class, effects)

    def _colder_elsewhere(self, size_class: SizeClass, stamp: float, now: float) -> Segment | None:
        """A segment of another class of which all that would go was last used before ``stamp``."""
        others = [c for c in self._segments.classes.values() if c is not size_class]
        if not others:
            return None
        by_age = heapq.merge(*(c.segments.values() for c in others), key=_touched)
        few = list(takewhile(lambda segment: segment.touched < stamp, islice(by_age, _LOOKS)))
        tolls = [_toll(segment) for segment in few]
        for toll in tolls:
            if toll.last_use >= stamp:
                self._segments.touch(toll.segment, min(toll.last_use, now))
        return _cheapest(toll for toll in tolls if toll.last_use < stamp)

    def _coldest_of_all(self) -> Segment | None:
        """The coldest segment in which nothing is in use."""
        bound = [s for c in self._segments.classes.values() for s in c.segments.values()]
        tolls: list[_Toll] = []
        coldest = _IN_USE
        for segment in sorted(bound, key=_touched):
            if segment.touched > coldest:
                break
            toll = _toll(segment)
            if toll.last_use < _IN_USE:
                tolls.append(toll)
                coldest = min(coldest, toll.last_use)
        return _cheapest(tolls)

    def _empty(self, segment: Segment, effects: list[Effect]) -> None:
        for occupant in list(segment.occupants):
            if occupant is not None and occupant.idle:
                self._evict_with_continuations(occupant, effects)
        self._segments.give_back(segment, effects)

    def _evict_with_continuations(self, root: Entry, effects: list[Effect]) -> None:
        node = root
        while True:
            while node.first_child is not None:
                node = node.first_child
            above = node.parent
            self._evict(node, effects)
            if node is root:
                return
            assert isinstance(above, Entry), "what continues an object hangs from an object"
            node = above

    def _evict(self, entry: Entry, effects: list[Effect]) -> None:
        self.evicted_total += 1
        self._catalog.drop(entry, effects)


def _touched(segment: Segment) -> float:
    return segment.touched


def _cheapest(tolls: Iterable[_Toll]) -> Segment | None:
    best = min(tolls, key=lambda toll: (toll.last_use, toll.objects), default=None)
    return None if best is None else best.segment


def _toll(segment: Segment) -> _Toll:
    last_use = segment.touched
    going: set[Entry] = set()
    pending: list[Entry] = [entry for entry in segment.occupants if entry is not None]
    while pending:
        entry = pending.pop()
        if entry in going:
            continue
        if not entry.idle:
            return _Toll(segment, _IN_USE, len(going))
        going.add(entry)
        last_use = max(last_use, entry.stamp)
        pending.extend(entry.children())
    return _Toll(segment, last_use, len(going))
