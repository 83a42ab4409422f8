"""The few effects that make an object in a test's pool, and a stand-in for a DAX device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maru_shm.index.effects import WriteReserved, WriteSealed
from maru_shm.pool.checksum import part_checksum, part_range
from maru_shm.pool.geometry import segment_offset
from maru_shm.pool.medium import DaxMedium
from maru_shm.pool.pool import Pool
from maru_shm.types import Extent, Generation, Key, Namespace, OwnerToken, SlotShape

NAMESPACE = Namespace(b"n" * 32)
OWNER = OwnerToken(0x1234_5678_9ABC_DEF0)
POOL_BYTES = 1 << 20
NOMINAL_BYTES = 1 << 16
SHAPE = SlotShape(slot_bytes=8192, payload_offset=4096)


@dataclass(frozen=True)
class DaxStandIn:
    """An ordinary file in the place of a DAX device, and what sysfs says of it."""

    path: Path
    medium: DaxMedium

    def say(self, attribute: str, value: str) -> None:
        """Change a sysfs attribute."""
        (self.sysfs / attribute).write_text(value)

    @property
    def sysfs(self) -> Path:
        return self.path.parent / "sys/bus/dax/devices" / self.path.name


def slot_offset(pool: Pool, slot: int, segment: int = 0, shape: SlotShape = SHAPE) -> int:
    return segment_offset(pool.geometry, segment) + slot * shape.slot_bytes


def reserve(
    pool: Pool, slot: int = 0, length: int = 3000, counter: int | None = None, segment: int = 0
) -> Extent:
    """Reserve a slot; its key is its number. Every slot has its own generation by default."""
    generation = Generation(pool.epoch << 40 | (slot + 1 if counter is None else counter))
    offset = slot_offset(pool, slot, segment)
    payload_offset = offset + SHAPE.payload_offset
    key = Key(slot.to_bytes(32, "big"))
    parent = Key(b"p" * 32) if slot % 2 else None
    pool.apply(
        [WriteReserved(offset, payload_offset, generation, NAMESPACE, key, parent, length, OWNER)]
    )
    return Extent(payload_offset, length, generation)


def seal(pool: Pool, extent: Extent, payload: bytes, num_parts: int = 1) -> None:
    """Write the payload and publish it with ``num_parts`` checksums."""
    view = pool.payload(extent)
    view[:] = payload
    parts = []
    for part in range(num_parts):
        start, end = part_range(extent.length, num_parts, part)
        parts.append(part_checksum(view[start:end]))
    offset = extent.offset - SHAPE.payload_offset
    pool.apply([WriteSealed(offset, extent.generation, tuple(parts))])


def store(pool: Pool, payload: bytes, slot: int = 0, num_parts: int = 1) -> Extent:
    """Reserve, write and seal."""
    extent = reserve(pool, slot, len(payload))
    seal(pool, extent, payload, num_parts)
    return extent
