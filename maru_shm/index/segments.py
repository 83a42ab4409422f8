"""Space: segments, the slots that they are divided into, and the size classes that own them.

Every segment is either in the common store (unbound) or divided into slots of one class. A
class takes a segment when it needs one and gives it back when it is empty. Nothing here knows
keys or chains; what to evict is decided in ``placement``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from maru_shm.index.effects import BindSegment, Effect, UnbindSegment
from maru_shm.index.entries import Entry
from maru_shm.index.eviction import EvictionPolicy
from maru_shm.index.size_classes import shape_for
from maru_shm.types import PoolGeometry, SlotShape


class SizeClass:
    """The segments bound to one slot shape, and the order in which its objects go."""

    __slots__ = ("policy", "roomy", "segments", "shape", "slots_per_segment")

    def __init__(self, shape: SlotShape, segment_bytes: int, policy: EvictionPolicy) -> None:
        self.shape = shape
        self.slots_per_segment = segment_bytes // shape.slot_bytes
        self.policy = policy
        self.segments: OrderedDict[int, Segment] = OrderedDict()
        """By number, the one used longest ago first."""
        self.roomy: dict[int, Segment] = {}
        """Those with a free slot."""


class Segment:
    """One bound segment."""

    __slots__ = ("base", "free", "number", "occupants", "size_class", "touched", "used")

    def __init__(self, number: int, base: int, size_class: SizeClass) -> None:
        self.number = number
        self.base = base
        """Bytes from the pool's start to slot 0."""
        self.size_class = size_class
        self.occupants: list[Entry | None] = []
        """By slot; as long as the highest slot ever used, so that binding costs nothing."""
        self.free: list[int] = []
        """Slots below ``len(occupants)`` that are free."""
        self.used = 0
        self.touched = float("-inf")
        """Clock reading of the last use of anything in it."""

    def slot_of(self, slot_offset: int) -> int | None:
        """The number of the slot that begins at ``slot_offset``; None if none does."""
        slot, rest = divmod(slot_offset - self.base, self.size_class.shape.slot_bytes)
        return slot if not rest and 0 <= slot < self.size_class.slots_per_segment else None


class Segments:
    """All segments of one pool."""

    def __init__(self, geometry: PoolGeometry, new_policy: Callable[[], EvictionPolicy]) -> None:
        self.geometry = geometry
        self.classes: dict[SlotShape, SizeClass] = {}
        """Classes that have a segment."""
        self.used_bytes = 0
        self._new_policy = new_policy
        self._unbound = dict.fromkeys(range(geometry.num_segments - 1, -1, -1))
        self._emptied: dict[int, Segment] = {}

    @property
    def num_unbound(self) -> int:
        """Segments in the common store."""
        return len(self._unbound)

    def class_for(self, length: int) -> SizeClass | None:
        """The class of objects of ``length`` bytes; None if no segment holds such an object."""
        shape = shape_for(length, self.geometry.segment_bytes)
        return None if shape is None else self.class_of(shape)

    def class_of(self, shape: SlotShape) -> SizeClass:
        """The class with this shape, a new one if it has no segment yet."""
        known = self.classes.get(shape)
        if known is not None:
            return known
        return SizeClass(shape, self.geometry.segment_bytes, self._new_policy())

    def with_room(self, size_class: SizeClass, effects: list[Effect]) -> Segment | None:
        """A segment of the class that has a free slot, bound just now if need be.

        The segment that got room last is filled first, the others may run empty.
        """
        for segment in reversed(size_class.roomy.values()):
            return segment
        if not self._unbound:
            self.return_emptied(effects)
        if not self._unbound:
            return None
        number, _ = self._unbound.popitem()
        effects.append(BindSegment(number, size_class.shape))
        return self._bind(number, size_class)

    def adopt(self, number: int, shape: SlotShape) -> Segment:
        """Bind a segment that the pool already calls bound; its slots are free yet."""
        del self._unbound[number]
        return self._bind(number, self.class_of(shape))

    def adopt_slot(self, segment: Segment, slot: int) -> None:
        """Claim a given slot, higher than every one claimed before in an adopted segment."""
        segment.free.extend(range(len(segment.occupants), slot))
        segment.occupants.extend([None] * (slot + 1 - len(segment.occupants)))

    def _bind(self, number: int, size_class: SizeClass) -> Segment:
        base = self.geometry.first_segment_offset + number * self.geometry.segment_bytes
        segment = Segment(number, base, size_class)
        self.classes[size_class.shape] = size_class
        size_class.segments[number] = size_class.roomy[number] = segment
        return segment

    def claim(self, segment: Segment) -> int:
        """Take a free slot of a roomy segment; its number. ``occupy`` follows."""
        if segment.free:
            slot = segment.free.pop()
        else:
            slot = len(segment.occupants)
            segment.occupants.append(None)
        return slot

    def occupy(self, segment: Segment, slot: int, entry: Entry) -> None:
        """Put ``entry`` into a claimed slot."""
        size_class = segment.size_class
        segment.occupants[slot] = entry
        segment.used += 1
        self.used_bytes += size_class.shape.slot_bytes
        if segment.used == size_class.slots_per_segment:
            del size_class.roomy[segment.number]

    def vacate(self, entry: Entry) -> None:
        """Free the slot of ``entry``. A segment without objects is given back soon after."""
        segment = entry.segment
        slot = (entry.slot_offset - segment.base) // segment.size_class.shape.slot_bytes
        segment.occupants[slot] = None
        segment.free.append(slot)
        segment.used -= 1
        self.used_bytes -= segment.size_class.shape.slot_bytes
        segment.size_class.roomy[segment.number] = segment
        if not segment.used:
            self._emptied[segment.number] = segment

    def return_emptied(self, effects: list[Effect]) -> None:
        """Give segments that have become empty, and still are, back to the common store."""
        for segment in self._emptied.values():
            if not segment.used:
                self._unbind(segment, effects)
        self._emptied.clear()

    def give_back(self, segment: Segment, effects: list[Effect]) -> None:
        """Give one empty segment back to the common store now."""
        self._emptied.pop(segment.number, None)
        self._unbind(segment, effects)

    def touch(self, segment: Segment, now: float) -> None:
        """Something in the segment has been used."""
        segment.touched = now
        segment.size_class.segments.move_to_end(segment.number)

    def _unbind(self, segment: Segment, effects: list[Effect]) -> None:
        size_class = segment.size_class
        del size_class.segments[segment.number]
        del size_class.roomy[segment.number]
        if not size_class.segments:
            del self.classes[size_class.shape]
        self._unbound[segment.number] = None
        effects.append(UnbindSegment(segment.number))
