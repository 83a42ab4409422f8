"""What goes when space runs out: leaves first, coldest first, whole segments where that is colder.

The pool holds four segments; an object of 1 MiB fills one, one of 256 KiB a third of one.
"""

from __future__ import annotations

from index_rig import KIB, MIB, NS, Rig, geometry, item, key

from maru_shm.control.messages import ReserveOutcome

QUARTER = 256 * KIB
"""Three of these fit a segment (and their headers)."""


def test_the_least_recently_used_object_goes_first(rig: Rig) -> None:
    for name in "abcd":
        rig.store(name, MIB)
    rig.use("a")
    rig.store("e", MIB)
    assert rig.present(*"abcde") == {"a", "c", "d", "e"}
    rig.store("f", MIB)
    assert rig.present(*"acdef") == {"a", "d", "e", "f"}


def test_finding_a_key_present_on_reserve_counts_as_use(rig: Rig) -> None:
    for name in "abcd":
        rig.store(name, MIB)
    rig.clock.now += 1
    assert rig.outcome(item("a", MIB)) is ReserveOutcome.PRESENT
    rig.store("e", MIB)
    assert rig.present(*"abcde") == {"a", "c", "d", "e"}


def test_the_tail_of_a_prefix_goes_before_what_it_continues(rig: Rig) -> None:
    rig.store_chain(["a", "b", "c", "d"], MIB)
    for new, left in (("w", "abc"), ("x", "ab"), ("y", "a"), ("z", "")):
        rig.store(new, MIB)
        rig.use("w", *"wxyz")
        assert rig.present(*"abcd") == set(left)


def test_an_object_with_a_child_outlives_it_however_cold_it_is(rig: Rig) -> None:
    rig.store("root", MIB)
    rig.store("other", MIB)
    rig.store("tail", MIB, parent="root")
    rig.store("last", MIB)
    rig.use("tail")
    rig.use("last")
    rig.store("x", MIB)
    assert rig.present("root", "tail", "other", "last") == {"root", "tail", "last"}
    rig.store("y", MIB)
    assert rig.present("root", "tail", "last", "x") == {"root", "last", "x"}


def test_chains_go_one_after_the_other_by_last_use_not_in_turns(rig: Rig) -> None:
    rig.store_chain(["a1", "a2"], MIB)
    rig.store_chain(["b1", "b2"], MIB)
    rig.use("a1", "a2")
    rig.store("x", MIB)
    rig.store("y", MIB)
    assert rig.present("a1", "a2", "b1", "b2") == {"a1", "a2"}


def test_a_prefix_used_alone_keeps_its_head_and_lets_its_tail_go(rig: Rig) -> None:
    rig.store_chain(["a1", "a2"], MIB)
    rig.store("b", MIB)
    rig.store("c", MIB)
    rig.use("a1")
    rig.store("x", MIB)
    rig.store("y", MIB)
    assert rig.present("a1", "a2", "b", "c") == {"a1", "c"}


def test_the_parents_of_a_request_are_not_evicted_for_its_children(rig: Rig) -> None:
    """Not even a parent that is the coldest object of all."""
    rig.store("parent", MIB)
    for name in "bcd":
        rig.store(name, MIB)
    first, second = rig.reserve(item("x", MIB), item("child", MIB, "parent")).results
    assert first.outcome is second.outcome is ReserveOutcome.GRANTED
    assert rig.present("parent", *"bcd") == {"parent", "d"}


def test_a_chain_longer_than_the_pool_keeps_its_head(rig: Rig) -> None:
    names = list("abcdef")
    parents = [None, *names[:-1]]
    items = [item(name, MIB, parent) for name, parent in zip(names, parents, strict=True)]
    outcomes = [result.outcome for result in rig.reserve(*items).results]
    assert outcomes == [ReserveOutcome.GRANTED] * 4 + [ReserveOutcome.NO_SPACE] * 2


def test_a_child_being_written_keeps_its_parent(rig: Rig) -> None:
    rig.store("a", MIB)
    child = rig.grant("child", MIB, parent="a")
    rig.grant("c", MIB)
    rig.grant("d", MIB)
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.NO_SPACE
    rig.medium.apply(rig.index.abort(rig.session, [child.generation]).effects)
    rig.grant("e", MIB)
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.GRANTED
    assert rig.present("a") == set()


def test_a_parent_that_comes_after_its_child_outlives_it(rig: Rig) -> None:
    rig.store("child", MIB, parent="late")
    rig.store("late", MIB)
    rig.store("c", MIB)
    rig.store("d", MIB)
    rig.use("child")
    rig.use("c")
    rig.use("d")
    rig.store("x", MIB)
    assert rig.present("late", "child", "c", "d") == {"late", "c", "d"}


def test_a_suspect_parent_that_is_stored_again_takes_its_children_back(rig: Rig) -> None:
    parent = rig.store("parent", 100)
    rig.store("child", 100, parent="parent")
    writing = rig.grant("writing", 100, parent="parent")
    rig.medium.apply(rig.index.suspect(rig.session, [parent.generation]).effects)
    rig.index.check_invariants()
    assert rig.use("child") == 1
    rig.store("parent", 100)
    rig.commit(writing)
    assert rig.use("parent", "child") == 2
    assert rig.use("parent", "writing") == 2


def test_keys_that_name_each_other_as_parents_can_still_be_evicted(rig: Rig) -> None:
    rig.store("self", MIB, parent="self")
    rig.store("a", MIB, parent="c")
    rig.store("b", MIB, parent="a")
    rig.store("c", MIB, parent="b")
    for name in ("w", "x", "y", "z"):
        rig.store(name, MIB)
    assert rig.present("self", "a", "b", "c") == set()


def test_space_for_another_size_comes_from_the_coldest_segment(rig: Rig) -> None:
    """And of a chain that is as cold from head to tail, from its tail."""
    rig.store_chain(["a1", "a2"], MIB)
    rig.store_chain(["b1", "b2"], MIB)
    rig.use("a1", "a2")
    rig.store("small", QUARTER)
    assert rig.present("a1", "a2", "b1", "b2", "small") == {"a1", "a2", "b1", "small"}


def test_a_colder_chain_of_another_size_loses_its_tail_first(rig: Rig) -> None:
    rig.store_chain(["b1", "b2"], MIB)
    for name in range(6):
        rig.store(("q", name), QUARTER)
    rig.store(("q", 6), QUARTER)
    assert rig.present("b1", "b2") == {"b1"}


def test_emptying_a_segment_takes_along_what_continues_its_objects() -> None:
    rig = Rig(geometry(num_segments=2))
    rig.store("head", MIB)
    rig.store("tail", QUARTER, parent="head")
    held = rig.index.lookup_each(rig.session, NS, [key("tail")])
    assert rig.outcome(item("x", 64)) is ReserveOutcome.NO_SPACE, "the tail is in use"
    assert held.lease is not None
    rig.index.release(rig.session, [held.lease])
    assert rig.outcome(item("x", 64)) is ReserveOutcome.GRANTED
    assert rig.present("head", "tail") == {"head"}, "equally cold, and one object less to lose"


def test_a_colder_segment_of_another_size_goes_before_a_warmer_object_of_the_same_size(
    rig: Rig,
) -> None:
    for name in ("q1", "q2", "q3"):
        rig.store(name, QUARTER)
    for name in ("a", "b", "c"):
        rig.store(name, MIB)
    rig.store("d", MIB)
    assert rig.present("q1", "q2", "q3", "a", "b", "c", "d") == {"a", "b", "c", "d"}


def test_a_segment_of_another_size_stays_while_anything_in_it_is_warmer(rig: Rig) -> None:
    for name in ("q1", "q2", "q3"):
        rig.store(name, QUARTER)
    for name in ("a", "b", "c"):
        rig.store(name, MIB)
    rig.use("q2")
    rig.store("d", MIB)
    assert rig.present("q1", "q2", "q3", "a", "b", "c") == {"q1", "q2", "q3", "b", "c"}


def test_a_segment_in_use_is_not_emptied_for_another_size(rig: Rig) -> None:
    for name in ("q1", "q2", "q3"):
        rig.store(name, QUARTER)
    rig.index.lookup_each(rig.session, NS, [key("q3")])
    for name in ("a", "b", "c", "d", "e"):
        rig.store(name, MIB)
    assert rig.present("q1", "q2", "q3") == {"q1", "q2", "q3"}


def test_continuations_used_on_their_own_keep_the_segment_of_their_head(rig: Rig) -> None:
    """A segment is as warm as what would have to go with it."""
    rig.store("head", QUARTER)
    rig.store("a", MIB)
    rig.store("b", MIB)
    rig.store("tail", MIB, parent="head")
    rig.use("tail")
    rig.store("x", MIB)
    assert rig.present("head", "tail", "a", "b") == {"head", "tail", "b"}


def test_a_segment_that_was_used_is_not_weighed_before_one_that_was_not() -> None:
    rig = Rig(geometry(num_segments=7))
    for number in range(5):
        rig.store_chain([(number, n) for n in range(3)], QUARTER)
    rig.store("a", MIB)
    rig.store("b", MIB)
    for number in range(4):
        rig.use(*((number, n) for n in range(3)))
    rig.store("c", MIB)
    assert rig.present("a", "b", (4, 0)) == {"a", "b"}


def test_segments_in_use_do_not_hide_a_cold_one_for_long() -> None:
    rig = Rig(geometry(num_segments=7))
    for number in range(5):
        rig.store_chain([(number, n) for n in range(3)], QUARTER)
    rig.store("a", MIB)
    rig.store("b", MIB)
    rig.index.lookup_each(rig.session, NS, [key((number, 0)) for number in range(4)])
    rig.store("c", MIB)
    rig.store("d", MIB)
    assert rig.present("a", "b", "c", "d", (4, 0)) == {"b", "c", "d"}


def test_a_parent_passed_over_for_its_child_is_evicted_later_all_the_same(rig: Rig) -> None:
    rig.store("parent", MIB)
    for name in "bcd":
        rig.store(name, MIB)
    _, second = rig.reserve(item("x", MIB), item("child", 2 * MIB, "parent")).results
    assert second.outcome is ReserveOutcome.TOO_LARGE
    rig.store("y", MIB)
    assert rig.present("parent", *"bcd") == {"c", "d"}


def test_a_segment_that_the_last_lease_emptied_is_taken_before_anything_is_evicted(
    rig: Rig,
) -> None:
    extents = [rig.store(name, MIB) for name in "abcd"]
    held = rig.index.lookup_each(rig.session, NS, [key("a")]).lease
    rig.medium.apply(rig.index.suspect(rig.session, [extents[0].generation]).effects)
    assert held is not None
    rig.index.release(rig.session, [held])
    rig.store("small", QUARTER)
    assert rig.present(*"abcd") == set("bcd")


def test_an_empty_segment_returns_to_the_common_store(rig: Rig) -> None:
    for name in range(4):
        rig.store(name, MIB)
    answer = rig.index.delete(rig.session, NS, [key(name) for name in range(4)])
    rig.medium.apply(answer.effects)
    assert rig.medium.shapes == {}
    for name in range(12):
        rig.grant(("q", name), QUARTER)
    assert len(rig.medium.shapes) == 4


def test_models_of_two_sizes_share_the_pool_for_long(rig: Rig) -> None:
    """Each gets space whenever it asks, and no slot is ever lost."""
    for round_number in range(200):
        length = MIB if round_number % 3 else QUARTER
        rig.store(round_number, length)
    counts = rig.index.counts()
    assert counts.no_space_total == 0
    assert counts.objects + counts.evicted_total == 200
    names = list(range(200))
    rows = rig.present(*names)
    rig.index.delete(rig.session, NS, [key(name) for name in rows])
    assert rig.index.counts().used_bytes == 0
