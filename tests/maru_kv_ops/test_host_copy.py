"""The host's copies in programs of their own, under sanitizers.

``host_copy/host_copy_check.cpp`` holds the walk over rows against ``locate_row``, rows of every
kind against an oracle of bytes, and several callers of one set of threads against data races.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "host_copy"
HOST_COPY = Path(__file__).parents[2] / "maru_kv_ops" / "csrc" / "host_copy.cpp"
OPTIONS = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_host_copies_are_right_and_clean_under(sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / "host_copy_check"
    options = [*OPTIONS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    sources = [str(HERE / "host_copy_check.cpp"), str(HOST_COPY)]
    compiled = subprocess.run(
        ["g++", *options, *sources, "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert compiled.returncode == 0, compiled.stderr

    # The thread sanitizer of older compilers cannot place its shadow where addresses are random.
    done = subprocess.run(
        ["setarch", "-R", str(program)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    walked, copies, shared = (part.split()[0] for part in done.stdout.split(","))
    assert int(walked) > 10_000
    assert (copies, shared) == ("176", "8")
