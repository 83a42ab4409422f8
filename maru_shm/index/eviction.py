"""Which object goes next when a size class has no room: policies, chosen by name.

A policy keeps the *leaves* of one size class in its order: sealed objects that nothing in the
pool continues. The index tells it when an object becomes one (again) and when it stops existing;
it does not tell it about every lease, so a policy skips what is not evictable at the moment,
and is told of it again by ``admit`` once it is. That a prefix outlives its continuations is
therefore no business of a policy: it never gets to see the prefix before.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

from maru_shm.index.entries import Entry
from maru_shm.index.errors import UnknownPolicy


class EvictionPolicy(Protocol):
    """Order of eviction inside one size class. Called from the index's one thread."""

    def admit(self, entry: Entry) -> None:
        """``entry`` is evictable now, was last used at ``entry.stamp``. Comes once after every
        use of it, so it may be known already: then it has just been used, or lost a child."""

    def discard(self, entry: Entry) -> None:
        """Forget ``entry``: it left the pool, or got a child. It may be unknown."""

    def victim(self) -> Entry | None:
        """The evictable entry that should go first. It stays known until it is discarded."""


class Lru:
    """Least recently used first, exactly, at constant cost.

    Uses come in the order of the clock, so appending keeps ``_order`` sorted. Only a parent
    whose last child went can be older than the newest entry; those few go to a heap.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[Entry, float] = OrderedDict()
        self._late: list[tuple[float, int, Entry]] = []
        self._tickets = 0
        self._newest = float("-inf")

    def admit(self, entry: Entry) -> None:
        """See ``EvictionPolicy``."""
        stamp = entry.stamp
        if stamp >= self._newest:
            self._newest = stamp
            self._order[entry] = stamp
            self._order.move_to_end(entry)
        elif self._order.get(entry) != stamp:
            self._order.pop(entry, None)
            self._tickets -= (
                1  # of two equal stamps the one admitted last goes first: a chain's rest
            )
            heapq.heappush(self._late, (stamp, self._tickets, entry))

    def discard(self, entry: Entry) -> None:
        """See ``EvictionPolicy``."""
        self._order.pop(entry, None)

    def victim(self) -> Entry | None:
        """See ``EvictionPolicy``."""
        late = self._late
        while late and not (late[0][2].evictable and late[0][2].stamp == late[0][0]):
            heapq.heappop(late)
        order = self._order
        while order:
            oldest = next(iter(order))
            if oldest.evictable:
                return late[0][2] if late and late[0][0] <= oldest.stamp else oldest
            del order[oldest]
        return late[0][2] if late else None


_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": Lru}


def policy_named(name: str) -> Callable[[], EvictionPolicy]:
    """What makes a policy of this name, once per size class. Raises UnknownPolicy."""
    try:
        return _POLICIES[name]
    except KeyError:
        raise UnknownPolicy(name, tuple(sorted(_POLICIES))) from None
