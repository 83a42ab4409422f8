"""Faults that users of KV connectors reported, each as a script for its whole kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from copies import Pace
from oracle import CHUNK_TOKENS
from sim_engine import EngineOptions
from simulation import Simulation
from vllm.v1.request import RequestStatus

from maru_vllm.worker.copy_runner import CopyKind

Simulate = Callable[..., Simulation]

BOTH_SCHEDULERS = pytest.mark.parametrize("async_scheduling", [False, True])


@BOTH_SCHEDULERS
@pytest.mark.parametrize("pace", list(Pace))
def test_b01_a_store_waits_for_the_forward_that_writes_its_blocks(
    simulate: Simulate, async_scheduling: bool, pace: Pace
) -> None:
    """B01: the forward runs as late as it can and copies as early as they can."""
    sim = simulate(EngineOptions(async_scheduling=async_scheduling))
    sim.engine.late_forward = True
    sim.copies.pace = Pace.AT_ONCE if pace is Pace.NEVER else pace
    sim.arrive("a", tokens=range(40), max_tokens=20)
    sim.run()
    assert sim.sealed_chunks([*range(40), *sim.engine.answers["a"]]) == [0, 1, 2, 3, 4, 5, 6]
    sim.finish()


@BOTH_SCHEDULERS
def test_b01_a_load_waits_for_forwards_that_still_use_its_blocks(
    simulate: Simulate, async_scheduling: bool
) -> None:
    """B01, the other way: blocks change hands from a running batch to a load."""
    sim = simulate(
        EngineOptions(num_blocks=12, prefix_caching=False, async_scheduling=async_scheduling)
    )
    sim.engine.late_forward = True
    sim.copies.pace = Pace.AT_ONCE
    for round_number in range(3):
        for i in range(3):
            sim.arrive(f"{round_number}.{i}", tokens=range(i * 50, i * 50 + 20), max_tokens=3)
        sim.run()
    sim.expect_hit("2.0", 16)
    sim.finish()


def test_b03_blocks_that_a_sibling_connector_filled_are_stored_as_they_are(
    simulate: Simulate,
) -> None:
    """B03: `update_state_after_alloc(.., 0)` names real blocks; a later step stores them."""
    sim = simulate(num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    # Engine 1 behaves as under MultiConnector: another connector's hit is taken instead of ours.
    connector = sim.engines[1].scheduler.connector
    assert connector is not None
    sibling = SiblingHit(sim, 1, num_tokens=16)
    connector.get_num_new_matched_tokens = sibling.matched  # type: ignore[method-assign]
    connector.update_state_after_alloc = sibling.allocated  # type: ignore[method-assign]
    sim.arrive("b", tokens=[*range(16), *range(90, 98)], max_tokens=3, engine=1)
    sim.run()
    assert sibling.filled
    assert sim.sealed_chunks([*range(16), *range(90, 98)]) == [0, 1, 2]
    sim.finish()


class SiblingHit:
    """A connector beside ours that fills the blocks of a hit by itself, synchronously."""

    def __init__(self, sim: Simulation, engine: int, num_tokens: int) -> None:
        self._sim = sim
        self._engine = sim.engines[engine]
        self._num_tokens = num_tokens
        self.filled = False

    def matched(self, request, num_computed_tokens):
        self._engine.half.matched_tokens(request, num_computed_tokens)
        return self._num_tokens - num_computed_tokens, False

    def allocated(self, request, blocks, num_external_tokens):
        self._engine.half.blocks_allocated(request, blocks, 0)
        table = blocks.get_block_ids()[0]
        kv = self._sim.oracle.kv(list(request.all_token_ids), 0, self._num_tokens, rank=0)
        for position in range(self._num_tokens):
            self._engine.workers[0].cache.write(table, position, kv[:, :, position])
        self.filled = True


@BOTH_SCHEDULERS
@pytest.mark.parametrize("tokens_per_step", [5, 13, 8, 3])
def test_b04_a_chunked_prefill_stores_every_full_chunk_wherever_its_steps_end(
    simulate: Simulate, tokens_per_step: int, async_scheduling: bool
) -> None:
    """B04: step boundaries inside chunks, on them, and many of them in one chunk."""
    options = EngineOptions(tokens_per_step=tokens_per_step, async_scheduling=async_scheduling)
    sim = simulate(options, num_engines=2)
    sim.arrive("a", tokens=range(61))
    sim.run()
    assert sim.sealed_chunks(range(61)) == [0, 1, 2, 3, 4, 5, 6]
    sim.arrive("b", tokens=range(61), engine=1)
    sim.run()
    sim.expect_hit("b", 56)
    sim.finish()


@BOTH_SCHEDULERS
def test_b08_an_abort_during_a_load_keeps_its_blocks_until_the_late_copy_is_over(
    simulate: Simulate, async_scheduling: bool
) -> None:
    """B08: abort, let others want the blocks, and only then let the copy land."""
    options = EngineOptions(num_blocks=14, prefix_caching=False, async_scheduling=async_scheduling)
    sim = simulate(options)
    sim.arrive("a", tokens=range(32))
    sim.run()
    sim.copies.pace = Pace.NEVER
    sim.arrive("b", tokens=range(32))
    sim.run_until("b", RequestStatus.WAITING_FOR_REMOTE_KVS)
    sim.step()
    assert [task.kind for task in sim.copies.under_way] == [CopyKind.LOAD]
    sim.abort("b")
    for i in range(3):
        sim.arrive(f"c{i}", tokens=range(100 + 20 * i, 116 + 20 * i), max_tokens=4)
    sim.step(12)
    sim.copies.finish_all(CopyKind.LOAD)  # late: had its blocks been reused, a forward would see it
    sim.copies.pace = Pace.NEXT_STEP
    sim.run()
    sim.finish()


def test_b08_an_abort_of_a_request_whose_lookup_is_still_out_gives_the_lease_back(
    simulate: Simulate,
) -> None:
    """B08: the earliest moment of a load's life."""
    sim = simulate()
    sim.arrive("a", tokens=range(32))
    sim.run()
    sim.planes[0].deliver = _slow_replies
    sim.arrive("b", tokens=range(32))
    sim.step()
    sim.abort("b")
    sim.finish()


def _slow_replies(_request):
    from maru_shm.control.local import Delivery

    return Delivery(reply_ticks=6)


def test_b10_an_object_that_vanishes_between_lookup_and_load_is_recomputed(
    simulate: Simulate,
) -> None:
    """B10: the lease is lost with the server, and the space gets another owner."""
    sim = simulate(EngineOptions(prefix_caching=False))
    sim.arrive("a", tokens=range(32))
    sim.run()
    sim.copies.pace = Pace.NEVER
    sim.arrive("b", tokens=range(32), max_tokens=3)
    sim.run_until("b", RequestStatus.WAITING_FOR_REMOTE_KVS)
    assert sim.copies.under_way
    _evict_everything(sim)
    sim.copies.finish_all()
    sim.copies.pace = Pace.NEXT_STEP
    sim.run()
    sim.expect_answer("b")
    assert sim.sealed_chunks(range(32)) == [0, 1, 2, 3]  # stored anew
    sim.finish()


def _evict_everything(sim: Simulation) -> None:
    """Restart the server, so that no lease stands, and delete all objects as another client."""
    from maru_shm.control.local import LocalPlane
    from maru_shm.types import OwnerToken

    sim.kill_server()
    sim.start_server()
    other = LocalPlane(sim.server, OwnerToken(99), clock=sim.clock)
    for row in reversed(sim.objects()):
        other.delete(row.namespace, [row.key], timeout_s=1.0)
    other.close()
    assert sim.objects() == []


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@BOTH_SCHEDULERS
def test_b10_a_failed_copy_is_never_taken_for_a_success(
    simulate: Simulate, policy: str, async_scheduling: bool
) -> None:
    """B10: recomputed, or failed where the operator wants that; never wrong tokens."""
    options = EngineOptions(
        prefix_caching=False, load_failure_policy=policy, async_scheduling=async_scheduling
    )
    sim = simulate(options)
    sim.arrive("a", tokens=range(32))
    sim.run()
    sim.copies.failing = lambda task: task.kind is CopyKind.LOAD
    sim.arrive("b", tokens=range(32), max_tokens=3)
    sim.run()
    expected = "length" if policy == "recompute" else "error"
    assert sim.engine.finish_reasons["b"] == expected
    sim.finish()


def test_b10_a_failed_load_is_tried_once_and_not_for_ever(simulate: Simulate) -> None:
    sim = simulate(EngineOptions(prefix_caching=False))
    sim.arrive("a", tokens=range(32))
    sim.run()
    tried: list[int] = []

    def fail(task):
        if task.kind is CopyKind.LOAD:
            tried.append(task.job_id)
        return task.kind is CopyKind.LOAD

    sim.copies.failing = fail
    sim.arrive("b", tokens=range(32), max_tokens=3)
    sim.run()
    assert len(tried) == 1
    sim.expect_answer("b")
    sim.finish()


@BOTH_SCHEDULERS
def test_b11_a_preempted_request_loads_again(simulate: Simulate, async_scheduling: bool) -> None:
    """B11: 7 blocks, two requests that do not fit together, and no local prefix cache."""
    options = EngineOptions(num_blocks=8, prefix_caching=False, async_scheduling=async_scheduling)
    sim = simulate(options)
    sim.arrive("a", tokens=range(12), max_tokens=14)
    sim.arrive("b", tokens=range(50, 60), max_tokens=14)
    sim.run()
    preempted = [name for name in ("a", "b") if sim.engine.hits.get(name)]
    assert preempted, "a preempted request must load what was stored before its preemption"
    sim.expect_answer("a")
    sim.expect_answer("b")
    sim.finish()


@BOTH_SCHEDULERS
def test_b11_a_preemption_during_a_store_ends_the_copy_before_the_blocks_are_used_again(
    simulate: Simulate, async_scheduling: bool
) -> None:
    """B11, the store's side: copies that never end by themselves are flushed."""
    options = EngineOptions(num_blocks=8, prefix_caching=False, async_scheduling=async_scheduling)
    sim = simulate(options)
    sim.copies.pace = Pace.NEVER
    sim.arrive("a", tokens=range(12), max_tokens=14)
    sim.arrive("b", tokens=range(50, 60), max_tokens=14)
    for _ in range(30):
        sim.step()
    assert sim.copies.waited_for
    sim.copies.pace = Pace.NEXT_STEP
    sim.run()
    sim.finish()


@BOTH_SCHEDULERS
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_b30_a_prompt_of_exactly_n_chunks_hits_in_full(
    simulate: Simulate, num_chunks: int, async_scheduling: bool
) -> None:
    """B30: a full hit leaves a token to compute, on this engine and on another."""
    sim = simulate(EngineOptions(async_scheduling=async_scheduling), num_engines=2)
    prompt = range(num_chunks * CHUNK_TOKENS)
    sim.arrive("a", tokens=prompt, max_tokens=4)
    sim.run()
    sim.arrive("b", tokens=prompt, max_tokens=4, engine=1)
    sim.run()
    sim.expect_hit("b", num_chunks * CHUNK_TOKENS)
    sim.expect_answer("b")
    sim.finish()


@BOTH_SCHEDULERS
def test_b31_every_turn_of_a_chat_hits_all_of_the_turns_before(
    simulate: Simulate, async_scheduling: bool
) -> None:
    """B31: suffixes after hits, and decoded tokens, are stored; each turn on another engine."""
    sim = simulate(EngineOptions(async_scheduling=async_scheduling), num_engines=3)
    text = list(range(20))
    stored_before = 0
    for turn in range(3):
        name = f"turn {turn}"
        sim.arrive(name, tokens=text, max_tokens=9, engine=turn)
        sim.run()
        sim.expect_hit(name, stored_before)
        # The last token of an answer has no KV: chunks end before it.
        stored_before = (len(text) + 9 - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        text += sim.engines[turn].answers[name] + list(range(200 + 10 * turn, 207 + 10 * turn))
    sim.finish()
