"""Many extents as one byte string: how the index keeps them, and how they travel.

A lookup of 128 keys hands 128 extents from the index to the server's socket and on to a client.
Packed, that is one join and one copy; as objects it would be 50 us of constructors and attribute
reads on either side. Whoever needs one extent builds that one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from maru_shm.types import Extent, Generation

EXTENT_BYTES = 24
_EXTENT = struct.Struct("<QQQ")
"""Offset, length, generation, little-endian."""

ABSENT_EXTENT = bytes(EXTENT_BYTES)
"""Stands for None: a generation is never 0."""


def pack_extent(extent: Extent) -> bytes:
    """``EXTENT_BYTES`` bytes. struct.error if a number does not fit 64 bits."""
    return _EXTENT.pack(extent.offset, extent.length, extent.generation)


def unpack_extent(packed: bytes) -> Extent:
    """The extent of ``pack_extent``."""
    offset, length, generation = _EXTENT.unpack(packed)
    return Extent(offset, length, Generation(generation))


class Extents(Sequence[Extent | None]):
    """An immutable sequence of extents, equal to a tuple of the same; None where there is none.

    Every access builds the ``Extent`` anew (0.6 us): keep what you use more than once.
    """

    __slots__ = ("packed",)

    packed: bytes
    """``EXTENT_BYTES`` per extent, in order."""

    def __init__(self, packed: bytes) -> None:
        """Raises ValueError if ``packed`` ends within an extent."""
        if len(packed) % EXTENT_BYTES:
            raise ValueError(
                f"extent string of {len(packed)} bytes is not a multiple of {EXTENT_BYTES}"
            )
        self.packed = packed

    @staticmethod
    def of(extents: Iterable[Extent | None]) -> Extents:
        """These extents, packed. struct.error if a number does not fit 64 bits."""
        if isinstance(extents, Extents):
            return extents
        return Extents(
            b"".join(ABSENT_EXTENT if each is None else pack_extent(each) for each in extents)
        )

    def __len__(self) -> int:
        return len(self.packed) // EXTENT_BYTES

    @overload
    def __getitem__(self, index: int) -> Extent | None: ...
    @overload
    def __getitem__(self, index: slice) -> Extents: ...
    def __getitem__(self, index: int | slice) -> Extent | Extents | None:
        places = range(0, len(self.packed), EXTENT_BYTES)[index]
        if isinstance(places, range):
            return Extents(b"".join(self.packed[at : at + EXTENT_BYTES] for at in places))
        offset, length, generation = _EXTENT.unpack_from(self.packed, places)
        return Extent(offset, length, Generation(generation)) if generation else None

    def __iter__(self) -> Iterator[Extent | None]:
        for offset, length, generation in _EXTENT.iter_unpack(self.packed):
            yield Extent(offset, length, Generation(generation)) if generation else None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extents):
            return tuple(self) == tuple(other)
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Extents.of({list(self)})"
