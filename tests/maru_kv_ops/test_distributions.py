"""The kernel sources in the sdist and in the wheel are those of the tree, byte for byte.

Nothing here needs torch: these guards run wherever Python does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_kv_ops.vendor import CSRC, UNIT, hashes

ROOT = Path(__file__).parents[2]
NOT_IN_A_BUILD = shutil.ignore_patterns("*.so", "__pycache__", "_build.json")


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and a wheel built from what the sdist unpacks to, as an installer would."""
    folder = tmp_path_factory.mktemp("distributions")
    tree = folder / "tree"
    tree.mkdir()
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)
    for package in ("maru_shm", "maru_kv_ops", "maru_vllm", "maru_cli"):
        shutil.copytree(ROOT / package, tree / package, ignore=NOT_IN_A_BUILD)
    sdist = folder / _build(tree, "build_sdist", folder)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return sdist, folder / _build(source, "build_wheel", folder)


def _build(tree: Path, hook: str, to: Path) -> str:
    """Call the build backend as pip does; without the extensions, which are not looked at here."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"from setuptools import build_meta; print(build_meta.{hook}({str(to)!r}))",
        ],
        cwd=tree,
        env={**os.environ, "MARU_SKIP_KV_OPS": "1", "MARU_CXL_FLUSH": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def _in_sdist(archive: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(archive) as opened:
        for member in opened.getmembers():
            if member.isfile():
                content = opened.extractfile(member)
                assert content is not None
                yield member.name.partition("/")[2], content.read()


def _in_wheel(archive: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(archive) as opened:
        for name in opened.namelist():
            yield name, opened.read(name)


def test_sdist_and_wheel_carry_the_same_bytes_as_the_tree(
    distributions: tuple[Path, Path],
) -> None:
    sdist, wheel = distributions
    tree = {f"{UNIT}/{file}": (CSRC / file).read_bytes() for file in hashes()}
    assert tree
    for files in (dict(_in_sdist(sdist)), dict(_in_wheel(wheel))):
        assert {path: files[path] for path in files if path.startswith(f"{UNIT}/")} == tree
        (record,) = (path for path in files if path.endswith("VENDOR.md"))
        assert files[record] == (ROOT / "VENDOR.md").read_bytes()


def test_an_installed_wheel_verifies_itself(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """With the record found among its license files, and a changed byte found too."""
    with zipfile.ZipFile(distributions[1]) as wheel:
        wheel.extractall(tmp_path)

    def verify() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "maru_kv_ops.vendor", "verify"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    assert verify().returncode == 0
    (tmp_path / UNIT / "formats.h").write_bytes(b"// other bytes")
    done = verify()
    assert done.returncode == 1
    assert "formats.h has SHA-256" in done.stderr
    assert str(tmp_path) in done.stderr
