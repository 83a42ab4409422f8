"""Native extensions. Everything else about the project stands in pyproject.toml.

    maru_shm._cxl_flush   cache-line flushes for CXL memory       a C compiler
    maru_kv_ops._host     copies between host memories            a C++ compiler, pybind11
    maru_kv_ops._C        copies between a GPU and host memory    torch for CUDA, nvcc

An extension that cannot be built is left out and the install goes on: what became of those of
maru_kv_ops is written into the package (``maru_kv_ops/_build.json``), which quotes it where it
matters. One line for each extension says how it went (``pip install -v`` shows it).

    MARU_CXL_FLUSH         unset: build it if that works; 1: fail if it does not; 0: do not build it
    MARU_SKIP_KV_OPS       1: build neither _host nor _C
    MARU_REQUIRE_KV_OPS    1: fail if one of them cannot be built
    TORCH_CUDA_ARCH_LIST   architectures of _C, as torch reads it; unset: those of the visible GPUs
    CUDA_HOME              the toolkit; unset: that of the nvcc on PATH
    MAX_JOBS               compilers at once, as torch reads it
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # a build backend does not run in the folder of its setup.py

from maru_kv_ops import build_record, preflight, vendor  # noqa: E402 # found by the line above
from maru_kv_ops.build_record import BuildState, ExtensionRecord  # noqa: E402 # likewise

FLUSH, HOST, KERNELS = "maru_shm._cxl_flush", "maru_kv_ops._host", "maru_kv_ops._C"
CXL_FLUSH_WISH = os.environ.get("MARU_CXL_FLUSH", "")
WARNINGS = ["-Wall", "-Wextra"]
RETRY = "Correct that, then run: " + build_record.BUILD_STEP


class BuildRefused(Exception):
    """An extension that was required cannot be built. Ends the install."""


@dataclass(frozen=True)
class Planned:
    """The extensions of maru_kv_ops that this build tries, and why not the others."""

    wish: preflight.Wish
    extensions: tuple[Extension, ...]
    skipped: dict[str, ExtensionRecord]
    kernels: preflight.Build | None


def plan() -> Planned:
    """Ask the preflight gate. Raises BuildRefused for what is required and refused."""
    try:
        found = preflight.look()
    except ValueError as error:
        raise BuildRefused(str(error)) from None
    decision = preflight.decide(found)
    if isinstance(decision, preflight.Build):
        trial = preflight.try_compiler(decision.toolkit, preflight.run_command)
        decision = trial or decision
    if found.wish is preflight.Wish.SKIP:
        assert isinstance(decision, preflight.Refusal)
        record = ExtensionRecord(BuildState.SKIPPED, decision.reason)
        return Planned(found.wish, (), {"_C": record, "_host": record}, None)
    extensions: list[Extension] = []
    skipped: dict[str, ExtensionRecord] = {}
    torch = found.torch if isinstance(found.torch, preflight.TorchFacts) else None
    host = host_extension()
    kernels = kernel_extension(decision) if isinstance(decision, preflight.Build) else decision
    for name, extension in ((HOST, host), (KERNELS, kernels)):
        if isinstance(extension, Extension):
            extensions.append(extension)
            continue
        if found.wish is preflight.Wish.REQUIRE:
            raise BuildRefused(
                f"MARU_REQUIRE_KV_OPS=1, but {name} cannot be built: {extension.reason}"
            )
        version = torch.version if torch is not None and name == KERNELS else None
        skipped[name.rpartition(".")[2]] = ExtensionRecord(
            BuildState.SKIPPED, extension.reason, version
        )
    build = decision if isinstance(decision, preflight.Build) else None
    return Planned(found.wish, tuple(extensions), skipped, build)


def flush_extension() -> Extension:
    """Cache-line flushes: one C file."""
    return Extension(
        FLUSH,
        sources=["maru_shm/_cxl_flush.c"],
        extra_compile_args=["-O2", *WARNINGS],
        optional=CXL_FLUSH_WISH != "1",
    )


def host_extension() -> Extension | preflight.Refusal:
    """The kernels' copies, compiled for the host."""
    try:
        import pybind11
    except ImportError as error:  # a build without isolation has what its environment has
        return preflight.Refusal(
            f"pybind11 cannot be imported ({error}). Install it (pip install 'pybind11>=3.0'), "
            f"then run: {build_record.BUILD_STEP}"
        )

    return Extension(
        HOST,
        sources=[
            "maru_kv_ops/binding/host_module.cpp",
            "maru_kv_ops/csrc/host_copy.cpp",
            "maru_kv_ops/csrc/transfers.cpp",
        ],
        include_dirs=[pybind11.get_include()],
        define_macros=sources_macros(),
        extra_compile_args=["-O3", "-std=c++17", "-fvisibility=hidden", "-pthread", *WARNINGS],
        extra_link_args=["-pthread"],
        depends=unit_files(),
        language="c++",
        optional=True,
    )


def kernel_extension(build: preflight.Build) -> Extension | preflight.Refusal:
    """The CUDA extension, as torch builds such extensions."""
    # Read by torch when it is imported next, and when it compiles.
    os.environ["CUDA_HOME"] = str(build.toolkit.root)
    os.environ["TORCH_CUDA_ARCH_LIST"] = build.arch_list
    try:
        from torch.utils.cpp_extension import CUDAExtension
    except Exception as error:  # as with torch itself: its insides raise anything
        return preflight.Refusal(
            f"torch.utils.cpp_extension of torch {build.torch.version} cannot be imported "
            f"({type(error).__name__}: {error}). {RETRY}"
        )

    csrc = HERE / "maru_kv_ops" / "csrc"
    device_sources = sorted(
        str(path.relative_to(HERE))
        for path in csrc.iterdir()
        if path.suffix in (".cu", ".cpp") and path.name != "host_copy.cpp"
    )
    extension: Extension = CUDAExtension(
        KERNELS,
        sources=["maru_kv_ops/binding/cuda_module.cpp", *device_sources],
        define_macros=[
            *sources_macros(),
            macro("MARU_TORCH_VERSION", build.torch.version),
            macro("MARU_CUDA_VERSION", build.toolkit.version),
            macro("MARU_ARCH_LIST", build.arch_list),
        ],
        extra_compile_args={
            # No -std: torch adds the one that its headers need.
            "cxx": ["-O3", "-fvisibility=hidden", *WARNINGS],
            "nvcc": ["-O3", "-Xcompiler", ",".join(WARNINGS)],
        },
        depends=unit_files(),
    )
    extension.optional = True
    return extension


def sources_macros() -> list[tuple[str, str]]:
    """From which kernel sources a module is compiled."""
    return [
        macro("MARU_KERNEL_REVISION", vendor.kernel_revision()),
        macro("MARU_SOURCES_DIGEST", vendor.sources_digest()),
    ]


def macro(name: str, text: str) -> tuple[str, str]:
    """A macro that is a string literal."""
    return (name, f'"{text}"')


def unit_files() -> list[str]:
    """Every native source, so that a change of any is a reason to compile again."""
    package = HERE / "maru_kv_ops"
    return sorted(
        str(path.relative_to(HERE))
        for folder in ("csrc", "binding")
        for path in (package / folder).iterdir()
    )


class BuildWhatWorks(build_ext):
    """``build_ext`` that drops what does not compile, and writes down what became of everything."""

    def run(self) -> None:
        """Build all, then write the record where the package will be read from."""
        into_source = bool(self.inplace) or bool(getattr(self, "editable_mode", False))
        self.records = dict(PLANNED.skipped)
        super().run()
        write_record(self.records, self.build_lib, into_source)

    def build_extension(self, ext: Extension) -> None:
        """Build one, and report either way."""
        try:
            if ext.name == KERNELS:
                self._build_with_torch(ext)
            else:
                with captured_output():
                    super().build_extension(ext)
        except Exception as error:
            reason = preflight.first_error(f"{output_of(error)}\n{error}")
            say(f"{ext.name} OFF: {reason}")
            if ext.name == FLUSH:
                raise  # setuptools goes on without an extension that is optional.
            self._drop(ext, reason)
        else:
            say(f"{ext.name} ON")
            if ext.name != FLUSH:
                self.records[ext.name.rpartition(".")[2]] = built_record(ext)

    def _drop(self, ext: Extension, reason: str) -> None:
        if PLANNED.wish is preflight.Wish.REQUIRE:
            raise BuildRefused(f"MARU_REQUIRE_KV_OPS=1, but {ext.name} does not compile: {reason}")
        name = ext.name.rpartition(".")[2]
        self.records[name] = ExtensionRecord(
            BuildState.FAILED, f"it does not compile: {reason}. {RETRY}"
        )

    def _build_with_torch(self, ext: Extension) -> None:
        from torch.utils.cpp_extension import BuildExtension

        command = BuildExtension(self.distribution)
        for option in ("build_lib", "build_temp", "force", "debug", "plat_name"):
            setattr(command, option, getattr(self, option))
        command.ensure_finalized()
        command.inplace = False  # what comes of it is copied with the others
        command.extensions = [ext]
        with captured_output():
            command.run()


class BuildRecordToo(build_py):
    """``build_py`` that writes the record of a build without extensions, which is all it knows."""

    def run(self) -> None:
        """Build, and say what is skipped; ``build_ext`` comes later and overwrites the record."""
        super().run()
        into_source = bool(getattr(self, "editable_mode", False))
        write_record(PLANNED.skipped, self.build_lib, into_source)
        for name, record in PLANNED.skipped.items():
            say(f"maru_kv_ops.{name} OFF: {record.reason}")


def write_record(
    records: dict[str, ExtensionRecord], build_lib: str | None, into_source: bool
) -> None:
    """Write it where the package will be read from: the wheel's folder, or the checkout.

    What the record calls not built is not there either: a module of an earlier build, perhaps for
    another torch, must not pass for one of this.
    """
    folders = [] if build_lib is None else [Path(build_lib) / "maru_kv_ops"]
    if into_source:
        folders.append(HERE / "maru_kv_ops")
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        build_record.write(records, folder / build_record.RECORD.name)
        for name, record in records.items():
            if record.state is not BuildState.BUILT:
                for old in folder.glob(f"{name}.*.so"):
                    old.unlink()


PLANNED: Planned


def built_record(ext: Extension) -> ExtensionRecord:
    """What a module was made with."""
    build = PLANNED.kernels if ext.name == KERNELS else None
    compiler = host_compiler()
    if build is None:
        return ExtensionRecord(BuildState.BUILT, compiler=compiler)
    return ExtensionRecord(
        BuildState.BUILT,
        compiler=compiler,
        torch=build.torch.version,
        cuda=build.toolkit.version,
        arch_list=build.arch_list,
    )


def host_compiler() -> str | None:
    """What the C++ compiler of this build says that it is."""
    command = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    said = preflight.run_command([*shlex.split(command)[:1], "--version"]).stdout.splitlines()
    return said[0].strip() if said else None


def say(line: str) -> None:
    """One line of the build's output, whatever else is in it."""
    print(f"maru build: {line}", file=sys.stderr, flush=True)


@contextmanager
def captured_output() -> Iterator[None]:
    """Show what compilers print, and attach it to what is raised, which says less."""
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        failure: BaseException | None = None
        try:
            yield
        except Exception as error:
            failure = error
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in enumerate(kept, start=1):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            text = file.read().decode(errors="replace")
            sys.stderr.write(text)
            if failure is not None:
                failure.add_note(text)


def output_of(error: Exception) -> str:
    """What compilers printed before this was raised."""
    return "\n".join(getattr(error, "__notes__", []))


def main() -> None:
    """Decide, then hand over to setuptools."""
    global PLANNED
    PLANNED = plan()
    extensions = list(PLANNED.extensions)
    if CXL_FLUSH_WISH == "0":
        say(f"{FLUSH} OFF: MARU_CXL_FLUSH=0")
    else:
        extensions.insert(0, flush_extension())
    setup(
        ext_modules=extensions,
        cmdclass={"build_ext": BuildWhatWorks, "build_py": BuildRecordToo},
    )


main()
