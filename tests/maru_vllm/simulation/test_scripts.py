"""Scripts beside the bug log: what else a cache beside an engine must get right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from copies import Pace
from oracle import WrongBytes
from sim_engine import EngineOptions
from simulation import Simulation
from vllm.v1.request import RequestStatus

from maru_shm.control.local import Delivery, Fate
from maru_shm.control.messages import LookupPrefix, Reserve
from maru_vllm.worker.copy_runner import CopyKind

Simulate = Callable[..., Simulation]

BOTH_SCHEDULERS = pytest.mark.parametrize("async_scheduling", [False, True])


def test_one_engine_answers_from_what_the_other_stored(simulate: Simulate) -> None:
    sim = simulate(num_engines=2)
    sim.arrive("a", tokens=range(20), max_tokens=6)
    sim.run()
    sim.arrive("b", tokens=range(20), max_tokens=6, engine=1)
    sim.run()
    sim.expect_hit("a", 0)
    sim.expect_hit("b", 16)
    sim.finish()


@BOTH_SCHEDULERS
def test_two_engines_that_compute_the_same_at_once_store_it_once(
    simulate: Simulate, async_scheduling: bool
) -> None:
    sim = simulate(EngineOptions(async_scheduling=async_scheduling), num_engines=2)
    sim.arrive("a", tokens=range(24), max_tokens=4, engine=0)
    sim.arrive("b", tokens=range(24), max_tokens=4, engine=1)
    sim.run()
    assert len(sim.objects()) == 3
    sim.finish()


@BOTH_SCHEDULERS
def test_a_request_of_a_single_step_is_stored(simulate: Simulate, async_scheduling: bool) -> None:
    """Finished before the reserve was answered: its blocks wait for the store."""
    sim = simulate(EngineOptions(async_scheduling=async_scheduling))
    sim.planes[0].deliver = lambda _: Delivery(reply_ticks=3)
    sim.arrive("a", tokens=range(24), max_tokens=1)
    sim.run()
    assert sim.sealed_chunks(range(24)) == [0, 1, 2]
    sim.finish()


def test_a_late_store_keeps_a_finished_requests_blocks(simulate: Simulate) -> None:
    sim = simulate(EngineOptions(num_blocks=12, prefix_caching=False))
    sim.copies.pace = Pace.NEVER
    sim.arrive("a", tokens=range(24))
    sim.step(6)
    assert sim.engine.status("a") == RequestStatus.FINISHED_LENGTH_CAPPED
    sim.arrive("b", tokens=range(60, 84), max_tokens=4)  # wants the same blocks
    sim.step(6)
    sim.copies.finish_all()
    sim.copies.pace = Pace.NEXT_STEP
    sim.run()
    assert sim.sealed_chunks(range(24)) == [0, 1, 2]
    sim.finish()


def test_a_local_hit_shortens_the_load_to_what_is_missing(simulate: Simulate) -> None:
    """The local prefix ends inside a chunk; the load begins there."""
    sim = simulate(num_engines=2)
    sim.arrive("a", tokens=range(40))
    sim.run()
    sim.arrive("b", tokens=range(12), engine=1)  # 12 tokens local, 8 of them from the pool
    sim.run()
    sim.arrive("c", tokens=range(40), max_tokens=3, engine=1)
    sim.run()
    sim.expect_hit("c", 40 - 12)
    sim.finish()


@BOTH_SCHEDULERS
def test_an_abort_at_any_step_leaves_nothing_behind(
    simulate: Simulate, async_scheduling: bool
) -> None:
    for abort_after in range(8):
        sim = simulate(EngineOptions(tokens_per_step=7, async_scheduling=async_scheduling))
        sim.arrive("a", tokens=range(30), max_tokens=6)
        sim.step(abort_after)
        if sim.engine.status("a") is not None:
            sim.abort("a")
        sim.finish()


def test_a_pool_that_is_full_evicts_and_goes_on(simulate: Simulate) -> None:
    sim = simulate(EngineOptions(prefix_caching=False), pool_bytes=1 << 17)
    for i in range(60):
        sim.arrive(f"{i}", tokens=range(1000 * i, 1000 * i + 60))
        sim.run()
    assert sim.server.service is not None
    assert sim.server.service.index.counts().evicted_total > 0
    sim.arrive("again", tokens=range(59_000, 59_060), max_tokens=2)
    sim.run()
    sim.expect_hit("again", 56)
    sim.finish()


@BOTH_SCHEDULERS
@pytest.mark.parametrize("dies_after", range(6))
def test_a_server_that_dies_costs_misses_at_worst(
    simulate: Simulate, dies_after: int, async_scheduling: bool
) -> None:
    """B24's kind: killed while engines compute, store and load; started again later."""
    sim = simulate(
        EngineOptions(tokens_per_step=16, async_scheduling=async_scheduling), num_engines=2
    )
    sim.arrive("a", tokens=range(40), max_tokens=6)
    sim.run()
    sim.arrive("b", tokens=range(40), max_tokens=6, engine=1)
    sim.arrive("c", tokens=range(100, 140), max_tokens=6)
    sim.step(dies_after)
    sim.kill_server()
    sim.step(5)
    sim.arrive("d", tokens=range(40), max_tokens=6, engine=1)
    sim.step(3)
    sim.start_server()
    sim.run()
    for name in "abcd":
        sim.expect_answer(name)
    sim.arrive("e", tokens=range(40), max_tokens=2, engine=1)
    sim.finish()
    # Nothing that was sealed is lost.
    assert sim.sealed_chunks(range(40)) == [0, 1, 2, 3, 4]


def test_without_a_server_an_engine_just_computes(simulate: Simulate) -> None:
    sim = simulate()
    sim.kill_server()
    sim.arrive("a", tokens=range(40), max_tokens=6)
    sim.run()
    sim.expect_answer("a")
    sim.finish()


def test_a_lookup_that_is_never_answered_delays_a_request_only_for_its_patience(
    simulate: Simulate,
) -> None:
    sim = simulate()
    sim.planes[0].deliver = lambda request: (
        Delivery(Fate.LOST) if isinstance(request, LookupPrefix) else Delivery()
    )
    sim.arrive("a", tokens=range(20), max_tokens=1)
    steps = 0
    while sim.engine.answers["a"] == []:
        sim.step()
        steps += 1
    assert steps <= 6  # 20 ms of patience, 5 ms a step
    sim.finish()


def test_a_reserve_that_is_never_answered_does_not_hold_blocks_for_ever(
    simulate: Simulate,
) -> None:
    sim = simulate()
    sim.planes[0].deliver = lambda request: (
        Delivery(Fate.LOST) if isinstance(request, Reserve) else Delivery()
    )
    sim.arrive("a", tokens=range(20), max_tokens=1)
    sim.run()
    sim.finish()


@BOTH_SCHEDULERS
def test_failed_stores_leave_no_object_and_no_reservation(
    simulate: Simulate, async_scheduling: bool
) -> None:
    sim = simulate(EngineOptions(async_scheduling=async_scheduling))
    sim.copies.failing = lambda task: task.kind is CopyKind.STORE
    sim.arrive("a", tokens=range(40), max_tokens=6)
    sim.run()
    sim.finish()
    assert sim.objects() == []


@BOTH_SCHEDULERS
def test_reservations_granted_after_a_preemption_took_the_blocks_are_given_back(
    simulate: Simulate, async_scheduling: bool
) -> None:
    options = EngineOptions(num_blocks=8, prefix_caching=False, async_scheduling=async_scheduling)
    sim = simulate(options)
    sim.planes[0].deliver = lambda request: Delivery(
        reply_ticks=9 if isinstance(request, Reserve) else 0
    )
    sim.arrive("a", tokens=range(12), max_tokens=14)
    sim.arrive("b", tokens=range(50, 60), max_tokens=14)
    sim.run()
    assert sim.engine.preemptions
    sim.finish()


def test_after_a_reset_of_the_cache_nothing_old_is_found(simulate: Simulate) -> None:
    sim = simulate(EngineOptions(prefix_caching=False))
    sim.arrive("a", tokens=range(20))
    sim.run()
    assert sim.engine.scheduler.reset_prefix_cache(reset_connector=True)
    sim.arrive("b", tokens=range(20))
    sim.engine.step()
    sim.engine.step()
    sim.expect_hit("b", 0)


@BOTH_SCHEDULERS
def test_a_reset_that_preempts_running_requests_lets_them_go_on(
    simulate: Simulate, async_scheduling: bool
) -> None:
    sim = simulate(EngineOptions(async_scheduling=async_scheduling))
    sim.copies.pace = Pace.NEVER
    sim.arrive("a", tokens=range(20), max_tokens=12)
    sim.step(5)
    sim.engine.drain()
    sim.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    sim.copies.pace = Pace.NEXT_STEP
    sim.run()
    sim.expect_answer("a")
    sim.finish()


@BOTH_SCHEDULERS
def test_an_object_of_two_ranks_is_visible_only_when_both_have_written(
    simulate: Simulate, async_scheduling: bool
) -> None:
    options = EngineOptions(num_ranks=2, async_scheduling=async_scheduling)
    sim = simulate(options, num_engines=2)
    slow = sim.engine.workers[1].copies
    slow.pace = Pace.NEVER
    sim.arrive("a", tokens=range(24), max_tokens=2)
    sim.step(8)
    assert sim.sealed_chunks(range(24)) == []
    slow.finish_all()
    slow.pace = Pace.NEXT_STEP
    sim.run()
    assert sim.sealed_chunks(range(24)) == [0, 1, 2]
    sim.arrive("b", tokens=range(24), max_tokens=2, engine=1)
    sim.run()
    sim.expect_hit("b", 24)
    sim.finish()


@BOTH_SCHEDULERS
def test_a_load_that_fails_on_one_of_two_ranks_is_recomputed_on_both(
    simulate: Simulate, async_scheduling: bool
) -> None:
    options = EngineOptions(num_ranks=2, async_scheduling=async_scheduling)
    sim = simulate(options, num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    sim.engines[1].workers[1].copies.failing = lambda task: task.kind is CopyKind.LOAD
    sim.arrive("b", tokens=range(24), max_tokens=4, engine=1)
    sim.run()
    sim.expect_answer("b")
    sim.finish()


# ---------------------------------------------------------------------- the oracle can fail


def test_the_oracle_sees_a_flipped_byte_in_the_pool(simulate: Simulate) -> None:
    """Under verify=header nothing of ours looks at the payload; the forward's check must."""
    sim = simulate(num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    sim.payload(range(24), 1)[100] ^= 1
    sim.arrive("b", tokens=range(24), engine=1)
    with pytest.raises(WrongBytes, match="reads wrong KV"):
        sim.run()


def test_the_oracle_sees_a_store_that_reads_before_the_forward_wrote(simulate: Simulate) -> None:
    """B01 brought back on purpose: copies that do not wait for their mark."""
    sim = simulate(EngineOptions(async_scheduling=True))
    sim.engine.late_forward = True
    sim.copies.pace = Pace.AT_ONCE
    sim.engine.workers[0].device.mark = lambda: _NoMark()  # type: ignore[method-assign]
    sim.arrive("a", tokens=range(24), max_tokens=8)
    with pytest.raises(WrongBytes, match="bytes wrong"):
        sim.run()


class _NoMark:
    def behind(self):
        from contextlib import nullcontext

        return nullcontext()


def test_the_oracle_sees_blocks_that_are_stored_after_they_changed_hands(
    simulate: Simulate,
) -> None:
    """A half that never holds a finished request's blocks is found out."""
    sim = simulate(EngineOptions(num_blocks=8, prefix_caching=False))
    connector = sim.engine.scheduler.connector
    assert connector is not None

    def careless(request, block_ids):
        sim.engine.half.finished(request, block_ids[0])
        return False, None

    connector.request_finished_all_groups = careless  # type: ignore[attr-defined]
    sim.engine.half._take_holds = frozenset  # type: ignore[method-assign]
    sim.copies.pace = Pace.NEVER
    sim.arrive("a", tokens=range(24), max_tokens=3)
    sim.step(5)
    sim.arrive("b", tokens=range(60, 84), max_tokens=3)
    sim.step(2)
    sim.copies.pace = Pace.AT_ONCE
    sim.copies.finish_all()
    with pytest.raises(WrongBytes, match="bytes wrong"):
        sim.step(5)
