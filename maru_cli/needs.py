"""Packages that some subcommands need and that ``maru`` itself does without."""

from __future__ import annotations

import importlib.util

from maru_cli.failures import CommandFailed

ADVICE = {
    "torch": "it comes with vLLM",
    "vllm": "./install.sh --demo installs it (without a GPU its CPU build); on a GPU host: "
    "pip install vllm",
}


def insist_on(package: str, command: str) -> None:
    """Raises CommandFailed if ``package`` is not installed; does not import it."""
    if importlib.util.find_spec(package) is None:
        raise CommandFailed(f"{command} needs {package}, which is not here: {ADVICE[package]}")
