"""Everything that has space in the pool, under all the ways in which it is found.

By key and chain (``Forest``), by generation (``ByGeneration``), by slot (``Segments``), and, once
evictable, by age (``EvictionPolicy``). The four change together, here and nowhere else.
"""

from __future__ import annotations

from maru_shm.index.effects import Effect, WriteFree
from maru_shm.index.entries import Entry, EntryState
from maru_shm.index.forest import Forest
from maru_shm.index.generations import ByGeneration
from maru_shm.index.segments import Segment, Segments
from maru_shm.types import Extent, Generation, Key, Namespace, OwnerToken

EPOCH_SHIFT = 40
"""A generation is ``epoch << EPOCH_SHIFT | counter``: 2**40 grants in each of 2**23 epochs."""


class Catalog:
    """Entries and their life: reserved, sealed, gone; condemned and quarantined besides."""

    def __init__(self, segments: Segments, epoch: int) -> None:
        self.segments = segments
        self.epoch = epoch
        self._last_generation = epoch << EPOCH_SHIFT
        self.forests: dict[Namespace, Forest] = {}
        self.by_generation = ByGeneration()
        """Reserved and sealed entries."""
        self.quarantine: dict[OwnerToken, dict[Generation, Entry]] = {}
        self.num_sealed = 0

    @property
    def untouched(self) -> bool:
        """Whether nothing was ever added."""
        return self._last_generation == self.epoch << EPOCH_SHIFT and not self.segments.classes

    def forest(self, namespace: Namespace) -> Forest:
        """The namespace's forest, a new one if nothing of it is known."""
        forest = self.forests.get(namespace)
        if forest is None:
            forest = self.forests[namespace] = Forest(namespace)
        return forest

    def prune(self, forest: Forest) -> None:
        """Forget a forest that nothing is left of."""
        if not len(forest):
            self.forests.pop(forest.namespace, None)

    def reserve(
        self,
        forest: Forest,
        key: Key,
        parent: Key | None,
        segment: Segment,
        length: int,
        now: float,
    ) -> Entry:
        """A new reserved entry, and generation, in a slot of ``segment``, which has a free one."""
        self._last_generation += 1
        slot = self.segments.claim(segment)
        shape = segment.size_class.shape
        payload = segment.base + slot * shape.slot_bytes + shape.payload_offset
        extent = Extent(payload, length, Generation(self._last_generation))
        entry = Entry(key, forest, extent, segment, EntryState.RESERVED, now)
        self.segments.occupy(segment, slot, entry)
        self.by_generation.append(entry)
        self.plant(entry, parent)
        return entry

    def plant(self, entry: Entry, parent: Key | None) -> None:
        """Link a reserved entry into its forest. Its parent is no leaf any more."""
        self.forests[entry.forest.namespace] = entry.forest  # may have been pruned in this call
        entry.forest.plant(entry, parent)
        above = entry.parent
        if isinstance(above, Entry):
            above.segment.size_class.policy.discard(above)

    def seal(self, entry: Entry, now: float) -> None:
        """Make a reserved entry visible."""
        entry.forest.seal(entry)
        self.num_sealed += 1
        self.touch(entry, now)

    def touch(self, entry: Entry, now: float) -> None:
        """A sealed entry has been used."""
        entry.stamp = now
        self.segments.touch(entry.segment, now)
        if entry.evictable:
            entry.segment.size_class.policy.admit(entry)

    def drop(self, entry: Entry, effects: list[Effect]) -> None:
        """Take away a reserved entry, or a sealed one that nobody leases: its slot is free."""
        effects.append(WriteFree(entry.slot_offset))
        self._leave(entry)
        self.vacate(entry)

    def condemn(self, entry: Entry, effects: list[Effect]) -> None:
        """Take a sealed entry out of sight now, and free its slot when no lease stands on it.

        Its header is cleared at once: a reader that is still copying sees the generation change.
        """
        effects.append(WriteFree(entry.slot_offset))
        self._leave(entry)
        if entry.leases:
            entry.state = EntryState.CONDEMNED
        else:
            self.vacate(entry)

    def unleased(self, entry: Entry) -> None:
        """The last lease on ``entry`` ended."""
        if entry.state is EntryState.CONDEMNED:
            self.vacate(entry)
        elif entry.evictable:
            entry.segment.size_class.policy.admit(entry)

    def release_quarantined(
        self, owner: OwnerToken, generation: Generation, effects: list[Effect]
    ) -> bool:
        """Free a quarantined slot of ``owner``; False if there is none of that generation."""
        held = self.quarantine.get(owner, {})
        entry = held.pop(generation, None)
        if entry is None:
            return False
        if not held:
            del self.quarantine[owner]
        effects.append(WriteFree(entry.slot_offset))
        self.vacate(entry)
        return True

    def _leave(self, entry: Entry) -> None:
        self.num_sealed -= entry.state is EntryState.SEALED
        entry.segment.size_class.policy.discard(entry)
        self.by_generation.remove(entry)
        parent = entry.forest.uproot(entry)
        self.prune(entry.forest)
        if parent is not None and parent.evictable:
            parent.segment.size_class.policy.admit(parent)

    def vacate(self, entry: Entry) -> None:
        """Free the slot of an entry that is found by nothing any more."""
        entry.state = EntryState.GONE
        self.segments.vacate(entry)
