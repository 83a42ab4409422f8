"""Reading table entries and headers from a mapped pool. What readers, scan and walk share."""

from __future__ import annotations

import numpy as np

from maru_shm.pool import format as fmt
from maru_shm.pool.flush import CacheLines
from maru_shm.pool.format import ObjectHeader, PoolSeed, SegmentEntry, SlotPlace
from maru_shm.pool.geometry import place_of_payload, segment_of, segment_offset, slots_per_segment
from maru_shm.types import PoolGeometry


class SlotTable:
    """A pool's table and headers as they are at this moment; caches nothing.

    Thread: any.
    """

    def __init__(
        self, buffer: memoryview, seed: PoolSeed, geometry: PoolGeometry, lines: CacheLines
    ) -> None:
        self.seed = seed
        self.geometry = geometry
        self._buffer = buffer
        self._lines = lines

    def entry(self, segment: int) -> SegmentEntry | None:
        """How ``segment`` is bound; None if it is not, or its entry is not whole."""
        raw = self._fresh(fmt.entry_offset(segment), fmt.ENTRY_BYTES)
        return fmt.unpack_entry(self.seed, segment, self.geometry, raw)

    def entry_damaged(self, segment: int) -> bool:
        """Whether the entry is neither whole nor that of an unbound segment."""
        raw = self._fresh(fmt.entry_offset(segment), fmt.ENTRY_BYTES)
        return (
            any(raw[: fmt.WORD_BYTES])
            and fmt.unpack_entry(self.seed, segment, self.geometry, raw) is None
            and self._fresh(fmt.entry_offset(segment), fmt.ENTRY_BYTES) == raw
        )

    def used_slots(self, segment: int, entry: SegmentEntry) -> list[int]:
        """Indexes of the slots whose word is not 0 (one strided look: slots can be many)."""
        count = slots_per_segment(self.geometry, entry)
        slot_bytes = entry.shape.slot_bytes
        start = segment_offset(self.geometry, segment)
        self._lines.invalidate(self._buffer, start, count * slot_bytes)
        self._lines.fence()
        slots = np.frombuffer(self._buffer[start : start + count * slot_bytes], dtype="<u8")
        return [int(index) for index in np.flatnonzero(slots[:: slot_bytes // 8])]

    def place(self, payload_offset: int) -> SlotPlace | None:
        """The slot whose payload starts at ``payload_offset`` as its segment is bound now."""
        segment = segment_of(self.geometry, payload_offset)
        if segment is None:
            return None
        entry = self.entry(segment)
        if entry is None:
            return None
        return place_of_payload(self.geometry, segment, entry, payload_offset)

    def header(self, place: SlotPlace) -> ObjectHeader | None:
        """The slot's header; None if it is free or not whole."""
        return fmt.unpack_header(self.seed, place, self.raw_header(place))

    def raw_header(self, place: SlotPlace) -> bytes:
        """A private copy of the header: the fixed fields and as many parts as they speak of."""
        raw = self._fresh(place.slot_offset, fmt.HEADER_BYTES)
        size = fmt.header_bytes(place, raw)
        return raw if size == len(raw) else self._fresh(place.slot_offset, size)

    def word(self, slot_offset: int) -> int:
        """The header's first word, by one aligned 8-byte load."""
        self._lines.invalidate(self._buffer, slot_offset, fmt.WORD_BYTES)
        self._lines.fence()
        with self._buffer[slot_offset : slot_offset + fmt.WORD_BYTES].cast("Q") as word:
            return int(word[0])

    def _fresh(self, offset: int, length: int) -> bytes:
        self._lines.invalidate(self._buffer, offset, length)
        self._lines.fence()
        return bytes(self._buffer[offset : offset + length])
