"""Options that several subcommands share."""

from __future__ import annotations

from enum import Enum, unique
from pathlib import Path
from typing import Annotated

import typer


@unique
class OutputFormat(Enum):
    """Who reads the command's standard output."""

    PEOPLE = "people"
    JSON = "json"


def output_format(json: bool) -> OutputFormat:
    """What the ``--json`` flag asks for."""
    return OutputFormat.JSON if json else OutputFormat.PEOPLE


JsonFlag = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object, as the last line.")
]
ServerUrl = Annotated[
    str | None,
    typer.Option(
        "--server-url",
        envvar="MARU_SERVER_URL",
        help="The server, ipc://PATH or tcp://HOST:PORT. Default: this user's embedded server.",
    ),
]
RuntimeDir = Annotated[
    Path | None,
    typer.Option(
        "--runtime-dir",
        envvar="MARU_RUNTIME_DIR",
        help="Folder of the embedded server's socket, locks and log.",
    ),
]
