"""Chunked prefill, aborts and preemption: the moments where blocks change hands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_engine import CHUNK_TOKENS, Engine, EngineSettings
from e2e_prompts import assert_follows, assert_identical, prompt_of, reference_hit
from e2e_store import Store

ODD_STEP_TOKENS = 150
"""No multiple of block or chunk: every chunk boundary lies inside some step."""
FEW_BLOCKS = 20
"""Two of the requests below fit, three do not."""


@pytest.fixture(scope="module")
def odd_steps(
    start_engine: Callable[[str, EngineSettings], Engine], shared_dir: Path, model: Path
) -> Engine:
    settings = EngineSettings(model, shared_dir, max_batched_tokens=ODD_STEP_TOKENS)
    return start_engine("odd-steps", settings)


@pytest.fixture(scope="module")
def few_blocks(
    start_engine: Callable[[str, EngineSettings], Engine], shared_dir: Path, model: Path
) -> Engine:
    settings = EngineSettings(model, shared_dir, num_blocks=FEW_BLOCKS, max_model_len=448)
    return start_engine("few-blocks", settings)


def test_a_prompt_computed_in_odd_steps_is_stored_whole(
    odd_steps: Engine, second: Engine, reference: Engine
) -> None:
    """B04: chunks whose boundaries lie inside steps, over several steps, are all there."""
    prompt = prompt_of(9, seed=201)
    assert len(prompt) > 3 * ODD_STEP_TOKENS
    odd_steps.wait_ready().ask(prompt)
    assert_identical(second.ask(prompt), reference_hit(reference, prompt))


def test_a_hit_is_followed_by_a_suffix_in_odd_steps(
    odd_steps: Engine, first: Engine, reference: Engine
) -> None:
    prompt = prompt_of(3, seed=202, tail=0)
    longer = prompt + prompt_of(6, seed=203)
    first.ask(prompt)
    assert odd_steps.wait_ready().ask(longer).cached == 3 * CHUNK_TOKENS
    assert_identical(first.ask(longer), reference_hit(reference, longer))


def test_an_abort_during_a_load_leaves_every_block_and_lease_free(
    first: Engine, second: Engine, reference: Engine, store: Store
) -> None:
    """B08: the blocks of an aborted load are not reused while it may still write to them."""
    prompt = prompt_of(8, seed=204)
    first.ask(prompt)
    free = second.call("free_blocks")
    for attempt in range(3):
        request_id = f"aborted-{attempt}"
        second.call("add", request_id=request_id, prompt=prompt, max_tokens=8, salt=None)
        second.call("step_until", request_id=request_id, status="WAITING_FOR_REMOTE_KVS")
        second.call("abort", request_id=request_id)
        second.call("drain")
        assert second.call("status", request_id=request_id) == "gone"
    assert second.call("free_blocks") == free
    assert store.stats().leases == 0
    assert_identical(second.ask(prompt), reference_hit(reference, prompt))


def test_preempted_requests_go_on_with_the_right_bytes(
    few_blocks: Engine, first: Engine, reference: Engine, store: Store
) -> None:
    """B11, with stores in flight whose source blocks the preemption gives away."""
    prompts = [prompt_of(3, seed=2050 + i) for i in range(3)]
    free = few_blocks.wait_ready().call("free_blocks")
    for _ in range(2):
        answers = few_blocks.generate(*prompts, max_tokens=150)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_follows(reference, prompt, answer)
    assert few_blocks.call("preemptions") > 0
    assert few_blocks.call("free_blocks") == free
    assert store.stats().reservations == 0
    assert store.stats().leases == 0
    for prompt in prompts:
        assert_identical(first.ask(prompt), reference_hit(reference, prompt))
    with pytest.raises(AssertionError):
        assert_follows(reference, prompts[0], answers[1])
