from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from maru_cli import needs
from maru_cli.failures import ExitStatus

if TYPE_CHECKING:
    from conftest import Maru


def test_help_names_every_subcommand(maru: Maru) -> None:
    shown = maru("--help")
    assert shown.status == ExitStatus.OK
    for command in ("server", "stat", "ls", "verify", "doctor", "demo", "bench"):
        assert f" {command} " in shown.out


@pytest.mark.parametrize("command", ["demo", "bench serve", "bench copy"])
def test_what_needs_a_missing_package_says_how_to_get_it(
    command: str, maru: Maru, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(needs.importlib.util, "find_spec", lambda name: None)
    refused = maru(*command.split())
    assert refused.status == ExitStatus.FAILED
    assert refused.err.startswith(f"maru: maru {command} needs ")
    assert refused.err.count("\n") == 1


def test_an_unknown_layout_is_refused_with_the_known_ones(maru: Maru) -> None:
    refused = maru("bench", "copy", "--layout", "HND")
    assert refused.status == ExitStatus.FAILED
    assert "LBHNC" in refused.err


def test_a_bench_without_a_chunk_to_hit_is_refused(maru: Maru) -> None:
    refused = maru("bench", "serve", "--prompt-tokens", "100")
    assert refused.status == ExitStatus.FAILED
    assert "no chunk of 256 tokens" in refused.err


def test_the_command_needs_no_torch_and_does_not_wait_for_it() -> None:
    """The store is served on hosts without an engine; a process of its own, for this one has it."""
    script = (
        "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
        "from maru_cli import app\n"
        "sys.argv = ['maru', '--help']\n"
        "app.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == ExitStatus.OK, done.stderr
    assert " doctor " in done.stdout
