"""Checksums of parts: pinned values, what the sample covers, how parts divide a payload."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from maru_shm.pool.checksum import (
    SAMPLE_ALL_BYTES,
    STRIPE_BYTES,
    full_checksum,
    part_checksum,
    part_range,
    sample_checksum,
    sampled_ranges,
)


def test_checksums_are_pinned() -> None:
    data = memoryview(bytes(range(256)) * 1024)
    assert full_checksum(memoryview(b"")) == 0x2D06800538D394C2
    assert part_checksum(data).full == xxh3_64_intdigest(bytes(data))
    stripes = b"".join(bytes(data[a:b]) for a, b in sampled_ranges(len(data)))
    length = len(data).to_bytes(8, "little")
    assert part_checksum(data).sample == xxh3_64_intdigest(stripes + length)


@given(st.integers(1, 1 << 40))
def test_sampled_ranges_ascend_and_hold_the_first_and_the_last_byte(length: int) -> None:
    if length > 1 << 28:
        length = 1 << 28 | length % 4097
    ranges = list(sampled_ranges(length))
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(a[1] <= b[0] or b[1] == length for a, b in itertools.pairwise(ranges))
    if length > SAMPLE_ALL_BYTES:
        assert {b - a for a, b in ranges} == {STRIPE_BYTES}
        assert sum(b - a for a, b in ranges) <= max(16 * STRIPE_BYTES, length // 64)
    else:
        assert ranges == [(0, length)]


@pytest.mark.parametrize("length", [1, 4096, 65536, 65537, 1 << 20])
def test_the_sample_finds_a_copy_that_never_ran(length: int) -> None:
    assert sample_checksum(memoryview(b"\1" * length)) != sample_checksum(memoryview(bytes(length)))


def test_the_sample_depends_on_the_length_of_equal_bytes() -> None:
    assert sample_checksum(memoryview(bytes(1 << 20))) != sample_checksum(
        memoryview(bytes((1 << 20) + 64))
    )


@given(st.integers(1, 1 << 40), st.integers(1, 300))
def test_parts_cover_a_payload_without_gap_or_overlap(length: int, num_parts: int) -> None:
    ranges = [part_range(length, num_parts, part) for part in range(num_parts)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
