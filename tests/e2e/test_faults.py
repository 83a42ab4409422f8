"""What breaks around an engine: it sees a miss, never an exception, never a wrong byte."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from e2e_engine import CHUNK_TOKENS, Answer, Engine, EngineSettings
from e2e_prompts import assert_identical, prompt_of, reference_hit
from e2e_store import Store

RECOVERY_S = 60.0
"""Generous: an engine notices a dead server at its next request, and starts another one."""
SMALL_POOL_BYTES = 4 << 20
"""About 60 chunks of the tiny model."""


@pytest.fixture(scope="module")
def fault_dir(make_runtime_dir: Callable[[], Path]) -> Path:
    return make_runtime_dir()


@pytest.fixture(scope="module")
def fault_engines(
    start_engine: Callable[[str, EngineSettings], Engine], fault_dir: Path, model: Path
) -> list[Engine]:
    """Two engines with a server of their own to break; they check every byte that they load."""
    settings = EngineSettings(
        model, fault_dir, maru={"maru_verify": "full", "maru_pool_size": SMALL_POOL_BYTES}
    )
    failing = replace(settings, failure_policy="fail")
    return [start_engine("fault-recompute", settings), start_engine("fault-fail", failing)]


@pytest.fixture
def recomputing(fault_engines: list[Engine]) -> Engine:
    return fault_engines[0].wait_ready()


@pytest.fixture
def failing(fault_engines: list[Engine]) -> Engine:
    return fault_engines[1].wait_ready()


@pytest.fixture
def fault_store(fault_dir: Path) -> Store:
    return Store(fault_dir)


def ask_until_hit(engine: Engine, prompt: list[int], cold: Answer) -> Answer:
    """Misses are allowed while a server comes back, and hits must come back with it."""
    give_up = time.monotonic() + RECOVERY_S
    while True:
        answer = engine.ask(prompt, max_tokens=len(cold.tokens))
        assert answer.tokens == cold.tokens
        if answer.cached == len(prompt) // CHUNK_TOKENS * CHUNK_TOKENS:
            return answer
        assert time.monotonic() < give_up, "the engine never hit again after the server's death"
        time.sleep(0.5)


def test_a_failed_load_is_recomputed_to_the_tokens_of_a_cold_run(
    recomputing: Engine, reference: Engine, fault_store: Store
) -> None:
    """B09, B10: corruption is found, the object disappears, the answer is a cold run's."""
    prompt = prompt_of(5, seed=301)
    before = fault_store.generations()
    cold = recomputing.ask(prompt)
    assert fault_store.corrupt(fault_store.generations() - before) == 5
    again = recomputing.ask(prompt)
    assert again.tokens == cold.tokens
    assert again.logprobs == cold.logprobs
    assert fault_store.stats().suspect_total > 0
    third = recomputing.ask(prompt)
    assert_identical(third, reference_hit(reference, prompt))


def test_under_policy_fail_a_failed_load_fails_the_request_and_only_it(
    recomputing: Engine, failing: Engine, fault_store: Store
) -> None:
    prompt = prompt_of(5, seed=302)
    before = fault_store.generations()
    cold = recomputing.ask(prompt)
    fault_store.corrupt(fault_store.generations() - before)
    answer = failing.ask(prompt)
    assert answer.finish_reason == "error"
    assert answer.tokens == ()
    assert failing.ask(prompt).tokens == cold.tokens


def test_a_full_pool_evicts_and_goes_on(
    recomputing: Engine, reference: Engine, fault_store: Store
) -> None:
    for seed in range(3030, 3040):
        recomputing.ask(prompt_of(12, seed=seed), max_tokens=1)
    assert fault_store.stats().evicted_total > 0
    prompt = prompt_of(12, seed=3039)
    assert_identical(recomputing.ask(prompt), reference_hit(reference, prompt))
    assert fault_store.damaged() == []


def test_a_killed_server_costs_misses_and_comes_back_with_its_objects(
    recomputing: Engine, reference: Engine, fault_store: Store
) -> None:
    """B24, B21: nothing sealed is lost, the engines start the next server by themselves."""
    prompt = prompt_of(4, seed=304)
    cold = recomputing.ask(prompt)
    expected = reference_hit(reference, prompt)
    epoch = fault_store.stats().epoch
    fault_store.kill_server()
    during = recomputing.ask(prompt)
    assert during in (cold, expected)
    answer = ask_until_hit(recomputing, prompt, cold)
    assert_identical(answer, expected)
    assert fault_store.stats().epoch > epoch


def test_a_server_killed_while_engines_run_never_makes_a_wrong_token(
    recomputing: Engine, reference: Engine, fault_store: Store
) -> None:
    prompts = [prompt_of(4, seed=3050 + i) for i in range(4)]
    cold = [recomputing.ask(p, max_tokens=30) for p in prompts]
    for _ in range(2):
        fault_store.wait_for_server(RECOVERY_S)
        recomputing.send_generate(prompts, max_tokens=30)
        time.sleep(0.1)
        fault_store.kill_server()
        answers = recomputing.receive_answers()
        assert [a.tokens for a in answers] == [c.tokens for c in cold]
    ask_until_hit(recomputing, prompts[0], cold[0])


def test_an_engine_killed_during_a_store_leaves_nothing_half_written(
    start_engine: Callable[[str, EngineSettings], Engine],
    recomputing: Engine,
    reference: Engine,
    fault_store: Store,
) -> None:
    victim = start_engine("victim", recomputing.settings).wait_ready()
    prompt = prompt_of(4, seed=306)
    victim.call("stop_stores_halfway", seconds=120.0)
    victim.send_generate([prompt])
    fault_store.wait_until(lambda stats: stats.reservations > 0, RECOVERY_S)
    victim.kill()
    fault_store.wait_until(lambda stats: stats.reservations == 0, RECOVERY_S)
    assert recomputing.ask(prompt).cached == 0
    assert_identical(recomputing.ask(prompt), reference_hit(reference, prompt))
    assert fault_store.damaged() == []


def test_the_engines_logged_no_exception(fault_engines: list[Engine]) -> None:
    for engine in fault_engines:
        assert "Traceback" not in engine.log_since_ready()
