"""What the index asks of the medium: data, applied in order by the service.

The index is pure, so every change of bytes in the pool leaves it as one of these values. The
service applies the list of one call in its order *before* it answers: a slot's header is
cleared before the slot is granted again, a segment is bound before its first header is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from maru_shm.types import Generation, Key, Namespace, OwnerToken, PartChecksum, SlotShape


@dataclass(frozen=True, slots=True)
class BindSegment:
    """Divide segment ``segment`` into slots of ``shape``."""

    segment: int
    shape: SlotShape


@dataclass(frozen=True, slots=True)
class UnbindSegment:
    """Return segment ``segment`` to the common store."""

    segment: int


@dataclass(frozen=True, slots=True)
class WriteReserved:
    """Give the slot out: header in state *writing* with a new generation."""

    slot_offset: int
    """Bytes from the pool's start to the slot (its header)."""
    payload_offset: int
    """Bytes from the pool's start to the payload."""
    generation: Generation
    namespace: Namespace
    key: Key
    parent: Key | None
    length: int
    owner: OwnerToken


@dataclass(frozen=True, slots=True)
class WriteSealed:
    """Publish the object in the slot: header in state *sealed* with its checksums."""

    slot_offset: int
    generation: Generation
    parts: tuple[PartChecksum, ...]


@dataclass(frozen=True, slots=True)
class WriteFree:
    """Take the object away: header in state *free*, generation 0."""

    slot_offset: int


Effect = BindSegment | UnbindSegment | WriteReserved | WriteSealed | WriteFree
