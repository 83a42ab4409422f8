"""The parts that keep order: by generation, and by last use."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from index_rig import NS, geometry, key

from maru_shm.index.entries import Entry, EntryState
from maru_shm.index.eviction import Lru
from maru_shm.index.forest import Forest
from maru_shm.index.generations import ByGeneration
from maru_shm.index.segments import Segments
from maru_shm.types import Extent, Generation


def entries(count: int) -> list[Entry]:
    forest = Forest(NS)
    segments = Segments(geometry(), Lru)
    size_class = segments.class_for(100)
    assert size_class is not None
    segment = segments.with_room(size_class, [])
    assert segment is not None
    return [
        Entry(key(n), forest, Extent(0, 100, Generation(n)), segment, EntryState.SEALED, 0.0)
        for n in range(1, count + 1)
    ]


@settings(deadline=None)
@given(st.sets(st.integers(1, 3000)), st.integers(0, 3001), st.integers(1, 1500))
def test_generations_are_listed_in_order_after_any_removal(
    removed: set[int], after: int, limit: int
) -> None:
    book = ByGeneration()
    everything = ENTRIES
    for entry in everything:
        book.append(entry)
    for number in removed:
        book.remove(everything[number - 1])
    left = [n for n in range(1, 3001) if n not in removed]
    assert [e.extent.generation for e in book.after(Generation(after), limit)] == [
        n for n in left if n > after
    ][:limit]
    for number in (1, 1024, 1025, 3000):
        expected = None if number in removed else everything[number - 1]
        assert book.get(Generation(number)) is expected


ENTRIES = entries(3000)


def test_a_page_of_generations_can_be_emptied_and_used_again() -> None:
    book = ByGeneration()
    for entry in ENTRIES[:10]:
        book.append(entry)
        book.remove(entry)
    book.append(ENTRIES[11])
    assert book.after(Generation(0), 5) == [ENTRIES[11]]
    assert book.get(Generation(3)) is None


@settings(deadline=None)
@example([(0, "c"), (1, "u"), (0, "c"), (0, "u")])  # known late, then used
@given(st.lists(st.tuples(st.integers(0, 7), st.sampled_from("uulc")), max_size=60))
def test_lru_names_the_evictable_entry_used_longest_ago(script: list[tuple[int, str]]) -> None:
    """u: use and release; l: lease on or off; c: child comes or goes. Against a plain minimum."""
    policy = Lru()
    several = entries(9)
    child = several.pop()
    for now, entry in enumerate(several):
        entry.stamp = now - 8.0
        policy.admit(entry)
    for now, (number, what) in enumerate(script):
        entry = several[number]
        if what == "u":
            entry.stamp = float(now)
        elif what == "l":
            entry.leases ^= 1
        elif entry.first_child is None:
            entry.first_child = child
            policy.discard(entry)
        else:
            entry.first_child = None
        if entry.evictable:
            policy.admit(entry)
        evictable = [e for e in several if e.evictable]
        oldest = min(evictable, key=lambda e: e.stamp, default=None)
        assert policy.victim() is oldest


def test_an_entry_knows_the_sealed_child_that_lookups_try_first() -> None:
    forest = Forest(NS)
    parent, first, second = entries(3)
    for entry in (parent, first, second):
        entry.forest, entry.state = forest, EntryState.RESERVED
    forest.plant(first, parent.key)
    forest.seal(first)
    forest.plant(parent, None)
    forest.plant(second, parent.key)
    assert parent.heir is None
    forest.seal(parent)
    assert parent.heir is first, "a child that was sealed before its parent"
    forest.seal(second)
    assert parent.heir is second
    forest.uproot(second)
    assert parent.heir is None
