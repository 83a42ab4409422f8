"""Reading an object so that never a wrong byte is used, lease or no lease.

The protocol around every copy: ``begin_read`` (header whole, sealed, of this generation), copy,
``end_read`` (still so). A generation is given out once in a pool's life and is cleared from the
header before its space is given out anew, so equal words before and after mean that the bytes
between were the object's. A lease makes a change unlikely; this finds it if it happens.

``read`` and ``leased_view`` wrap the protocol for callers that want bytes; whoever copies by
other means (to device memory, through a plan) uses the two halves.

Thread: all functions from any thread, also for the same extent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, unique

from maru_shm.pool.checksum import full_checksum, part_range, sample_checksum
from maru_shm.pool.errors import ObjectCorrupt, ObjectGone, PoolError
from maru_shm.pool.format import ObjectHeader, SlotState, pack_word
from maru_shm.pool.pool import Pool
from maru_shm.types import Extent, PartChecksum


@unique
class Verify(Enum):
    """How much of a payload is checked when it is read."""

    HEADER = "header"
    """The header only: whole, sealed, right generation and length."""
    SAMPLE = "sample"
    """And about 1/64 of the bytes; finds copies that never happened and foreign pages."""
    FULL = "full"
    """And every byte."""


@unique
class Verdict(Enum):
    """What a check found."""

    OK = "ok"
    STALE = "stale"
    """The slot is free or belongs to another generation: the object was evicted. A miss."""
    TORN = "torn"
    """The header is not whole, or contradicts the extent: the medium was damaged. Report the
    object as suspect."""


def check(pool: Pool, extent: Extent) -> Verdict:
    """Whether ``extent`` names a sealed object at this moment. Some 10 us."""
    verdict, _ = _look(pool, extent)
    return verdict


def checksums(pool: Pool, extent: Extent) -> tuple[PartChecksum, ...]:
    """The object's checksums, in part order; empty if its writer computed none.

    Raises ObjectGone or ObjectCorrupt.
    """
    verdict, header = _look(pool, extent)
    if header is None:
        raise _error(pool, extent, verdict)
    return header.parts


def begin_read(pool: Pool, extent: Extent) -> Verdict:
    """``check``, and make sure that the loads that follow see the medium's bytes."""
    verdict, _ = _look(pool, extent)
    if verdict is Verdict.OK:
        pool.lines.invalidate(pool.mapping.buffer, extent.offset, extent.length)
        pool.lines.fence()
    return verdict


def end_read(pool: Pool, extent: Extent) -> Verdict:
    """``check`` after the copy: anything but OK means that the copy must be discarded."""
    pool.lines.fence()
    return check(pool, extent)


def payload_matches(pool: Pool, extent: Extent, verify: Verify, part: int | None = None) -> bool:
    """Whether the payload's bytes in the mapping fit the checksums in its header.

    ``part``: compare only this part; None for all. True where there is nothing to compare: HEADER
    was asked, the writer computed none, or the object is not there any more. Use it between
    ``begin_read`` and ``end_read``; without OK from the latter the answer means nothing.
    """
    if verify is Verify.HEADER:
        return True
    _, header = _look(pool, extent)
    if header is None:
        return True
    payload = pool.payload(extent)
    num_parts = len(header.parts)
    for index in range(num_parts) if part is None else (part,):
        if index < num_parts:
            start, end = part_range(extent.length, num_parts, index)
            if not bytes_match(payload[start:end], header.parts[index], verify):
                return False
    return True


def bytes_match(data: memoryview, expected: PartChecksum, verify: Verify) -> bool:
    """Whether one part's bytes (contiguous, anywhere) fit its checksum."""
    match verify:
        case Verify.HEADER:
            return True
        case Verify.SAMPLE:
            return sample_checksum(data) == expected.sample
        case Verify.FULL:
            return full_checksum(data) == expected.full


def read(pool: Pool, extent: Extent, verify: Verify = Verify.HEADER) -> bytes:
    """A private copy of the object's payload.

    Raises ObjectGone (a miss) or ObjectCorrupt (report it as suspect).
    """
    with leased_view(pool, extent, verify) as view:
        return bytes(view)


@contextmanager
def leased_view(pool: Pool, extent: Extent, verify: Verify = Verify.HEADER) -> Iterator[memoryview]:
    """The payload in place, read-only, for as long as the block runs.

    Hold a lease meanwhile. Checked before the block and after it: if the object was replaced
    the block's end raises ObjectGone, and what the block made of the bytes must be discarded.
    An exception from inside the block goes through unchanged.
    """
    _raise_for(pool, extent, begin_read(pool, extent))
    view = pool.payload(extent).toreadonly()
    try:
        matches = payload_matches(pool, extent, verify)
        _raise_for(pool, extent, end_read(pool, extent))
        if not matches:
            raise ObjectCorrupt(
                f"{pool.path}: payload at {extent.offset} (generation {extent.generation:#x}) "
                f"does not match its {verify.value} checksum; report it as suspect"
            )
        yield view
        _raise_for(pool, extent, end_read(pool, extent))
    finally:
        view.release()


def _look(pool: Pool, extent: Extent) -> tuple[Verdict, ObjectHeader | None]:
    place = pool.table.place(extent.offset)
    if place is None:
        return Verdict.STALE, None  # Its segment was unbound or bound to another shape.
    word = pool.table.word(place.slot_offset)
    header = pool.table.header(place)
    if word == pack_word(extent.generation, SlotState.SEALED) and header is not None:
        if header.generation != extent.generation:
            return Verdict.STALE, None  # Replaced between the two looks.
        if header.state is SlotState.SEALED and header.length == extent.length:
            return Verdict.OK, header
        return Verdict.TORN, None
    # A header is never published unwhole: under a word that stays, this is damage.
    if word != 0 and header is None and pool.table.word(place.slot_offset) == word:
        return Verdict.TORN, None
    return Verdict.STALE, None


def _raise_for(pool: Pool, extent: Extent, verdict: Verdict) -> None:
    if verdict is not Verdict.OK:
        raise _error(pool, extent, verdict)


def _error(pool: Pool, extent: Extent, verdict: Verdict) -> PoolError:
    where = f"{pool.path}: object at {extent.offset} (generation {extent.generation:#x})"
    if verdict is Verdict.TORN:
        return ObjectCorrupt(f"{where} has a damaged header; report it as suspect")
    return ObjectGone(f"{where} is not there any more; look it up again")
