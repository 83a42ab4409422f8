from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maru_shm.extents import EXTENT_BYTES, Extents, pack_extent, unpack_extent
from maru_shm.types import Extent, Generation

u64 = st.integers(0, 2**64 - 1)
extents = st.builds(Extent, u64, u64, st.integers(1, 2**64 - 1).map(Generation))
sequences = st.lists(st.none() | extents, max_size=6).map(tuple)


@given(sequences)
def test_a_packed_sequence_is_equal_to_the_tuple_it_was_made_of(
    plain: tuple[Extent | None, ...],
) -> None:
    packed = Extents.of(plain)
    assert packed == plain
    assert plain == packed
    assert hash(packed) == hash(plain)
    assert packed == Extents(packed.packed)
    assert packed != (*plain, None)
    assert packed != list(plain)


@given(sequences, st.integers(-8, 8), st.slices(6))
def test_it_is_indexed_sliced_and_counted_like_a_tuple(
    plain: tuple[Extent | None, ...], index: int, part: slice
) -> None:
    packed = Extents.of(plain)
    assert len(packed) == len(plain)
    assert packed[part] == plain[part]
    if -len(plain) <= index < len(plain):
        assert packed[index] == plain[index]
    else:
        with pytest.raises(IndexError):
            packed[index]


@given(extents)
def test_one_extent_survives_packing(extent: Extent) -> None:
    assert unpack_extent(pack_extent(extent)) == extent


def test_the_bytes_are_offset_length_and_generation_in_little_endian() -> None:
    packed = Extents.of([Extent(1, 2, Generation(3)), None]).packed
    assert packed == struct.pack("<6Q", 1, 2, 3, 0, 0, 0)


def test_a_string_that_ends_within_an_extent_is_refused() -> None:
    with pytest.raises(ValueError, match="25 bytes"):
        Extents(bytes(EXTENT_BYTES + 1))
