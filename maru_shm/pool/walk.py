"""The walk of ``maru verify``: every header and payload of a pool against its checksums.

Works on a dead pool and on one in use: it maps read-only, takes no lease and disturbs nobody.
What changes under its eyes is reported as that, never as damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, unique

from maru_shm.pool import geometry as geo
from maru_shm.pool.format import ObjectHeader, SegmentEntry, SlotPlace, SlotState
from maru_shm.pool.pool import Pool
from maru_shm.pool.reading import Verdict, Verify, begin_read, end_read, payload_matches
from maru_shm.types import Extent


@unique
class WalkVerdict(Enum):
    """What the walk says of one slot."""

    OK = "ok"
    """Header whole, payload as its checksums say (as far as was asked)."""
    NO_CHECKSUM = "no_checksum"
    """Header whole; its writer computed no checksum, so the payload could not be compared."""
    WRITING = "writing"
    """Reserved: its bytes mean nothing yet."""
    TORN_HEADER = "torn_header"
    """Neither free nor a whole header. A restarted server reclaims the slot."""
    TORN_SEGMENT = "torn_segment"
    """The segment's table entry is damaged: nothing in it can be found."""
    BAD_CHECKSUM = "bad_checksum"
    """The payload is not what was stored."""
    CHANGED_WHILE_READ = "changed_while_read"
    """The server gave the slot to another object meanwhile; neither good nor bad."""


DAMAGE = frozenset({WalkVerdict.TORN_HEADER, WalkVerdict.TORN_SEGMENT, WalkVerdict.BAD_CHECKSUM})


@dataclass(frozen=True, slots=True)
class Finding:
    """One slot that is not free."""

    offset: int
    """Bytes from the pool's start to the slot (for TORN_SEGMENT: to the segment)."""
    generation: int
    """0 where no header could be read."""
    verdict: WalkVerdict
    extent: Extent | None
    """The payload; None where no header could be read."""
    header: ObjectHeader | None


def walk(
    pool: Pool,
    verify: Verify = Verify.FULL,
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[Finding]:
    """Yield a finding for every slot in use, in ascending offsets.

    ``pool``: opened by ``open_pool(..., access=Access.READ)``. ``on_progress(done_bytes,
    all_bytes)`` is called in this thread after every slot, and reaches ``all_bytes`` at the end.
    """
    total = pool.geometry.num_segments * pool.geometry.segment_bytes
    for segment in range(pool.geometry.num_segments):
        start = geo.segment_offset(pool.geometry, segment)
        done = segment * pool.geometry.segment_bytes
        entry = pool.table.entry(segment)
        if entry is not None:
            for index in pool.table.used_slots(segment, entry):
                slot = start + index * entry.shape.slot_bytes
                finding = _look_at(pool, SlotPlace(slot, entry.shape, entry.stamp), verify)
                if finding is not None:
                    yield finding
                if on_progress is not None:
                    on_progress(done + slot + entry.shape.slot_bytes - start, total)
        elif pool.table.entry_damaged(segment):
            yield Finding(start, 0, WalkVerdict.TORN_SEGMENT, None, None)
        if on_progress is not None:
            on_progress(done + pool.geometry.segment_bytes, total)


def _look_at(pool: Pool, place: SlotPlace, verify: Verify) -> Finding | None:
    word = pool.table.word(place.slot_offset)
    if word == 0:
        return None
    header = pool.table.header(place)
    if header is None:
        # Damage stays as it is; a header that the server is just changing does not.
        if pool.table.word(place.slot_offset) != word or not _still_bound(pool, place):
            return Finding(place.slot_offset, word >> 2, WalkVerdict.CHANGED_WHILE_READ, None, None)
        return Finding(place.slot_offset, 0, WalkVerdict.TORN_HEADER, None, None)
    extent = Extent(place.payload_offset, header.length, header.generation)
    verdict = _compare(pool, extent, header, verify)
    return Finding(place.slot_offset, header.generation, verdict, extent, header)


def _compare(pool: Pool, extent: Extent, header: ObjectHeader, verify: Verify) -> WalkVerdict:
    if header.state is SlotState.WRITING:
        return WalkVerdict.WRITING
    if begin_read(pool, extent) is not Verdict.OK:
        return WalkVerdict.CHANGED_WHILE_READ
    matches = payload_matches(pool, extent, verify)
    if end_read(pool, extent) is not Verdict.OK:
        return WalkVerdict.CHANGED_WHILE_READ
    if not matches:
        return WalkVerdict.BAD_CHECKSUM
    if not header.parts and verify is not Verify.HEADER:
        return WalkVerdict.NO_CHECKSUM
    return WalkVerdict.OK


def _still_bound(pool: Pool, place: SlotPlace) -> bool:
    segment = geo.segment_of(pool.geometry, place.slot_offset)
    assert segment is not None
    return pool.table.entry(segment) == SegmentEntry(place.shape, place.stamp)
