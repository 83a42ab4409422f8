"""Who gets space for what, and when it becomes visible."""

from __future__ import annotations

import pytest
from index_rig import KIB, MIB, NS, OTHER_NS, Rig, geometry, item, key

from maru_shm.control.messages import CommitItem, ObjectState, ReserveOutcome
from maru_shm.index.effects import WriteFree, WriteSealed
from maru_shm.index.errors import InvalidLength, UnknownPolicy, UnknownSession
from maru_shm.index.index import Index
from maru_shm.types import Generation, OwnerToken, PartChecksum, SessionId


def test_an_object_is_found_only_after_its_commit(rig: Rig) -> None:
    extent = rig.grant("a", 100)
    assert rig.use("a") == 0
    rig.commit(extent)
    lookup = rig.index.lookup_prefix(rig.session, NS, [key("a")])
    assert list(lookup.extents) == [extent]


def test_a_second_writer_learns_that_a_key_is_being_written_and_then_that_it_is_there(
    rig: Rig,
) -> None:
    other = rig.open(OwnerToken(8), 2)
    extent = rig.grant("a", 100)
    (result,) = rig.reserve(item("a", 100), session=other).results
    assert (result.outcome, result.extent) == (ReserveOutcome.BEING_WRITTEN, None)
    rig.commit(extent)
    (result,) = rig.reserve(item("a", 100), session=other).results
    assert (result.outcome, result.extent) == (ReserveOutcome.PRESENT, None)


def test_a_writers_own_reservation_counts_as_being_written(rig: Rig) -> None:
    first, second = rig.reserve(item("a", 100), item("a", 100)).results
    assert first.outcome is ReserveOutcome.GRANTED
    assert second.outcome is ReserveOutcome.BEING_WRITTEN


def test_the_same_key_in_another_namespace_is_another_object(rig: Rig) -> None:
    rig.store("a", 100)
    (result,) = rig.reserve(item("a", 100), ns=OTHER_NS).results
    assert result.outcome is ReserveOutcome.GRANTED
    assert rig.use("a", ns=OTHER_NS) == 0


def test_an_object_larger_than_a_segment_is_too_large_and_the_largest_that_fits_is_not(
    rig: Rig,
) -> None:
    largest = rig.geometry.segment_bytes - 4096
    assert rig.outcome(item("a", largest + 1)) is ReserveOutcome.TOO_LARGE
    assert rig.outcome(item("b", largest)) is ReserveOutcome.GRANTED


def test_there_is_no_space_while_everything_is_being_written(rig: Rig) -> None:
    for name in range(4):
        rig.grant(name, MIB)
    assert rig.outcome(item("x", MIB)) is ReserveOutcome.NO_SPACE
    assert rig.outcome(item("small", 64)) is ReserveOutcome.NO_SPACE
    assert rig.index.counts().no_space_total == 2


def test_a_commit_carries_the_checksums_to_the_header(rig: Rig) -> None:
    extent = rig.grant("a", 100)
    parts = (PartChecksum(1, 2), PartChecksum(3, 4))
    answer = rig.index.commit(rig.session, [CommitItem(extent.generation, parts)])
    assert answer.effects == [WriteSealed(extent.offset - 256, extent.generation, parts)]


def test_a_generation_of_somebody_else_is_lost_and_stays_reserved(rig: Rig) -> None:
    other = rig.open(OwnerToken(8), 2)
    extent = rig.grant("a", 100)
    assert rig.commit(extent, session=other) == [extent.generation]
    assert rig.index.abort(other, [extent.generation]).count == 0
    assert rig.commit(extent) == []


def test_committing_twice_loses_the_second_time_and_keeps_the_object(rig: Rig) -> None:
    extent = rig.store("a", 100)
    assert rig.commit(extent) == [extent.generation]
    assert rig.use("a") == 1


def test_an_aborted_reservation_frees_its_slot_and_its_key(rig: Rig) -> None:
    extent = rig.grant("a", MIB)
    answer = rig.index.abort(rig.session, [extent.generation, Generation(12345)])
    assert answer.count == 1
    rig.medium.apply(answer.effects)
    assert rig.medium.shapes == {}
    assert rig.index.counts().used_bytes == 0
    assert rig.grant("a", MIB).generation > extent.generation


def test_generations_carry_the_epoch_and_never_repeat(rig: Rig) -> None:
    first = rig.grant("a", 100)
    second = rig.grant("b", 100)
    assert first.generation >> 40 == rig.epoch
    assert second.generation > first.generation


def test_closing_a_session_frees_its_reservations_and_keeps_what_is_sealed(rig: Rig) -> None:
    rig.store("a", 100)
    extent = rig.grant("b", 100)
    effects = rig.index.close_session(rig.session)
    assert effects == [WriteFree(extent.offset - 256)]
    rig.medium.apply(effects)
    assert rig.present("a", "b") == {"a"}
    assert rig.index.close_session(rig.session) == []


def test_an_owners_death_closes_its_sessions_and_nobody_elses(rig: Rig) -> None:
    other = rig.open(OwnerToken(8), 2)
    mine = rig.grant("mine", 100)
    (theirs,) = rig.reserve(item("theirs", 100), session=other).results
    effects = rig.index.owner_died(rig.owner)
    assert effects == [WriteFree(mine.offset - 256)]
    assert [counts.session for counts in rig.index.session_counts()] == [other]
    assert theirs.extent is not None
    assert rig.commit(theirs.extent, session=other) == []


def test_a_request_of_an_unknown_session_is_refused(rig: Rig) -> None:
    stranger = SessionId(99)
    with pytest.raises(UnknownSession, match="99"):
        rig.index.lookup_prefix(stranger, NS, [key("a")])
    with pytest.raises(UnknownSession):
        rig.index.reserve(stranger, NS, [item("a", 1)])


def test_a_bad_length_refuses_the_whole_request_before_anything_is_granted(rig: Rig) -> None:
    with pytest.raises(InvalidLength, match="0 bytes"):
        rig.index.reserve(rig.session, NS, [item("a", 100), item("b", 0)])
    assert rig.index.counts().reservations == 0


def test_an_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(UnknownPolicy, match="choose one of lru"):
        Index(geometry(), 1, lambda: 0.0, policy="mru")


def test_deleting_removes_what_nobody_leases(rig: Rig) -> None:
    rig.store_chain(["a", "b", "c"], 100)
    lookup = rig.index.lookup_each(rig.session, NS, [key("b")])
    answer = rig.index.delete(rig.session, NS, [key(n) for n in ("a", "b", "c", "d")])
    rig.medium.apply(answer.effects)
    rig.index.check_invariants()
    assert answer.count == 2
    assert rig.present("a", "b", "c") == {"b"}
    assert lookup.lease is not None


def test_objects_are_listed_by_ascending_generation_page_by_page(rig: Rig) -> None:
    rig.store("a", 64 * KIB)
    rig.grant("b", 100)
    rig.store("c", 100)
    rig.clock.now += 5
    first = rig.index.list_objects(Generation(0), 2)
    rest = rig.index.list_objects(first[-1].extent.generation, 2)
    rows = [*first, *rest]
    assert [row.key for row in rows] == [key("a"), key("b"), key("c")]
    assert [row.state for row in rows] == [
        ObjectState.SEALED,
        ObjectState.WRITING,
        ObjectState.SEALED,
    ]
    assert [row.extent.length for row in rows] == [64 * KIB, 100, 100]
    assert rows[2].age_s == 5
    assert rig.index.list_objects(rows[-1].extent.generation, 2) == []


def test_counts_follow_what_happened(rig: Rig) -> None:
    rig.store("a", 100)
    aborted = rig.grant("b", 100)
    rig.medium.apply(rig.index.abort(rig.session, [aborted.generation]).effects)
    rig.grant("c", 100)
    rig.index.lookup_prefix(rig.session, NS, [key("a"), key("b")])
    counts = rig.index.counts()
    assert (counts.objects, counts.reservations, counts.leases) == (1, 1, 1)
    assert (counts.lookups, counts.lookup_keys, counts.hit_keys) == (1, 2, 1)
    assert (counts.reserved_total, counts.committed_total, counts.aborted_total) == (3, 1, 1)
    assert counts.used_bytes == 2 * (256 + 128)
