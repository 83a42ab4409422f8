"""Small trees to build, and the environments to build them in.

A tree has the project's own ``setup.py`` and package, with native sources that are a few lines
long, so that a build takes a second. Toolkits and torch are stubs: scripts that pose as nvcc, a
package that poses as torch. What really compiles CUDA is marked ``cuda_build``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maru_kv_ops import build_record
from maru_kv_ops.build_record import ExtensionRecord

ROOT = Path(__file__).parents[2]
EMPTY_MODULE = """
#include <Python.h>
static PyModuleDef module = {{PyModuleDef_HEAD_INIT, "{name}", nullptr, -1, nullptr}};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_{name}() {{
    return PyModule_Create(&module);
}}
"""
SWITCHES = (
    "CUDA_HOME",
    "CUDA_PATH",
    "MARU_CXL_FLUSH",
    "MARU_REQUIRE_KV_OPS",
    "MARU_SKIP_KV_OPS",
    "NVCC_APPEND_FLAGS",
    "PYTHONPATH",
    "TORCH_CUDA_ARCH_LIST",
)


@dataclass(frozen=True)
class Built:
    """What a build left behind."""

    status: int
    output: str
    tree: Path

    @property
    def records(self) -> dict[str, ExtensionRecord]:
        return build_record.read(self.tree / "maru_kv_ops" / "_build.json")

    def modules(self) -> list[str]:
        """Names of the extensions that lie in the package."""
        return sorted(path.name.split(".")[0] for path in self.tree.glob("maru_kv_ops/*.so"))


class BuildTree:
    """A checkout in small."""

    def __init__(self, path: Path) -> None:
        self.path = path
        package = path / "maru_kv_ops"
        shutil.copytree(
            ROOT / "maru_kv_ops",
            package,
            ignore=shutil.ignore_patterns("*.so", "__pycache__", "_build.json", "csrc", "binding"),
        )
        for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "VENDOR.md"):
            shutil.copy(ROOT / name, path)
        (package / "csrc").mkdir()
        (package / "binding").mkdir()
        for name in ("transfers.cpp", "host_copy.cpp"):
            (package / "csrc" / name).write_text("")
        self.host_source.write_text(EMPTY_MODULE.format(name="_host"))
        (package / "binding" / "cuda_module.cpp").write_text(EMPTY_MODULE.format(name="_C"))
        self.kernel_source.write_text("__global__ void nothing() {}\n")

    @property
    def host_source(self) -> Path:
        return self.path / "maru_kv_ops" / "binding" / "host_module.cpp"

    @property
    def kernel_source(self) -> Path:
        return self.path / "maru_kv_ops" / "csrc" / "kernel.cu"

    def build(
        self, environ: Mapping[str, str | Path], python: tuple[str, ...] = (sys.executable,)
    ) -> Built:
        """Build in place, in this process's environment less all switches, plus ``environ``."""
        inherited = {name: value for name, value in os.environ.items() if name not in SWITCHES}
        done = subprocess.run(
            [*python, "setup.py", "build_py", "build_ext", "--inplace"],
            cwd=self.path,
            env={**inherited, "MARU_CXL_FLUSH": "0", **{k: str(v) for k, v in environ.items()}},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        return Built(done.returncode, done.stdout + done.stderr, self.path)


def stub_torch(folder: Path, cuda: str | None, version: str = "2.14.1+stub") -> Path:
    """A folder for PYTHONPATH with a package that says that it is torch."""
    package = folder / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__version__ = {version!r}\nfrom . import version\n")
    (package / "version.py").write_text(f"cuda = {cuda!r}\n")
    return folder


def stub_toolkit(root: Path, version: str = "13.0", compiles: str = "exit 0") -> Path:
    """A toolkit whose nvcc answers like one; ``compiles``: what it does when it is to compile."""
    (root / "include").mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").write_text("")
    script(
        root / "bin" / "nvcc",
        f"""
        case "$1" in
          --version) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
          --dryrun) echo "#$ TOP={root}/bin/.." >&2 ;;
          *) {compiles} ;;
        esac
        """,
    )
    return root


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(text))
    path.chmod(0o755)
    return path


def path_with(first: Path) -> str:
    """PATH with a folder in front, and without the machine's own CUDA tools behind it."""
    others = [
        entry
        for entry in os.environ["PATH"].split(os.pathsep)
        if not any((Path(entry) / tool).exists() for tool in ("nvcc", "nvidia-smi"))
    ]
    return os.pathsep.join([str(first), *others])
