"""What a command shows: tables and progress for people, one JSON object for programs.

With ``--json`` everything for people goes to standard error, and standard output gets exactly one
line: the result object.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, unique
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from maru_cli.options import OutputFormat

OnProgress = Callable[[int, int], None]
"""Called with how much is done, and of how much."""


@unique
class Unit(Enum):
    """What a progress bar counts."""

    BYTES = "bytes"
    ROUNDS = "rounds"
    PERCENT = "percent"


@unique
class Align(Enum):
    """How a table's columns behind the first are set."""

    LEFT = "left"
    RIGHT = "right"


PLAIN_WIDTH = 160
"""Columns where standard output is no terminal; a pager or a log wraps by itself."""


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


class Screen:
    """Where one command writes."""

    def __init__(self, output: OutputFormat) -> None:
        self._output = output
        self._people = _console(stderr=output is OutputFormat.JSON)
        self._progress = _console(stderr=True)

    def say(self, text: str) -> None:
        """One line for people, as it is (no markup)."""
        self._people.print(text, markup=False, soft_wrap=True)

    def table(
        self,
        title: str,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        align: Align = Align.RIGHT,
    ) -> None:
        """A table for people; its first column is set left. Empty columns: no header.

        Without rows nothing is shown.
        """
        if not rows:
            return
        table = Table(title=title, title_justify="left", show_header=any(columns))
        for index, column in enumerate(columns):
            right = index > 0 and align is Align.RIGHT
            table.add_column(column, justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self._people.print(table)

    def facts(self, title: str, facts: Mapping[str, str]) -> None:
        """Names and values for people, one a line."""
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in facts.items():
            table.add_row(name, value)
        self._people.print(table)

    @contextmanager
    def progress(self, what: str, unit: Unit) -> Iterator[OnProgress]:
        """A bar that is drawn where there is a terminal, and goes when all is done.

        The callback may be called from any thread.
        """
        if not self._progress.is_terminal:
            yield lambda done, total: None
            return
        counter = DownloadColumn(binary_units=True) if unit is Unit.BYTES else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), counter)
        with Progress(*columns, console=self._progress, transient=True) as bar:
            task = bar.add_task(what, total=None)

            def on_progress(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)
                if done >= total:
                    bar.stop()

            yield on_progress

    @contextmanager
    def status(self, what: str) -> Iterator[Callable[[str], None]]:
        """A line that changes in place on a terminal; elsewhere a line for each new text.

        What stands in brackets at a text's end (a count of seconds) does not make it new.
        """
        if self._progress.is_terminal:
            with self._progress.status(what) as status:
                yield status.update
            return
        shown = ""

        def report(text: str) -> None:
            nonlocal shown
            if (new := text.partition(" (")[0]) != shown:
                shown = new
                self._progress.print(new, markup=False, soft_wrap=True)

        report(what)
        yield report

    def result(self, value: object) -> None:
        """The command's result: the JSON line, if that was asked for. Call once, last."""
        if self._output is OutputFormat.JSON:
            print(json.dumps(plain(value)), flush=True)


def plain(value: Any) -> Any:
    """Dataclasses, enums, bytes and sequences as what JSON knows; bytes become hex."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def size_text(num_bytes: float) -> str:
    """Bytes for people, in binary units: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def age_text(seconds: float) -> str:
    """A duration for people: ``45 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
