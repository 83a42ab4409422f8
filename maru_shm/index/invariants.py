"""What must hold between any two calls of the index. For tests: visits every object."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from maru_shm.index.catalog import Catalog
from maru_shm.index.entries import Entry, EntryState, Node
from maru_shm.index.forest import Forest
from maru_shm.index.leases import LeaseBook, Session
from maru_shm.index.segments import Segment, Segments
from maru_shm.types import Generation, Key


def check(catalog: Catalog, sessions: Iterable[Session], leases: LeaseBook) -> None:
    """Raise AssertionError, with what is inconsistent, unless all of these hold:

    1. A segment is unbound or in one class; its slots are free or occupied, and counted.
    2. An occupant lies where its slot is, with its payload inside.
    3. A key is sealed, reserved or missing, not two of them; forests and stand-ins are in use.
    4. Children and parents name each other; chains have no rings; heirs are sealed children.
    5. Generations list exactly the reserved and sealed entries, ascending.
    6. An entry's lease count is the number of leases on it; condemned entries have leases.
    7. Every reservation is held by exactly one session; quarantined entries by their owner.
    8. Leases are in the order in which they expire.
    9. A class with an evictable object has a victim, and that is evictable.
    """
    occupants = _check_segments(catalog.segments)
    _check_states(catalog, occupants, sessions)
    for namespace, forest in catalog.forests.items():
        assert forest.namespace == namespace, "a forest stands under another namespace"
        _check_forest(forest)
    _check_leases(occupants, leases)
    for size_class in catalog.segments.classes.values():
        victim = size_class.policy.victim()
        evictable = [e for e in occupants if e.segment.size_class is size_class and e.evictable]
        assert bool(evictable) == (victim is not None), f"{len(evictable)} evictable, got {victim}"
        assert victim is None or victim in evictable, f"victim {victim} is not evictable"


def _check_segments(segments: Segments) -> set[Entry]:
    bound: dict[int, Segment] = {}
    for shape, size_class in segments.classes.items():
        assert size_class.shape == shape, f"class of {size_class.shape} stands under {shape}"
        assert size_class.segments, f"class {shape} has no segment and is still known"
        for number, segment in size_class.segments.items():
            assert segment.number == number, f"segment {segment.number} stands under {number}"
            assert number not in bound, f"segment {number} is bound twice"
            assert segment.size_class is size_class, f"segment {number} names another class"
            bound[number] = segment
        full = {n for n, s in size_class.segments.items() if s.used == size_class.slots_per_segment}
        assert set(size_class.roomy) == set(size_class.segments) - full, f"roomy of {shape}"
    assert len(bound) + segments.num_unbound == segments.geometry.num_segments, "segment lost"
    occupants: set[Entry] = set()
    used_bytes = 0
    for segment in bound.values():
        used_bytes += segment.used * segment.size_class.shape.slot_bytes
        occupants |= _check_slots(segment)
    assert used_bytes == segments.used_bytes, f"{used_bytes} != {segments.used_bytes} bytes used"
    return occupants


def _check_slots(segment: Segment) -> set[Entry]:
    where = f"segment {segment.number}"
    shape = segment.size_class.shape
    free = [slot for slot, entry in enumerate(segment.occupants) if entry is None]
    assert sorted(segment.free) == free, f"{where}: free list {segment.free}, free are {free}"
    assert segment.used == len(segment.occupants) - len(free), f"{where}: wrong count"
    assert len(segment.occupants) <= segment.size_class.slots_per_segment, f"{where}: too many"
    occupants = set()
    for slot, entry in enumerate(segment.occupants):
        if entry is None:
            continue
        assert entry.segment is segment, f"{where} slot {slot}: entry names another segment"
        offset = segment.base + slot * shape.slot_bytes
        assert entry.slot_offset == offset, f"{where} slot {slot}: at {entry.slot_offset}"
        assert 0 < entry.extent.length <= shape.slot_bytes - shape.payload_offset, f"{where} {slot}"
        occupants.add(entry)
    return occupants


def _check_states(catalog: Catalog, occupants: set[Entry], sessions: Iterable[Session]) -> None:
    by_state: dict[EntryState, set[Entry]] = {state: set() for state in EntryState}
    for entry in occupants:
        by_state[entry.state].add(entry)
    assert not by_state[EntryState.GONE], "an entry that is gone occupies a slot"

    sealed = {e for forest in catalog.forests.values() for e in forest.sealed.values()}
    reserved = {e for forest in catalog.forests.values() for e in forest.reserved.values()}
    assert sealed == by_state[EntryState.SEALED], "sealed by key and by slot differ"
    assert reserved == by_state[EntryState.RESERVED], "reserved by key and by slot differ"
    assert catalog.num_sealed == len(sealed), f"{catalog.num_sealed} counted, {len(sealed)} there"

    listed = catalog.by_generation.after(Generation(0), len(occupants) + 1)
    assert set(listed) == sealed | reserved, "generations list something else"
    numbers = [entry.generation for entry in listed]
    assert numbers == sorted(set(numbers)), "generations are not ascending"
    for entry in listed:
        assert catalog.by_generation.get(entry.generation) is entry, "not found by generation"

    held = [entry for session in sessions for entry in session.reservations.values()]
    assert len(held) == len(set(held)), "two sessions hold one reservation"
    assert set(held) == reserved, "reservations by session and by slot differ"
    kept = {e for entries in catalog.quarantine.values() for e in entries.values()}
    assert kept == by_state[EntryState.QUARANTINED], "quarantine by owner and by slot differ"


def _check_forest(forest: Forest) -> None:
    assert len(forest), "an empty forest is still known"
    nodes: dict[bytes, Node] = {}
    tables: tuple[Mapping[Key, Node], ...] = (forest.sealed, forest.reserved, forest.missing)
    for known in tables:
        for key, node in known.items():
            assert node.key == key, f"{node.key.hex()} stands under {key.hex()}"
            assert node.forest is forest, f"{key.hex()} names another forest"
            assert key not in nodes, f"{key.hex()} is known twice"
            nodes[key] = node
    children = 0
    for node in nodes.values():
        before = None
        for child in node.children():
            children += 1
            assert child.parent is node, f"{child.key.hex()} names another parent"
            assert nodes.get(child.key) is child, f"child {child.key.hex()} is not in the forest"
            assert child.previous_sibling is before, f"{child.key.hex()}: wrong sibling"
            before = child
        if not isinstance(node, Entry):
            assert node.first_child is not None, f"nothing waits for {node.key.hex()}"
        elif node.heir is not None:
            assert node.heir.parent is node, f"{node.key.hex()}: heir is no child"
            assert node.heir.state is EntryState.SEALED, f"{node.key.hex()}: heir is not sealed"
    with_parent = [n for n in nodes.values() if isinstance(n, Entry) and n.parent is not None]
    assert children == len(with_parent), f"{children} children, {len(with_parent)} name a parent"
    _check_rings(nodes.values())


def _check_rings(nodes: Iterable[Node]) -> None:
    rooted: set[Node] = set()
    for node in nodes:
        path: set[Node] = set()
        above: Node | None = node
        while above is not None and above not in rooted:
            assert above not in path, f"{above.key.hex()} descends from itself"
            path.add(above)
            above = above.parent if isinstance(above, Entry) else None
        rooted |= path


def _check_leases(occupants: set[Entry], leases: LeaseBook) -> None:
    standing = list(leases)
    expiries = [lease.expires_at for lease in standing]
    assert expiries == sorted(expiries), f"leases out of order: {expiries}"
    for lease in standing:
        assert lease.holder.leases.get(lease.id) is lease, f"lease {lease.id} is not its holder's"
    counted = Counter(entry for lease in standing for entry in lease.entries)
    for entry in occupants | set(counted):
        assert entry.leases == counted[entry], f"{entry.leases} leases, {counted[entry]} stand"
        leased = entry.state in (EntryState.SEALED, EntryState.CONDEMNED)
        assert leased or not entry.leases, f"lease on an object that is {entry.state.name}"
        assert entry.state is not EntryState.CONDEMNED or entry.leases, "condemned and unleased"
