"""Two engines, one pool: what one computed, the other answers from."""

from __future__ import annotations

import pytest
from e2e_engine import CHUNK_TOKENS, Engine
from e2e_prompts import assert_identical, prompt_of, reference_hit
from e2e_store import Store


def test_a_second_engine_answers_from_what_the_first_computed(
    first: Engine, second: Engine, reference: Engine
) -> None:
    prompt = prompt_of(6, seed=101)
    cold = first.ask(prompt)
    assert cold.cached == 0
    expected = reference_hit(reference, prompt)
    assert expected.cached == 6 * CHUNK_TOKENS
    assert_identical(second.ask(prompt), expected)
    assert_identical(first.ask(prompt), expected)


def test_flipped_bytes_in_the_pool_change_the_answer_so_the_comparison_can_fail(
    first: Engine, second: Engine, reference: Engine, store: Store
) -> None:
    """With the default check (headers only) nothing but our comparison sees flipped payloads."""
    prompt = prompt_of(6, seed=102)
    before = store.generations()
    first.ask(prompt)
    expected = reference_hit(reference, prompt)
    flipped = store.generations() - before
    assert store.corrupt(flipped) == 6
    wrong = second.ask(prompt)
    store.corrupt(flipped)  # flips them back
    assert wrong.cached == expected.cached
    assert wrong.logprobs != expected.logprobs
    with pytest.raises(AssertionError):
        assert_identical(wrong, expected)
    assert_identical(second.ask(prompt), expected)


def test_the_third_turn_of_a_chat_hits_all_of_the_second(
    first: Engine, second: Engine, reference: Engine
) -> None:
    """B31: the suffix after a hit, and the tokens that were decoded, are stored as well.

    The reference has the same chat: KV of decoded tokens differs in the last bits from KV of the
    same tokens in a prompt. Every turn ends so that both caches hold the same tokens of it.
    """
    turn = prompt_of(3, seed=103)
    answered = first.ask(turn, max_tokens=CHUNK_TOKENS)
    assert reference.ask(turn, max_tokens=CHUNK_TOKENS) == answered
    turn = turn + list(answered.tokens) + prompt_of(2, seed=104, tail=0)
    second_turn = second.ask(turn, max_tokens=CHUNK_TOKENS)
    assert second_turn.cached == 4 * CHUNK_TOKENS
    assert_identical(second_turn, reference.ask(turn, max_tokens=CHUNK_TOKENS))
    turn = turn + list(second_turn.tokens) + prompt_of(0, seed=105)
    third_turn = first.ask(turn)
    assert third_turn.cached == 7 * CHUNK_TOKENS
    assert_identical(third_turn, reference.ask(turn))


def test_a_prompt_of_exactly_n_chunks_is_hit_in_full(
    first: Engine, second: Engine, reference: Engine
) -> None:
    """B30: a full hit leaves one token to compute, and the engine lives on.

    vLLM's own cache stops a block short of a full prompt, so the log-probabilities of its hit
    may differ in the last bits; those of two kinds of Maru hits may not.
    """
    prompt = prompt_of(4, seed=106, tail=0)
    first.ask(prompt)
    hit = second.ask(prompt)
    expected = reference_hit(reference, prompt)
    assert hit.cached >= 4 * CHUNK_TOKENS - 1
    assert hit.tokens == expected.tokens
    assert hit.logprobs == pytest.approx(expected.logprobs, abs=0.05)
    assert_identical(first.ask(prompt), hit)


def test_many_requests_at_once_each_get_their_own_bytes(
    first: Engine, second: Engine, reference: Engine
) -> None:
    """B02: concurrent loads and stores with common and with own prefixes."""
    common = prompt_of(2, seed=107, tail=0)
    prompts = [common + prompt_of(2, seed=1070 + i) for i in range(6)]
    first.generate(*prompts)
    answers = second.generate(*prompts, max_tokens=1)
    assert [a.cached for a in answers] == [4 * CHUNK_TOKENS] * 6
    for prompt in prompts:
        assert_identical(second.ask(prompt), reference_hit(reference, prompt))


def test_another_cache_salt_shares_nothing(first: Engine, second: Engine) -> None:
    """B16, end to end for the one input that needs no other model."""
    prompt = prompt_of(3, seed=108)
    first.ask(prompt, salt="tenant-a")
    assert second.ask(prompt, salt="tenant-b").cached == 0
    assert second.ask(prompt).cached == 0
    assert second.ask(prompt, salt="tenant-a").cached == 3 * CHUNK_TOKENS


def test_nothing_is_left_reserved_or_leased_when_the_engines_are_idle(
    first: Engine, second: Engine, store: Store
) -> None:
    first.ask(prompt_of(3, seed=109))
    second.ask(prompt_of(3, seed=109))
    stats = store.stats()
    assert stats.reservations == 0
    assert stats.leases == 0
    assert store.damaged() == []
