"""Every way in which the build of the CUDA extension was seen to end, and what must come of it.

A refusal or a compile error drops the extension, never the install, and the reason is in the
package afterwards.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from build_tree import (
    BuildTree,
    Built,
    path_with,
    script,
    stub_toolkit,
    stub_torch,
)

from maru_kv_ops.build_record import BUILD_STEP, BuildState


@pytest.fixture
def tree(tmp_path: Path) -> BuildTree:
    (tmp_path / "tree").mkdir()
    return BuildTree(tmp_path / "tree")


@pytest.fixture
def cuda_torch(tmp_path: Path) -> Path:
    return stub_torch(tmp_path / "torch", cuda="13.0")


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    return stub_toolkit(tmp_path / "toolkit")


def dropped(built: Built, *says: str) -> str:
    """The install went on without the extension; the reason, which says all of this."""
    assert built.status == 0, built.output
    record = built.records["_C"]
    assert record.state is BuildState.SKIPPED
    for part in (*says, BUILD_STEP):
        assert part in record.reason
    assert f"maru build: maru_kv_ops._C OFF: {record.reason}" in built.output
    assert built.modules() == ["_host"]
    host = built.records["_host"]
    assert host.state is BuildState.BUILT
    assert host.compiler
    return record.reason


def test_no_gpu_visible_and_no_arch_list(tree: BuildTree, cuda_torch: Path, toolkit: Path) -> None:
    environ = {"PYTHONPATH": cuda_torch, "CUDA_HOME": toolkit, "PATH": path_with(toolkit / "bin")}
    dropped(tree.build(environ), "TORCH_CUDA_ARCH_LIST", "no GPU")


def test_nvcc_is_a_wrapper_outside_the_toolkit(
    tree: BuildTree, cuda_torch: Path, toolkit: Path, tmp_path: Path
) -> None:
    """The gate goes on to the next question, so it found the toolkit behind the script."""
    wrapper = script(tmp_path / "bin" / "nvcc", f'exec {toolkit}/bin/nvcc "$@"\n')
    environ = {"PYTHONPATH": cuda_torch, "PATH": path_with(wrapper.parent)}
    dropped(tree.build(environ), "TORCH_CUDA_ARCH_LIST")


def test_nvcc_is_a_wrapper_that_does_not_say_where_its_toolkit_is(
    tree: BuildTree, cuda_torch: Path, tmp_path: Path
) -> None:
    wrapper = script(tmp_path / "bin" / "nvcc", "echo 'release 13.0'\n")
    environ = {"PYTHONPATH": cuda_torch, "PATH": path_with(wrapper.parent)}
    dropped(tree.build(environ), str(wrapper), "CUDA_HOME")


def test_the_root_that_nvcc_names_is_no_toolkit(
    tree: BuildTree, cuda_torch: Path, toolkit: Path
) -> None:
    (toolkit / "include" / "cuda_runtime.h").unlink()
    environ = {"PYTHONPATH": cuda_torch, "PATH": path_with(toolkit / "bin")}
    dropped(tree.build(environ), str(toolkit), "cuda_runtime.h", "CUDA_HOME")


def test_cuda_home_names_no_toolkit(tree: BuildTree, cuda_torch: Path, toolkit: Path) -> None:
    environ = {
        "PYTHONPATH": cuda_torch,
        "CUDA_HOME": "/nowhere",
        "PATH": path_with(toolkit / "bin"),
    }
    dropped(tree.build(environ), "/nowhere", str(toolkit / "bin" / "nvcc"))


def test_no_toolkit_at_all(tree: BuildTree, cuda_torch: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    environ = {"PYTHONPATH": cuda_torch, "PATH": path_with(tmp_path / "empty")}
    dropped(tree.build(environ), "nvcc is not on PATH")


def test_torch_is_a_cpu_build(tree: BuildTree, toolkit: Path, tmp_path: Path) -> None:
    torch = stub_torch(tmp_path / "cpu", cuda=None, version="2.13.0+cpu")
    environ = {"PYTHONPATH": torch, "CUDA_HOME": toolkit, "TORCH_CUDA_ARCH_LIST": "9.0"}
    dropped(tree.build(environ), "torch 2.13.0+cpu has no CUDA")


def test_nvcc_and_torch_differ_in_the_major_version(
    tree: BuildTree, cuda_torch: Path, tmp_path: Path
) -> None:
    older = stub_toolkit(tmp_path / "older", version="12.9")
    environ = {"PYTHONPATH": cuda_torch, "CUDA_HOME": older, "TORCH_CUDA_ARCH_LIST": "9.0"}
    dropped(tree.build(environ), "12.9", "13.0", "CUDA_HOME")


def test_the_host_compiler_is_not_accepted(
    tree: BuildTree, cuda_torch: Path, tmp_path: Path
) -> None:
    complaint = "#error -- unsupported GNU version! gcc versions later than 15 are not supported!"
    toolkit = stub_toolkit(tmp_path / "picky", compiles=f"echo '{complaint}' >&2; exit 1")
    environ = {"PYTHONPATH": cuda_torch, "CUDA_HOME": toolkit, "TORCH_CUDA_ARCH_LIST": "9.0"}
    dropped(tree.build(environ), complaint)


def overlay_of(folder: Path, *names: str) -> Path:
    """As pip isolates: a folder with some of the interpreter's packages, to go with python -S."""
    overlay = folder / "pip-build-env-test" / "overlay"
    overlay.mkdir(parents=True)
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("setuptools", "_distutils_hack", "pkg_resources", "wheel", *names):
        for found in packages.glob(f"{name}*"):
            (overlay / found.name).symlink_to(found)
    return overlay


def test_an_isolated_build_does_not_see_torch(tree: BuildTree, tmp_path: Path) -> None:
    overlay = overlay_of(tmp_path, "pybind11")
    built = tree.build({"PYTHONPATH": overlay}, python=(sys.executable, "-S"))
    reason = dropped(built, "isolated")
    assert "torch" in reason


def test_pybind11_is_missing_in_a_build_without_isolation(tree: BuildTree, tmp_path: Path) -> None:
    environ = {"PYTHONPATH": overlay_of(tmp_path)}
    built = tree.build(environ, python=(sys.executable, "-S"))
    assert built.status == 0, built.output
    record = built.records["_host"]
    assert record.state is BuildState.SKIPPED
    assert "pip install 'pybind11" in record.reason
    assert BUILD_STEP in record.reason
    assert built.modules() == []


def test_torch_cannot_build_extensions(tree: BuildTree, cuda_torch: Path, toolkit: Path) -> None:
    """Everything is there that the gate asks for, and torch's own part of it does not import."""
    environ = {"PYTHONPATH": cuda_torch, "CUDA_HOME": toolkit, "TORCH_CUDA_ARCH_LIST": "9.0"}
    dropped(tree.build(environ), "torch.utils.cpp_extension", "ModuleNotFoundError")


def test_skip(tree: BuildTree) -> None:
    built = tree.build({"MARU_SKIP_KV_OPS": "1"})
    assert built.status == 0, built.output
    assert built.modules() == []
    for name in ("_C", "_host"):
        assert built.records[name].state is BuildState.SKIPPED
        assert "MARU_SKIP_KV_OPS=1" in built.records[name].reason


@pytest.mark.parametrize("refusal", ["no torch for CUDA", "no toolkit", "no architecture"])
def test_require_turns_every_refusal_into_a_failed_install(
    tree: BuildTree, cuda_torch: Path, toolkit: Path, tmp_path: Path, refusal: str
) -> None:
    environ: dict[str, str | Path] = {
        "MARU_REQUIRE_KV_OPS": "1",
        "PYTHONPATH": cuda_torch,
        "CUDA_HOME": toolkit,
        "PATH": path_with(toolkit / "bin"),
    }
    if refusal == "no torch for CUDA":
        environ["PYTHONPATH"] = stub_torch(tmp_path / "cpu", cuda=None)
    if refusal == "no toolkit":
        environ["CUDA_HOME"] = "/nowhere"
    built = tree.build(environ)
    assert built.status != 0
    assert "MARU_REQUIRE_KV_OPS=1, but maru_kv_ops._C cannot be built: " in built.output
    said = {
        "no torch for CUDA": "has no CUDA",
        "no toolkit": "/nowhere",
        "no architecture": "TORCH_CUDA_ARCH_LIST",
    }
    assert said[refusal] in built.output


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"MARU_SKIP_KV_OPS": "1", "MARU_REQUIRE_KV_OPS": "1"}, "are both 1"),
        ({"MARU_SKIP_KV_OPS": "yes"}, "MARU_SKIP_KV_OPS is 'yes'"),
    ],
)
def test_switches_that_make_no_sense_stop_the_install(
    tree: BuildTree, environ: dict[str, str], says: str
) -> None:
    built = tree.build(environ)
    assert built.status != 0
    assert says in built.output


def test_a_compile_error_drops_the_extension_and_is_quoted(tree: BuildTree) -> None:
    tree.host_source.write_text("this is no C++\n")
    built = tree.build({})
    assert built.status == 0, built.output
    record = built.records["_host"]
    assert record.state is BuildState.FAILED
    assert "error" in record.reason
    assert "host_module.cpp" in record.reason
    assert BUILD_STEP in record.reason
    assert built.modules() == []


def test_a_compile_error_fails_an_install_that_requires_the_extensions(tree: BuildTree) -> None:
    """Here the host executor's, which needs nothing but a compiler."""
    tree.host_source.write_text("this is no C++\n")
    environ = {"MARU_REQUIRE_KV_OPS": "1"}
    built = tree.build(environ)
    assert built.status != 0


def test_an_extension_of_an_earlier_build_does_not_pass_for_this_one(tree: BuildTree) -> None:
    assert tree.build({}).modules() == ["_host"]
    (tree.path / "maru_kv_ops" / "_C.cpython-311-x86_64-linux-gnu.so").write_text("old")
    tree.host_source.write_text("this is no C++\n")
    assert tree.build({}).modules() == []


# ------------------------------------------------------------------ with nvcc and torch for CUDA


def import_c(built: Built) -> None:
    """Import the module that was built, in a process of its own."""
    subprocess.run(
        [sys.executable, "-c", "import torch, maru_kv_ops._C"], cwd=built.tree, check=True
    )


@pytest.mark.cuda_build
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_an_arch_list_builds_without_a_gpu(tree: BuildTree, jobs: str) -> None:
    """CUDA_HOME is not set, and this machine's nvcc may be a wrapper outside the toolkit."""
    built = tree.build({"TORCH_CUDA_ARCH_LIST": "9.0", "MAX_JOBS": jobs})
    assert built.status == 0, built.output
    record = built.records["_C"]
    assert record.state is BuildState.BUILT, record.reason
    assert record.arch_list == "9.0"
    assert record.cuda is not None
    assert built.modules() == ["_C", "_host"]
    import_c(built)


@pytest.mark.cuda_build
def test_a_toolkit_without_cusparse_and_cublas_is_enough() -> None:
    """``_C`` of this environment was built; nothing in its sources asks for more than it had."""
    import maru_kv_ops
    from maru_kv_ops import vendor

    assert maru_kv_ops.import_error() is None
    package = Path(vendor.CSRC).parent
    for folder in ("csrc", "binding"):
        for source in (package / folder).iterdir():
            for line in source.read_text().splitlines():
                assert not (line.startswith("#include") and ("ATen/" in line or "torch/" in line))


@pytest.mark.cuda_build
def test_no_gpu_and_no_arch_list_with_the_real_torch(tree: BuildTree, tmp_path: Path) -> None:
    dropped(tree.build({}), "TORCH_CUDA_ARCH_LIST")


@pytest.mark.cuda_build
def test_a_kernel_that_does_not_compile_drops_the_extension_and_is_quoted(tree: BuildTree) -> None:
    tree.kernel_source.write_text("__global__ void broken() { undeclared(); }\n")
    built = tree.build({"TORCH_CUDA_ARCH_LIST": "9.0"})
    assert built.status == 0, built.output
    record = built.records["_C"]
    assert record.state is BuildState.FAILED
    assert "undeclared" in record.reason
    assert built.modules() == ["_host"]


@pytest.mark.cuda_build
def test_a_kernel_that_does_not_compile_fails_an_install_that_requires_it(tree: BuildTree) -> None:
    tree.kernel_source.write_text("__global__ void broken() { undeclared(); }\n")
    built = tree.build({"TORCH_CUDA_ARCH_LIST": "9.0", "MARU_REQUIRE_KV_OPS": "1"})
    assert built.status != 0
    assert "undeclared" in built.output
