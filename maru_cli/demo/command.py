"""``maru demo``: starts the servers, plays a scenario, shows a table."""

from __future__ import annotations

from enum import Enum, unique
from typing import TYPE_CHECKING, Annotated

import typer

from maru_cli.failures import ExitStatus
from maru_cli.needs import insist_on
from maru_cli.options import JsonFlag, output_format
from maru_cli.output import Screen, size_text

if TYPE_CHECKING:
    from maru_cli.demo.scenario import CorruptResult, SharedResult

POOL_SIZE = "512MiB"
"""The demo stores 84 MiB."""


@unique
class Scenario(Enum):
    """What is shown."""

    SHARE = "share"
    CORRUPT = "corrupt"


def run(
    corrupt: Annotated[
        bool,
        typer.Option(
            "--corrupt",
            help="Flip bytes in the pool in between, and show that this is found out and the "
            "requests are recomputed.",
        ),
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Start real vLLM servers and let one answer from KV that another computed.

    Compares tokens and log-probabilities with plain vLLM. Takes some minutes without a GPU.
    Exit status 1 if they are not identical.
    """
    screen = Screen(output_format(json))
    insist_on("vllm", "maru demo")
    result = _play(Scenario.CORRUPT if corrupt else Scenario.SHARE, screen)
    screen.result(result)
    if not _as_promised(result):
        raise typer.Exit(ExitStatus.FAILED)


def _play(scenario: Scenario, screen: Screen) -> SharedResult | CorruptResult:
    from maru_cli.demo import scenario as play
    from maru_cli.serving.model import ModelShape, make_model
    from maru_cli.serving.server import MaruSettings, ServerSettings, serving
    from maru_cli.serving.workplace import workplace

    verify = "full" if scenario is Scenario.CORRUPT else "header"
    with workplace("demo") as place, screen.status("making a small model") as report:
        make_model(place.model, ModelShape())
        maru = MaruSettings(place.runtime_dir, {"maru_pool_size": POOL_SIZE, "maru_verify": verify})

        def settings(name: str, maru: MaruSettings | None) -> ServerSettings:
            return ServerSettings(name, place.model, place.folder, play.MAX_MODEL_LEN, maru)

        servers = [settings("engine-A", maru), settings("engine-B", maru)]
        if scenario is Scenario.CORRUPT:
            with serving(servers, report) as (first, second):
                result = play.corrupt(first, second, place, report)
                _show_corrupt(screen, result)
                return result
        servers.append(settings("reference", None))
        with serving(servers, report) as (first, second, reference):
            shared = play.share(first, second, reference, place, report)
            _show_shared(screen, shared)
            return shared


def _as_promised(result: SharedResult | CorruptResult) -> bool:
    from maru_cli.demo.scenario import SharedResult

    if isinstance(result, SharedResult):
        return result.identical
    return result.corruption_detected and result.recomputed_tokens > 0 and result.tokens_equal


def _show_shared(screen: Screen, result: SharedResult) -> None:
    cold = result.ttft_cold_ms
    screen.table(
        f"{result.prompts} prompts of {result.prompt_tokens} tokens: time to first token, median",
        ("request", "TTFT", "against cold"),
        [
            (name, f"{ttft_ms:.0f} ms", f"{cold / ttft_ms:.1f} x")
            for name, ttft_ms in (
                ("cold, vLLM without Maru", result.ttft_cold_plain_ms),
                ("cold, with Maru (stores its KV)", cold),
                ("hit, vLLM's own prefix cache", result.ttft_prefix_cache_ms),
                ("hit from Maru, same engine", result.ttft_hit_same_ms),
                ("hit from Maru, other engine", result.ttft_hit_other_ms),
            )
        ],
    )
    screen.facts(
        "",
        {
            "tokens served from Maru": str(result.hit_tokens),
            "bytes moved": f"{size_text(result.bytes_stored)} stored,"
            f" {size_text(result.bytes_loaded)} loaded",
            "identical to vLLM's prefix cache": "yes, tokens and log-probabilities"
            if result.identical
            else "NO: the hits' tokens or log-probabilities differ",
        },
    )


def _show_corrupt(screen: Screen, result: CorruptResult) -> None:
    screen.facts(
        "Damaged objects in the pool",
        {
            "objects damaged": str(result.objects_corrupted),
            "corruption detected": "yes" if result.corruption_detected else "NO",
            "objects reported as damaged": str(result.suspect_objects),
            "prompt tokens recomputed": str(result.recomputed_tokens),
            "tokens equal to a cold run": "yes" if result.tokens_equal else "NO",
        },
    )
