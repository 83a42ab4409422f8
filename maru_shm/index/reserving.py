"""One request for space: its items in order, first writer wins."""

from __future__ import annotations

from collections.abc import Sequence

from maru_shm.control.messages import ReserveItem, ReserveOutcome, ReserveResult
from maru_shm.index.answers import ReserveAnswer
from maru_shm.index.catalog import Catalog
from maru_shm.index.effects import Effect, WriteReserved
from maru_shm.index.entries import Entry
from maru_shm.index.leases import Session
from maru_shm.index.placement import Placement
from maru_shm.types import Namespace, SlotShape

_PRESENT = ReserveResult(ReserveOutcome.PRESENT, None)
_BEING_WRITTEN = ReserveResult(ReserveOutcome.BEING_WRITTEN, None)
_NO_SPACE = ReserveResult(ReserveOutcome.NO_SPACE, None)
_TOO_LARGE = ReserveResult(ReserveOutcome.TOO_LARGE, None)


class Reserving:
    """One call of ``Index.reserve``; used once."""

    def __init__(
        self,
        catalog: Catalog,
        placement: Placement,
        holder: Session,
        namespace: Namespace,
        now: float,
    ) -> None:
        self._catalog = catalog
        self._placement = placement
        self._holder = holder
        self._forest = catalog.forest(namespace)
        self._now = now
        self._effects: list[Effect] = []
        self._full: set[SlotShape] = set()
        """Shapes for which nothing could be evicted; that does not change within a call."""
        self.granted = 0
        self.no_space = 0

    def run(self, items: Sequence[ReserveItem]) -> ReserveAnswer:
        """Grant what can be granted. Parents of the items are not evicted for their children."""
        parents = self._sealed_parents(items)
        for entry in parents:
            entry.leases += 1
        results = [self._reserve(item) for item in items]
        for entry in parents:
            entry.leases -= 1
            if not entry.leases:
                self._catalog.unleased(entry)
        self._catalog.prune(self._forest)
        self._catalog.segments.return_emptied(self._effects)
        return ReserveAnswer(results, self._effects)

    def _sealed_parents(self, items: Sequence[ReserveItem]) -> list[Entry]:
        sealed = self._forest.sealed
        wanted = (sealed.get(item.parent) for item in items if item.parent is not None)
        return [entry for entry in wanted if entry is not None]

    def _reserve(self, item: ReserveItem) -> ReserveResult:
        forest = self._forest
        known = forest.sealed.get(item.key)
        if known is not None:
            self._catalog.touch(known, self._now)
            return _PRESENT
        if item.key in forest.reserved:
            return _BEING_WRITTEN
        size_class = self._catalog.segments.class_for(item.length)
        if size_class is None:
            return _TOO_LARGE
        segment = None
        if not self._full or size_class.shape not in self._full:
            segment = self._placement.room(size_class, self._now, self._effects)
        if segment is None:
            self._full.add(size_class.shape)
            self.no_space += 1
            return _NO_SPACE
        entry = self._catalog.reserve(
            forest, item.key, item.parent, segment, item.length, self._now
        )
        extent = entry.extent
        self._holder.reservations[extent.generation] = entry
        self.granted += 1
        self._effects.append(
            WriteReserved(
                slot_offset=entry.slot_offset,
                payload_offset=extent.offset,
                generation=extent.generation,
                namespace=forest.namespace,
                key=item.key,
                parent=item.parent,
                length=item.length,
                owner=self._holder.owner,
            )
        )
        return ReserveResult(ReserveOutcome.GRANTED, extent)
