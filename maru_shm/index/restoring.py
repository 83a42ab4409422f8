"""Rebuilding a catalog from what a walk over the pool's headers found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from maru_shm.index.catalog import EPOCH_SHIFT, Catalog
from maru_shm.index.effects import Effect, UnbindSegment, WriteFree
from maru_shm.index.entries import Entry, EntryState
from maru_shm.index.forest import Forest
from maru_shm.index.found import FoundObject, FoundSegment
from maru_shm.index.segments import Segment
from maru_shm.types import Extent, Key, OwnerToken, PoolGeometry


def restore(
    catalog: Catalog,
    found: Iterable[FoundSegment],
    owner_lives: Callable[[OwnerToken], bool],
    now: float,
) -> list[Effect]:
    """Fill an empty catalog; returns what has to be cleared in the pool.

    Sealed objects come back, the newest generation of a key alone. Reservations of owners that
    live are quarantined, the others freed. What does not fit its slot, or claims a generation
    that this epoch could give out, is freed: its bytes are not trusted. When objects were last
    used is not recorded in the pool: all count as used now, older generations before younger.
    """
    effects: list[Effect] = []
    lives = cache(owner_lives)
    adopted: list[Segment] = []
    sealed: list[tuple[Entry, Key | None]] = []
    for bound in found:
        if not _usable(bound, catalog.segments.geometry):
            effects.append(UnbindSegment(bound.segment))
            continue
        segment = catalog.segments.adopt(bound.segment, bound.shape)
        adopted.append(segment)
        writing = {item.slot_offset for item in bound.writing}
        for item in sorted((*bound.sealed, *bound.writing), key=lambda each: each.slot_offset):
            slot = _slot_of(item, segment, catalog.epoch)
            if slot is None:
                effects.append(WriteFree(item.slot_offset))
            elif item.slot_offset not in writing:
                entry = _occupy(catalog, item, segment, slot, EntryState.RESERVED, now)
                sealed.append((entry, item.parent))
            elif lives(item.owner):
                entry = _occupy(catalog, item, segment, slot, EntryState.QUARANTINED, now)
                catalog.quarantine.setdefault(item.owner, {})[item.generation] = entry
            else:
                effects.append(WriteFree(item.slot_offset))
    sealed.sort(key=lambda pair: pair[0].generation)
    _list_sealed(catalog, sealed, now, effects)
    for segment in adopted:
        if not segment.used:
            catalog.segments.give_back(segment, effects)
    return effects


def _list_sealed(
    catalog: Catalog,
    sealed: list[tuple[Entry, Key | None]],
    now: float,
    effects: list[Effect],
) -> None:
    last_generation = 0
    for entry, parent in sealed:
        if entry.generation == last_generation:
            effects.append(WriteFree(entry.slot_offset))
            catalog.vacate(entry)
            catalog.prune(entry.forest)
            continue
        last_generation = entry.generation
        older = entry.forest.sealed.get(entry.key)
        if older is not None:
            catalog.drop(older, effects)
        catalog.by_generation.append(entry)
        catalog.plant(entry, parent)
        catalog.seal(entry, now)


def _usable(bound: FoundSegment, geometry: PoolGeometry) -> bool:
    shape = bound.shape
    return (
        0 <= bound.segment < geometry.num_segments
        and 0 < shape.payload_offset < shape.slot_bytes <= geometry.segment_bytes
    )


def _slot_of(item: FoundObject, segment: Segment, epoch: int) -> int | None:
    shape = segment.size_class.shape
    if not 0 < item.length <= shape.slot_bytes - shape.payload_offset:
        return None
    if not 0 < item.generation < epoch << EPOCH_SHIFT:
        return None
    slot = segment.slot_of(item.slot_offset)
    return None if slot is None or slot < len(segment.occupants) else slot


def _occupy(
    catalog: Catalog, item: FoundObject, segment: Segment, slot: int, state: EntryState, now: float
) -> Entry:
    extent = Extent(
        item.slot_offset + segment.size_class.shape.payload_offset, item.length, item.generation
    )
    if state is EntryState.QUARANTINED:
        forest = Forest(item.namespace)  # of its own: nobody finds it by key
    else:
        forest = catalog.forest(item.namespace)
    entry = Entry(item.key, forest, extent, segment, state, now)
    catalog.segments.adopt_slot(segment, slot)
    catalog.segments.occupy(segment, slot, entry)
    return entry
