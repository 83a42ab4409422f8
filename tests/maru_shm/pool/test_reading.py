"""Checked reads: what was stored, or no answer, whatever happens in between."""

from __future__ import annotations

import threading

import pytest
from pool_cases import SHAPE, reserve, seal, slot_offset, store

from maru_shm.index.effects import BindSegment, UnbindSegment, WriteFree, WriteSealed
from maru_shm.pool import reading
from maru_shm.pool.errors import ObjectCorrupt, ObjectGone
from maru_shm.pool.pool import Pool
from maru_shm.pool.reading import Verdict, Verify, check, checksums, leased_view, read
from maru_shm.types import Extent, Generation

PAYLOAD = bytes(range(256)) * 12


def test_a_sealed_object_reads_back_at_every_level(pool: Pool) -> None:
    extent = store(pool, PAYLOAD, num_parts=3)
    assert check(pool, extent) is Verdict.OK
    assert len(checksums(pool, extent)) == 3
    for verify in Verify:
        assert read(pool, extent, verify) == PAYLOAD


def test_nothing_is_readable_before_it_is_sealed(pool: Pool) -> None:
    extent = reserve(pool)
    assert check(pool, extent) is Verdict.STALE
    with pytest.raises(ObjectGone):
        read(pool, extent)


@pytest.mark.parametrize("change", [-1, 1])
def test_an_extent_of_another_generation_is_stale(pool: Pool, change: int) -> None:
    extent = store(pool, PAYLOAD, slot=4)
    other = Extent(extent.offset, extent.length, Generation(extent.generation + change))
    assert check(pool, other) is Verdict.STALE


def test_an_extent_that_names_no_slot_is_stale(pool: Pool) -> None:
    extent = store(pool, PAYLOAD)
    for offset in (0, extent.offset + 64, extent.offset + (1 << 16) * 3, 1 << 40):
        assert check(pool, Extent(offset, extent.length, extent.generation)) is Verdict.STALE


def test_an_extent_of_another_length_is_torn(pool: Pool) -> None:
    extent = store(pool, PAYLOAD)
    assert check(pool, Extent(extent.offset, 5, extent.generation)) is Verdict.TORN


@pytest.mark.parametrize("at", [0, 7, 8, 16, 24, 29, 31, 40, 70, 100, 130, 140])
def test_a_damaged_header_is_torn_wherever_it_is_damaged(pool: Pool, at: int) -> None:
    extent = store(pool, PAYLOAD)
    pool.mapping.buffer[slot_offset(pool, 0) + at] ^= 0x10
    assert check(pool, extent) is Verdict.TORN
    with pytest.raises(ObjectCorrupt, match="suspect"):
        read(pool, extent)


def test_a_flipped_payload_byte_is_found_by_full_and_not_by_header(pool: Pool) -> None:
    extent = store(pool, PAYLOAD)
    pool.mapping.buffer[extent.offset + 1500] ^= 1
    assert read(pool, extent, Verify.HEADER) != PAYLOAD
    with pytest.raises(ObjectCorrupt, match="full checksum"):
        read(pool, extent, Verify.FULL)


def test_only_the_asked_part_is_compared(pool: Pool) -> None:
    extent = store(pool, PAYLOAD, num_parts=4)
    pool.mapping.buffer[extent.offset + len(PAYLOAD) - 1] ^= 1
    matches = [reading.payload_matches(pool, extent, Verify.FULL, part=p) for p in range(4)]
    assert matches == [True, True, True, False]
    assert not reading.payload_matches(pool, extent, Verify.FULL)
    assert reading.payload_matches(pool, extent, Verify.HEADER)


def test_an_object_without_checksums_reads_at_every_level(pool: Pool) -> None:
    extent = reserve(pool, length=10)
    pool.apply([WriteSealed(slot_offset(pool, 0), extent.generation, ())])
    assert checksums(pool, extent) == ()
    assert len(read(pool, extent, Verify.FULL)) == 10


def replace(pool: Pool) -> None:
    """Evict slot 0 and give it to another object."""
    pool.apply([WriteFree(slot_offset(pool, 0))])
    seal(pool, reserve(pool, slot=0, length=len(PAYLOAD), counter=77), b"o" * len(PAYLOAD))


def evict(pool: Pool) -> None:
    pool.apply([WriteFree(slot_offset(pool, 0))])


def rebind(pool: Pool) -> None:
    pool.apply([WriteFree(slot_offset(pool, 0)), UnbindSegment(0), BindSegment(0, SHAPE)])


@pytest.mark.parametrize("happens", [replace, evict, rebind])
def test_b10_an_object_that_vanishes_during_the_copy_is_never_used(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, happens: object
) -> None:
    extent = store(pool, PAYLOAD)
    real = reading.begin_read

    def then_it_happens(pool: Pool, extent: Extent) -> Verdict:
        verdict = real(pool, extent)
        happens(pool)  # type: ignore[operator]
        return verdict

    monkeypatch.setattr(reading, "begin_read", then_it_happens)
    for verify in Verify:
        with pytest.raises(ObjectGone):
            read(pool, extent, verify)


@pytest.mark.parametrize("happens", [replace, evict, rebind])
def test_a_view_in_place_says_at_its_end_that_the_object_was_replaced(
    pool: Pool, happens: object
) -> None:
    extent = store(pool, PAYLOAD)
    context = leased_view(pool, extent)
    assert bytes(context.__enter__()) == PAYLOAD
    happens(pool)  # type: ignore[operator]
    with pytest.raises(ObjectGone):
        context.__exit__(None, None, None)


def test_readers_beside_a_server_that_evicts_all_the_time_never_use_a_wrong_byte(
    pool: Pool,
) -> None:
    """Two readers copy whatever extent stands in the open; it is replaced under their eyes."""
    current = [store(pool, bytes([1]) * 3000)]
    stop = threading.Event()
    wrong: list[bytes] = []
    outcomes = {"read": 0, "gone": 0}

    def read_on() -> None:
        while not stop.is_set():
            extent = current[0]
            try:
                data = read(pool, extent)
            except ObjectGone:
                outcomes["gone"] += 1
                continue
            outcomes["read"] += 1
            if data != bytes([extent.generation & 0xFF]) * 3000:
                wrong.append(data)

    readers = [threading.Thread(target=read_on) for _ in range(2)]
    for reader in readers:
        reader.start()
    for counter in range(256, 1500):
        pool.apply([WriteFree(slot_offset(pool, 0))])
        extent = reserve(pool, slot=0, length=3000, counter=counter)
        seal(pool, extent, bytes([counter & 0xFF]) * 3000)
        current[0] = extent
    stop.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert outcomes["read"] > 0


def test_a_view_in_place_is_read_only_and_void_afterwards(pool: Pool) -> None:
    extent = store(pool, PAYLOAD)
    with leased_view(pool, extent, Verify.FULL) as view, pytest.raises(TypeError):
        view[0] = 1
    with pytest.raises(ValueError, match="released"):
        bytes(view)


def test_an_error_inside_a_view_goes_through(pool: Pool) -> None:
    extent = store(pool, PAYLOAD)
    with pytest.raises(ZeroDivisionError), leased_view(pool, extent):
        _ = 1 // 0
