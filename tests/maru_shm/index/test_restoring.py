"""A server that starts over a pool finds what was sealed, and trusts nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from index_rig import KIB, MIB, NS, OTHER_NS, Rig, item, key

from maru_shm.control.messages import ReserveOutcome
from maru_shm.index.effects import UnbindSegment, WriteFree
from maru_shm.index.found import FoundObject, FoundSegment
from maru_shm.index.index import Index
from maru_shm.types import Generation, OwnerToken, SlotShape


def test_everything_sealed_comes_back_where_it_was(rig: Rig) -> None:
    chain = rig.store_chain(["a", "b", "c"], 300 * KIB)
    small = rig.store("small", 100)
    rig.reserve(item("elsewhere", 100), ns=OTHER_NS)
    rig.start()
    found = rig.index.lookup_prefix(rig.session, NS, [key(n) for n in ("a", "b", "c")])
    assert list(found.extents) == chain
    assert list(rig.index.lookup_each(rig.session, NS, [key("small")]).extents) == [small]
    assert rig.index.counts().objects == 4
    rig.index.check_invariants()


def test_chains_come_back_as_chains(rig: Rig) -> None:
    """The head goes after its tail although it is older, in whatever order slots are found."""
    rig.store("tail", MIB, parent="head")
    rig.store("head", MIB)
    rig.store("c", MIB)
    rig.store("d", MIB)
    rig.start()
    rig.store("x", MIB)
    assert rig.present("head", "tail", "c", "d") == {"head", "c", "d"}


def test_generations_are_in_order_again_although_slots_are_not(rig: Rig) -> None:
    rig.store("a", 100)
    rig.store("b", 100)
    rig.medium.apply(rig.index.delete(rig.session, NS, [key("a")]).effects)
    rig.store("c", 100)
    rig.start()
    rows = rig.index.list_objects(Generation(0), 10)
    assert [row.key for row in rows] == [key("b"), key("c")]


def test_reservations_of_the_dead_are_freed(rig: Rig) -> None:
    rig.grant("a", MIB)
    rig.start()
    assert rig.index.counts().quarantined == 0
    assert rig.medium.shapes == {}, "and a segment without objects is returned"


def test_reservations_of_living_owners_keep_their_slot_but_not_their_key(rig: Rig) -> None:
    rig.living.add(rig.owner)
    old = rig.grant("a", MIB)
    rig.start()
    assert rig.index.counts().quarantined == 1
    assert rig.index.quarantined_owners() == [rig.owner]
    new = rig.grant("a", MIB)
    assert new.offset != old.offset
    for name in ("b", "c"):
        rig.grant(name, MIB)
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.NO_SPACE


def test_committing_a_quarantined_generation_loses_it_and_frees_its_slot(rig: Rig) -> None:
    rig.living.add(rig.owner)
    old = rig.grant("a", MIB)
    rig.start()
    stranger = rig.open(OwnerToken(8), 2)
    assert rig.commit(old, session=stranger) == [old.generation]
    assert rig.index.counts().quarantined == 1, "a stranger cannot say that nobody writes there"
    assert rig.commit(old) == [old.generation]
    assert rig.index.counts().quarantined == 0
    assert rig.present("a") == set()
    assert rig.medium.shapes == {}


def test_aborting_a_quarantined_generation_frees_its_slot(rig: Rig) -> None:
    rig.living.add(rig.owner)
    old = rig.grant("a", MIB)
    rig.start()
    answer = rig.index.abort(rig.session, [old.generation])
    rig.medium.apply(answer.effects)
    assert answer.count == 1
    assert rig.medium.shapes == {}


def test_an_owners_death_frees_its_quarantined_slots_without_a_session(rig: Rig) -> None:
    rig.living |= {rig.owner, OwnerToken(8)}
    rig.grant("a", MIB)
    other = rig.open(OwnerToken(8), 2)
    rig.reserve(item("b", MIB), session=other)
    rig.start()
    rig.medium.apply(rig.index.owner_died(OwnerToken(8)))
    assert rig.index.quarantined_owners() == [rig.owner]
    rig.index.check_invariants()


def test_closing_a_session_leaves_its_owners_quarantine_alone(rig: Rig) -> None:
    rig.living.add(rig.owner)
    rig.grant("a", MIB)
    rig.start()
    assert rig.index.close_session(rig.session) == []
    assert rig.index.counts().quarantined == 1


def test_of_two_objects_with_one_key_the_newest_generation_wins(rig: Rig) -> None:
    old, new, child = rig.store("old", 100), rig.store("new", 100), rig.store("child", 100, "new")
    slot = old.offset - 256
    rig.medium.headers[slot] = replace(rig.medium.headers[slot], key=key("new"))
    rig.start()
    rig.index.check_invariants()
    found = rig.index.lookup_prefix(rig.session, NS, [key("new"), key("child")])
    assert list(found.extents) == [new, child]
    assert slot not in rig.medium.headers


def test_a_key_alone_in_its_namespace_may_be_found_twice(rig: Rig) -> None:
    old, new = rig.store("old", 100), rig.store("new", 100)
    slot = old.offset - 256
    rig.medium.headers[slot] = replace(rig.medium.headers[slot], key=key("new"))
    rig.start()
    assert list(rig.index.lookup_each(rig.session, NS, [key("new")]).extents) == [new]
    rig.index.check_invariants()


def test_generations_of_a_new_epoch_are_higher_than_any_restored_one(rig: Rig) -> None:
    old = rig.store("a", 100)
    rig.start()
    assert rig.store("b", 100).generation > old.generation
    rig.start()
    assert rig.present("a", "b") == {"a", "b"}


SHAPE = SlotShape(slot_bytes=1024, payload_offset=256)


def found_object(slot_offset: int, generation: int = 1, length: int = 100) -> FoundObject:
    number = Generation(generation)
    return FoundObject(slot_offset, number, NS, key("a"), None, length, OwnerToken(1))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(found_object(8192 + 512), id="between two slots"),
        pytest.param(found_object(8192, length=769), id="longer than its slot"),
        pytest.param(found_object(8192, length=0), id="without bytes"),
        pytest.param(found_object(8192, generation=0), id="without a generation"),
        pytest.param(found_object(8192, generation=1 << 40), id="of a generation yet to come"),
        pytest.param(found_object(4096), id="before its segment"),
        pytest.param(found_object(8192 + 1028 * 1024), id="behind its segment"),
    ],
)
def test_a_header_that_cannot_be_true_is_cleared(rig: Rig, wrong: FoundObject) -> None:
    index = Index(rig.geometry, 1, rig.clock)
    effects = index.restore([FoundSegment(0, SHAPE, (wrong,), ())], lambda owner: True)
    assert effects == [WriteFree(wrong.slot_offset), UnbindSegment(0)]
    assert index.counts().objects == 0
    index.check_invariants()


def test_one_generation_found_twice_is_kept_once(rig: Rig) -> None:
    index = Index(rig.geometry, 1, rig.clock)
    twice = (found_object(8192), replace(found_object(8192 + 1024), key=key("b")))
    effects = index.restore([FoundSegment(0, SHAPE, twice, ())], lambda owner: True)
    assert effects == [WriteFree(8192 + 1024)]
    assert index.counts().objects == 1
    index.check_invariants()


@pytest.mark.parametrize(
    "bound",
    [
        FoundSegment(9, SHAPE, (), ()),
        FoundSegment(0, SlotShape(slot_bytes=1 << 30, payload_offset=256), (), ()),
        FoundSegment(0, SlotShape(slot_bytes=256, payload_offset=256), (), ()),
    ],
)
def test_a_segment_bound_to_an_impossible_shape_is_returned(rig: Rig, bound: FoundSegment) -> None:
    index = Index(rig.geometry, 1, rig.clock)
    assert index.restore([bound], lambda owner: True) == [UnbindSegment(bound.segment)]
    index.check_invariants()


def test_a_shape_of_another_version_is_served_until_it_runs_empty(rig: Rig) -> None:
    odd = SlotShape(slot_bytes=1088, payload_offset=256)
    index = Index(rig.geometry, 1, rig.clock)
    index.restore([FoundSegment(2, odd, (found_object(rig_base(rig, 2) + 1088),), ())], bool)
    index.check_invariants()
    assert index.counts().used_bytes == 1088


def rig_base(rig: Rig, segment: int) -> int:
    return rig.geometry.first_segment_offset + segment * rig.geometry.segment_bytes


def test_owners_are_asked_for_once_each(rig: Rig) -> None:
    for name in "abc":
        rig.grant(name, 100)
    asked: list[OwnerToken] = []
    index = Index(rig.geometry, 2, rig.clock)
    index.restore(rig.medium.scan(), lambda owner: not asked.append(owner))
    assert asked == [rig.owner]
    assert index.counts().quarantined == 3


def test_restoring_into_a_used_index_is_refused(rig: Rig) -> None:
    rig.store("a", 100)
    with pytest.raises(RuntimeError, match="must come first"):
        rig.index.restore([], lambda owner: False)
