"""Whether ``maru_kv_ops._C`` can be built here: asked before anything is compiled.

    wish      MARU_SKIP_KV_OPS, MARU_REQUIRE_KV_OPS
      |
    torch     importable, built for CUDA
      |
    toolkit   found (CUDA_HOME, else the nvcc on PATH is asked where its toolkit is), headers there,
      |       of torch's CUDA major version
    target    TORCH_CUDA_ARCH_LIST, else the GPUs that are visible
      |
    trial     nvcc compiles two lines with this host compiler

The first refusal decides, and is a whole sentence with what to do. ``decide`` is pure; ``look``
gathers the facts with subprocesses and environment variables. torch is imported by ``look`` only,
and CUDA is never initialised. Called by ``setup.py``; ``maru doctor`` and the installed package
quote what was decided then (``build_record``).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from maru_kv_ops.build_record import BUILD_STEP

TIMEOUT_S = 120
"""For one call of nvcc or nvidia-smi."""


class Wish(Enum):
    """What the environment variables ask for."""

    IF_POSSIBLE = "if possible"
    SKIP = "MARU_SKIP_KV_OPS"
    REQUIRE = "MARU_REQUIRE_KV_OPS"


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch that the build would be for."""

    version: str
    cuda: str | None
    """Its CUDA version; None for a build without."""


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A CUDA toolkit that has what a build needs."""

    root: Path
    version: str
    """As nvcc says it: "13.0"."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why something is not there, as the middle of a sentence or a whole one."""

    text: str


@dataclass(frozen=True, slots=True)
class Environment:
    """What was found. Facts that were not asked for because an earlier one decides are Problems."""

    wish: Wish
    isolated: bool
    """Whether this is a build environment that pip made and that hides the installed packages."""
    torch: TorchFacts | Problem
    toolkit: Toolkit | Problem
    arch_list: str | None
    """TORCH_CUDA_ARCH_LIST."""
    visible_archs: tuple[str, ...]
    """Compute capabilities of the GPUs that are visible: "9.0"."""


@dataclass(frozen=True, slots=True)
class Build:
    """The extension can be tried."""

    torch: TorchFacts
    toolkit: Toolkit
    arch_list: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """It is left out; ``reason`` is complete."""

    reason: str


def wish_of(environ: Mapping[str, str]) -> Wish:
    """Read the two switches. Raises ValueError if both are set, or one is neither 0 nor 1."""
    on = {name for name in (Wish.SKIP, Wish.REQUIRE) if _is_on(environ, name.value)}
    if len(on) == 2:
        raise ValueError(f"{Wish.SKIP.value} and {Wish.REQUIRE.value} are both 1; unset one")
    return on.pop() if on else Wish.IF_POSSIBLE


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    value = environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} is {value!r}; it can be 1, 0 or unset")
    return value == "1"


def decide(found: Environment) -> Build | Refusal:
    """Build, or the first reason not to."""
    if found.wish is Wish.SKIP:
        return Refusal(f"skipped because {Wish.SKIP.value}=1. Unset it and run: {BUILD_STEP}")
    if isinstance(found.torch, Problem):
        if found.isolated:
            return Refusal(
                "torch is not in the isolated environment that pip built this package in, and what "
                f"is installed outside is hidden from it. Run: {BUILD_STEP}"
            )
        return Refusal(f"{found.torch.text}. Install torch for CUDA, then run: {BUILD_STEP}")
    if found.torch.cuda is None:
        return Refusal(
            f"torch {found.torch.version} has no CUDA. On a machine with a GPU install a build of "
            f"torch for CUDA, then run: {BUILD_STEP}"
        )
    if isinstance(found.toolkit, Problem):
        return Refusal(f"{found.toolkit.text}. Then run: {BUILD_STEP}")
    if found.toolkit.version.split(".")[0] != found.torch.cuda.split(".")[0]:
        return Refusal(
            f"the toolkit in {found.toolkit.root} is CUDA {found.toolkit.version}, torch "
            f"{found.torch.version} was built with CUDA {found.torch.cuda}; their major versions "
            f"must be equal. Set CUDA_HOME to a toolkit of CUDA {found.torch.cuda}, then run: "
            f"{BUILD_STEP}"
        )
    arch_list = found.arch_list or ";".join(dict.fromkeys(sorted(found.visible_archs)))
    if not arch_list:
        return Refusal(
            "no GPU is visible here and TORCH_CUDA_ARCH_LIST is not set, so there is no "
            "architecture to compile for. Set it to that of your GPUs (9.0 for H100 and H200, 8.0 "
            f"for A100; several with ;), then run: {BUILD_STEP}"
        )
    return Build(found.torch, found.toolkit, arch_list)


def refusal_of_trial(output: str, toolkit: Toolkit) -> Refusal:
    """What a failed trial says: the host compiler is not accepted, or something is missing."""
    return Refusal(
        f"nvcc {toolkit.version} of {toolkit.root} cannot compile two lines with the host compiler "
        f"here: {first_error(output)}. Choose another one (NVCC_PREPEND_FLAGS='-ccbin g++-12', "
        f"CXX=g++-12), then run: {BUILD_STEP}"
    )


def first_error(output: str) -> str:
    """The line of a compiler's output that says what is wrong, else its last one."""
    lines = [" ".join(line.split()) for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(fatal )?error\b", line, re.IGNORECASE)]
    return (telling or lines or ["no output"])[0 if telling else -1][:400]


# ---------------------------------------------------------------------------- looking


def look(environ: Mapping[str, str] = os.environ) -> Environment:
    """Gather the facts, in order, up to the first that decides. Raises ValueError (switches)."""
    unasked = Problem("not asked")
    wish = wish_of(environ)
    isolated = any("pip-build-env" in entry for entry in sys.path)
    torch: TorchFacts | Problem = unasked
    toolkit: Toolkit | Problem = unasked
    visible: tuple[str, ...] = ()
    arch_list = environ.get("TORCH_CUDA_ARCH_LIST") or None
    if wish is not Wish.SKIP:
        torch = find_torch()
    if isinstance(torch, TorchFacts) and torch.cuda is not None:
        toolkit = find_toolkit(environ)
    if isinstance(toolkit, Toolkit) and arch_list is None:
        visible = visible_archs(environ)
    return Environment(wish, isolated, torch, toolkit, arch_list, visible)


def find_torch() -> TorchFacts | Problem:
    """Import torch, which does not initialise CUDA."""
    try:
        import torch
        import torch.version
    except Exception as error:  # a torch that is broken raises anything, from inside its libraries
        return Problem(f"torch cannot be imported ({type(error).__name__}: {error})")
    cuda: str | None = torch.version.cuda
    return TorchFacts(str(torch.__version__), cuda)


def find_toolkit(environ: Mapping[str, str]) -> Toolkit | Problem:
    """The toolkit that CUDA_HOME names, else that of the nvcc on PATH."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    if home:
        nvcc = Path(home) / "bin" / "nvcc"
        if not nvcc.is_file():
            other = f"; the nvcc on PATH is {on_path}" if on_path else ""
            return Problem(
                f"CUDA_HOME is {home}, which has no bin/nvcc{other}. Set it to a CUDA toolkit, or "
                "unset it"
            )
        root = Path(home)
    elif on_path is None:
        return Problem("no CUDA toolkit: nvcc is not on PATH and CUDA_HOME is not set. Install one")
    else:
        nvcc = Path(on_path)
        asked = _root_that_nvcc_names(nvcc)
        if asked is None:
            return Problem(
                f"{nvcc} does not say where its toolkit is. Set CUDA_HOME to the toolkit's root"
            )
        root = asked
    if not any((root / include / "cuda_runtime.h").is_file() for include in _INCLUDES):
        return Problem(
            f"the CUDA toolkit of {nvcc} is {root}, which has no include/cuda_runtime.h. Set "
            "CUDA_HOME to the root of a complete toolkit"
        )
    said = _output_of([str(nvcc), "--version"])
    version = re.search(r"release (\d+\.\d+)", said)
    if version is None:
        return Problem(f"{nvcc} --version names no release: {first_error(said)}. Repair it")
    return Toolkit(root.resolve(), version.group(1))


_INCLUDES = ("include", "targets/x86_64-linux/include", "targets/sbsa-linux/include")


def _root_that_nvcc_names(nvcc: Path) -> Path | None:
    """Ask nvcc: it may be a script that calls another one, whose parent folder is no toolkit."""
    top = re.search(r"^#\$ TOP=(.+)$", _output_of([str(nvcc), "--dryrun", "x.cu"]), re.MULTILINE)
    return None if top is None else Path(os.path.normpath(top.group(1).strip()))


def visible_archs(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Compute capabilities of the GPUs that the driver lists; none where there is no driver."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return ()
    said = _output_of([command, "--query-gpu=compute_cap", "--format=csv,noheader"])
    return tuple(
        line.strip() for line in said.splitlines() if re.fullmatch(r"\d+\.\d+", line.strip())
    )


def try_compiler(
    toolkit: Toolkit, run: Callable[[list[str]], subprocess.CompletedProcess[str]]
) -> Refusal | None:
    """Compile two lines; a host compiler that nvcc does not accept shows here, in a second."""
    with tempfile.TemporaryDirectory(prefix="maru-preflight-") as folder:
        source = Path(folder) / "trial.cu"
        source.write_text("#include <cuda_runtime.h>\n__global__ void trial() {}\n")
        done = run(
            [str(toolkit.root / "bin" / "nvcc"), "-c", str(source), "-o", f"{folder}/trial.o"]
        )
        if done.returncode == 0:
            return None
        return refusal_of_trial(done.stdout + done.stderr, toolkit)


def run_command(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run, and take its output; a command that cannot run or hangs has failed."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _output_of(command: list[str]) -> str:
    done = run_command(command)
    return done.stdout + done.stderr
