"""Maru depends on no other KV cache project: none is named in an import, none is needed by one.

``tests/e2e/test_no_other_cache.py`` shows the same of a running engine.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKER = Path(__file__).with_name("no_other_cache")
PACKAGES = ("maru_shm", "maru_kv_ops", "maru_vllm", "maru_cli")

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys
names = []
for package in sys.argv[1:]:
    found = importlib.import_module(package)
    names += [package] + [m.name for m in pkgutil.walk_packages(found.__path__, package + ".")]
for name in names:
    if not name.endswith(("._C", ".__main__")):  # _C needs its torch, not any torch
        importlib.import_module(name)
print(len(names))
"""


def _other_caches() -> tuple[str, ...]:
    """Read, not imported: importing the list blocks the names in this process too."""
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse((BLOCKER / "sitecustomize.py").read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "OTHER_CACHES"
    ]
    assert isinstance(names, tuple)
    return names


def _named_modules(source: str) -> Iterator[str]:
    """Every module that the source imports, also through a string handed to an import function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_of_another_cache(name: str, other_caches: tuple[str, ...]) -> bool:
    """Also another project's connector inside vLLM: ``vllm...v1.lmcache_connector``."""
    return all(part.isidentifier() for part in name.split(".")) and any(
        part == cache or part.startswith(f"{cache}_")
        for part in name.lower().split(".")
        for cache in other_caches
    )


def test_no_module_imports_another_kv_cache_project() -> None:
    other_caches = _other_caches()
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)} names {name}"
        for path in [*files, ROOT / "setup.py"]
        for name in _named_modules(path.read_text())
        if _is_of_another_cache(name, other_caches)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "import lmcache",
        "import lmcache.v1.config as config",
        "def f():\n    try:\n        from mooncake.store import Store\n    except ImportError: ...",
        "from vllm.distributed.kv_transfer.kv_connector.v1 import lmcache_connector",
        "importlib.import_module('nixl._api')",
    ],
)
def test_the_search_finds_imports_of_every_kind(source: str) -> None:
    assert any(_is_of_another_cache(name, _other_caches()) for name in _named_modules(source))


def _run_blocked(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(BLOCKER)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_blocker_blocks() -> None:
    for name in ("lmcache", "mooncake", "nixl", "flexkv", "vllm_kvblockd"):
        done = _run_blocked("-c", f"import {name}")
        assert done.returncode == 1
        assert f"ModuleNotFoundError: import of {name} halted" in done.stderr


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="maru_vllm needs vLLM")
def test_every_module_imports_where_no_other_kv_cache_project_is() -> None:
    done = _run_blocked("-c", IMPORT_EVERYTHING, *PACKAGES)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 50
