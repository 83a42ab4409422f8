"""``maru bench store``, ``copy`` and ``serve``: options in, table and JSON out.

What is measured, and how, stands in the modules beside this one.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from maru_cli.failures import CommandFailed
from maru_cli.needs import insist_on
from maru_cli.options import JsonFlag, output_format
from maru_cli.output import Screen, Unit, size_text

app = typer.Typer(
    help="Measure Maru on this machine, always against something known.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
DEFAULT_ROUNDS = 7
Rounds = Annotated[int, typer.Option("--rounds", min=5, help="Rounds; figures are medians.")]


@app.command()
def copy(
    executor: Annotated[
        str | None,
        typer.Option("--executor", help="host or torch; without, what the connector takes here."),
    ] = None,
    threads: Annotated[int, typer.Option("--threads", min=1)] = 1,
    layout: Annotated[
        str, typer.Option("--layout", help="vLLM's KV cache layout, such as LBHNC or BLNHC.")
    ] = "LBHNC",
    block_size: Annotated[int, typer.Option("--block-size", min=1)] = 32,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Of the request.")] = 2048,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Pages of 4 to 256 KiB, with one and two threads.")
    ] = False,
    rounds: Rounds = DEFAULT_ROUNDS,
    json: JsonFlag = False,
) -> None:
    """Load and store of one request's chunks against plain memcpy of the same bytes."""
    screen = Screen(output_format(json))
    insist_on("torch", "maru bench copy")
    from maru_cli.bench.copy import (
        CopyBenchError,
        CopyBenchSettings,
        default_executor,
        run_copy_bench,
        sweep_settings,
    )
    from maru_kv_ops.layouts import KVLayout

    if layout not in [known.value for known in KVLayout]:
        known_layouts = ", ".join(known.value for known in KVLayout)
        raise CommandFailed(f"no layout {layout!r}; there are {known_layouts}")
    settings = CopyBenchSettings(
        executor=executor or default_executor(),
        threads=threads,
        layout=KVLayout(layout),
        block_size=block_size,
        tokens=tokens,
        rounds=rounds,
    )
    title = "Copies of one request's chunks"
    with screen.progress("copying", Unit.ROUNDS) as on_round:
        try:
            if not sweep:
                result = run_copy_bench(settings, on_round)
            else:
                wanted = sweep_settings(settings)
                results = []
                for number, one in enumerate(wanted):
                    results.append(run_copy_bench(one))
                    on_round((number + 1) * rounds, len(wanted) * rounds)
        except CopyBenchError as error:
            raise CommandFailed(str(error)) from error
    if not sweep:
        _show(screen, title, result)
        return
    screen.table(
        f"{title}, over memcpy with as many threads ({settings.executor})",
        ("threads", "page", "load", "store"),
        [
            (
                str(one.threads),
                size_text(one.page_bytes),
                f"{one.load_ratio:.2f}",
                f"{one.store_ratio:.2f}",
            )
            for one in results
        ],
    )
    screen.result({"results": results})


@app.command()
def store(
    objects: Annotated[
        int, typer.Option("--objects", min=128, help="Objects in the index before it starts.")
    ] = 10_000,
    rounds: Rounds = DEFAULT_ROUNDS,
    json: JsonFlag = False,
) -> None:
    """Lookup-and-lease of 128 keys against a bare ZeroMQ round trip of the same bytes."""
    screen = Screen(output_format(json))
    from maru_cli.bench.store import StoreBenchSettings, run_store_bench

    with screen.progress("asking", Unit.PERCENT) as on_progress:
        result = run_store_bench(
            StoreBenchSettings(objects=objects, rounds=rounds),
            lambda fraction: on_progress(round(100 * fraction), 100),
        )
    _show(screen, "Lookup-and-lease over the server's socket", result)


@app.command()
def serve(
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", help="Of each prompt, in whole chunks of 256.")
    ] = 1024,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Requests at once.")] = 1,
    rounds: Rounds = 5,
    json: JsonFlag = False,
) -> None:
    """Real engines with and without Maru: cold requests, hits, and vLLM's own prefix cache."""
    screen = Screen(output_format(json))
    insist_on("vllm", "maru bench serve")
    from maru_cli.bench.serve import ServeBenchSettings, run_serve_bench

    settings = ServeBenchSettings(prompt_tokens, concurrency, rounds)
    with screen.status("preparing") as report:
        result = run_serve_bench(
            settings, report, lambda done, of: report(f"measuring: {done} of {of} rounds done")
        )
    _show(screen, "Serving", result)


def _show(screen: Screen, title: str, result: Any) -> None:
    fields = dataclasses.asdict(result)
    screen.facts(title, {name: str(value) for name, value in fields.items()})
    screen.result(result)
