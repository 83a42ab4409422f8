"""``maru ls``: the objects in a pool."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from maru_cli.looking import looking
from maru_cli.options import JsonFlag, RuntimeDir, ServerUrl, output_format
from maru_cli.output import Screen, age_text, plain, size_text

SHORT_DIGITS = 12
"""Hex digits of a key or namespace that are shown to people; enough to tell 10^6 apart."""


def run(
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Show at most so many objects.")
    ] = None,
    server_url: ServerUrl = None,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """List the objects of a running server's pool, oldest grant first."""
    screen = Screen(output_format(json))
    with looking(server_url, runtime_dir) as looker:
        rows = list(itertools.islice(looker.objects(), limit))
    screen.table(
        f"{len(rows)} objects, {size_text(sum(row.extent.length for row in rows))}",
        ("namespace", "key", "state", "size", "last used", "leases"),
        [
            (
                row.namespace.hex()[:SHORT_DIGITS],
                row.key.hex()[:SHORT_DIGITS],
                row.state.name.lower(),
                size_text(row.extent.length),
                f"{age_text(row.age_s)} ago",
                str(row.leases),
            )
            for row in rows
        ],
    )
    objects = [{**plain(row), "state": row.state.name.lower()} for row in rows]
    screen.result({"url": looker.url, "objects": objects})
