"""Slots fit, waste little, and depend on nothing but the payload's length."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maru_shm.index.size_classes import LARGE_PAYLOAD_BYTES, payload_offset_for, shape_for

MIB = 1024 * 1024


def segment_bytes(nominal: int) -> int:
    return nominal + nominal // 256


nominals = st.sampled_from([1 * MIB, 16 * MIB, 256 * MIB, 1024 * MIB])


@settings(deadline=None)
@given(nominals, st.data())
def test_every_length_up_to_a_segments_payload_has_a_slot_that_holds_it(
    nominal: int, data: st.DataObject
) -> None:
    segment = segment_bytes(nominal)
    length = data.draw(st.integers(1, segment - 4096))
    shape = shape_for(length, segment)
    assert shape is not None
    assert shape.payload_offset == payload_offset_for(length)
    assert shape.payload_offset + length <= shape.slot_bytes <= segment
    assert shape.slot_bytes % 64 == 0


@settings(deadline=None)
@given(nominals, st.integers(LARGE_PAYLOAD_BYTES, 1024 * MIB))
def test_large_payloads_are_page_aligned_and_rounding_wastes_at_most_a_sixteenth(
    nominal: int, length: int
) -> None:
    shape = shape_for(length, segment_bytes(nominal))
    if shape is None:
        assert length + 4096 > segment_bytes(nominal)
        return
    assert shape.payload_offset == 4096
    assert shape.slot_bytes % 4096 == 0
    assert shape.slot_bytes - shape.payload_offset - length < max(4096, length / 16)


@settings(deadline=None)
@given(st.integers(1, LARGE_PAYLOAD_BYTES - 1))
def test_small_payloads_waste_less_than_a_cache_line_or_a_sixteenth(length: int) -> None:
    shape = shape_for(length, segment_bytes(MIB))
    assert shape is not None
    assert shape.payload_offset == 256
    assert shape.slot_bytes - 256 - length < max(64, length / 16)


@settings(deadline=None)
@given(nominals, st.integers(1, 64 * MIB))
def test_the_same_slot_serves_its_whole_class(nominal: int, length: int) -> None:
    shape = shape_for(length, segment_bytes(nominal))
    if shape is not None and payload_offset_for(length) == payload_offset_for(length + 1):
        largest = shape.slot_bytes - shape.payload_offset
        if payload_offset_for(largest) == shape.payload_offset:
            assert shape_for(largest, segment_bytes(nominal)) == shape


@pytest.mark.parametrize("nominal", [MIB, 256 * MIB, 1024 * MIB])
def test_power_of_two_payloads_from_one_mebibyte_on_fill_a_segment_without_a_tail(
    nominal: int,
) -> None:
    payload = MIB
    while payload <= nominal:
        shape = shape_for(payload, segment_bytes(nominal))
        assert shape is not None
        assert segment_bytes(nominal) // shape.slot_bytes == nominal // payload
        payload *= 2


def test_32_mebibytes_fit_a_256_mebibyte_segment_eight_times() -> None:
    shape = shape_for(32 * MIB, segment_bytes(256 * MIB))
    assert shape is not None
    assert segment_bytes(256 * MIB) // shape.slot_bytes == 8


def test_a_payload_larger_than_a_segment_has_no_class() -> None:
    segment = segment_bytes(MIB)
    assert shape_for(segment - 4096, segment) is not None
    assert shape_for(segment - 4095, segment) is None


def test_the_number_of_classes_stays_small() -> None:
    segment = segment_bytes(64 * MIB)
    shapes = {shape_for(length, segment) for length in range(1, 64 * MIB, 997)}
    assert len(shapes) < 16 * 27
