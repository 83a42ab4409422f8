from __future__ import annotations

import pytest
from control_cases import NAMESPACE, FakeClock, chain, granted, key, sealed

from maru_shm.control import messages as m
from maru_shm.control.local import LocalServer, ScriptedOwners
from maru_shm.control.service import Service
from maru_shm.pool.errors import NotEnoughSpace
from maru_shm.pool.pool import Pool
from maru_shm.pool.reading import Verdict, check
from maru_shm.pool.reserving import BlockReserver
from maru_shm.types import Generation, LeaseId, OwnerToken, PartChecksum, SessionId


@pytest.fixture
def service(server: LocalServer) -> Service:
    assert server.service is not None
    return server.service


def open_session(service: Service, owner: int = 1) -> SessionId:
    opened = service.handle(
        m.OpenSession(OwnerToken(owner), f"local:{owner:016x}", f"client {owner}")
    )
    assert isinstance(opened, m.SessionOpened)
    return opened.session


def reserve(service: Service, session: SessionId, count: int) -> list[m.Extent]:
    reply = service.handle(m.Reserve(session, NAMESPACE, chain(count)))
    assert isinstance(reply, m.Reserved)
    return granted(reply)


def granted_of(reply: m.Reply) -> list[m.Extent]:
    assert isinstance(reply, m.Reserved)
    return granted(reply)


def no_space_left(*_: object) -> None:
    raise NotEnoughSpace("p.pool", 1 << 20, 0, "Free some.")


def lookup(service: Service, session: SessionId, count: int) -> m.LeaseGrant:
    keys = tuple(key(number) for number in range(count))
    reply = service.handle(m.LookupPrefix(session, NAMESPACE, keys))
    assert isinstance(reply, m.LeaseGrant)
    return reply


def stats(service: Service) -> m.Stats:
    reply = service.handle(m.GetStats())
    assert isinstance(reply, m.Stats)
    return reply


def test_the_header_is_in_the_pool_before_the_answer(service: Service, pool: Pool) -> None:
    session = open_session(service)
    (extent,) = reserve(service, session, 1)
    assert check(pool, extent) is not Verdict.OK
    service.handle(m.Commit(session, tuple(sealed([extent]))))
    assert check(pool, extent) is Verdict.OK


def test_an_object_is_invisible_until_it_is_committed(service: Service) -> None:
    session = open_session(service)
    extents = reserve(service, session, 3)
    assert lookup(service, session, 3).extents == ()
    service.handle(m.Commit(session, tuple(sealed(extents))))
    grant = lookup(service, session, 5)
    assert grant.extents == tuple(extents)
    assert grant.lease is not None


def test_an_unknown_session_is_refused_as_such(service: Service) -> None:
    session = SessionId(12345)
    for request in (
        m.CloseSession(session),
        m.LookupPrefix(session, NAMESPACE, (key(0),)),
        m.LookupEach(session, NAMESPACE, (key(0),)),
        m.RenewLeases(session, (LeaseId(1),)),
        m.ReleaseLeases(session, (LeaseId(1),)),
        m.Reserve(session, NAMESPACE, chain(1)),
        m.Commit(session, ()),
        m.Abort(session, (Generation(1),)),
        m.ReportSuspect(session, (Generation(1),)),
        m.Delete(session, NAMESPACE, (key(0),)),
    ):
        reply = service.handle(request)
        assert isinstance(reply, m.Refused), request
        assert reply.code is m.ErrorCode.UNKNOWN_SESSION
        assert reply.epoch == service.epoch


def test_a_session_of_an_older_epoch_is_never_taken_for_one_of_this(server: LocalServer) -> None:
    assert server.service is not None
    old = open_session(server.service)
    server.kill()
    server.start()
    assert open_session(server.service, owner=2) != old
    reply = server.service.handle(m.LookupPrefix(old, NAMESPACE, (key(0),)))
    assert isinstance(reply, m.Refused)
    assert reply.code is m.ErrorCode.UNKNOWN_SESSION


def test_a_lock_file_elsewhere_is_refused_with_the_right_place(service: Service) -> None:
    reply = service.handle(m.OpenSession(OwnerToken(1), "/etc/passwd", "x"))
    assert isinstance(reply, m.Refused)
    assert reply.code is m.ErrorCode.BAD_REQUEST
    assert "local:0000000000000001" in reply.message
    assert "MARU_RUNTIME_DIR" in reply.message


def test_opening_again_gives_the_same_session_with_its_reservations(service: Service) -> None:
    session = open_session(service)
    extents = reserve(service, session, 2)
    assert open_session(service) == session
    reply = service.handle(m.Commit(session, tuple(sealed(extents))))
    assert reply == m.Committed(service.epoch, ())


def test_death_of_the_owner_frees_leases_and_reservations(
    service: Service, owners: ScriptedOwners
) -> None:
    session = open_session(service)
    service.handle(m.Commit(session, tuple(sealed(reserve(service, session, 2)))))
    lookup(service, session, 2)
    service.handle(m.Reserve(session, NAMESPACE, chain(4)))
    assert (stats(service).leases, stats(service).reservations) == (1, 2)
    service.tend()
    assert service.num_sessions == 1
    owners.dead.add(OwnerToken(1))
    service.tend()
    after = stats(service)
    assert (service.num_sessions, after.leases, after.reservations, after.objects) == (0, 0, 0, 2)
    service.index.check_invariants()


def test_goodbye_keeps_reservations_while_a_worker_may_still_write(
    service: Service, owners: ScriptedOwners
) -> None:
    session = open_session(service)
    reserve(service, session, 1)
    assert service.handle(m.CloseSession(session)) == m.Done(service.epoch, 1)
    service.tend()
    assert stats(service).reservations == 1
    assert isinstance(service.handle(m.Commit(session, ())), m.Refused)
    owners.dead.add(OwnerToken(1))
    service.tend()
    assert stats(service).reservations == 0
    assert service.num_sessions == 0


def test_goodbye_of_a_client_whose_workers_are_gone_frees_at_once(
    service: Service, owners: ScriptedOwners
) -> None:
    session = open_session(service)
    reserve(service, session, 1)
    owners.dead.add(OwnerToken(1))
    service.handle(m.CloseSession(session))
    assert stats(service).reservations == 0


def test_a_reply_that_could_not_be_delivered_is_taken_back(service: Service) -> None:
    session = open_session(service)
    service.handle(m.Commit(session, tuple(sealed(reserve(service, session, 1)))))
    for request in (
        m.LookupPrefix(session, NAMESPACE, (key(0),)),
        m.LookupEach(session, NAMESPACE, (key(0), key(7))),
        m.Reserve(session, NAMESPACE, chain(3)),
    ):
        service.take_back(request, service.handle(request))
    after = stats(service)
    assert (after.leases, after.reservations, after.objects) == (0, 0, 1)


def test_leases_end_with_their_term(service: Service, clock: FakeClock) -> None:
    session = open_session(service)
    service.handle(m.Commit(session, tuple(sealed(reserve(service, session, 1)))))
    lease = lookup(service, session, 1).lease
    assert lease is not None
    clock.now += 29
    assert service.handle(m.RenewLeases(session, (lease,))) == m.Renewed(service.epoch, ())
    clock.now += 31
    service.tend()
    assert stats(service).leases == 0
    assert service.handle(m.RenewLeases(session, (lease,))) == m.Renewed(service.epoch, (lease,))


def test_suspect_objects_are_never_served_again(service: Service, pool: Pool) -> None:
    session = open_session(service)
    extents = reserve(service, session, 2)
    service.handle(m.Commit(session, tuple(sealed(extents))))
    reply = service.handle(m.ReportSuspect(session, (extents[0].generation,)))
    assert reply == m.Done(service.epoch, 1)
    assert lookup(service, session, 2).extents == ()
    assert check(pool, extents[0]) is not Verdict.OK


def test_a_commit_that_the_header_cannot_hold_is_refused_and_drops_the_object(
    service: Service, pool: Pool
) -> None:
    session = open_session(service)
    (extent,) = reserve(service, session, 1)
    parts = tuple(PartChecksum(number, number) for number in range(100))
    reply = service.handle(m.Commit(session, (m.CommitItem(extent.generation, parts),)))
    assert isinstance(reply, m.Refused)
    assert lookup(service, session, 1).extents == ()
    assert check(pool, extent) is not Verdict.OK
    assert stats(service).reservations == 0
    service.index.check_invariants()


def test_a_refused_commit_drops_no_object_that_was_not_its_own(service: Service) -> None:
    other = open_session(service, owner=2)
    (theirs,) = reserve(service, other, 1)
    service.handle(m.Commit(other, tuple(sealed([theirs]))))
    session = open_session(service)
    (mine,) = granted_of(service.handle(m.Reserve(session, NAMESPACE, chain(2))))
    too_many = tuple(PartChecksum(number, number) for number in range(100))
    items = (m.CommitItem(theirs.generation, ()), m.CommitItem(mine.generation, too_many))
    assert isinstance(service.handle(m.Commit(session, items)), m.Refused)
    assert lookup(service, session, 2).extents == (theirs,)


def test_a_reserve_that_the_medium_has_no_blocks_for_is_taken_back_and_answered_no_space(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = open_session(service)
    with monkeypatch.context() as full:
        full.setattr(BlockReserver, "ensure", no_space_left)
        for _ in range(2):
            reply = service.handle(m.Reserve(session, NAMESPACE, chain(3)))
            assert isinstance(reply, m.Reserved)
            assert [result.outcome for result in reply.results] == [m.ReserveOutcome.NO_SPACE] * 3
            assert granted(reply) == []
        now = stats(service)
        assert (now.reservations, now.used_bytes) == (0, 0)
        service.index.check_invariants()
        assert caplog.text.count("cannot store") == 1
    extents = reserve(service, session, 3)
    service.handle(m.Commit(session, tuple(sealed(extents))))
    assert lookup(service, session, 3).extents == tuple(extents)


def test_a_reserve_that_the_medium_ends_half_way_leaves_what_was_there_before(
    service: Service, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = open_session(service)
    before = reserve(service, session, 2)
    service.handle(m.Commit(session, tuple(sealed(before))))
    small = m.ReserveItem(key(100), None, 1000)  # has room in a segment that is bound
    large = m.ReserveItem(key(101), None, 100_000)  # needs another
    with monkeypatch.context() as full:
        full.setattr(BlockReserver, "ensure", no_space_left)
        reply = service.handle(m.Reserve(session, NAMESPACE, (small, large)))
    assert isinstance(reply, m.Reserved)
    assert [result.outcome for result in reply.results] == [m.ReserveOutcome.NO_SPACE] * 2
    assert lookup(service, session, 2).extents == tuple(before)
    assert all(check(pool, extent) is Verdict.OK for extent in before)
    assert len(granted_of(service.handle(m.Reserve(session, NAMESPACE, (small, large))))) == 2
    service.index.check_invariants()


def test_a_failure_inside_becomes_a_refusal_and_is_logged(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("on purpose")

    session = open_session(service)
    monkeypatch.setattr(service.index, "lookup_prefix", fail)
    reply = service.handle(m.LookupPrefix(session, NAMESPACE, (key(0),)))
    assert isinstance(reply, m.Refused)
    assert reply.code is m.ErrorCode.INTERNAL
    assert "on purpose" in reply.message
    assert "on purpose" in caplog.text


def test_listing_pages_through_objects_in_the_order_of_their_generations(
    service: Service,
) -> None:
    session = open_session(service)
    extents = reserve(service, session, 5)
    service.handle(m.Commit(session, tuple(sealed(extents[:3]))))
    seen: list[m.ObjectRow] = []
    while True:
        after = seen[-1].extent.generation if seen else Generation(0)
        page = service.handle(m.ListObjects(after, 2))
        assert isinstance(page, m.ObjectRows)
        seen += page.rows
        if len(page.rows) < 2:
            break
    assert [row.extent for row in seen] == extents
    assert [row.state for row in seen] == [m.ObjectState.SEALED] * 3 + [m.ObjectState.WRITING] * 2


def test_stats_name_the_pool_and_count_every_session(service: Service, pool: Pool) -> None:
    session = open_session(service)
    open_session(service, owner=2)
    extents = reserve(service, session, 3)
    service.handle(m.Commit(session, tuple(sealed(extents[:2]))))
    lookup(service, session, 3)
    now = stats(service)
    assert now.pool.uuid == pool.uuid
    assert now.sessions[0] == m.ClientStats(session, "client 1", 1, 1)
    assert len(now.sessions) == 2
    assert (now.objects, now.reservations, now.lookups) == (2, 1, 1)
    assert (now.lookup_keys, now.hit_keys, now.reserved_total, now.committed_total) == (3, 2, 3, 2)
