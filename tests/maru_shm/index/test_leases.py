"""A leased object's space is not given out while the lease stands."""

from __future__ import annotations

from index_rig import MIB, NS, Rig, item, key

from maru_shm.control.messages import ReserveOutcome
from maru_shm.index.effects import WriteFree
from maru_shm.types import LeaseId, OwnerToken


def fill(rig: Rig) -> None:
    for name in ("a", "b", "c", "d"):
        rig.store(name, MIB)


def lease(rig: Rig, *names: str) -> LeaseId:
    found = rig.index.lookup_each(rig.session, NS, [key(name) for name in names])
    assert found.lease is not None
    return found.lease


def test_a_prefix_ends_at_the_first_key_that_is_not_there(rig: Rig) -> None:
    extents = rig.store_chain(["a", "b"], 100)
    rig.store("d", 100)
    found = rig.index.lookup_prefix(rig.session, NS, [key(n) for n in ("a", "b", "c", "d")])
    assert list(found.extents) == extents


def test_a_prefix_is_found_whatever_order_its_keys_were_linked_in(rig: Rig) -> None:
    """Keys that no parent links, siblings and strangers are all found by their key."""
    rig.store("root", 100)
    for name in ("left", "right"):
        rig.store(name, 100, parent="root")
    rig.store("apart", 100)
    for names in (["root", "left"], ["root", "right", "left"], ["apart", "root", "apart"]):
        assert rig.use(*names) == len(names)


def test_looking_each_key_up_leaves_none_where_nothing_is(rig: Rig) -> None:
    a, b = rig.store("a", 100), rig.store("b", 100)
    found = rig.index.lookup_each(rig.session, NS, [key(n) for n in ("x", "a", "y", "b", "a")])
    assert list(found.extents) == [None, a, None, b, a]
    rig.index.check_invariants()


def test_nothing_found_means_no_lease(rig: Rig) -> None:
    assert rig.index.lookup_prefix(rig.session, NS, [key("a")]).lease is None
    found = rig.index.lookup_each(rig.session, NS, [key("a")])
    assert (found.lease, list(found.extents)) == (None, [None])


def test_a_leased_object_is_never_evicted(rig: Rig) -> None:
    fill(rig)
    held = lease(rig, "a", "b", "c", "d")
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.NO_SPACE
    assert rig.index.release(rig.session, [held, LeaseId(99)]) == 1
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.GRANTED


def test_two_leases_on_one_object_must_both_end(rig: Rig) -> None:
    fill(rig)
    first, second = lease(rig, "a", "b", "c", "d"), lease(rig, "a", "b", "c", "d")
    rig.index.release(rig.session, [first])
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.NO_SPACE
    rig.index.release(rig.session, [second])
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.GRANTED


def test_an_overdue_lease_no_longer_stands(rig: Rig) -> None:
    fill(rig)
    held = lease(rig, "a", "b", "c", "d")
    rig.clock.now += 29.9
    assert rig.index.expire() == []
    assert rig.index.counts().leases == 1
    rig.clock.now += 0.1
    rig.index.expire()
    rig.index.check_invariants()
    assert rig.index.counts().leases == 0
    assert rig.index.renew(rig.session, [held]) == [held]
    assert rig.index.release(rig.session, [held]) == 0


def test_a_reservation_does_not_wait_for_somebody_to_sweep_overdue_leases(rig: Rig) -> None:
    fill(rig)
    lease(rig, "a", "b", "c", "d")
    rig.clock.now += 30
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.GRANTED


def test_a_renewed_lease_stands_for_another_term(rig: Rig) -> None:
    fill(rig)
    held, other = lease(rig, "a"), lease(rig, "b")
    rig.clock.now += 20
    assert rig.index.renew(rig.session, [held, LeaseId(77)]) == [LeaseId(77)]
    rig.clock.now += 20
    rig.index.expire()
    assert rig.index.renew(rig.session, [held, other]) == [other]


def test_a_session_cannot_end_or_renew_the_lease_of_another(rig: Rig) -> None:
    fill(rig)
    stranger = rig.open(OwnerToken(8), 2)
    held = lease(rig, "a")
    assert rig.index.release(stranger, [held]) == 0
    assert rig.index.renew(stranger, [held]) == [held]
    assert rig.index.renew(rig.session, [held]) == []


def test_closing_a_session_ends_its_leases(rig: Rig) -> None:
    fill(rig)
    reader = rig.open(OwnerToken(8), 2)
    rig.index.lookup_each(reader, NS, [key(name) for name in "abcd"])
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.NO_SPACE
    rig.index.close_session(reader)
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.GRANTED


def test_a_suspect_object_is_gone_at_once_and_its_space_only_after_the_last_lease(
    rig: Rig,
) -> None:
    fill(rig)
    held = lease(rig, "a", "b", "c", "d")
    (extent,) = [e for e in rig.index.lookup_each(rig.session, NS, [key("a")]).extents if e]
    answer = rig.index.suspect(rig.session, [extent.generation])
    assert answer.count == 1
    assert answer.effects == [WriteFree(extent.offset - 4096)]
    rig.medium.apply(answer.effects)
    rig.index.check_invariants()
    assert rig.use("a") == 0
    assert rig.outcome(item("a", MIB)) is ReserveOutcome.NO_SPACE

    rig.index.release(rig.session, [held])
    assert rig.present("b", "c", "d") == {"b", "c", "d"}
    rig.index.lookup_each(rig.session, NS, [key(name) for name in "bcd"])
    assert rig.outcome(item("a", MIB)) is ReserveOutcome.NO_SPACE, "one lease on a still stands"
    rig.clock.now += 31
    assert rig.grant("a", MIB).generation > extent.generation


def test_a_suspect_object_that_nobody_leases_frees_its_segment_at_once(rig: Rig) -> None:
    extent = rig.store("a", MIB)
    answer = rig.index.suspect(rig.session, [extent.generation, extent.generation])
    rig.medium.apply(answer.effects)
    assert answer.count == 1
    assert rig.medium.shapes == {}


def test_a_reservation_cannot_be_suspect(rig: Rig) -> None:
    extent = rig.grant("a", 100)
    assert rig.index.suspect(rig.session, [extent.generation]).count == 0
    assert rig.commit(extent) == []


def test_the_segment_of_a_condemned_object_is_returned_with_the_next_effects(rig: Rig) -> None:
    extent = rig.store("a", MIB)
    held = lease(rig, "a")
    rig.medium.apply(rig.index.suspect(rig.session, [extent.generation]).effects)
    rig.index.release(rig.session, [held])
    rig.medium.apply(rig.index.expire())
    assert rig.medium.shapes == {}
    rig.index.check_invariants()
