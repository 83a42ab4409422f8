from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum

import pytest

from maru_cli.options import OutputFormat
from maru_cli.output import Screen, age_text, plain, size_text


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True, slots=True)
class Thing:
    colour: Colour
    raw: bytes
    parts: tuple[int, ...]


def test_values_become_what_json_knows() -> None:
    assert plain([Thing(Colour.RED, b"\x01\xff", (1, 2))]) == [
        {"colour": "red", "raw": "01ff", "parts": [1, 2]}
    ]


def test_with_json_all_that_people_read_goes_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(OutputFormat.JSON)
    screen.say("hello [bold]")
    screen.table("title", ("a", "b"), [("x", "1")])
    screen.facts("facts", {"name": "value"})
    screen.result({"a": 1})
    said = capsys.readouterr()
    assert json.loads(said.out) == {"a": 1}
    for text in ("hello [bold]", "title", "value"):
        assert text in said.err


def test_for_people_there_is_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(OutputFormat.PEOPLE)
    screen.say("hello")
    screen.result({"a": 1})
    assert capsys.readouterr().out == "hello\n"


def test_without_a_terminal_a_status_is_printed_once_per_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Screen(OutputFormat.PEOPLE).status("starting") as report:
        report("waiting for A (1 s)")
        report("waiting for A (2 s)")
        report("done")
    assert capsys.readouterr().err.splitlines() == ["starting", "waiting for A", "done"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (4 << 30, "4.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_said_in_binary_units(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(59, "59 s"), (600, "10 min"), (9000, "2.5 h")])
def test_ages_are_said_in_a_unit_that_fits(seconds: float, text: str) -> None:
    assert age_text(seconds) == text
