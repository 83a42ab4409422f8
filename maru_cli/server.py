"""``maru server``: a server in the foreground."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from maru_cli.failures import CommandFailed
from maru_cli.looking import chosen_runtime_dir
from maru_cli.options import JsonFlag, RuntimeDir, output_format
from maru_cli.output import Screen, Unit, size_text
from maru_shm.control.embedded import default_pool_bytes
from maru_shm.control.server import PoolCare, ServerSettings, serve
from maru_shm.pool import Pool
from maru_shm.pool.medium import MEDIUM_NAMES, medium_for
from maru_vllm.settings import parse_size


def run(
    pool_size: Annotated[
        str | None,
        typer.Option(
            "--pool-size",
            help='Size of a pool that must be made, such as "16GiB". Default: 4 GiB, or half of '
            "the free memory if that is less; all of a DAX device.",
        ),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(
            "--path",
            help="The pool: a file, or a DAX device. It stays when the server leaves. Default: a "
            "file of this runtime dir under /dev/shm, removed when the server leaves.",
        ),
    ] = None,
    medium: Annotated[
        str | None,
        typer.Option("--medium", help=f"One of {', '.join(MEDIUM_NAMES)}. Default: by the path."),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            envvar="MARU_SERVER_URL",
            help="Where to listen: ipc://PATH or tcp://LOOPBACK:PORT. Default: where this user's "
            "engines look.",
        ),
    ] = None,
    linger: Annotated[
        float | None,
        typer.Option("--linger", min=0, help="Leave so many seconds after the last session."),
    ] = None,
    runtime_dir: RuntimeDir = None,
    json: JsonFlag = False,
) -> None:
    """Run a server until Ctrl-C. Engines start one by themselves; this one has its own pool."""
    screen = Screen(output_format(json))
    settings = _settings(pool_size, path, medium, url, linger, runtime_dir)
    with screen.progress("populating the pool", Unit.BYTES) as on_populate:
        serve(
            settings,
            on_ready=lambda pool: _announce(screen, settings, pool),
            on_populate=on_populate,
        )
    screen.say("stopped")


def _settings(
    pool_size: str | None,
    path: Path | None,
    medium: str | None,
    url: str | None,
    linger_s: float | None,
    runtime_dir: Path | None,
) -> ServerSettings:
    runtime = chosen_runtime_dir(runtime_dir)
    pool_path = runtime.pool if path is None else path.absolute()
    medium = medium or medium_for(str(pool_path))
    try:
        pool_bytes = None if pool_size is None else parse_size(pool_size)
    except ValueError as error:
        raise CommandFailed(f"--pool-size {pool_size}: expected {error}") from None
    if pool_bytes is None and medium != "dax":
        pool_bytes = default_pool_bytes(pool_path.parent)
    return ServerSettings(
        url=url or runtime.url,
        pool_path=str(pool_path),
        pool_bytes=pool_bytes,
        medium=medium,
        pool_care=PoolCare.OWN if path is None else PoolCare.KEEP,
        linger_s=linger_s,
    )


def _announce(screen: Screen, settings: ServerSettings, pool: Pool) -> None:
    pool_bytes = pool.geometry.pool_bytes
    screen.say(
        f"ready: {settings.url}, pool {pool.path} ({pool.medium.name}, {size_text(pool_bytes)}),"
        f" process {os.getpid()}"
    )
    screen.result(
        {
            "url": settings.url,
            "pool": pool.path,
            "medium": pool.medium.name,
            "pool_bytes": pool_bytes,
            "pid": os.getpid(),
        }
    )
