"""What Maru costs and gains on real engines: two with the connector, one without.

Every round sends new prompts: cold to the plain engine and to the first engine with Maru (in
turns, the order changes with each round), again to the plain engine (its own prefix cache), and to
the second engine with Maru, which has never seen them. Figures are medians over the rounds of the
rounds' median time to first token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from maru_cli.failures import CommandFailed
from maru_cli.serving.asking import Completion, complete, read_counters
from maru_cli.serving.model import ModelShape, make_model, random_prompt
from maru_cli.serving.server import ApiServer, MaruSettings, ServerSettings, serving
from maru_cli.serving.workplace import Workplace, workplace
from maru_vllm.settings import DEFAULT_CHUNK_TOKENS

MIN_ROUNDS = 5
OUTPUT_TOKENS = 4
TAIL_TOKENS = 24
"""Computed in every hit: fewer than a block, so that Maru and the prefix cache stop alike."""
SPARE_POOL_BYTES = 256 << 20
_WARM_UP_SEED = 1_000_000


@dataclass(frozen=True, slots=True)
class ServeBenchSettings:
    """What is sent."""

    prompt_tokens: int = 4 * DEFAULT_CHUNK_TOKENS
    """Rounded down to whole chunks; a tail of ``TAIL_TOKENS`` is added to each prompt."""
    concurrency: int = 1
    """Requests sent at once."""
    rounds: int = MIN_ROUNDS

    def check(self) -> None:
        """Raises CommandFailed for values that measure nothing."""
        if self.prompt_tokens < DEFAULT_CHUNK_TOKENS:
            raise CommandFailed(
                f"prompts of {self.prompt_tokens} tokens hold no chunk of {DEFAULT_CHUNK_TOKENS}"
                " tokens: nothing would hit"
            )
        if self.rounds < MIN_ROUNDS:
            raise CommandFailed(f"{self.rounds} rounds are too few; at least {MIN_ROUNDS}")
        if self.concurrency < 1:
            raise CommandFailed(f"a concurrency of {self.concurrency} sends nothing")

    @property
    def chunks(self) -> int:
        """Whole chunks of each prompt."""
        return self.prompt_tokens // DEFAULT_CHUNK_TOKENS

    @property
    def all_chunks(self) -> int:
        """Chunks of all rounds together."""
        return self.rounds * self.concurrency * self.chunks

    @property
    def full_prompt_tokens(self) -> int:
        """Tokens that are sent."""
        return self.chunks * DEFAULT_CHUNK_TOKENS + TAIL_TOKENS


@dataclass(frozen=True, slots=True)
class ServeBenchResult:
    """The JSON object of ``maru bench serve``; times in ms to the first token, 1 GB is 10^9."""

    prompt_tokens: int
    concurrency: int
    rounds: int
    ttft_plain_cold_ms: float
    ttft_cold_ms: float
    ttft_prefix_cache_ms: float
    ttft_hit_ms: float
    """On the engine that did not compute the prompt."""
    cold_overhead: float
    """Cold TTFT with Maru over cold TTFT without."""
    hit_speedup: float
    """Cold TTFT over hit TTFT, both with Maru."""
    hit_over_prefix_cache: float
    """Hit TTFT over the TTFT of vLLM's own prefix cache."""
    hit_added_ms: float
    """Hit TTFT less that of vLLM's own prefix cache."""
    hit_gbps: float
    """Bytes loaded over the seconds from their blocks' allocation to the worker's report."""
    hit_tokens_share: float
    """Part of the tokens that could hit and did; below 1 the other figures mean little."""


@dataclass(frozen=True, slots=True)
class _Round:
    plain_cold_s: float
    cold_s: float
    prefix_cache_s: float
    hit_s: float
    hit_tokens: int


def run_serve_bench(
    settings: ServeBenchSettings,
    report: Callable[[str], None],
    on_round: Callable[[int, int], None],
) -> ServeBenchResult:
    """Start the engines, measure, stop them; minutes. Raises CommandFailed."""
    settings.check()
    with workplace("bench") as place:
        report("making a small model")
        shape = ModelShape()
        make_model(place.model, shape)
        max_model_len = settings.full_prompt_tokens + OUTPUT_TOKENS + 1
        stored_bytes = settings.all_chunks * DEFAULT_CHUNK_TOKENS * shape.kv_bytes_per_token
        maru = MaruSettings(
            place.runtime_dir, {"maru_pool_size": 2 * stored_bytes + SPARE_POOL_BYTES}
        )
        servers = [
            ServerSettings(name, place.model, place.folder, max_model_len, maru_or_none)
            for name, maru_or_none in (("engine-A", maru), ("engine-B", maru), ("reference", None))
        ]
        with serving(servers, report) as (first, second, reference):
            report("measuring")
            return _measure(settings, place, first, second, reference, on_round)


def _measure(
    settings: ServeBenchSettings,
    place: Workplace,
    first: ApiServer,
    second: ApiServer,
    reference: ApiServer,
    on_round: Callable[[int, int], None],
) -> ServeBenchResult:
    for server in (first, second, reference):
        complete(server, random_prompt(DEFAULT_CHUNK_TOKENS // 2, _WARM_UP_SEED), OUTPUT_TOKENS)
    rounds = []
    for number in range(settings.rounds):
        rounds.append(_round(settings, number, place, first, second, reference))
        on_round(number + 1, settings.rounds)
    counters = read_counters(second)
    return _result(settings, rounds, counters)


def _round(
    settings: ServeBenchSettings,
    number: int,
    place: Workplace,
    first: ApiServer,
    second: ApiServer,
    reference: ApiServer,
) -> _Round:
    prompts = [
        random_prompt(settings.full_prompt_tokens, number * settings.concurrency + index)
        for index in range(settings.concurrency)
    ]
    if number % 2:
        cold = _ask(first, prompts)
        plain_cold = _ask(reference, prompts)
    else:
        plain_cold = _ask(reference, prompts)
        cold = _ask(first, prompts)
    place.wait_for_objects((number + 1) * settings.concurrency * settings.chunks)
    prefix_cache = _ask(reference, prompts)
    hits = _ask(second, prompts)
    return _Round(
        plain_cold_s=_median_s(plain_cold),
        cold_s=_median_s(cold),
        prefix_cache_s=_median_s(prefix_cache),
        hit_s=_median_s(hits),
        hit_tokens=sum(hit.cached_tokens for hit in hits),
    )


def _ask(server: ApiServer, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    with ThreadPoolExecutor(len(prompts)) as senders:
        return list(senders.map(lambda prompt: complete(server, prompt, OUTPUT_TOKENS), prompts))


def _median_s(answers: Sequence[Completion]) -> float:
    return statistics.median(answer.ttft_s for answer in answers)


def _result(
    settings: ServeBenchSettings, rounds: Sequence[_Round], counters: dict[str, float]
) -> ServeBenchResult:
    plain_cold = statistics.median(r.plain_cold_s for r in rounds)
    cold = statistics.median(r.cold_s for r in rounds)
    prefix_cache = statistics.median(r.prefix_cache_s for r in rounds)
    hit = statistics.median(r.hit_s for r in rounds)
    possible = settings.all_chunks * DEFAULT_CHUNK_TOKENS
    load_seconds = counters.get("vllm:maru_load_seconds_total", 0.0)
    loaded_bytes = counters.get("vllm:maru_loaded_bytes_total", 0.0)
    return ServeBenchResult(
        prompt_tokens=settings.full_prompt_tokens,
        concurrency=settings.concurrency,
        rounds=len(rounds),
        ttft_plain_cold_ms=round(1e3 * plain_cold, 1),
        ttft_cold_ms=round(1e3 * cold, 1),
        ttft_prefix_cache_ms=round(1e3 * prefix_cache, 1),
        ttft_hit_ms=round(1e3 * hit, 1),
        cold_overhead=round(cold / plain_cold, 3),
        hit_speedup=round(cold / hit, 2),
        hit_over_prefix_cache=round(hit / prefix_cache, 3),
        hit_added_ms=round(1e3 * (hit - prefix_cache), 1),
        hit_gbps=round(loaded_bytes / load_seconds / 1e9, 3) if load_seconds else 0.0,
        hit_tokens_share=round(sum(r.hit_tokens for r in rounds) / possible, 3),
    )
