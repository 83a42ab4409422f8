"""The index's record of one object, and its place among the chains.

Keys form a forest: an object's parent is the object that it continues. ``Entry`` is an object
that has space in the pool; ``Missing`` stands in for a parent that has none, so that its
children are found again when it comes (back). Both are internal to ``maru_shm.index``.

Written by hand with ``__slots__`` and intrusive sibling links because there may be ten million
of them: with its extent, key and dictionary slot an entry takes about 400 bytes
(benchmarks/index_scale.py measures it). The extent is kept packed, as lookups hand it on.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import Enum, unique
from typing import TYPE_CHECKING

from maru_shm.extents import pack_extent, unpack_extent
from maru_shm.types import Extent, Generation, Key

if TYPE_CHECKING:
    from maru_shm.index.forest import Forest
    from maru_shm.index.segments import Segment


@unique
class EntryState(Enum):
    """Where an entry stands in its life."""

    RESERVED = 1
    """Granted to a session, not visible."""
    SEALED = 2
    """Visible. Only sealed entries are found, leased and evicted."""
    CONDEMNED = 3
    """Suspect: out of the forest, its slot waits for the leases that still stand on it."""
    QUARANTINED = 4
    """Reservation of an earlier epoch whose writer may still write; in no forest."""
    GONE = 5
    """Has no slot any more. Only stale references see this."""


_U64 = struct.Struct("<Q")
_GENERATION_AT = 16


class Node:
    """A key that children may hang from."""

    __slots__ = ("first_child", "forest", "key")

    def __init__(self, key: Key, forest: Forest) -> None:
        self.key = key
        self.forest = forest
        self.first_child: Entry | None = None

    def children(self) -> Iterator[Entry]:
        """Reserved and sealed children, newest first; do not relink while iterating."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling


class Missing(Node):
    """A parent that is not in the pool while children of it are."""

    __slots__ = ()


class Entry(Node):
    """One object's slot, reserved or sealed."""

    __slots__ = (
        "heir",
        "leases",
        "next_sibling",
        "packed_extent",
        "parent",
        "previous_sibling",
        "segment",
        "stamp",
        "state",
    )

    def __init__(
        self,
        key: Key,
        forest: Forest,
        extent: Extent,
        segment: Segment,
        state: EntryState,
        stamp: float,
    ) -> None:
        super().__init__(key, forest)
        self.packed_extent = pack_extent(extent)
        self.segment = segment
        self.state = state
        self.stamp = stamp
        """Clock reading of the last use; a lease counts as use until it ends."""
        self.leases = 0
        self.parent: Node | None = None
        self.next_sibling: Entry | None = None
        self.previous_sibling: Entry | None = None
        self.heir: Entry | None = None
        """The sealed child that a prefix lookup tries before it asks the dictionary: a chain's
        entries lie side by side in memory, a dictionary of millions does not (at 2 million
        objects 128 keys took 17 us this way and 43 us through the dictionary)."""

    @property
    def extent(self) -> Extent:
        """Where the payload lies, and which grant of the slot this is; built anew every time."""
        return unpack_extent(self.packed_extent)

    @property
    def generation(self) -> Generation:
        """That of ``extent``."""
        generation: Generation = _U64.unpack_from(self.packed_extent, _GENERATION_AT)[0]
        return generation

    @property
    def slot_offset(self) -> int:
        """Bytes from the pool's start to the slot's header."""
        offset: int = _U64.unpack_from(self.packed_extent)[0]
        return offset - self.segment.size_class.shape.payload_offset

    @property
    def idle(self) -> bool:
        """Sealed and leased by nobody."""
        return self.state is EntryState.SEALED and not self.leases

    @property
    def evictable(self) -> bool:
        """Idle, and nothing in the pool continues it."""
        return self.first_child is None and not self.leases and self.state is EntryState.SEALED
