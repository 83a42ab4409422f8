"""The bytes of superblock, table entry and header: pinned, and refused where they are damaged."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_shm.pool import format as fmt
from maru_shm.pool.errors import NotAPool, PoolFormatError
from maru_shm.pool.format import (
    ObjectHeader,
    SegmentEntry,
    SlotPlace,
    SlotState,
    Superblock,
    pool_seed,
)
from maru_shm.pool.geometry import plan_file
from maru_shm.pool.pool import choose_copy
from maru_shm.types import (
    Generation,
    Key,
    Namespace,
    OwnerToken,
    PartChecksum,
    PoolGeometry,
    SlotShape,
)

UUID = bytes(range(16))
SEED = pool_seed(UUID)
GEOMETRY = PoolGeometry(
    pool_bytes=1 << 20, segment_bytes=69632, first_segment_offset=12288, num_segments=14
)
SUPERBLOCK = Superblock(UUID, GEOMETRY, epoch=3, boot_id=bytes(range(100, 116)))
ENTRY = SegmentEntry(SlotShape(slot_bytes=8192, payload_offset=4096), stamp=3 << 32 | 5)
PLACE = SlotPlace(slot_offset=12288 + 8192, shape=ENTRY.shape, stamp=ENTRY.stamp)
HEADER = ObjectHeader(
    state=SlotState.SEALED,
    generation=Generation(3 << 40 | 7),
    owner=OwnerToken(0x0102030405060708),
    length=4096,
    namespace=Namespace(b"\x11" * 32),
    key=Key(b"\x22" * 32),
    parent=Key(b"\x33" * 32),
    parts=(PartChecksum(full=0xF0, sample=0x50), PartChecksum(full=0xF1, sample=0x51)),
)

GOLDEN_SUPERBLOCK = bytes.fromhex(
    "4d415255040302010100000060000000000102030405060708090a0b0c0d0e0f"
    "0000100000000000001001000000000000300000000000000e00000000000000"
    "03000000000000006465666768696a6b6c6d6e6f70717273a72160a9916145c7"
)
GOLDEN_ENTRY = bytes.fromhex("8000000040000000050000000300000061d8e27b3a3451c00000000000000000")
GOLDEN_HEADER = bytes.fromhex(
    "1e000000000c0000983037ec673fa3f508070605040302010010000000020001"
    "1111111111111111111111111111111111111111111111111111111111111111"
    "2222222222222222222222222222222222222222222222222222222222222222"
    "3333333333333333333333333333333333333333333333333333333333333333"
    "f0000000000000005000000000000000f1000000000000005100000000000000"
)


def test_superblock_bytes_are_the_documented_ones() -> None:
    packed = fmt.pack_superblock(SUPERBLOCK)
    assert packed == GOLDEN_SUPERBLOCK
    assert packed[:16] == b"MARU\x04\x03\x02\x01\x01\x00\x00\x00\x60\x00\x00\x00"
    assert struct.unpack_from("<Q", packed, 64) == (3,)
    assert fmt.unpack_superblock(GOLDEN_SUPERBLOCK) == SUPERBLOCK


def test_table_entry_bytes_are_the_documented_ones() -> None:
    assert fmt.pack_entry(SEED, 2, ENTRY) == GOLDEN_ENTRY
    assert GOLDEN_ENTRY[:8] == struct.pack("<II", 8192 // 64, 4096 // 64)
    assert fmt.unpack_entry(SEED, 2, GEOMETRY, GOLDEN_ENTRY) == ENTRY


def test_header_bytes_are_the_documented_ones() -> None:
    assert fmt.pack_header(SEED, PLACE, HEADER) == GOLDEN_HEADER
    assert struct.unpack_from("<Q", GOLDEN_HEADER) == ((3 << 40 | 7) << 2 | 2,)
    assert GOLDEN_HEADER[24:32] == (4096).to_bytes(5, "little") + b"\x02\x00\x01"
    assert fmt.unpack_header(SEED, PLACE, GOLDEN_HEADER) == HEADER


digests = st.binary(min_size=32, max_size=32)
words = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> tuple[SlotPlace, ObjectHeader]:
    payload_offset = draw(st.sampled_from([256, 4096]))
    shape = SlotShape(payload_offset + 64 * draw(st.integers(1, 1 << 20)), payload_offset)
    place = SlotPlace(64 * draw(st.integers(0, 1 << 30)), shape, draw(words))
    parts = st.builds(PartChecksum, full=words, sample=words)
    return place, ObjectHeader(
        state=draw(st.sampled_from([SlotState.WRITING, SlotState.SEALED])),
        generation=Generation(draw(st.integers(1, 2**62 - 1))),
        owner=OwnerToken(draw(st.integers(0, 2**63 - 1))),
        length=draw(st.integers(1, place.payload_capacity)),
        namespace=Namespace(draw(digests)),
        key=Key(draw(digests)),
        parent=draw(st.none() | digests.map(Key)),
        parts=tuple(draw(st.lists(parts, max_size=fmt.parts_capacity(shape)))),
    )


@given(headers())
@settings(max_examples=60)
def test_any_header_reads_back_as_it_was_written(case: tuple[SlotPlace, ObjectHeader]) -> None:
    place, header = case
    raw = fmt.pack_header(SEED, place, header)
    assert len(raw) == fmt.header_bytes(place, raw) <= place.shape.payload_offset
    assert fmt.unpack_header(SEED, place, raw) == header


@given(bit=st.integers(0, len(GOLDEN_HEADER) * 8 - 1))
def test_a_header_with_any_one_bit_flipped_is_not_whole(bit: int) -> None:
    assert fmt.unpack_header(SEED, PLACE, _flipped(GOLDEN_HEADER, bit)) is None


@given(length=st.integers(fmt.HEADER_BYTES, len(GOLDEN_HEADER) - 1), rest=st.binary())
def test_a_header_torn_at_any_byte_is_not_whole(length: int, rest: bytes) -> None:
    torn = (GOLDEN_HEADER[:length] + rest).ljust(256, b"\xee")
    assert fmt.unpack_header(SEED, PLACE, torn) is None


@given(raw=st.binary(min_size=256, max_size=256))
def test_random_bytes_are_never_a_header_nor_an_entry(raw: bytes) -> None:
    assert fmt.unpack_header(SEED, PLACE, raw) is None
    assert fmt.unpack_entry(SEED, 0, GEOMETRY, raw[:32]) is None


def test_a_header_counts_only_in_its_own_pool_slot_and_binding() -> None:
    elsewhere = SlotPlace(PLACE.slot_offset + 8192, PLACE.shape, PLACE.stamp)
    earlier = SlotPlace(PLACE.slot_offset, PLACE.shape, PLACE.stamp - 1)
    assert fmt.unpack_header(SEED, elsewhere, GOLDEN_HEADER) is None
    assert fmt.unpack_header(SEED, earlier, GOLDEN_HEADER) is None
    assert fmt.unpack_header(pool_seed(b"z" * 16), PLACE, GOLDEN_HEADER) is None


def test_a_free_slot_has_no_header() -> None:
    assert fmt.pack_word(Generation(9), SlotState.FREE) == 0
    assert fmt.unpack_header(SEED, PLACE, bytes(8) + GOLDEN_HEADER[8:]) is None


def test_a_header_that_does_not_fit_its_slot_is_refused() -> None:
    small = SlotPlace(0, SlotShape(512, 256), 1)
    with pytest.raises(ValueError, match="payload capacity of 256 bytes"):
        fmt.pack_header(SEED, small, _with(HEADER, length=257))
    with pytest.raises(ValueError, match="9 parts, but the header has room for 8"):
        fmt.pack_header(SEED, small, _with(HEADER, length=256, parts=HEADER.parts[:1] * 9))


@given(bit=st.integers(0, 24 * 8 - 1))
def test_an_entry_with_any_one_bit_flipped_is_not_whole(bit: int) -> None:
    assert fmt.unpack_entry(SEED, 2, GEOMETRY, _flipped(GOLDEN_ENTRY, bit)) is None


def test_an_entry_counts_only_for_its_own_segment() -> None:
    assert fmt.unpack_entry(SEED, 3, GEOMETRY, GOLDEN_ENTRY) is None


@given(bit=st.integers(0, fmt.SUPERBLOCK_BYTES * 8 - 1))
def test_a_superblock_with_any_one_bit_flipped_is_refused(bit: int) -> None:
    with pytest.raises((NotAPool, PoolFormatError)):
        fmt.unpack_superblock(_flipped(GOLDEN_SUPERBLOCK, bit))


@given(raw=st.binary(max_size=200), start=st.sampled_from([b"", GOLDEN_SUPERBLOCK[:16]]))
def test_random_bytes_are_never_a_superblock(raw: bytes, start: bytes) -> None:
    with pytest.raises((NotAPool, PoolFormatError)):
        fmt.unpack_superblock(start + raw)


def test_another_version_is_refused_by_name_whatever_follows() -> None:
    other = GOLDEN_SUPERBLOCK[:8] + (7).to_bytes(4, "little") + b"\xff" * 200
    with pytest.raises(PoolFormatError, match="format version 7; this build reads 1"):
        fmt.unpack_superblock(other)


def test_the_other_byte_order_is_refused_by_name() -> None:
    with pytest.raises(PoolFormatError, match="0x04030201"):
        fmt.unpack_superblock(b"MARU\x01\x02\x03\x04" + GOLDEN_SUPERBLOCK[8:])


@pytest.mark.parametrize(
    "geometry",
    [
        PoolGeometry(1 << 20, 69632, 12288, 0),
        PoolGeometry(1 << 20, 69632, 12288, 15),
        PoolGeometry(1 << 20, 69632, 8192, 14),
        PoolGeometry(1 << 20, 69633, 12288, 14),
        PoolGeometry(1 << 20, 0, 12288, 14),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(geometry: PoolGeometry) -> None:
    packed = fmt.pack_superblock(Superblock(UUID, geometry, 1, bytes(16)))
    with pytest.raises(PoolFormatError, match="contradict"):
        fmt.unpack_superblock(packed)


@given(torn=st.sampled_from([0, 1]), length=st.integers(0, fmt.SUPERBLOCK_BYTES - 1))
def test_tearing_one_superblock_copy_leaves_the_other(torn: int, length: int) -> None:
    older, newer = fmt.pack_superblock(_epoch(3)), fmt.pack_superblock(_epoch(4))
    copies = [older, newer]
    copies[torn] = copies[torn][:length] + b"\xaa" * (fmt.SUPERBLOCK_BYTES - length)
    chosen = choose_copy("p", _head(*copies))
    assert chosen.newest.epoch == (4 if torn == 0 else 3)
    assert chosen.newest_copy == 1 - torn
    assert not chosen.both_whole


def test_the_newer_of_two_whole_copies_counts() -> None:
    chosen = choose_copy("p", _head(fmt.pack_superblock(_epoch(6)), fmt.pack_superblock(_epoch(5))))
    assert (chosen.newest.epoch, chosen.newest_copy, chosen.both_whole) == (6, 0, True)


def test_two_torn_copies_are_a_damaged_pool_and_two_foreign_ones_are_none() -> None:
    torn = _flipped(GOLDEN_SUPERBLOCK, 70 * 8)
    with pytest.raises(PoolFormatError, match="checksum is wrong"):
        choose_copy("p", _head(torn, torn))
    with pytest.raises(NotAPool):
        choose_copy("p", b"#!/bin/sh\n".ljust(8192, b" "))


@given(st.integers(1 << 16, 1 << 40), st.sampled_from([4096, 1 << 21]))
def test_a_planned_file_is_accepted_and_hardly_larger_than_asked(asked: int, align: int) -> None:
    geometry = plan_file(asked, align, nominal_segment_bytes=1 << 16)
    assert (
        fmt.unpack_superblock(
            fmt.pack_superblock(Superblock(UUID, geometry, 0, bytes(16)))
        ).geometry
        == geometry
    )
    payload = geometry.num_segments << 16
    assert asked - (1 << 16) < payload <= asked
    assert geometry.pool_bytes % align == 0


def _flipped(raw: bytes, bit: int) -> bytes:
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _head(first: bytes, second: bytes) -> bytes:
    return first.ljust(4096, b"\0") + second.ljust(4096, b"\0")


def _epoch(epoch: int) -> Superblock:
    return Superblock(UUID, GEOMETRY, epoch, bytes(16))


def _with(header: ObjectHeader, **changes: object) -> ObjectHeader:
    fields = {name: getattr(header, name) for name in ObjectHeader.__dataclass_fields__}
    return ObjectHeader(**{**fields, **changes})
