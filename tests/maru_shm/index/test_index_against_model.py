"""The index against a dictionary model, step by step, with a medium that replays its effects.

Checked after every step:

1. ``check_invariants`` holds, and the medium accepted every effect: nothing is granted over a
   header that was not cleared, beyond its segment, or with a generation used before.
2. What is sealed is what the model sealed, less what the index says it evicted; never leased,
   reserved or condemned space is handed out (no two live extents overlap).
3. An object whose parent is there was never left behind by it: no eviction left a child whose
   parent was evicted.
4. A lookup finds exactly the prefix that is there, with the extents that were granted.
5. A restarted index finds the same sealed objects; reservations of the living are quarantined.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from index_rig import KIB, MIB, NS, Rig, geometry, key

from maru_shm.control.messages import CommitItem, ReserveItem, ReserveOutcome
from maru_shm.index.effects import Effect, WriteFree
from maru_shm.types import Extent, Generation, Key, LeaseId, OwnerToken, SessionId

NAMES = [f"{chain}{depth}" for chain in "abc" for depth in range(6)]
KEYS = [key(name) for name in NAMES]
PARENT = {key(n): key(f"{n[0]}{int(n[1]) - 1}") if int(n[1]) else None for n in NAMES}
SIZES = {"a": MIB, "b": 300 * KIB, "c": 300 * KIB}
LENGTH = {key(name): SIZES[name[0]] for name in NAMES}
CHAINS = {chain: [key(f"{chain}{depth}") for depth in range(6)] for chain in "abc"}
TERM_S = 10.0


@dataclass
class Lease:
    session: SessionId
    extents: list[Extent]
    expires_at: float


@dataclass
class Model:
    """What must be so, in dictionaries."""

    sealed: dict[Key, Extent] = field(default_factory=dict)
    reserved: dict[Generation, tuple[SessionId, Key, Extent]] = field(default_factory=dict)
    quarantined: dict[Generation, tuple[OwnerToken, Extent]] = field(default_factory=dict)
    leases: dict[LeaseId, Lease] = field(default_factory=dict)

    def leased(self) -> set[Generation]:
        return {e.generation for lease in self.leases.values() for e in lease.extents}

    def occupied(self) -> list[Extent]:
        """Extents that nobody else may be given: each generation once."""
        extents = [
            *self.sealed.values(),
            *(extent for _, _, extent in self.reserved.values()),
            *(extent for _, extent in self.quarantined.values()),
            *(extent for lease in self.leases.values() for extent in lease.extents),
        ]
        return list({extent.generation: extent for extent in extents}.values())


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(geometry(num_segments=3), lease_term_s=TERM_S)
        self.model = Model()
        self.owners = {self.rig.session: self.rig.owner}
        self.open_second()

    def open_second(self) -> None:
        other = OwnerToken(8)
        self.owners[self.rig.open(other, 2)] = other

    # ------------------------------------------------------------------ steps

    @rule(
        number=st.integers(1, 2),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4),
    )
    def reserve_some(self, number: int, keys: list[Key]) -> None:
        self.reserve(SessionId(number), keys)

    @rule(number=st.integers(1, 2), chain=st.sampled_from("abc"), count=st.integers(1, 6))
    def reserve_a_chain(self, number: int, chain: str, count: int) -> None:
        self.reserve(SessionId(number), CHAINS[chain][:count])

    def reserve(self, session: SessionId, keys: list[Key]) -> None:
        self.sweep()
        before = dict(self.model.sealed)
        parents = {PARENT[k] for k in keys} & set(before)
        items = [ReserveItem(k, PARENT[k], LENGTH[k]) for k in keys]
        answer = self.rig.index.reserve(session, NS, items)
        self.evicted(answer.effects, before)
        self.rig.medium.apply(answer.effects)
        for item, result in zip(items, answer.results, strict=True):
            being_written = {k for _, k, _ in self.model.reserved.values()}
            match result.outcome:
                case ReserveOutcome.GRANTED:
                    assert item.key not in being_written
                    assert item.key not in before or item.key not in self.model.sealed
                    assert result.extent is not None
                    assert result.extent.length == item.length
                    self.model.reserved[result.extent.generation] = (
                        session,
                        item.key,
                        result.extent,
                    )
                case ReserveOutcome.PRESENT:
                    assert item.key in before
                case ReserveOutcome.BEING_WRITTEN:
                    assert item.key in being_written
                case ReserveOutcome.NO_SPACE:
                    assert self.something_must_stay() or parents, "a free pool has room"
                case ReserveOutcome.TOO_LARGE:
                    raise AssertionError("every size of this test fits a segment")

    def evicted(self, effects: list[Effect], before: dict[Key, Extent]) -> None:
        """Take what the effects free out of the model, in their order."""
        by_slot = {extent.offset - 4096: k for k, extent in before.items()}
        for effect in effects:
            if not isinstance(effect, WriteFree):
                continue
            gone = by_slot[effect.slot_offset]
            extent = self.model.sealed.pop(gone)
            assert extent.generation not in self.model.leased(), "a leased object was evicted"
            left = {*self.model.sealed, *(k for _, k, _ in self.model.reserved.values())}
            orphans = [k for k in left if PARENT[k] == gone]
            assert not orphans, "an object was evicted before what continues it"

    def something_must_stay(self) -> bool:
        return bool(self.model.leased() or self.model.reserved or self.model.quarantined)

    @rule(number=st.integers(1, 2), data=st.data())
    def commit_some(self, number: int, data: st.DataObject) -> None:
        session = SessionId(number)
        known = [*self.model.reserved, *self.model.quarantined, Generation(5)]
        chosen = data.draw(st.lists(st.sampled_from(known), max_size=4, unique=True))
        answer = self.rig.index.commit(session, [CommitItem(g, ()) for g in chosen])
        self.rig.medium.apply(answer.effects)
        lost = []
        for generation in chosen:
            holder, name, extent = self.model.reserved.get(generation, (None, None, None))
            if holder == session and name is not None and extent is not None:
                del self.model.reserved[generation]
                self.model.sealed[name] = extent
            else:
                lost.append(generation)
                self.leave_quarantine(session, generation)
        assert answer.lost == lost

    @rule(number=st.integers(1, 2), data=st.data())
    def abort_some(self, number: int, data: st.DataObject) -> None:
        session = SessionId(number)
        known = [*self.model.reserved, *self.model.quarantined, Generation(5)]
        chosen = data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        answer = self.rig.index.abort(session, chosen)
        self.rig.medium.apply(answer.effects)
        count = 0
        for generation in chosen:
            if self.model.reserved.get(generation, (None,))[0] == session:
                del self.model.reserved[generation]
                count += 1
            else:
                count += self.leave_quarantine(session, generation)
        assert answer.count == count

    def leave_quarantine(self, session: SessionId, generation: Generation) -> bool:
        owner, _ = self.model.quarantined.get(generation, (None, None))
        if owner != self.owners[session]:
            return False
        del self.model.quarantined[generation]
        return True

    @rule(number=st.integers(1, 2), chain=st.sampled_from("abc"), start=st.integers(0, 2))
    def look_a_prefix_up(self, number: int, chain: str, start: int) -> None:
        keys = CHAINS[chain][start:]
        found = self.rig.index.lookup_prefix(SessionId(number), NS, keys)
        expected = []
        for wanted in keys:
            if wanted not in self.model.sealed:
                break
            expected.append(self.model.sealed[wanted])
        assert list(found.extents) == expected
        self.leased(SessionId(number), found.lease, expected)

    @rule(number=st.integers(1, 2), keys=st.lists(st.sampled_from(KEYS), max_size=3))
    def look_each_up(self, number: int, keys: list[Key]) -> None:
        found = self.rig.index.lookup_each(SessionId(number), NS, keys)
        expected = [self.model.sealed.get(wanted) for wanted in keys]
        assert list(found.extents) == expected
        self.leased(SessionId(number), found.lease, [e for e in expected if e is not None])

    def leased(self, session: SessionId, lease: LeaseId | None, extents: list[Extent]) -> None:
        assert (lease is None) == (not extents)
        if lease is not None:
            assert lease not in self.model.leases
            self.model.leases[lease] = Lease(session, extents, self.rig.clock.now + TERM_S)

    @rule(number=st.integers(1, 2), data=st.data())
    def release_some(self, number: int, data: st.DataObject) -> None:
        self.sweep()
        chosen = data.draw(st.lists(st.sampled_from([*self.model.leases, LeaseId(0)]), max_size=3))
        mine = {n for n in chosen if n and self.model.leases[n].session == number}
        assert self.rig.index.release(SessionId(number), chosen) == len(mine)
        for lease in mine:
            del self.model.leases[lease]

    @rule(number=st.integers(1, 2), data=st.data())
    def renew_some(self, number: int, data: st.DataObject) -> None:
        self.sweep()
        known = [*self.model.leases, LeaseId(0)]
        chosen = data.draw(st.lists(st.sampled_from(known), max_size=3, unique=True))
        mine = [n for n in chosen if n and self.model.leases[n].session == number]
        lost = self.rig.index.renew(SessionId(number), chosen)
        assert lost == [n for n in chosen if n not in mine]
        for lease in mine:
            self.model.leases[lease].expires_at = self.rig.clock.now + TERM_S

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.clock.now += seconds

    @rule()
    def expire(self) -> None:
        self.rig.medium.apply(self.rig.index.expire())
        self.sweep()
        assert self.rig.index.counts().leases == len(self.model.leases)

    def sweep(self) -> None:
        now = self.rig.clock.now
        self.model.leases = {n: x for n, x in self.model.leases.items() if x.expires_at > now}

    @precondition(lambda self: self.model.sealed)
    @rule(data=st.data())
    def suspect_one(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.model.sealed)))
        generation = self.model.sealed.pop(name).generation
        chosen = [generation, *list(self.model.reserved)[:1]]
        answer = self.rig.index.suspect(SessionId(1), chosen)
        self.rig.medium.apply(answer.effects)
        assert answer.count == 1

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True))
    def delete_some(self, keys: list[Key]) -> None:
        self.sweep()
        answer = self.rig.index.delete(SessionId(2), NS, keys)
        self.rig.medium.apply(answer.effects)
        leased = self.model.leased()
        gone = [
            k
            for k in keys
            if k in self.model.sealed and self.model.sealed[k].generation not in leased
        ]
        assert answer.count == len(gone)
        for name in gone:
            del self.model.sealed[name]

    @rule(number=st.integers(1, 2))
    def a_session_ends(self, number: int) -> None:
        session = SessionId(number)
        self.rig.medium.apply(self.rig.index.close_session(session))
        self.forget(session)
        self.rig.index.open_session(session, self.owners[session])

    @rule(number=st.integers(1, 2))
    def an_owner_dies(self, number: int) -> None:
        session = SessionId(number)
        owner = self.owners[session]
        self.rig.medium.apply(self.rig.index.owner_died(owner))
        self.forget(session)
        self.model.quarantined = {
            g: kept for g, kept in self.model.quarantined.items() if kept[0] != owner
        }
        self.rig.index.open_session(session, owner)

    def forget(self, session: SessionId) -> None:
        model = self.model
        model.leases = {n: x for n, x in model.leases.items() if x.session != session}
        model.reserved = {g: r for g, r in model.reserved.items() if r[0] != session}

    @rule(living=st.sets(st.sampled_from([OwnerToken(7), OwnerToken(8)])))
    def the_server_starts_again(self, living: set[OwnerToken]) -> None:
        kept = {g: v for g, v in self.model.quarantined.items() if v[0] in living}
        for generation, (session, _, extent) in self.model.reserved.items():
            if self.owners[session] in living:
                kept[generation] = (self.owners[session], extent)
        self.model = Model(sealed=self.model.sealed, quarantined=kept)
        self.rig.living = living
        self.rig.start()
        self.open_second()

    # -------------------------------------------------------------- invariants

    @invariant()
    def it_is_consistent(self) -> None:
        self.rig.index.check_invariants()

    @invariant()
    def what_is_there_is_what_the_model_holds(self) -> None:
        rows = self.rig.index.list_objects(Generation(0), 1000)
        sealed = {row.key: row.extent for row in rows if row.state.name == "SEALED"}
        writing = {row.extent.generation for row in rows if row.state.name == "WRITING"}
        assert sealed == self.model.sealed
        assert writing == set(self.model.reserved)
        counts = self.rig.index.counts()
        assert counts.objects == len(sealed)
        assert counts.quarantined == len(self.model.quarantined)

    @invariant()
    def no_two_extents_overlap(self) -> None:
        spans = sorted((e.offset, e.offset + e.length) for e in self.model.occupied())
        for (_, end), (begin, _) in pairwise(spans):
            assert end <= begin, "space in use was given out"

    @invariant()
    def the_headers_say_the_same(self) -> None:
        medium = self.rig.medium
        headers = {h.generation for slot, h in medium.headers.items() if slot in medium.sealed}
        assert headers == {extent.generation for extent in self.model.sealed.values()}


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndexAgainstModel = IndexMachine.TestCase
