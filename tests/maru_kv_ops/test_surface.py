"""What ``maru_kv_ops`` says and shows, with the extension and in every way without it.

Most cases run in a process of their own, over a copy of the package with a stand-in for the
extension, and a stand-in for torch: loading happens once per process. Nothing here needs torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import maru_kv_ops
from maru_kv_ops import build_record, extension
from maru_kv_ops.build_record import BUILD_STEP, BuildState, ExtensionRecord

GUARDS = ("test_format_agreement", "test_header_interface", "test_provenance", "test_vendor")
PACKAGE = Path(extension.__file__).parent
BUILT = ExtensionRecord(BuildState.BUILT, torch="2.14.1+cu130", cuda="13.0", arch_list="9.0")

WORKING_C = """
import sys
torch_came_first = "torch" in sys.modules
with open(__file__ + ".loads", "a") as log:
    log.write("x")
def build_info():
    return {
        "kernel_revision": "a" * 40, "sources_digest": "d" * 64, "cuda": "13.0",
        "torch": "2.14.1+cu130", "arch_list": "9.0", "another fact": 1,
    }
def multi_layer_kv_transfer(): return "multi"
def single_layer_kv_transfer(): return "single"
def multi_layer_block_kv_transfer(): return "blocks"
def run_plan(): return "plan"
class TransferDirection: ...
class CopyPath: ...
class EngineKVFormat: ...
class PageBufferShapeDesc: ...
"""
UNDEFINED_SYMBOL_C = """
void _ZN3c104cuda20getCurrentCUDAStreamEa(void);
void *PyInit__C(void) { _ZN3c104cuda20getCurrentCUDAStreamEa(); return 0; }
"""


class Package:
    """A copy of the package's Python files, in a folder that Python finds first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "maru_kv_ops"
        self.folder.mkdir()
        for module in PACKAGE.glob("*.py"):
            shutil.copy(module, self.folder)
        self.torch(version="2.14.1+cu130")

    def torch(self, *, version: str = "", source: str = "") -> None:
        (self.root / "torch.py").write_text(source or f"__version__ = '{version}'\n")

    def record(self, record: ExtensionRecord) -> None:
        build_record.write({"_C": record}, self.folder / "_build.json")

    def extension(self, source: str) -> None:
        (self.folder / "_C.py").write_text(source)

    def run(self, code: str) -> str:
        """What the code prints. It has ``maru_kv_ops`` imported."""
        done = subprocess.run(
            [sys.executable, "-c", f"import sys, maru_kv_ops\n{code}"],
            cwd=self.root,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(self.root)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def error(self) -> str:
        """What ``import_error`` says, after a look at everything that has to agree with it."""
        said = self.run(
            "assert maru_kv_ops.is_available() is False\n"
            "assert maru_kv_ops.build_info() is None\n"
            "print(maru_kv_ops.import_error())"
        )
        assert said.startswith("maru_kv_ops._C ")
        assert said.count(BUILD_STEP) == 1
        assert "circular" not in said
        assert len(said.splitlines()) == 1
        return said


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_importing_the_package_imports_neither_torch_nor_the_extension(package: Package) -> None:
    package.extension(WORKING_C)
    looking = "print([n for n in ('torch', 'numpy', 'maru_kv_ops._C') if n in sys.modules])"
    assert package.run(looking) == "[]"
    assert package.run(f"maru_kv_ops.is_available()\n{looking}") == "['torch', 'maru_kv_ops._C']"


def test_the_extension_is_loaded_with_torch_before_it(package: Package) -> None:
    package.extension(WORKING_C)
    said = package.run(
        "assert maru_kv_ops.is_available() is True\n"
        "assert maru_kv_ops.import_error() is None\n"
        "assert maru_kv_ops._C.torch_came_first\n"
        "print(maru_kv_ops.build_info())"
    )
    assert said == str(
        extension.BuildInfo("a" * 40, "d" * 64, cuda="13.0", torch="2.14.1+cu130", arch_list="9.0")
    )


def test_the_extensions_names_are_the_packages(package: Package) -> None:
    package.extension(WORKING_C)
    package.run(
        "from maru_kv_ops import extension\n"
        "for name in extension.PUBLIC_NAMES:\n"
        "    assert getattr(maru_kv_ops, name) is getattr(maru_kv_ops._C, name), name"
    )
    assert package.run("from maru_kv_ops import _C; print(_C.run_plan())") == "plan"


@pytest.mark.parametrize("name", ["_C", *extension.PUBLIC_NAMES])
def test_a_name_of_a_missing_extension_raises_an_error_with_the_reason_and_the_build_step(
    package: Package, name: str
) -> None:
    package.record(ExtensionRecord(BuildState.SKIPPED, "the moon is full"))
    said = package.run(
        f"try:\n    maru_kv_ops.{name}\n"
        "except AttributeError as error:\n    print(error)\nelse:\n    raise SystemExit(1)"
    )
    assert said.startswith(f"maru_kv_ops.{name} is not available: ")
    assert "the moon is full" in said
    assert BUILD_STEP in said


@pytest.mark.parametrize("available", [True, False])
def test_an_unknown_name_is_an_ordinary_attribute_error(package: Package, available: bool) -> None:
    if available:
        package.extension(WORKING_C)
    said = package.run(
        "try:\n    maru_kv_ops.no_such_thing\nexcept AttributeError as error:\n    print(error)\n"
        "assert 'torch' not in sys.modules"
    )
    assert said == "module 'maru_kv_ops' has no attribute 'no_such_thing'"


def test_every_name_of_the_surface_can_be_asked_for_here() -> None:
    for name in extension.PUBLIC_NAMES:
        assert hasattr(maru_kv_ops, name) is maru_kv_ops.is_available()
    assert (maru_kv_ops.import_error() is None) is maru_kv_ops.is_available()
    assert (maru_kv_ops.build_info() is None) is not maru_kv_ops.is_available()


@pytest.mark.parametrize("state", [BuildState.SKIPPED, BuildState.FAILED])
def test_the_reason_of_the_build_is_quoted(package: Package, state: BuildState) -> None:
    package.record(ExtensionRecord(state, "nvcc 12.1 is there, torch is built for CUDA 13.0."))
    assert package.error() == (
        f"maru_kv_ops._C was not built: nvcc 12.1 is there, torch is built for CUDA 13.0. "
        f"To build it: {BUILD_STEP}"
    )


def test_a_reason_that_names_the_build_step_is_not_given_it_twice(package: Package) -> None:
    package.record(ExtensionRecord(BuildState.SKIPPED, f"no torch. Run {BUILD_STEP}"))
    package.error()


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"_C": {"state": "odd"}}', '{"_C": 1}'])
def test_without_a_readable_record_the_folder_is_named(
    package: Package, content: str | None
) -> None:
    if content is not None:
        (package.folder / "_build.json").write_text(content)
    assert f"is not in {package.folder}, and no build was recorded there" in package.error()


def test_a_built_file_that_is_gone_is_said_to_be_gone(package: Package) -> None:
    package.record(BUILT)
    assert f"was built, but its file is no longer in {package.folder}" in package.error()


def test_a_file_for_another_python_is_named(package: Package) -> None:
    package.record(BUILT)
    (package.folder / "_C.cpython-38-x86_64-linux-gnu.so").write_text("")
    assert "is there as _C.cpython-38-x86_64-linux-gnu.so, this Python imports" in package.error()


def test_torch_that_cannot_be_imported_is_the_cause(package: Package) -> None:
    package.extension(WORKING_C)
    package.torch(source="raise ImportError('libcudart.so.13: cannot open shared object file')")
    assert (
        "needs torch, which cannot be imported here: ImportError: libcudart.so.13: cannot open "
        "shared object file"
    ) in package.error()


def test_pythons_guess_about_a_circular_import_is_never_passed_on(package: Package) -> None:
    package.extension("from maru_kv_ops import extension\nimport maru_kv_ops.later")
    (package.folder / "later.py").write_text("from maru_kv_ops._C import run_plan\n")
    said = package.error()
    assert "cannot be loaded: ImportError: cannot import name 'run_plan'" in said


def test_a_replaced_torch_is_told_from_the_undefined_symbol(package: Package) -> None:
    source = package.root / "broken.c"
    source.write_text(UNDEFINED_SYMBOL_C)
    built = package.folder / "_C.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, source], check=True)
    package.record(BUILT)
    package.torch(version="2.13.0+cpu")
    said = package.error()
    assert "was built for torch 2.14.1+cu130, torch 2.13.0+cpu is installed here: " in said
    assert "undefined symbol: _ZN3c104cuda20getCurrentCUDAStreamEa" in said

    (package.folder / "_build.json").unlink()
    assert "was built for another torch, torch 2.13.0+cpu is installed here: " in package.error()


def test_a_torch_of_another_version_is_refused_even_if_the_extension_loads(
    package: Package,
) -> None:
    package.extension(WORKING_C)
    package.torch(version="2.15.0+cu130")
    assert "was built for torch 2.14.1+cu130, torch 2.15.0+cu130 is installed" in package.error()


def test_any_other_failure_is_quoted(package: Package) -> None:
    package.extension("raise RuntimeError('generic_type: type \"X\" is\\nalready registered!')")
    assert (
        'cannot be loaded: RuntimeError: generic_type: type "X" is already registered!'
    ) in package.error()


@pytest.mark.parametrize("works", [True, False])
def test_many_threads_that_ask_at_once_load_it_once(package: Package, works: bool) -> None:
    package.extension(WORKING_C if works else f"{WORKING_C}\nraise OSError('no')")
    package.torch(source="import time; time.sleep(0.1); __version__ = '2.14.1+cu130'")
    package.run(
        "import threading\n"
        "answers = []\n"
        "ask = lambda: answers.append(maru_kv_ops.is_available())\n"
        "threads = [threading.Thread(target=ask) for _ in range(16)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        f"assert answers == [{works}] * 16, answers"
    )
    assert (package.folder / "_C.py.loads").read_text() == "x"


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    records = {
        "_C": BUILT,
        "_host": ExtensionRecord(BuildState.FAILED, 'cc said: "no"\u2026', compiler="c++ 12"),
    }
    build_record.write(records, tmp_path / "record.json")
    assert build_record.read(tmp_path / "record.json") == records
    assert build_record.read(tmp_path / "none.json") == {}


def test_a_record_of_a_newer_build_still_gives_what_is_known(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    build_record.write({"_C": replace(BUILT, reason="r")}, record)
    record.write_text(record.read_text().replace('"torch"', '"new fact": 1, "torch"'))
    assert build_record.read(record) == {"_C": replace(BUILT, reason="r")}


def test_the_guards_run_where_torch_is_missing() -> None:
    """None of them is skipped together with tests that need it."""
    here = Path(__file__).parent
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['torch'] = sys.modules['vllm'] = None\n"
            "import pytest; raise SystemExit(pytest.main(sys.argv[1:]))",
            *("-q", "-rs", "-p", "no:cacheprovider"),
            *(str(here / f"{name}.py") for name in GUARDS),
        ],
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "torch" not in done.stdout
