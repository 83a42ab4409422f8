"""The bytes of a pool that are not payload: superblock, segment table, object headers.

Pure packing and unpacking; docs/format.md has the tables of fields, the order of writes and the
reasons. All integers are little-endian. Nothing here raises on bad bytes but ``NotAPool`` and
``PoolFormatError``, and those only for the superblock: a bad table entry or header is ``None``.

Every checksum is xxh3-64 seeded with a hash of the pool's uuid, and covers where the record
lies, so a record of another pool, or one moved inside this pool, is as bad as a torn one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Final

from xxhash import xxh3_64_intdigest

from maru_shm.pool.errors import NotAPool, PoolFormatError
from maru_shm.types import (
    KEY_BYTES,
    Generation,
    Key,
    Namespace,
    OwnerToken,
    PartChecksum,
    PoolGeometry,
    SlotShape,
)

Buffer = bytes | bytearray | memoryview

FORMAT_VERSION: Final = 1
PAGE_BYTES: Final = 4096
SUPERBLOCK_OFFSETS: Final = (0, PAGE_BYTES)
"""Two copies, a page each, written in turn: tearing one leaves the other."""
TABLE_OFFSET: Final = 2 * PAGE_BYTES
ENTRY_BYTES: Final = 32
HEADER_BYTES: Final = 128
"""Fixed part of an object's header; ``PART_BYTES`` more for each part's checksums."""
PART_BYTES: Final = 16
UUID_BYTES: Final = 16
MAX_EPOCH: Final = (1 << 22) - 1
"""So that a generation (``epoch << 40 | counter``) and the state fit one 8-byte word."""
MAX_LENGTH: Final = (1 << 40) - 1
WORD_BYTES: Final = 8
"""The header's first word: what publishes, clears and identifies an object."""


class PoolSeed(int):
    """Seed of every checksum of one pool, from its uuid."""


def pool_seed(uuid: bytes) -> PoolSeed:
    """The seed for the pool ``uuid``."""
    return PoolSeed(xxh3_64_intdigest(uuid))


# ---------------------------------------------------------------------------- superblock

_MAGIC: Final = b"MARU"
_BYTE_ORDER: Final = 0x01020304
_IDENTITY = struct.Struct("<4sIII")
_SUPERBLOCK = struct.Struct("<4sIII16sQQQIIQ16sQ")
SUPERBLOCK_BYTES: Final = _SUPERBLOCK.size
_CHECKED = SUPERBLOCK_BYTES - 8


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a pool says about itself."""

    uuid: bytes
    """16 random bytes."""
    geometry: PoolGeometry
    epoch: int
    """Incarnations of a server so far; 0 right after the pool was made."""
    boot_id: bytes
    """16 bytes: the host's boot in which the pool was last opened by a server; zeros on media
    whose flushed bytes outlive a boot."""


def pack_superblock(block: Superblock) -> bytes:
    """One copy of the superblock, ``SUPERBLOCK_BYTES`` long."""
    g = block.geometry
    body = _SUPERBLOCK.pack(
        _MAGIC,
        _BYTE_ORDER,
        FORMAT_VERSION,
        SUPERBLOCK_BYTES,
        block.uuid,
        g.pool_bytes,
        g.segment_bytes,
        g.first_segment_offset,
        g.num_segments,
        0,
        block.epoch,
        block.boot_id,
        0,
    )[:_CHECKED]
    return body + xxh3_64_intdigest(body).to_bytes(8, "little")


def unpack_superblock(copy: Buffer) -> Superblock:
    """Read one copy.

    Raises NotAPool if the magic is missing, PoolFormatError if it is there but the version,
    the byte order, the checksum or the geometry is not one that this build can use.
    """
    if len(copy) < SUPERBLOCK_BYTES or bytes(copy[:4]) != _MAGIC:
        raise NotAPool("no Maru superblock there")
    _, order, version, _ = _IDENTITY.unpack_from(copy)
    if order != _BYTE_ORDER:
        raise PoolFormatError(f"byte-order mark is {order:#010x}, not {_BYTE_ORDER:#010x}")
    if version != FORMAT_VERSION:
        raise PoolFormatError(f"format version {version}; this build reads {FORMAT_VERSION}")
    body = bytes(copy[:_CHECKED])
    fields = _SUPERBLOCK.unpack_from(copy)
    if xxh3_64_intdigest(body) != fields[12]:
        raise PoolFormatError("superblock checksum is wrong")
    block = Superblock(
        uuid=fields[4],
        geometry=PoolGeometry(
            pool_bytes=fields[5],
            segment_bytes=fields[6],
            first_segment_offset=fields[7],
            num_segments=fields[8],
        ),
        epoch=fields[10],
        boot_id=fields[11],
    )
    _check_geometry(block.geometry)
    if block.epoch > MAX_EPOCH:
        raise PoolFormatError(f"epoch {block.epoch} is past the last one, {MAX_EPOCH}")
    return block


def _check_geometry(g: PoolGeometry) -> None:
    fits = (
        g.num_segments > 0
        and g.segment_bytes > 0
        and g.segment_bytes % PAGE_BYTES == 0
        and g.first_segment_offset % PAGE_BYTES == 0
        and g.first_segment_offset >= TABLE_OFFSET + g.num_segments * ENTRY_BYTES
        and g.first_segment_offset + g.num_segments * g.segment_bytes <= g.pool_bytes
    )
    if not fits:
        raise PoolFormatError(f"sizes contradict each other: {g}")


# ---------------------------------------------------------------------------- segment table

_ENTRY = struct.Struct("<IIQQQ")


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One bound segment."""

    shape: SlotShape
    stamp: int
    """Unique per binding; part of every header's checksum, so that headers left by an earlier
    binding of the same bytes never look whole."""


def entry_offset(segment: int) -> int:
    """Bytes from the pool's start to the table entry of ``segment``."""
    return TABLE_OFFSET + segment * ENTRY_BYTES


def pack_entry(seed: PoolSeed, segment: int, entry: SegmentEntry) -> bytes:
    """The entry of a bound segment; its first 8 bytes are its word and are never 0."""
    slot, payload = entry.shape.slot_bytes, entry.shape.payload_offset
    if slot % 64 or payload % 64 or not HEADER_BYTES <= payload < slot or slot >> 38:
        raise ValueError(f"segment {segment}: no such slot shape: {entry.shape}")
    body = _ENTRY.pack(slot // 64, payload // 64, entry.stamp, 0, 0)[:16]
    return body + _entry_checksum(seed, segment, body).to_bytes(8, "little") + bytes(8)


def unpack_entry(
    seed: PoolSeed, segment: int, geometry: PoolGeometry, raw: Buffer
) -> SegmentEntry | None:
    """The entry, or None if the segment is unbound or its entry is not whole."""
    slot_units, payload_units, stamp, checksum, _ = _ENTRY.unpack_from(raw)
    if checksum != _entry_checksum(seed, segment, bytes(raw[:16])):
        return None
    shape = SlotShape(slot_bytes=slot_units * 64, payload_offset=payload_units * 64)
    if not HEADER_BYTES <= shape.payload_offset < shape.slot_bytes <= geometry.segment_bytes:
        return None
    return SegmentEntry(shape=shape, stamp=stamp)


def _entry_checksum(seed: PoolSeed, segment: int, body: bytes) -> int:
    return xxh3_64_intdigest(body + segment.to_bytes(8, "little"), seed=seed)


# ---------------------------------------------------------------------------- object header

_HEADER = struct.Struct("<QQQQ32s32s32s")
_PART = struct.Struct("<QQ")
_PLACE = struct.Struct("<QQ")
_PACKED = struct.Struct("<Q")
"""Length, number of parts and flags, at 24."""
_HAS_PARENT: Final = 1
assert _HEADER.size == HEADER_BYTES
assert _PART.size == PART_BYTES


@unique
class SlotState(IntEnum):
    """Low two bits of a header's word."""

    FREE = 0
    WRITING = 1
    SEALED = 2


_USED_STATES: Final = {1: SlotState.WRITING, 2: SlotState.SEALED}


def pack_word(generation: int, state: SlotState) -> int:
    """The word of a slot in ``state``; 0 for a free one."""
    return generation << 2 | state if state is not SlotState.FREE else 0


@dataclass(frozen=True, slots=True)
class ObjectHeader:
    """A whole header in state *writing* or *sealed*."""

    state: SlotState
    generation: Generation
    owner: OwnerToken
    length: int
    namespace: Namespace
    key: Key
    parent: Key | None
    parts: tuple[PartChecksum, ...]


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a header lies; its checksum depends on all of it."""

    slot_offset: int
    shape: SlotShape
    stamp: int
    """Of the segment's binding."""

    @property
    def payload_offset(self) -> int:
        """Bytes from the pool's start to the payload."""
        return self.slot_offset + self.shape.payload_offset

    @property
    def payload_capacity(self) -> int:
        """Payload bytes that the slot can hold."""
        return self.shape.slot_bytes - self.shape.payload_offset


def parts_capacity(shape: SlotShape) -> int:
    """How many parts' checksums a header in such a slot can hold."""
    return (shape.payload_offset - HEADER_BYTES) // PART_BYTES


def pack_header(seed: PoolSeed, place: SlotPlace, header: ObjectHeader) -> bytes:
    """The whole header, word included, ``HEADER_BYTES + len(parts) * PART_BYTES`` long.

    Raises ValueError if the header does not fit the slot or a field is out of range.
    """
    if not 0 < header.length <= min(place.payload_capacity, MAX_LENGTH):
        raise ValueError(
            f"slot at {place.slot_offset}: length {header.length} is not within its payload "
            f"capacity of {place.payload_capacity} bytes"
        )
    if len(header.parts) > parts_capacity(place.shape):
        raise ValueError(
            f"slot at {place.slot_offset}: {len(header.parts)} parts, but the header has room for "
            f"{parts_capacity(place.shape)}"
        )
    if len(header.namespace) != KEY_BYTES or len(header.key) != KEY_BYTES:
        raise ValueError(f"slot at {place.slot_offset}: key or namespace is not {KEY_BYTES} bytes")
    flags = _HAS_PARENT if header.parent is not None else 0
    raw = _HEADER.pack(
        pack_word(header.generation, header.state),
        0,
        header.owner,
        header.length | len(header.parts) << 40 | flags << 56,
        header.namespace,
        header.key,
        header.parent if header.parent is not None else bytes(KEY_BYTES),
    ) + b"".join(_PART.pack(p.full, p.sample) for p in header.parts)
    checksum = _header_checksum(seed, place, raw)
    return raw[:8] + checksum.to_bytes(8, "little") + raw[16:]


def header_bytes(place: SlotPlace, fixed: Buffer) -> int:
    """Bytes of the header whose fixed fields are ``fixed``; never past the slot's payload."""
    (packed,) = _PACKED.unpack_from(fixed, 24)
    num_parts = min(int(packed) >> 40 & 0xFFFF, parts_capacity(place.shape))
    return HEADER_BYTES + num_parts * PART_BYTES


def unpack_header(seed: PoolSeed, place: SlotPlace, raw: Buffer) -> ObjectHeader | None:
    """The header, or None if the slot is free or its header is not whole.

    ``raw`` starts at the slot and is ``header_bytes`` long or longer. Pass a private copy: the
    fields are looked at more than once.
    """
    word, checksum, owner, packed, namespace, key, parent = _HEADER.unpack_from(raw)
    num_parts = packed >> 40 & 0xFFFF
    state = _USED_STATES.get(word & 3)
    if state is None:
        return None
    if num_parts > parts_capacity(place.shape):
        return None
    size = HEADER_BYTES + num_parts * PART_BYTES
    if len(raw) < size:
        return None
    if checksum != _header_checksum(seed, place, bytes(raw[:size])):
        return None
    length = packed & MAX_LENGTH
    if not 0 < length <= place.payload_capacity or word >> 2 == 0:
        return None
    return ObjectHeader(
        state=state,
        generation=Generation(word >> 2),
        owner=OwnerToken(owner),
        length=length,
        namespace=Namespace(namespace),
        key=Key(key),
        parent=Key(parent) if packed >> 56 & _HAS_PARENT else None,
        parts=tuple(
            PartChecksum(full=full, sample=sample)
            for full, sample in _PART.iter_unpack(raw[HEADER_BYTES:size])
        ),
    )


def _header_checksum(seed: PoolSeed, place: SlotPlace, raw: bytes) -> int:
    where = _PLACE.pack(place.slot_offset, place.stamp)
    return xxh3_64_intdigest(raw[:8] + raw[16:] + where, seed=seed)
