"""Prompts of token ids, and the reference they are compared with.

A hit and a cold run differ in the last bits for good reasons (other batch shapes). So the
reference for a hit is an engine without Maru that serves the prompt from vLLM's own prefix
cache, with the same boundary between cached and computed tokens: there tokens and
log-probabilities must be equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from e2e_engine import BLOCK_TOKENS, CHUNK_TOKENS, Answer, Engine

from maru_cli.serving.model import random_prompt


def prompt_of(num_chunks: int, seed: int, *, tail: int = 20) -> list[int]:
    """``num_chunks`` full chunks and ``tail`` tokens more.

    With 1 <= tail <= BLOCK_TOKENS, vLLM's prefix cache and Maru serve the same tokens: all
    full chunks, which are then all full blocks before the last token as well.
    """
    assert 0 <= tail <= BLOCK_TOKENS
    return random_prompt(num_chunks * CHUNK_TOKENS + tail, seed)


def reference_hit(reference: Engine, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
    """What the engine without Maru says when its own prefix cache serves the prompt."""
    reference.ask(prompt, max_tokens=1)
    return reference.ask(prompt, max_tokens=max_tokens)


def assert_identical(answer: Answer, expected: Answer) -> None:
    """Same tokens, same log-probabilities to the last bit, same cached tokens."""
    assert answer.cached == expected.cached
    assert answer.tokens == expected.tokens
    assert answer.logprobs == expected.logprobs


NEAR_TIE_NATS = 0.2
"""bfloat16 logits of another batch shape move log-probabilities by some hundredths here."""


def assert_follows(reference: Engine, prompt: Sequence[int], answer: Answer) -> None:
    """Every token was the likeliest one, or in a near tie with it, given all before it.

    For answers that no other run repeats to the last bit: preemption and batches change the
    shapes of the computation, and one near tie that falls the other way changes all that follows.
    """
    shortfalls = reference.call("shortfalls", prompt=list(prompt), answer=list(answer.tokens))
    assert max(shortfalls) < NEAR_TIE_NATS
