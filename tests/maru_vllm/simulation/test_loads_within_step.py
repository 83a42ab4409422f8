"""Loads that their own step needs, under vLLM's scheduler: hits, failures, and aborts between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from oracle import CHUNK_TOKENS
from sim_engine import EngineOptions
from simulation import Simulation
from vllm.v1.request import RequestStatus

from maru_vllm.settings import LoadMode

Simulate = Callable[..., Simulation]

MODES = pytest.mark.parametrize("mode", [LoadMode.LAYER_BY_LAYER, LoadMode.BEFORE_FORWARD])
OVERLAPPED = EngineOptions(load_mode=LoadMode.LAYER_BY_LAYER)


def fail_loads(sim: Simulation, engine: int = 0) -> None:
    """All copies out of objects, from now on."""
    for worker in sim.engines[engine].workers:
        worker.executor.loads_fail = lambda: True


@MODES
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_hit_is_used_in_the_step_that_loads_it(
    simulate: Simulate, mode: LoadMode, num_ranks: int
) -> None:
    sim = simulate(EngineOptions(load_mode=mode, num_ranks=num_ranks), num_engines=2)
    sim.arrive("a", tokens=range(21), max_tokens=6)
    sim.run()
    sim.arrive("b", tokens=range(21), max_tokens=6, engine=1)
    sim.step(1)
    assert sim.engines[1].status("b") == RequestStatus.RUNNING
    sim.run()
    sim.expect_hit("b", 16)
    sim.expect_answer("b")
    sim.finish()


@MODES
def test_b30_a_prompt_of_exactly_n_chunks_leaves_its_last_block_to_compute(
    simulate: Simulate, mode: LoadMode
) -> None:
    sim = simulate(EngineOptions(load_mode=mode), num_engines=2)
    prompt = range(3 * CHUNK_TOKENS)
    sim.arrive("a", tokens=prompt, max_tokens=3)
    sim.run()
    sim.arrive("b", tokens=prompt, max_tokens=3, engine=1)
    sim.run()
    sim.expect_hit("b", 3 * CHUNK_TOKENS - 4)
    sim.expect_answer("b")
    sim.finish()


def test_requests_of_one_step_share_what_one_of_them_loads(simulate: Simulate) -> None:
    """The second finds the blocks of the first in vLLM's own cache, before they are loaded."""
    sim = simulate(OVERLAPPED, num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    for i in range(3):
        sim.arrive(f"b{i}", tokens=[*range(24), 90 + i], max_tokens=4, engine=1)
    sim.run()
    for i in range(3):
        sim.expect_answer(f"b{i}")
    sim.expect_hit("b0", 24)
    sim.expect_hit("b1", 0)
    sim.finish()


@MODES
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_b10_a_failed_load_is_recomputed_or_fails_by_policy_and_is_tried_once(
    simulate: Simulate, mode: LoadMode, policy: str, num_ranks: int
) -> None:
    options = EngineOptions(load_mode=mode, load_failure_policy=policy, num_ranks=num_ranks)
    sim = simulate(options, num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    fail_loads(sim, engine=1)
    sim.arrive("b", tokens=[*range(24), *range(50, 60)], max_tokens=5, engine=1)
    sim.run()
    if policy == "recompute":
        sim.expect_answer("b")
    else:
        assert sim.engines[1].finish_reasons["b"] == "error"
    sim.finish()


def test_one_rank_that_fails_is_enough(simulate: Simulate) -> None:
    sim = simulate(replace(OVERLAPPED, num_ranks=2), num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    sim.engines[1].workers[1].executor.loads_fail = lambda: True
    sim.arrive("b", tokens=range(24), max_tokens=5, engine=1)
    sim.run()
    sim.expect_answer("b")
    sim.finish()


def test_what_was_computed_on_a_failed_load_is_not_stored(simulate: Simulate) -> None:
    """The oracle looks at every object that is sealed."""
    sim = simulate(OVERLAPPED, num_engines=2)
    sim.arrive("a", tokens=range(16))
    sim.run()
    fail_loads(sim, engine=1)
    text = [*range(16), *range(60, 84)]
    sim.arrive("b", tokens=text, engine=1)
    sim.run()
    assert sim.sealed_chunks(text) == [0, 1, 2, 3, 4]
    sim.finish()


def test_what_a_failed_load_left_in_vllms_prefix_cache_is_found_by_nobody(
    simulate: Simulate,
) -> None:
    """Recomputed in pieces, while another request looks for the same prefix."""
    options = replace(OVERLAPPED, tokens_per_step=8)
    sim = simulate(options, num_engines=2)
    sim.arrive("a", tokens=range(48))
    sim.run()
    fail_loads(sim, engine=1)
    sim.arrive("b", tokens=[*range(48), 90], max_tokens=2, engine=1)
    sim.step(2)
    sim.arrive("c", tokens=[*range(48), 91], max_tokens=2, engine=1)
    sim.run()
    sim.expect_answer("b")
    sim.expect_answer("c")
    sim.finish()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("in_step", [True, False])
@pytest.mark.parametrize("own_tokens", [7, 16])
def test_an_abort_around_a_failed_load_leaves_nothing_in_the_prefix_cache(
    simulate: Simulate, policy: str, in_step: bool, own_tokens: int
) -> None:
    """While the step runs that fails, and before what failed is computed: vLLM looks for failed
    blocks in requests that run, and takes them out of its cache only under policy "fail"."""
    options = replace(OVERLAPPED, load_failure_policy=policy, tokens_per_step=32)
    sim = simulate(options, num_engines=2)
    sim.arrive("a", tokens=range(24))
    sim.run()
    fail_loads(sim, engine=1)
    text = [*range(24), *range(70, 70 + own_tokens)]  # with and without a chunk to store
    sim.arrive("b", tokens=text, max_tokens=2, engine=1)
    if in_step:
        sim.abort_in_step("b")
    sim.step()
    assert sim.engines[1].hits["b"] == 24
    if sim.engines[1].status("b") is not None:
        sim.abort("b")
    for worker in sim.engines[1].workers:
        worker.executor.loads_fail = lambda: False
    for name in ("c", "d"):  # c makes the way to what had been computed behind the load
        sim.arrive(name, tokens=[*text, 99, 98], max_tokens=2, engine=1)
        sim.run()
        sim.expect_answer(name)
    sim.finish()
