"""Servers as child processes, and the client's side of their HTTP, against a stand-in for vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_cli.failures import CommandFailed
from maru_cli.serving.asking import complete, read_counters, reset_prefix_cache
from maru_cli.serving.model import FIRST_WORD, VOCABULARY, random_prompt
from maru_cli.serving.server import ApiServer, MaruSettings, ServerSettings, serving

FAKE = Path(__file__).with_name("fake_api_server.py")


def _settings(tmp_path: Path, maru: MaruSettings | None = None) -> ServerSettings:
    return ServerSettings("fake", tmp_path / "model", tmp_path, 2048, maru)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    monkeypatch.setattr(ServerSettings, "arguments", lambda self, port: [str(FAKE), str(port)])
    with serving([_settings(tmp_path)], lambda text: None) as [server]:
        yield server


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_answer_is_taken_apart(server: ApiServer) -> None:
    answer = complete(server, [10, 20, 30], max_tokens=2)
    assert answer.tokens == (10, 11)
    assert answer.logprobs == (-0.5, -0.5)
    assert (answer.prompt_tokens, answer.cached_tokens) == (3, 2)
    assert answer.ttft_s > 0


def test_counters_are_summed_over_their_labels_and_gauges_are_none(server: ApiServer) -> None:
    assert read_counters(server) == {"vllm:maru_loaded_bytes_total": 123.0}


def test_a_reset_waits_until_no_block_is_held(server: ApiServer) -> None:
    reset_prefix_cache(server)  # The stand-in says "not yet" twice.


def test_servers_are_stopped_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServerSettings, "arguments", lambda self, port: [str(FAKE), str(port)])
    seen = []

    def fail_while_serving() -> None:
        with serving([_settings(tmp_path)], lambda text: None) as [server]:
            seen.append((server.pid, _is_running(server.pid)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_while_serving()
    [(pid, was_running)] = seen
    assert was_running
    assert not _is_running(pid)


def test_a_server_that_ends_at_once_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; print('no such model'); sys.exit(3)"
    monkeypatch.setattr(ServerSettings, "arguments", lambda self, port: ["-c", code])
    with (
        pytest.raises(CommandFailed, match=r"'fake' ended with status 3(?s:.)*no such model"),
        serving([_settings(tmp_path)], lambda text: None),
    ):
        pass


def test_a_lost_server_is_said_to_be_lost(server: ApiServer) -> None:
    server.stop()
    with pytest.raises(CommandFailed, match="lost the vLLM server 'fake'"):
        complete(server, [1], max_tokens=1)


def test_servers_differ_in_maru_only(tmp_path: Path) -> None:
    maru = MaruSettings(tmp_path / "run", {"maru_verify": "full"})
    plain, shared = _settings(tmp_path), _settings(tmp_path, maru)
    extra = shared.arguments(1)[len(plain.arguments(1)) :]
    assert shared.arguments(1)[: len(plain.arguments(1))] == plain.arguments(1)
    assert extra[0] == "--kv-transfer-config"
    config = json.loads(extra[1])
    assert config["kv_connector"] == "MaruKVConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"]["maru_verify"] == "full"
    difference = set(shared.environment().items()) ^ set(plain.environment().items())
    assert {name for name, _ in difference} == {"MARU_RUNTIME_DIR"}


def test_prompts_of_two_seeds_differ_from_the_first_chunk_on() -> None:
    first, second = random_prompt(256, seed=1), random_prompt(256, seed=2)
    assert first != second
    assert first == random_prompt(256, seed=1)
    assert all(FIRST_WORD <= token < VOCABULARY for token in first)
