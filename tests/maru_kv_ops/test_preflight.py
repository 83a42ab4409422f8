"""The gate's decisions, and what it makes of the answers of nvcc and nvidia-smi."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from maru_kv_ops.build_record import BUILD_STEP
from maru_kv_ops.preflight import (
    Build,
    Environment,
    Problem,
    Refusal,
    Toolkit,
    TorchFacts,
    Wish,
    decide,
    find_toolkit,
    first_error,
    try_compiler,
    visible_archs,
    wish_of,
)

TOOLKIT = Toolkit(Path("/opt/cuda"), "13.0")
COMPLETE = Environment(
    wish=Wish.IF_POSSIBLE,
    isolated=False,
    torch=TorchFacts("2.14.1+cu130", "13.0"),
    toolkit=TOOLKIT,
    arch_list="9.0",
    visible_archs=(),
)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def reason(found: Environment) -> str:
    decision = decide(found)
    assert isinstance(decision, Refusal)
    assert BUILD_STEP in decision.reason
    return decision.reason


def test_what_is_complete_is_built_for_the_architectures_that_were_asked_for() -> None:
    found = replace(COMPLETE, arch_list="8.0;9.0+PTX", visible_archs=("12.0",))
    decision = decide(found)
    assert isinstance(decision, Build)
    assert decision.arch_list == "8.0;9.0+PTX"


def test_without_a_wish_it_is_built_for_the_visible_gpus_each_architecture_once() -> None:
    decision = decide(replace(COMPLETE, arch_list=None, visible_archs=("9.0", "8.0", "9.0")))
    assert isinstance(decision, Build)
    assert decision.arch_list == "8.0;9.0"


def test_a_minor_version_of_cuda_may_differ() -> None:
    newer = Toolkit(TOOLKIT.root, "13.2")
    assert isinstance(decide(replace(COMPLETE, toolkit=newer)), Build)


def test_the_first_refusal_decides() -> None:
    """In an environment that lacks everything, and then has one thing after the other."""
    found = Environment(Wish.SKIP, False, Problem("no torch"), Problem("no nvcc"), None, ())
    assert "MARU_SKIP_KV_OPS=1" in reason(found)
    found = replace(found, wish=Wish.IF_POSSIBLE)
    assert "no torch" in reason(found)
    found = replace(found, torch=TorchFacts("2.13.0+cpu", None))
    assert "torch 2.13.0+cpu has no CUDA" in reason(found)
    found = replace(found, torch=TorchFacts("2.14.1+cu130", "13.0"))
    assert "no nvcc" in reason(found)
    found = replace(found, toolkit=Toolkit(Path("/opt/cuda"), "12.9"))
    assert "12.9" in reason(found)
    assert "13.0" in reason(found)
    found = replace(found, toolkit=TOOLKIT)
    assert "TORCH_CUDA_ARCH_LIST" in reason(found)


def test_an_isolated_build_is_told_apart_from_a_missing_torch() -> None:
    found = replace(COMPLETE, torch=Problem("no torch"), isolated=True)
    assert "isolated environment" in reason(found)
    assert "isolated" not in reason(replace(found, isolated=False))


@pytest.mark.parametrize(
    ("environ", "wish"),
    [
        ({}, Wish.IF_POSSIBLE),
        ({"MARU_SKIP_KV_OPS": "0", "MARU_REQUIRE_KV_OPS": ""}, Wish.IF_POSSIBLE),
        ({"MARU_SKIP_KV_OPS": "1", "MARU_REQUIRE_KV_OPS": "0"}, Wish.SKIP),
        ({"MARU_REQUIRE_KV_OPS": "1"}, Wish.REQUIRE),
    ],
)
def test_the_switches_are_1_0_or_unset(environ: dict[str, str], wish: Wish) -> None:
    assert wish_of(environ) is wish


@pytest.mark.parametrize(
    "environ",
    [{"MARU_SKIP_KV_OPS": "true"}, {"MARU_SKIP_KV_OPS": "1", "MARU_REQUIRE_KV_OPS": "1"}],
)
def test_other_switches_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="MARU_SKIP_KV_OPS"):
        wish_of(environ)


def test_the_root_is_the_one_that_nvcc_names_not_the_folder_above_it(tmp_path: Path) -> None:
    root = tmp_path / "real"
    (root / "include").mkdir(parents=True)
    (root / "include" / "cuda_runtime.h").touch()
    wrapper = script(
        tmp_path / "bin" / "nvcc",
        f'[ "$1" = --version ] && echo "release 13.0, V13.0.88" || echo "#$ TOP={root}/bin/.." >&2',
    )
    found = find_toolkit({"PATH": f"{wrapper.parent}:/usr/bin:/bin"})
    assert found == Toolkit(root, "13.0")


def test_cuda_home_is_preferred_to_the_nvcc_on_path(tmp_path: Path) -> None:
    for name, version in (("wanted", "12.9"), ("other", "13.0")):
        (tmp_path / name / "include").mkdir(parents=True)
        (tmp_path / name / "include" / "cuda_runtime.h").touch()
        script(tmp_path / name / "bin" / "nvcc", f'echo "release {version}, V{version}.1"')
    environ = {"CUDA_HOME": f"{tmp_path}/wanted", "PATH": f"{tmp_path}/other/bin:/usr/bin:/bin"}
    assert find_toolkit(environ) == Toolkit(tmp_path / "wanted", "12.9")


def test_an_nvcc_without_a_release_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    script(tmp_path / "bin" / "nvcc", "echo 'nvcc: cannot execute cicc'")
    found = find_toolkit({"CUDA_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert isinstance(found, Problem)
    assert "cannot execute cicc" in found.text


def test_visible_gpus_are_those_that_the_driver_lists(tmp_path: Path) -> None:
    script(tmp_path / "nvidia-smi", "echo 9.0; echo 12.0")
    assert visible_archs({"PATH": f"{tmp_path}:/bin"}) == ("9.0", "12.0")


@pytest.mark.parametrize("says", ["echo 'NVIDIA-SMI has failed'; exit 9", "echo '[N/A]'"])
def test_a_driver_that_does_not_answer_lists_none(tmp_path: Path, says: str) -> None:
    script(tmp_path / "nvidia-smi", says)
    assert visible_archs({"PATH": f"{tmp_path}:/bin"}) == ()


def test_no_driver_no_gpus(tmp_path: Path) -> None:
    assert visible_archs({"PATH": str(tmp_path)}) == ()


def test_the_trial_quotes_the_compiler() -> None:
    complaint = "host_config.h:168:2: error: #error -- unsupported GNU version!"

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        assert command[0] == "/opt/cuda/bin/nvcc"
        return subprocess.CompletedProcess(command, 1, "", f"In file included:\n{complaint}\n")

    refusal = try_compiler(TOOLKIT, run)
    assert refusal is not None
    assert complaint in refusal.reason


def test_a_trial_that_passes_refuses_nothing() -> None:
    assert try_compiler(TOOLKIT, lambda c: subprocess.CompletedProcess(c, 0, "", "")) is None


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("a.cu:1: warning: unused\na.cu:2:  error: undeclared\nerror: 1 failed", "undeclared"),
        ("x.cpp:1:10: fatal error: cusparse.h: No such file", "cusparse.h"),
        ("collecting\nkilled by signal 9\n\n", "killed by signal 9"),
        ("", "no output"),
    ],
)
def test_the_first_error_is_the_line_that_says_what_is_wrong(output: str, line: str) -> None:
    assert line in first_error(output)
