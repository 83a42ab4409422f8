"""What a test client says to an API server: completions, timed; cache resets; metrics."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from maru_cli.failures import CommandFailed
from maru_cli.serving.server import ApiServer

REQUEST_DEADLINE_S = 300.0
RESET_DEADLINE_S = 30.0
RESET_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Completion:
    """One greedy answer."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the chosen tokens, natural logarithm, as the server prints them."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed: vLLM's own prefix cache and Maru together."""
    ttft_s: float
    """From sending the request to the first token."""


def complete(server: ApiServer, prompt: Sequence[int], max_tokens: int) -> Completion:
    """Send a prompt of token ids, greedily, as a stream, and take the time to the first token."""
    request = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": 1,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens: list[int] = []
    logprobs: list[float] = []
    usage: Mapping[str, object] = {}
    ttft_s = 0.0
    sent = time.perf_counter()
    for event in _stream(server, "/v1/completions", request):
        for choice in event["choices"]:
            if not tokens and choice["token_ids"]:
                ttft_s = time.perf_counter() - sent
            tokens += choice["token_ids"] or []
            logprobs += (choice["logprobs"] or {}).get("token_logprobs") or []
        usage = event.get("usage") or usage
    if len(tokens) != max_tokens or len(logprobs) != max_tokens:
        raise CommandFailed(
            f"{server.name} answered {len(tokens)} tokens and {len(logprobs)} log-probabilities"
            f" instead of {max_tokens}. {server.log_tail()}"
        )
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        prompt_tokens=_whole(usage, "prompt_tokens"),
        cached_tokens=_whole(details, "cached_tokens") if isinstance(details, Mapping) else 0,
        ttft_s=ttft_s,
    )


def _whole(counts: Mapping[str, object], name: str) -> int:
    value = counts.get(name)
    return value if isinstance(value, int) else 0


def reset_prefix_cache(server: ApiServer) -> None:
    """Empty vLLM's own prefix cache (Maru's pool stays); waits while stores still hold blocks."""
    deadline = time.monotonic() + RESET_DEADLINE_S
    while True:
        status, body = _exchange(server, "POST", "/reset_prefix_cache")
        if status == http.client.OK and json.loads(body)["success"]:
            return
        if time.monotonic() > deadline:
            raise CommandFailed(
                f"{server.name} did not empty its own prefix cache within {RESET_DEADLINE_S:.0f} s"
                f" (last answer: {status} {body[:200]!r}). {server.log_tail()}"
            )
        time.sleep(RESET_RETRY_S)  # vLLM refuses while blocks are held, and can only be asked


def read_counters(server: ApiServer) -> dict[str, float]:
    """The server's Prometheus counters by name, ``_total`` included, summed over labels."""
    status, body = _exchange(server, "GET", "/metrics")
    if status != http.client.OK:
        raise CommandFailed(f"{server.name} answered {status} to GET /metrics")
    counters: dict[str, float] = {}
    for family in text_string_to_metric_families(body.decode()):
        if family.type == "counter":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    counters[sample.name] = counters.get(sample.name, 0.0) + sample.value
    return counters


def _exchange(server: ApiServer, method: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_DEADLINE_S)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    except OSError as error:
        raise _lost(server, error) from error
    finally:
        connection.close()


def _stream(server: ApiServer, path: str, request: object) -> Iterator[Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=REQUEST_DEADLINE_S)
    try:
        connection.request(
            "POST", path, json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise CommandFailed(
                f"{server.name} refused a request: {response.status}"
                f" {response.read()[:500].decode(errors='replace')}"
            )
        for line in response:
            text = line.strip().removeprefix(b"data: ")
            if text and text != b"[DONE]":
                yield json.loads(text)
    except OSError as error:
        raise _lost(server, error) from error
    finally:
        connection.close()


def _lost(server: ApiServer, error: OSError) -> CommandFailed:
    return CommandFailed(f"lost the vLLM server {server.name!r}: {error}. {server.log_tail()}")
