"""The server's hand on a pool: carries effects out, and finds what an earlier server left.

Order of every write: see docs/format.md. In short, a record is written while its word is 0, and
its word last, by one aligned 8-byte store.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from maru_shm.index.effects import (
    BindSegment,
    Effect,
    UnbindSegment,
    WriteFree,
    WriteReserved,
    WriteSealed,
)
from maru_shm.index.found import FoundObject, FoundSegment
from maru_shm.pool import format as fmt
from maru_shm.pool import geometry as geo
from maru_shm.pool.errors import PoolError
from maru_shm.pool.flush import CacheLines
from maru_shm.pool.format import ObjectHeader, SegmentEntry, SlotPlace, SlotState
from maru_shm.pool.reserving import BlockReserver
from maru_shm.pool.slots import SlotTable

_log = logging.getLogger(__name__)


class PoolWriter:
    """Writes table entries and headers of one pool in one epoch.

    Thread: one, the server's.
    """

    def __init__(
        self,
        path: str,
        buffer: memoryview,
        lines: CacheLines,
        table: SlotTable,
        reserver: BlockReserver | None,
        epoch: int,
    ) -> None:
        self._path = path
        self._buffer = buffer
        self._lines = lines
        self._table = table
        self._geometry = table.geometry
        self._reserver = reserver
        self._epoch = epoch
        self._bound: dict[int, SegmentEntry] = {}
        self._bindings = 0

    def forget_all(self) -> None:
        """Unbind every segment: whatever the pool held is gone."""
        self._bound.clear()
        for segment in range(self._geometry.num_segments):
            self._store_entry_word(segment, 0)

    def write_superblock(self, copy: int, block: fmt.Superblock) -> None:
        """Write one of the two copies."""
        self._store(fmt.SUPERBLOCK_OFFSETS[copy], fmt.pack_superblock(block))

    def scan(self) -> Iterator[FoundSegment]:
        """What every bound segment holds, in ascending order.

        Headers and table entries that are torn, foreign or of an impossible generation are
        cleared on the way; their space counts as free.
        """
        self._bound.clear()
        for segment in range(self._geometry.num_segments):
            entry = self._table.entry(segment)
            if entry is None:
                self._store_entry_word(segment, 0)
                continue
            self._ensure_blocks(segment)
            self._bound[segment] = entry
            yield self._scan_segment(segment, entry)

    def apply(self, effects: Iterable[Effect]) -> None:
        """Carry the index's effects out, in order; all are on the medium when this returns.

        Raises PoolError for an effect that no sound index asks for (a slot outside a bound
        segment, an object larger than its slot, more parts than the header holds), and
        NotEnoughSpace if a segment has no blocks; the effects before it stand.
        """
        for effect in effects:
            match effect:
                case WriteReserved():
                    self._write_reserved(effect)
                case WriteSealed():
                    self._write_sealed(effect)
                case WriteFree():
                    self._store_word(self._place(effect.slot_offset).slot_offset, 0)
                case BindSegment():
                    self._bind(effect)
                case UnbindSegment():
                    self._check_segment(effect.segment)
                    self._store_entry_word(effect.segment, 0)
                    self._bound.pop(effect.segment, None)

    def _write_reserved(self, effect: WriteReserved) -> None:
        place = self._place(effect.slot_offset)
        if effect.payload_offset != place.payload_offset:
            raise PoolError(
                f"{self._path}: slot at {effect.slot_offset} has its payload at "
                f"{place.payload_offset}, not at {effect.payload_offset}"
            )
        self._publish(
            place,
            ObjectHeader(
                state=SlotState.WRITING,
                generation=effect.generation,
                owner=effect.owner,
                length=effect.length,
                namespace=effect.namespace,
                key=effect.key,
                parent=effect.parent,
                parts=(),
            ),
        )

    def _write_sealed(self, effect: WriteSealed) -> None:
        place = self._place(effect.slot_offset)
        header = self._table.header(place)
        if header is None or header.generation != effect.generation:
            # The header was damaged under us. Sealing it would bless the damage; as it is,
            # readers find it torn and report it.
            _log.error("%s: header at %d was damaged", self._path, effect.slot_offset)
            return
        self._publish(place, replace(header, state=SlotState.SEALED, parts=effect.parts))

    def _publish(self, place: SlotPlace, header: ObjectHeader) -> None:
        try:
            raw = fmt.pack_header(self._table.seed, place, header)
        except (ValueError, OverflowError) as error:
            raise PoolError(f"{self._path}: {error}") from error
        self._store_word(place.slot_offset, 0)
        self._store(place.slot_offset + fmt.WORD_BYTES, raw[fmt.WORD_BYTES :])
        self._store_word(place.slot_offset, fmt.pack_word(header.generation, header.state))

    def _bind(self, effect: BindSegment) -> None:
        self._check_segment(effect.segment)
        if effect.shape.slot_bytes > self._geometry.segment_bytes:
            raise PoolError(f"{self._path}: {effect.shape} is larger than a segment")
        self._ensure_blocks(effect.segment)
        self._bindings += 1
        entry = SegmentEntry(effect.shape, stamp=self._epoch << 32 | self._bindings)
        try:
            raw = fmt.pack_entry(self._table.seed, effect.segment, entry)
        except ValueError as error:
            raise PoolError(f"{self._path}: {error}") from error
        self._store_entry_word(effect.segment, 0)
        self._store(fmt.entry_offset(effect.segment) + fmt.WORD_BYTES, raw[fmt.WORD_BYTES :])
        word = int.from_bytes(raw[: fmt.WORD_BYTES], "little")
        self._store_entry_word(effect.segment, word)
        self._bound[effect.segment] = entry

    def _scan_segment(self, segment: int, entry: SegmentEntry) -> FoundSegment:
        start = geo.segment_offset(self._geometry, segment)
        found: dict[SlotState, list[FoundObject]] = {SlotState.SEALED: [], SlotState.WRITING: []}
        for index in self._table.used_slots(segment, entry):
            place = SlotPlace(start + index * entry.shape.slot_bytes, entry.shape, entry.stamp)
            header = self._table.header(place)
            if header is None or header.generation >> 40 > self._epoch:
                self._store_word(place.slot_offset, 0)
                continue
            found[header.state].append(
                FoundObject(
                    slot_offset=place.slot_offset,
                    generation=header.generation,
                    namespace=header.namespace,
                    key=header.key,
                    parent=header.parent,
                    length=header.length,
                    owner=header.owner,
                )
            )
        return FoundSegment(
            segment=segment,
            shape=entry.shape,
            sealed=tuple(found[SlotState.SEALED]),
            writing=tuple(found[SlotState.WRITING]),
        )

    def _place(self, slot_offset: int) -> SlotPlace:
        segment = geo.segment_of(self._geometry, slot_offset)
        entry = self._bound.get(segment) if segment is not None else None
        if segment is None or entry is None:
            raise PoolError(f"{self._path}: no bound segment has a slot at {slot_offset}")
        place = geo.place_of_slot(self._geometry, segment, entry, slot_offset)
        if place is None:
            raise PoolError(f"{self._path}: no slot of segment {segment} starts at {slot_offset}")
        return place

    def _check_segment(self, segment: int) -> None:
        if not 0 <= segment < self._geometry.num_segments:
            raise PoolError(
                f"{self._path}: no segment {segment}; there are {self._geometry.num_segments}"
            )

    def _ensure_blocks(self, segment: int) -> None:
        if self._reserver is not None:
            start = geo.segment_offset(self._geometry, segment)
            self._reserver.ensure(start, self._geometry.segment_bytes)

    def _store(self, offset: int, data: bytes) -> None:
        self._buffer[offset : offset + len(data)] = data
        self._lines.write_back(self._buffer, offset, len(data))
        self._lines.fence()

    def _store_word(self, offset: int, word: int) -> None:
        """One aligned 8-byte store: readers see the old word or the new one, never a mix."""
        with self._buffer[offset : offset + fmt.WORD_BYTES].cast("Q") as target:
            target[0] = word
        self._lines.write_back(self._buffer, offset, fmt.WORD_BYTES)
        self._lines.fence()

    def _store_entry_word(self, segment: int, word: int) -> None:
        self._store_word(fmt.entry_offset(segment), word)
