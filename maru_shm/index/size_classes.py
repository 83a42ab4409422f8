"""How large a slot an object gets: a pure function of its payload length.

Slots come in geometric classes, 16 per doubling, so that rounding wastes less than 1/16 of the
payload; a power of two is a class of its own and wastes nothing. Capacities are multiples of 64
bytes below ``LARGE_PAYLOAD_BYTES`` (there rounding wastes less than max(64 bytes, 1/16)), and of
a page from there on. A class never depends on which object came first: any segment of a class
serves every object of it, before and after a restart, and model sizes that differ by a few
percent share segments. Binding exactly to the first object's size would save those few percent
for one model and cost every other one a segment of its own.

A segment holds 1/256 more than a power of two. A header area of 4096 bytes is 1/256 of 1 MiB, so
power-of-two payloads from 1 MiB on fill a segment without a tail.
"""

from __future__ import annotations

from functools import lru_cache

from maru_shm.types import SlotShape

LARGE_PAYLOAD_BYTES = 64 * 1024
"""From here on payloads start on a page, which costs at most 1/16 of the payload."""

_SMALL_GRAIN = 64
"""A cache line: no two objects share one, so flushing one never touches the other."""
_LARGE_GRAIN = 4096
_STEPS_PER_DOUBLING = 16


def payload_offset_for(length: int) -> int:
    """Bytes from a slot's start to its payload, for a payload of ``length`` bytes."""
    return 4096 if length >= LARGE_PAYLOAD_BYTES else 256


@lru_cache(maxsize=256)
def shape_for(length: int, segment_bytes: int) -> SlotShape | None:
    """The slot that an object of ``length`` >= 1 payload bytes gets; None if no segment holds it.

    A class whose rounded slot would not fit the segment is cut to the segment, so that every
    object up to ``segment_bytes - payload_offset`` has a class.
    """
    large = length >= LARGE_PAYLOAD_BYTES
    grain = _LARGE_GRAIN if large else _SMALL_GRAIN
    offset = payload_offset_for(length)
    below = 1 << max(0, (length - 1).bit_length() - 1)  # below < length <= 2 * below
    step = max(grain, below // _STEPS_PER_DOUBLING)
    capacity = -(-length // step) * step
    slot_bytes = min(offset + capacity, segment_bytes // _SMALL_GRAIN * _SMALL_GRAIN)
    if offset + length > slot_bytes:
        return None
    return SlotShape(slot_bytes=slot_bytes, payload_offset=offset)
