"""The client's rules, on the in-process plane: one class serves it and the socket client."""

from __future__ import annotations

import os

import pytest
from control_cases import NAMESPACE, FakeClock, chain, granted, key, sealed

from maru_shm.control import messages as m
from maru_shm.control.errors import RequestRefused, Unreachable
from maru_shm.control.exchange import HELLO_TIMEOUT_S
from maru_shm.control.fields import MAX_ITEMS
from maru_shm.control.local import Delivery, Fate, LocalPlane, LocalServer, ScriptedOwners
from maru_shm.control.plane import ControlPlane
from maru_shm.types import OwnerToken

KEYS = [key(number) for number in range(4)]
LATE = Delivery(reply_ticks=10)


def counts(server: LocalServer) -> tuple[int, int]:
    """Leases and reservations that the server knows of."""
    assert server.service is not None
    now = server.service.index.counts()
    return now.leases, now.reservations


def poll(plane: LocalPlane, times: int) -> None:
    for _ in range(times):
        plane.poll()


def store(plane: LocalPlane, count: int) -> None:
    extents = granted(plane.reserve(NAMESPACE, chain(count), 1))
    assert plane.commit(sealed(extents), 1).lost == ()


def test_the_in_process_plane_is_a_control_plane(plane: LocalPlane) -> None:
    as_plane: ControlPlane = plane
    connection = as_plane.connection()
    assert connection is not None
    assert connection.pool.medium == "tmpfs"


def test_submit_returns_at_once_and_poll_brings_the_reply(plane: LocalPlane) -> None:
    store(plane, 2)
    plane.deliver = lambda _: Delivery(request_ticks=1, reply_ticks=2)
    pending = plane.submit_lookup_prefix(NAMESPACE, KEYS, 1)
    with pytest.raises(RuntimeError, match="poll"):
        pending.take()
    poll(plane, 2)
    assert not pending.done()
    poll(plane, 1)
    assert pending.done()
    assert len(pending.take().extents) == 2
    with pytest.raises(RuntimeError, match="taken"):
        pending.take()


def test_an_overdue_request_fails_as_unreachable_not_as_a_miss(
    plane: LocalPlane, clock: FakeClock
) -> None:
    plane.deliver = lambda _: LATE
    pending = plane.submit_lookup_prefix(NAMESPACE, KEYS, 0.02)
    clock.now += 0.019
    plane.poll()
    assert not pending.done()
    clock.now += 0.002
    plane.poll()
    with pytest.raises(Unreachable, match="in time"):
        pending.take()


def test_a_lease_that_arrives_after_its_request_expired_is_released(
    plane: LocalPlane, server: LocalServer, clock: FakeClock
) -> None:
    store(plane, 2)
    plane.deliver = lambda r: LATE if isinstance(r, m.LookupPrefix) else Delivery()
    pending = plane.submit_lookup_prefix(NAMESPACE, KEYS, 0.02)
    clock.now += 1
    plane.poll()
    assert pending.done()
    assert counts(server) == (1, 0)
    poll(plane, 12)
    assert counts(server) == (0, 0)
    assert plane.connection() is not None


def test_a_reservation_that_arrives_after_its_request_expired_is_aborted(
    plane: LocalPlane, server: LocalServer, clock: FakeClock
) -> None:
    plane.deliver = lambda r: LATE if isinstance(r, m.Reserve) else Delivery()
    pending = plane.submit_reserve(NAMESPACE, chain(3), 0.02)
    clock.now += 1
    plane.poll()
    assert pending.done()
    assert counts(server) == (0, 3)
    poll(plane, 12)
    assert counts(server) == (0, 0)


@pytest.mark.parametrize("polls_before_drop", [0, 1])
def test_a_dropped_request_leaks_nothing(
    plane: LocalPlane, server: LocalServer, polls_before_drop: int
) -> None:
    store(plane, 2)
    lookup = plane.submit_lookup_prefix(NAMESPACE, KEYS, 1)
    reserve = plane.submit_reserve(NAMESPACE, chain(4), 1)
    poll(plane, polls_before_drop)
    assert lookup.done() == reserve.done() == bool(polls_before_drop)
    assert counts(server) == (1, 2)
    del lookup, reserve
    poll(plane, 2)
    assert counts(server) == (0, 0)


def test_taken_grants_are_the_callers_and_are_not_given_back(
    plane: LocalPlane, server: LocalServer
) -> None:
    store(plane, 2)
    plane.lookup_prefix(NAMESPACE, KEYS, 1)
    plane.reserve(NAMESPACE, chain(4), 1)
    poll(plane, 5)
    assert counts(server) == (1, 2)


def test_without_a_server_submits_fail_at_once(plane: LocalPlane, server: LocalServer) -> None:
    server.kill()
    first = plane.submit_lookup_prefix(NAMESPACE, KEYS, 1)
    assert first.done()
    assert plane.connection() is None
    second = plane.submit_reserve(NAMESPACE, chain(1), 1)
    with pytest.raises(Unreachable):
        second.take()


def test_after_a_restart_the_session_comes_back_with_another_epoch(
    plane: LocalPlane, server: LocalServer, clock: FakeClock
) -> None:
    store(plane, 3)
    before = plane.connection()
    (extent,) = granted(plane.reserve(NAMESPACE, (*chain(4)[3:],), 1))
    server.kill()
    assert plane.submit_lookup_prefix(NAMESPACE, KEYS, 1).done()
    server.start()
    clock.now += 2
    poll(plane, 3)
    after = plane.connection()
    assert before is not None
    assert after is not None
    assert after.epoch > before.epoch
    assert after.session != before.session
    assert len(plane.lookup_prefix(NAMESPACE, KEYS, 1).extents) == 3
    # Its owner lives, so the old reservation was kept out of use until the owner speaks of it.
    assert server.service is not None
    assert server.service.index.counts().quarantined == 1
    assert plane.commit(sealed([extent]), 1).lost == (extent.generation,)
    assert server.service.index.counts().quarantined == 0
    server.service.index.check_invariants()


def test_a_restart_between_two_calls_costs_a_synchronous_caller_nothing(
    plane: LocalPlane, server: LocalServer
) -> None:
    store(plane, 1)
    server.kill()
    server.start()
    assert len(plane.lookup_prefix(NAMESPACE, KEYS, 1).extents) == 1


def test_a_restart_fails_a_submitted_request_and_the_session_is_opened_again(
    plane: LocalPlane, server: LocalServer
) -> None:
    server.kill()
    server.start()
    pending = plane.submit_lookup_prefix(NAMESPACE, KEYS, 1)
    plane.poll()
    with pytest.raises(RequestRefused) as refused:
        pending.take()
    assert refused.value.code is m.ErrorCode.UNKNOWN_SESSION
    poll(plane, 2)
    connection = plane.connection()
    assert connection is not None
    assert server.service is not None
    assert connection.epoch == server.service.epoch


def test_requests_that_went_down_with_the_server_fail_when_the_next_one_answers(
    plane: LocalPlane, server: LocalServer
) -> None:
    plane.deliver = lambda r: LATE if isinstance(r, m.LookupPrefix) else Delivery()
    lost = plane.submit_lookup_prefix(NAMESPACE, KEYS, 100)
    server.kill()
    server.start()
    plane.submit_renew([], 1)
    poll(plane, 3)
    assert lost.done()
    with pytest.raises(Unreachable, match="restarted"):
        lost.take()


def test_a_slow_server_keeps_its_session(
    plane: LocalPlane, server: LocalServer, clock: FakeClock
) -> None:
    before = plane.connection()
    plane.deliver = lambda _: LATE
    pending = plane.submit_lookup_prefix(NAMESPACE, KEYS, 0.02)
    clock.now += 0.03
    poll(plane, 20)
    assert pending.done()
    assert plane.connection() == before


def test_a_silent_server_is_lost_after_the_hello_timeout_and_found_again(
    plane: LocalPlane, clock: FakeClock
) -> None:
    before = plane.connection()
    plane.deliver = lambda _: Delivery(Fate.LOST)
    pending = plane.submit_lookup_prefix(NAMESPACE, KEYS, 0.02)
    clock.now += 0.03
    plane.poll()
    assert pending.done()
    assert plane.connection() is not None
    clock.now += HELLO_TIMEOUT_S + 0.1
    plane.poll()
    assert plane.connection() is None
    plane.deliver = lambda _: Delivery()
    clock.now += HELLO_TIMEOUT_S + 2
    poll(plane, 3)
    clock.now += 2
    poll(plane, 3)
    assert plane.connection() == before


def test_an_abort_of_late_grants_is_repeated_until_a_server_confirms_it(
    plane: LocalPlane, server: LocalServer, clock: FakeClock
) -> None:
    pending = plane.submit_reserve(NAMESPACE, chain(2), 1)
    plane.poll()
    plane.deliver = lambda r: Delivery(Fate.LOST) if isinstance(r, m.Abort) else Delivery()
    del pending
    poll(plane, 2)
    server.kill()
    server.start()
    assert server.service is not None
    assert server.service.index.counts().quarantined == 2
    plane.deliver = lambda _: Delivery()
    plane.submit_renew([], 1)
    poll(plane, 4)
    assert server.service.index.counts().quarantined == 0


def test_too_many_keys_are_refused_without_reaching_the_server(plane: LocalPlane) -> None:
    pending = plane.submit_lookup_prefix(NAMESPACE, [key(1)] * (MAX_ITEMS + 1), 1)
    with pytest.raises(RequestRefused, match=str(MAX_ITEMS)):
        pending.take()


def test_close_ends_the_session_and_is_idempotent(
    plane: LocalPlane, server: LocalServer, owners: ScriptedOwners
) -> None:
    store(plane, 1)
    plane.lookup_prefix(NAMESPACE, KEYS, 1)
    owners.dead.add(OwnerToken(1))
    plane.close()
    plane.close()
    assert counts(server) == (0, 0)
    assert plane.submit_lookup_prefix(NAMESPACE, KEYS, 1).done()


def test_a_forked_child_gets_a_clear_error(plane: LocalPlane) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        message = "nothing was raised"
        try:
            plane.submit_lookup_prefix(NAMESPACE, KEYS, 1)
        except RuntimeError as error:
            message = str(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(reader, 1000)
    os.close(reader)
    os.close(writer)


def test_synchronous_calls_give_up_at_their_deadline(server: LocalServer, clock: FakeClock) -> None:
    def pass_time() -> None:
        clock.now += 0.01

    plane = LocalPlane(server, OwnerToken(3), clock=clock, idle=pass_time)
    plane.deliver = lambda _: Delivery(Fate.LOST)
    began = clock.now
    with pytest.raises(Unreachable):
        plane.lookup_prefix(NAMESPACE, KEYS, 0.5)
    assert clock.now - began == pytest.approx(0.5, abs=0.05)
    server.kill()
    with pytest.raises(Unreachable, match="gone"):
        plane.stats(0.5)


def test_two_planes_of_one_server_see_each_others_objects(
    plane: LocalPlane, server: LocalServer, clock: FakeClock
) -> None:
    other = LocalPlane(server, OwnerToken(2), clock=clock)
    store(plane, 2)
    results = other.reserve(NAMESPACE, chain(3), 1).results
    assert [result.outcome.name for result in results] == ["PRESENT", "PRESENT", "GRANTED"]
    assert plane.reserve(NAMESPACE, chain(3), 1).results[2].outcome is (
        m.ReserveOutcome.BEING_WRITTEN
    )


def test_a_release_from_before_a_restart_ends_no_lease_of_after_it(
    plane: LocalPlane, server: LocalServer
) -> None:
    store(plane, 2)
    old = plane.lookup_prefix(NAMESPACE, KEYS, 1).lease
    assert old is not None
    server.kill()
    server.start()
    plane.lookup_prefix(NAMESPACE, KEYS, 1)
    assert plane.release([old], 1).count == 0
    assert counts(server) == (1, 0)
