"""A process may also import an extension that registers pybind types of the same names as ours.

The other extension is built here, and registers its types for the whole process. So would another
build of our own types, which it registers too: only types that ours keeps to itself bear that.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("same_names") / "other_cache.cpp"
OURS = [
    pytest.param("maru_kv_ops._host", id="host"),
    pytest.param("maru_kv_ops._C", id="cuda", marks=pytest.mark.cuda_build),
]
USE_BOTH = """
ours, other = sys.modules[OURS], sys.modules["other_cache"]
for theirs in (other, other.another_build):
    for name in ("TransferDirection", "EngineKVFormat", "PageBufferShapeDesc"):
        assert getattr(theirs, name) is not getattr(ours, name)
    assert int(theirs.TransferDirection.D2H) == int(ours.TransferDirection.D2H) == 1
    assert int(theirs.EngineKVFormat.NL_X_NB_BS_HS) == int(ours.EngineKVFormat.NL_X_NB_BS_HS) == 3
    theirs_shape, our_shape = theirs.PageBufferShapeDesc(), ours.PageBufferShapeDesc()
    theirs_shape.kv_size, our_shape.kv_size = 1, 2
    assert (theirs_shape.kv_size, our_shape.kv_size) == (1, 2)
"""


@pytest.fixture(scope="module")
def other_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other extension, alone in its folder."""
    import pybind11

    folder = tmp_path_factory.mktemp("same-names")
    built = folder / f"other_cache{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{path}" for path in (pybind11.get_include(), sysconfig.get_path("include"))]
    options = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden"]
    subprocess.run(["c++", *options, *includes, SOURCE, "-o", built], check=True)
    return built


def _run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", f"import importlib, sys\n{code}"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("first", ["ours", "other"])
def test_both_import_and_work_in_either_order(other_cache: Path, ours: str, first: str) -> None:
    names = [ours, "other_cache"] if first == "ours" else ["other_cache", ours]
    torch = "import torch\n" if ours.endswith("_C") else ""
    imports = "".join(f"importlib.import_module({name!r})\n" for name in names)
    done = _run(f"{torch}OURS = {ours!r}\n{imports}{USE_BOTH}", other_cache.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("ours", OURS)
def test_our_types_are_local_to_the_module(ours: str) -> None:
    """Where the two are built with unlike versions of pybind11 nothing collides; this still sees
    that ours would."""
    if ours.endswith("_C"):
        import torch  # noqa: F401  # before the extension
    module = importlib.import_module(ours)
    for name in ("TransferDirection", "EngineKVFormat", "PageBufferShapeDesc"):
        marks = [mark for mark in dir(getattr(module, name)) if "pybind11_module_local" in mark]
        assert marks, f"{ours}.{name} is registered for the whole process"


def test_types_that_are_not_local_collide(other_cache: Path) -> None:
    """Without this the tests above could not fail."""
    again = other_cache.name.replace("other_cache", "other_cache_again")
    shutil.copy(other_cache, other_cache.with_name(again))
    done = _run("import other_cache, other_cache_again", other_cache.parent)
    assert done.returncode == 1
    assert "is already registered" in done.stderr
