"""``setup.py`` with and without a working C compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def build(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``build_ext`` on a copy of what it needs, without the extensions of maru_kv_ops."""
    pytest.importorskip("setuptools")
    (directory / "maru_shm").mkdir()
    for name in ("setup.py", "VENDOR.md"):
        shutil.copy(ROOT / name, directory)
    shutil.copy(ROOT / "maru_shm/_cxl_flush.c", directory / "maru_shm")
    shutil.copytree(
        ROOT / "maru_kv_ops",
        directory / "maru_kv_ops",
        ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build.json"),
    )
    return subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", "out"],
        cwd=directory,
        env={**os.environ, "MARU_SKIP_KV_OPS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def built(directory: Path) -> list[Path]:
    return list(directory.glob("out/**/_cxl_flush*.so"))


def test_without_a_compiler_the_build_goes_on_and_says_what_is_missing(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert "maru build: maru_shm._cxl_flush OFF: command '/bin/false' failed" in done.stderr
    assert built(tmp_path) == []


def test_a_build_that_insists_fails_without_a_compiler(tmp_path: Path) -> None:
    done = build(tmp_path, CC="/bin/false", MARU_CXL_FLUSH="1")
    assert done.returncode != 0
    assert "_cxl_flush OFF" in done.stderr


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_with_a_compiler_the_extension_is_built_unless_it_is_switched_off(tmp_path: Path) -> None:
    for name, wish in (("on", "1"), ("off", "0")):
        (tmp_path / name).mkdir()
        done = build(tmp_path / name, MARU_CXL_FLUSH=wish)
        assert done.returncode == 0, done.stderr
        assert f"_cxl_flush {name.upper()}" in done.stderr
        assert len(built(tmp_path / name)) == (1 if name == "on" else 0)
