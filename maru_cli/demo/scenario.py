"""What the demo's servers are asked, and what their answers say. Starts no process itself.

The reference for "identical" is not a cold run: a hit computes the prompt's last tokens in a
smaller batch, and floating-point sums of other shapes differ in their last bits. All kinds of hits
agree exactly, so hits from Maru are compared with hits of vLLM's own prefix cache, at the same
boundary between cached and computed tokens. Maru hits whole chunks and vLLM whole blocks, so a
prompt of ``n`` chunks and fewer further tokens than a block has one boundary for both.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from maru_cli.failures import CommandFailed
from maru_cli.serving.asking import Completion, complete, read_counters, reset_prefix_cache
from maru_cli.serving.model import random_prompt
from maru_cli.serving.server import ApiServer
from maru_cli.serving.workplace import Workplace
from maru_shm.control.messages import ObjectState
from maru_shm.pool import open_pool
from maru_vllm.settings import DEFAULT_CHUNK_TOKENS

NUM_PROMPTS = 3
CHUNKS = 7
TAIL_TOKENS = 24
"""Fewer than the smallest block of CPU attention (32)."""
PROMPT_TOKENS = CHUNKS * DEFAULT_CHUNK_TOKENS + TAIL_TOKENS
OUTPUT_TOKENS = 16
MAX_MODEL_LEN = 2048
WARM_UP_TOKENS = 64
"""Less than a chunk: leaves nothing in the pool."""
FLIPPED_EVERY = 512
"""Of every so many payload bytes one is flipped."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class SharedResult:
    """The JSON object of ``maru demo``. Times are medians over the prompts."""

    identical: bool
    """Tokens and log-probabilities of all Maru hits equal those of vLLM's own prefix cache."""
    hit_tokens: int
    """Prompt tokens that Maru served, on both engines together."""
    prompts: int
    prompt_tokens: int
    """Of each prompt."""
    ttft_cold_ms: float
    """On the engine with Maru, which stores meanwhile."""
    ttft_cold_plain_ms: float
    """On the engine without Maru."""
    ttft_hit_same_ms: float
    ttft_hit_other_ms: float
    ttft_prefix_cache_ms: float
    bytes: int
    """Stored into and loaded from the pool, together."""
    bytes_stored: int
    bytes_loaded: int


@dataclass(frozen=True, slots=True)
class CorruptResult:
    """The JSON object of ``maru demo --corrupt``."""

    corruption_detected: bool
    """Checksums did not match, and the server was told."""
    recomputed_tokens: int
    """Prompt tokens that the second engine computed itself."""
    tokens_equal: bool
    """Its tokens are those of a cold run."""
    objects_corrupted: int
    suspect_objects: int
    """Objects that engines reported as damaged."""


def prompts() -> list[list[int]]:
    """The demo's prompts, as token ids; they share no chunk."""
    return [random_prompt(PROMPT_TOKENS, seed) for seed in range(1, NUM_PROMPTS + 1)]


def warm_up(servers: Sequence[ApiServer]) -> None:
    """Let every server answer once, so that no first-time cost is measured."""
    for server in servers:
        complete(server, random_prompt(WARM_UP_TOKENS, seed=0), OUTPUT_TOKENS)


def share(
    first: ApiServer, second: ApiServer, reference: ApiServer, place: Workplace, report: Report
) -> SharedResult:
    """Ask all three the same prompts: cold, again, and on the engine that never saw them."""
    warm_up((first, second, reference))
    cold_plain = _ask_all(reference, "cold, without Maru", report)
    own_cache = _ask_all(reference, "vLLM's own prefix cache", report)
    cold = _ask_all(first, "cold, storing into the pool", report)
    place.wait_for_objects(NUM_PROMPTS * CHUNKS)
    reset_prefix_cache(first)
    hits_same = _ask_all(first, "hit on the same engine", report)
    hits_other = _ask_all(second, "hit on the other engine", report)
    hits = [*hits_same, *hits_other]
    _insist_on_one_boundary(own_cache, hits)
    stored, loaded = _moved_bytes((first, second))
    return SharedResult(
        identical=all(
            (hit.tokens, hit.logprobs) == (wanted.tokens, wanted.logprobs)
            for hit, wanted in zip(hits, [*own_cache, *own_cache], strict=True)
        ),
        hit_tokens=sum(hit.cached_tokens for hit in hits),
        prompts=NUM_PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        ttft_cold_ms=_median_ttft_ms(cold),
        ttft_cold_plain_ms=_median_ttft_ms(cold_plain),
        ttft_hit_same_ms=_median_ttft_ms(hits_same),
        ttft_hit_other_ms=_median_ttft_ms(hits_other),
        ttft_prefix_cache_ms=_median_ttft_ms(own_cache),
        bytes=stored + loaded,
        bytes_stored=stored,
        bytes_loaded=loaded,
    )


def corrupt(first: ApiServer, second: ApiServer, place: Workplace, report: Report) -> CorruptResult:
    """Store with one engine, damage what lies in the pool, ask the other engine."""
    warm_up((first, second))
    cold = _ask_all(first, "cold, storing into the pool", report)
    place.wait_for_objects(NUM_PROMPTS * CHUNKS)
    report("flipping bytes in the pool")
    corrupted = flip_bytes(place)
    answers = _ask_all(second, "hit on damaged objects", report)
    with place.looker() as looker:
        suspect = looker.stats().suspect_total
    found = read_counters(second).get("vllm:maru_loads_suspect_total", 0.0)
    return CorruptResult(
        corruption_detected=suspect > 0 and found > 0,
        recomputed_tokens=sum(a.prompt_tokens - a.cached_tokens for a in answers),
        tokens_equal=[a.tokens for a in answers] == [c.tokens for c in cold],
        objects_corrupted=corrupted,
        suspect_objects=suspect,
    )


def flip_bytes(place: Workplace) -> int:
    """Damage every sealed payload in the pool, behind everybody's back; how many there were."""
    with place.looker() as looker:
        info = looker.stats().pool
        rows = [row for row in looker.objects() if row.state is ObjectState.SEALED]
    pool = open_pool(info.path, info.medium, expect_uuid=info.uuid)
    try:
        for row in rows:
            payload = np.frombuffer(pool.payload(row.extent), dtype=np.uint8)
            payload[::FLIPPED_EVERY] ^= 0xFF
            del payload
    finally:
        pool.close()
    return len(rows)


def _ask_all(server: ApiServer, what: str, report: Report) -> list[Completion]:
    answers = []
    for number, prompt in enumerate(prompts(), start=1):
        report(f"{what}: prompt {number} of {NUM_PROMPTS} to {server.name}")
        answers.append(complete(server, prompt, OUTPUT_TOKENS))
    return answers


def _insist_on_one_boundary(own_cache: Sequence[Completion], hits: Sequence[Completion]) -> None:
    expected = CHUNKS * DEFAULT_CHUNK_TOKENS
    for kind, answers in (("vLLM's own prefix cache", own_cache), ("Maru", hits)):
        served = [answer.cached_tokens for answer in answers]
        if any(count != expected for count in served):
            raise CommandFailed(
                f"{kind} should have served {expected} tokens of each prompt, and served {served};"
                " the comparison would mean nothing. See the servers' logs"
            )


def _moved_bytes(servers: Sequence[ApiServer]) -> tuple[int, int]:
    """Bytes (stored, loaded) that the engines counted."""
    counters = [read_counters(server) for server in servers]
    stored = sum(c.get("vllm:maru_stored_bytes_total", 0.0) for c in counters)
    loaded = sum(c.get("vllm:maru_loaded_bytes_total", 0.0) for c in counters)
    return int(stored), int(loaded)


def _median_ttft_ms(answers: Sequence[Completion]) -> float:
    return round(1e3 * statistics.median(answer.ttft_s for answer in answers), 1)
