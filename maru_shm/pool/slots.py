"""Reading table entries and headers from a mapped pool. What readers, scan and walk share."""

from __future__ import annotations

from maru_shm.pool import format as fmt
from maru_shm.pool.flush import CacheLines
from maru_shm.pool.format import ObjectHeader, PoolSeed, SegmentEntry, SlotPlace
from maru_shm.pool.geometry import place_of_payload, segment_of
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
        """A private copy of all bytes between the slot's start and its payload that can matter."""
        size = fmt.HEADER_BYTES + fmt.parts_capacity(place.shape) * fmt.PART_BYTES
        raw = self._fresh(place.slot_offset, fmt.HEADER_BYTES)
        num_parts = raw[29] | raw[30] << 8
        if num_parts == 0:
            return raw
        return self._fresh(
            place.slot_offset, min(size, fmt.HEADER_BYTES + num_parts * fmt.PART_BYTES)
        )

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
