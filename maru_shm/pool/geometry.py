"""How a pool of a given size is divided, and where a byte of it belongs. Pure arithmetic."""

from __future__ import annotations

from maru_shm.pool.errors import PoolError
from maru_shm.pool.format import (
    ENTRY_BYTES,
    PAGE_BYTES,
    TABLE_OFFSET,
    SegmentEntry,
    SlotPlace,
)
from maru_shm.types import PoolGeometry

MIN_NOMINAL_BYTES = 1 << 20
MAX_NOMINAL_BYTES = 1 << 30
"""Bounds of the default nominal segment: below, the table grows for nothing; above, one rarely
used size class would hold too much of the pool."""
DEFAULT_SEGMENTS = 16
"""The default aims at this many at least, so that several size classes can live side by side."""


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def default_nominal_bytes(pool_bytes: int) -> int:
    """Power of two near ``pool_bytes / 16``, within 1 MiB and 1 GiB."""
    wanted = max(pool_bytes // DEFAULT_SEGMENTS, 1)
    return min(max(1 << wanted.bit_length() - 1, MIN_NOMINAL_BYTES), MAX_NOMINAL_BYTES)


def divide_device(device_bytes: int, nominal_segment_bytes: int | None = None) -> PoolGeometry:
    """Divide a device of fixed size into as many equal segments as fit behind their table.

    Raises PoolError if not even one fits.
    """
    segment_bytes = _segment_bytes(device_bytes, nominal_segment_bytes)
    count = max((device_bytes - TABLE_OFFSET) // segment_bytes, 0)
    while count and _first_segment(count) + count * segment_bytes > device_bytes:
        count -= 1
    if count == 0:
        raise PoolError(
            f"{device_bytes} bytes have no room for one segment of {segment_bytes} bytes; "
            f"a pool needs at least {_first_segment(1) + segment_bytes}"
        )
    return PoolGeometry(
        pool_bytes=device_bytes,
        segment_bytes=segment_bytes,
        first_segment_offset=_first_segment(count),
        num_segments=count,
    )


def plan_file(
    payload_bytes: int, alignment: int, nominal_segment_bytes: int | None = None
) -> PoolGeometry:
    """Size a file for ``payload_bytes`` of power-of-two objects.

    It is larger by 1/256 for headers and by the pages of superblock and table; what is left of
    ``payload_bytes`` beyond a whole number of nominal segments is not used. Raises PoolError if
    it is less than one segment.
    """
    segment_bytes = _segment_bytes(payload_bytes, nominal_segment_bytes)
    nominal = nominal_segment_bytes or default_nominal_bytes(payload_bytes)
    count = payload_bytes // nominal
    if count < 1:
        raise PoolError(
            f"a pool of {payload_bytes} bytes is smaller than one segment, {nominal}; ask for more"
        )
    first = _first_segment(count)
    return PoolGeometry(
        pool_bytes=round_up(first + count * segment_bytes, alignment),
        segment_bytes=segment_bytes,
        first_segment_offset=first,
        num_segments=count,
    )


def _segment_bytes(pool_bytes: int, nominal_segment_bytes: int | None) -> int:
    """The nominal size and 1/256 for headers, so that power-of-two objects leave no tail."""
    nominal = nominal_segment_bytes or default_nominal_bytes(pool_bytes)
    if nominal < PAGE_BYTES or nominal & nominal - 1:
        raise PoolError(
            f"segment size {nominal} is not a power of two of at least {PAGE_BYTES} bytes"
        )
    return nominal + round_up(nominal // 256, PAGE_BYTES)


def _first_segment(num_segments: int) -> int:
    return round_up(TABLE_OFFSET + num_segments * ENTRY_BYTES, PAGE_BYTES)


def segment_offset(geometry: PoolGeometry, segment: int) -> int:
    """Bytes from the pool's start to ``segment``."""
    return geometry.first_segment_offset + segment * geometry.segment_bytes


def segment_of(geometry: PoolGeometry, offset: int) -> int | None:
    """The segment that the byte at ``offset`` lies in; None if it lies in none."""
    segment = (offset - geometry.first_segment_offset) // geometry.segment_bytes
    return segment if 0 <= segment < geometry.num_segments else None


def slots_per_segment(geometry: PoolGeometry, entry: SegmentEntry) -> int:
    """How many slots a segment bound like ``entry`` has."""
    return geometry.segment_bytes // entry.shape.slot_bytes


def place_of_slot(
    geometry: PoolGeometry, segment: int, entry: SegmentEntry, slot_offset: int
) -> SlotPlace | None:
    """The slot at ``slot_offset``; None if no slot of the segment starts there."""
    index, rest = divmod(slot_offset - segment_offset(geometry, segment), entry.shape.slot_bytes)
    if rest or not 0 <= index < slots_per_segment(geometry, entry):
        return None
    return SlotPlace(slot_offset=slot_offset, shape=entry.shape, stamp=entry.stamp)


def place_of_payload(
    geometry: PoolGeometry, segment: int, entry: SegmentEntry, payload_offset: int
) -> SlotPlace | None:
    """The slot whose payload starts at ``payload_offset``; None if there is none."""
    slot_offset = payload_offset - entry.shape.payload_offset
    return place_of_slot(geometry, segment, entry, slot_offset)
