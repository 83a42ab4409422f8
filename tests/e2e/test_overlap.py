"""Hits that are loaded layer by layer, ahead of the forward that uses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_engine import CHUNK_TOKENS, Engine, EngineSettings
from e2e_prompts import assert_identical, prompt_of, reference_hit
from e2e_store import Store


@pytest.fixture(scope="module")
def overlapped(
    start_engine: Callable[[str, EngineSettings], Engine], shared_dir: Path, model: Path
) -> Engine:
    """It checks every byte that it loads, after it has loaded and used it."""
    maru = {"maru_overlap_load_with_compute": True, "maru_verify": "full"}
    return start_engine("overlapped", EngineSettings(model, shared_dir, maru=maru)).wait_ready()


def test_an_overlapped_hit_is_the_hit_that_others_get(
    first: Engine, overlapped: Engine, reference: Engine
) -> None:
    prompt = prompt_of(6, seed=901)
    first.ask(prompt)
    expected = reference_hit(reference, prompt)
    hit = overlapped.ask(prompt)
    assert hit.cached == 6 * CHUNK_TOKENS
    assert_identical(hit, expected)
    assert_identical(first.ask(prompt), expected)


def test_what_follows_an_overlapped_hit_is_stored_and_found(
    first: Engine, overlapped: Engine, reference: Engine
) -> None:
    """B31, and many requests in one step, each with rows of its own in the staging tensors."""
    common = prompt_of(2, seed=902, tail=0)
    first.ask(common + prompt_of(0, seed=9021))
    prompts = [common + prompt_of(2, seed=9022 + i) for i in range(4)]
    answers = overlapped.generate(*prompts, max_tokens=1)
    assert [answer.cached for answer in answers] == [2 * CHUNK_TOKENS] * 4
    for prompt in prompts:
        hit = first.ask(prompt)
        assert hit.cached == 4 * CHUNK_TOKENS
        assert_identical(overlapped.ask(prompt), hit)


def test_a_prompt_of_exactly_n_chunks_leaves_a_block_to_compute(
    first: Engine, overlapped: Engine
) -> None:
    """B30 for loads that the step itself needs: it must compute the last token."""
    prompt = prompt_of(3, seed=903, tail=0)
    cold = first.ask(prompt)
    hit = overlapped.ask(prompt)
    assert 2 * CHUNK_TOKENS <= hit.cached < 3 * CHUNK_TOKENS
    assert hit.tokens == cold.tokens


def test_a_damaged_object_is_found_behind_the_forward_and_recomputed(
    first: Engine, overlapped: Engine, store: Store
) -> None:
    """B09: the step that used wrong bytes is thrown away, whatever it had computed from them."""
    prompt = prompt_of(4, seed=904)
    before = store.generations()
    cold = first.ask(prompt)
    assert store.corrupt(store.generations() - before) == 4
    answer = overlapped.ask(prompt)
    assert answer.tokens == cold.tokens
    assert answer.logprobs == pytest.approx(cold.logprobs, abs=0.05)
    assert store.damaged() == []
    again = overlapped.ask(prompt)
    assert again.tokens == cold.tokens
