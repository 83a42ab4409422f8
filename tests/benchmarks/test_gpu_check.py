"""The GPU check without a GPU: its checks find faults, its report says what was measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_bandwidth
import gpu_check
import pytest
import torch
from gpu_bandwidth import Plain, Point, Traffic, grid, measure
from gpu_correctness import (
    UNITS,
    Operation,
    Verdict,
    all_cases,
    check_plans,
    num_checks,
    run_checks,
)

from maru_kv_ops import torch_ops
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.formats import EngineKVFormat
from maru_kv_ops.host_executor import HostExecutor, host_module
from maru_kv_ops.layouts import KVLayout
from maru_kv_ops.plan import CopyPlan, TransferDirection

CPU = torch.device("cpu")
SCRIPT = Path(gpu_check.__file__)


def host() -> Any:
    module = host_module()
    assert module is not None
    return module


def test_the_native_operations_pass_every_check() -> None:
    seen: list[int] = []
    verdict = run_checks(host(), torch_ops, [HostExecutor()], CPU, lambda: seen.append(1))
    assert verdict.failures == ()
    assert verdict.checked == len(seen) == num_checks(1)


def test_the_cases_are_every_operation_format_direction_and_unit() -> None:
    cases = {(case.operation, case.format, case.direction, case.unit) for case in all_cases()}
    assert len(cases) == len(Operation) * len(EngineKVFormat) * 2 * len(UNITS)


@pytest.mark.parametrize("operation", Operation)
def test_an_operation_that_does_not_do_its_work_is_named(operation: Operation) -> None:
    def stubborn(*args: Any, **named: Any) -> None:
        """Moves nothing."""

    names = {each.value: getattr(host(), each.value) for each in Operation}
    operations: Any = SimpleNamespace(**{**names, operation.value: stubborn})
    verdict = run_checks(operations, torch_ops, [], CPU)
    assert verdict.failures
    assert all(failure.startswith(operation.value) for failure in verdict.failures)
    assert "wrong bytes in" in verdict.failures[0]
    assert "unit" in verdict.failures[0]


def test_an_executor_that_writes_beside_its_runs_is_named() -> None:
    class Careless(HostExecutor):
        name = "careless"

        def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
            path = super().run(plan, memory)
            if plan.direction is TransferDirection.D2H:
                memory.objects[0] ^= 1
            return path

    with pytest.raises(AssertionError, match="by careless: 1 wrong bytes in object 0"):
        check_plans(Careless(), KVLayout.LBHNC, 16, CPU)


def test_a_refusal_is_a_failure_and_the_rest_is_checked() -> None:
    def refuse(*args: Any, **named: Any) -> None:
        raise ValueError("not today")

    names: dict[str, Any] = {each.value: getattr(host(), each.value) for each in Operation}
    names[Operation.MULTI_LAYER.value] = refuse
    verdict = run_checks(SimpleNamespace(**names), torch_ops, [], CPU)  # type: ignore[arg-type] # it has the three
    assert len(verdict.failures) == len(EngineKVFormat) * 2 * len(UNITS)
    assert "ValueError: not today" in verdict.failures[0]
    assert verdict.checked == num_checks(0)


# ---------------------------------------------------------------------------- measuring


@dataclass
class MadeUp:
    """A device of round numbers: 50 GB/s one way, the kernel half of it, torch a tenth."""

    def plain(self) -> Plain:
        return Plain(50.0, 50.0, 80.0, 1000.0)

    def copy(self, path: CopyPath, traffic: Traffic, run_bytes: int, runs: int) -> float:
        share = {CopyPath.COPY_ENGINE: 1.0, CopyPath.KERNEL: 0.5, CopyPath.TORCH: 0.1}[path]
        moved = run_bytes * runs * (2 if traffic is Traffic.BOTH else 1)
        return moved / (self.plain().of(traffic) * share * 1e9)


def report_of(points: list[Point]) -> gpu_check.Report:
    return gpu_check.Report(
        device="made up",
        build={"cuda": "13.0"},
        checks=Verdict(600, ()),
        plain=MadeUp().plain(),
        points=tuple(points),
    )


def test_ratios_stand_over_the_plain_copy_of_the_same_traffic() -> None:
    points = measure(MadeUp(), MadeUp().plain(), 60, lambda: None)
    assert len(points) == len(list(grid())) * len(Traffic) * len(gpu_bandwidth.PATHS)
    for point in points:
        expected = {CopyPath.COPY_ENGINE: 1.0, CopyPath.KERNEL: 0.5, CopyPath.TORCH: 0.1}
        assert point.ratio == pytest.approx(expected[point.path])


def test_a_spent_budget_ends_the_measuring_and_keeps_what_there_is() -> None:
    assert measure(MadeUp(), MadeUp().plain(), -1, lambda: None) == []


def test_the_grid_has_no_copy_too_large_for_the_memory_of_the_check() -> None:
    sizes = [run_bytes * runs for run_bytes, runs in grid()]
    assert max(sizes) <= gpu_bandwidth.MAX_BYTES
    assert len(sizes) >= 15


def test_the_report_is_a_table_a_json_file_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(measure(MadeUp(), MadeUp().plain(), 60, lambda: None))
    gpu_check.write(report, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert written["plain"]["both_gbps"] == 80.0
    assert len(written["points"]) == len(report.points)
    assert (tmp_path / "out" / "gpu_check.png").read_bytes().startswith(b"\x89PNG")
    table = gpu_check.table_of(report)
    assert table.row_count == len(list(grid())) * len(Traffic)
    assert "25.0 (0.50)" in list(table.columns[4].cells)


def test_checks_without_measurements_are_reported_without_a_plot(tmp_path: Path) -> None:
    gpu_check.write(replace(report_of([]), plain=None), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
def test_without_a_gpu_it_says_so_and_exits_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "no GPU here" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="would build where there is a GPU")
def test_it_checks_its_own_checkout_and_not_what_is_installed(tmp_path: Path) -> None:
    for package in ("maru_kv_ops", "maru_vllm"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('the installed one')")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "the installed one" not in done.stderr


def test_without_torch_it_says_so_in_one_line_and_exits_2() -> None:
    without = f"import sys, runpy; sys.modules['torch'] = None; runpy.run_path({str(SCRIPT)!r})"
    done = subprocess.run(
        [sys.executable, "-c", without], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_check: no torch here")
    assert done.stderr.count("\n") == 1
