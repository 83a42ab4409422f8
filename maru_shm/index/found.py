"""What a walk over a pool's headers found, as the index is rebuilt from it.

``maru_shm.pool`` yields these while it scans; ``Index.restore`` takes them. A slot whose header
is torn, foreign or free is reported as free: its space is reclaimed, its bytes never trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from maru_shm.types import Generation, Key, Namespace, OwnerToken, SlotShape


@dataclass(frozen=True, slots=True)
class FoundObject:
    """One slot with a whole header in state *writing* or *sealed*."""

    slot_offset: int
    generation: Generation
    namespace: Namespace
    key: Key
    parent: Key | None
    length: int
    owner: OwnerToken


@dataclass(frozen=True, slots=True)
class FoundSegment:
    """One segment that the segment table calls bound. Slots not listed are free."""

    segment: int
    shape: SlotShape
    sealed: tuple[FoundObject, ...]
    writing: tuple[FoundObject, ...]
    """Reservations of an older epoch: quarantined while their owner lives."""
