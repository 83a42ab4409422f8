"""The words that every part of the store shares: keys, extents, sizes.

Nothing here does I/O or imports anything but the standard library, so that the index, the pool
and the control plane can exchange these values without knowing each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

KEY_BYTES = 32
"""Length of an object key and of a namespace: a 256-bit digest (docs/design.md, "Identity")."""

Key = NewType("Key", bytes)
"""Content-derived name of an object inside its namespace, exactly ``KEY_BYTES`` long."""

Namespace = NewType("Namespace", bytes)
"""Digest of everything that gives an object's bytes their meaning, exactly ``KEY_BYTES`` long."""

SessionId = NewType("SessionId", int)
"""Names one session at one server incarnation; unique within its epoch, never 0."""

OwnerToken = NewType("OwnerToken", int)
"""63-bit random number of one client process's life; names its lock file. Survives re-opened
sessions, so a restarted server can still ask whether the writer of a reservation lives."""

LeaseId = NewType("LeaseId", int)
"""Names one lease (a batch of objects held by one session) within an epoch; never 0."""

Generation = NewType("Generation", int)
"""Pool-wide unique number of one grant of space: ``epoch << 40 | counter``, never 0. A reader
compares it in the object's header before and after its copy; see docs/format.md."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where one object's payload lies, and which grant of that space it belongs to."""

    offset: int
    """Bytes from the start of the pool to the payload's first byte."""
    length: int
    """Payload bytes."""
    generation: Generation


@dataclass(frozen=True, slots=True)
class PartChecksum:
    """Checksums of one part (one rank's bytes) of an object, both xxh3-64 with seed 0."""

    full: int
    """Over all bytes of the part."""
    sample: int
    """Over the part's sampled stripes only; which ones, see maru_shm/pool/checksum.py."""


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Sizes of one pool, fixed when it is made."""

    pool_bytes: int
    segment_bytes: int
    """Bytes of one segment, equal for all; a nominal power of two plus 1/256 for headers, so that
    objects of a power-of-two payload fill a segment without a tail."""
    first_segment_offset: int
    """Bytes from the pool's start to segment 0; superblock and segment table lie before it."""
    num_segments: int


@dataclass(frozen=True, slots=True)
class SlotShape:
    """How a segment is divided while it is bound to one size class."""

    slot_bytes: int
    """Header and payload capacity of one object, in bytes; a multiple of 64."""
    payload_offset: int
    """Bytes from a slot's start to its payload: 256 (small objects) or 4096."""
