"""The command ``maru``: mounts the subcommands and turns failures into one line and a status."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn

import typer

from maru_cli import doctor, ls, server, stat, verify
from maru_cli.bench import command as bench
from maru_cli.demo import command as demo
from maru_cli.failures import CommandFailed, ExitStatus
from maru_shm.control.errors import Unreachable
from maru_shm.errors import MaruError
from maru_shm.pool.errors import NoSuchPool, NotAPool

app = typer.Typer(
    name="maru",
    help="A KV cache that vLLM instances share as memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("server")(server.run)
app.command("stat")(stat.run)
app.command("ls")(ls.run)
app.command("verify")(verify.run)
app.command("doctor")(doctor.run)
app.command("demo")(demo.run)
app.add_typer(bench.app, name="bench")


def main() -> NoReturn:
    """Entry point. Exit status: see ``maru_cli.failures``."""
    signal.signal(signal.SIGTERM, _leave)
    try:
        app()
    except CommandFailed as error:
        _fail(str(error), error.status)
    except (Unreachable, NoSuchPool, NotAPool) as error:
        _fail(str(error), ExitStatus.NOTHING_THERE)
    except MaruError as error:
        _fail(str(error), ExitStatus.FAILED)
    sys.exit(ExitStatus.OK)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # As an exception, so that whatever was started is stopped on the way out.
    raise SystemExit(128 + number)


def _fail(message: str, status: ExitStatus) -> NoReturn:
    print(f"maru: {message}", file=sys.stderr)
    sys.exit(status)
