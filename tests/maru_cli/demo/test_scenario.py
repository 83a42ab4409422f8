"""The demo's verdicts, on scripted answers: each of them can be bad, and is then said to be."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from maru_cli.demo import command, scenario
from maru_cli.failures import CommandFailed
from maru_cli.serving.asking import Completion
from maru_cli.serving.server import ApiServer
from maru_cli.serving.workplace import Workplace

CACHED = scenario.CHUNKS * 256
COLD = Completion((1, 2), (-0.1, -0.2), scenario.PROMPT_TOKENS, 0, ttft_s=2.0)
HIT = Completion((1, 3), (-0.1, -0.3), scenario.PROMPT_TOKENS, CACHED, ttft_s=0.5)


class Stats:
    suspect_total = 21


@dataclass(frozen=True)
class FakeServer:
    name: str


class FakePlace:
    def wait_for_objects(self, count: int) -> None:
        assert count == scenario.NUM_PROMPTS * scenario.CHUNKS

    @contextmanager
    def looker(self) -> Any:
        yield self

    def stats(self) -> Stats:
        return Stats()


class Script:
    """Answers each request of a server with the next of its list; the warm-up comes first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: dict[str, list[Completion]]):
        self.answers = {name: [COLD, *listed] for name, listed in answers.items()}
        self.counters = {
            "vllm:maru_stored_bytes_total": 10.0,
            "vllm:maru_loaded_bytes_total": 20.0,
            "vllm:maru_loads_suspect_total": 21.0,
        }
        monkeypatch.setattr(
            scenario, "complete", lambda server, *_: self.answers[server.name].pop(0)
        )
        monkeypatch.setattr(scenario, "reset_prefix_cache", lambda server: None)
        monkeypatch.setattr(scenario, "read_counters", lambda server: self.counters)
        monkeypatch.setattr(scenario, "flip_bytes", lambda place: 21)

    def share(self) -> scenario.SharedResult:
        a, b, reference = (cast(ApiServer, FakeServer(name)) for name in ("a", "b", "reference"))
        place = cast(Workplace, FakePlace())
        return scenario.share(a, b, reference, place, lambda text: None)

    def corrupt(self) -> scenario.CorruptResult:
        a, b = (cast(ApiServer, FakeServer(name)) for name in ("a", "b"))
        return scenario.corrupt(a, b, cast(Workplace, FakePlace()), lambda text: None)


def _answers(other_hit: Completion = HIT) -> dict[str, list[Completion]]:
    return {
        "reference": [COLD] * 3 + [replace(HIT, ttft_s=0.25)] * 3,
        "a": [COLD] * 3 + [HIT] * 3,
        "b": [HIT, HIT, other_hit],
    }


def test_equal_hits_are_identical_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    result = Script(monkeypatch, _answers()).share()
    assert result.identical
    assert result.hit_tokens == 6 * CACHED
    assert (result.ttft_cold_ms, result.ttft_hit_same_ms) == (2000.0, 500.0)
    assert result.ttft_prefix_cache_ms == 250.0
    assert result.bytes == result.bytes_stored + result.bytes_loaded == 60
    assert command._as_promised(result)


@pytest.mark.parametrize(
    "wrong", [replace(HIT, tokens=(1, 2)), replace(HIT, logprobs=(-0.1, -0.30001))]
)
def test_one_other_token_or_logprob_is_not_identical(
    wrong: Completion, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Script(monkeypatch, _answers(wrong)).share()
    assert not result.identical
    assert not command._as_promised(result)


def test_a_request_that_was_not_served_from_maru_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = Script(monkeypatch, _answers(replace(HIT, cached_tokens=0)))
    with pytest.raises(CommandFailed, match=f"should have served {CACHED} tokens"):
        script.share()


def test_damage_that_is_found_and_recomputed_is_as_promised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = Script(monkeypatch, {"a": [COLD] * 3, "b": [COLD] * 3}).corrupt()
    assert result.corruption_detected
    assert result.tokens_equal
    assert result.recomputed_tokens == 3 * scenario.PROMPT_TOKENS
    assert command._as_promised(result)


def test_damage_that_is_served_is_not_as_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, {"a": [COLD] * 3, "b": [HIT] * 3})
    script.counters["vllm:maru_loads_suspect_total"] = 0.0
    result = script.corrupt()
    assert not result.corruption_detected
    assert not result.tokens_equal
    assert not command._as_promised(result)
