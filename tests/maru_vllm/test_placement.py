"""``maru_placement``: what copies where, and what stops an engine's start."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.host_executor import HostExecutor
from maru_kv_ops.plan import CopyPlan, TransferDirection
from maru_kv_ops.torch_executor import TorchExecutor
from maru_vllm import placement
from maru_vllm.kv_ops import KVOps
from maru_vllm.placement import PlacementRefused, TablePlacement, executor_for
from maru_vllm.placement_table import PlacementRow, PlacementTable, default_table
from maru_vllm.settings import Placement
from maru_vllm.worker.calibration import runs_plan

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MODULE = ModuleType("operations")
BOTH = KVOps(native=MODULE, native_missing=None, host=MODULE, host_missing=None)  # type: ignore[arg-type] # stand-ins
NEITHER = KVOps(None, "_C was not built: run ./install.sh", None, "_host was not built: run it")


class Recorded:
    """An executor that only says that it ran."""

    name = "recorded"

    def __init__(self, path: CopyPath) -> None:
        self.path = path

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        return self.path

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def stand_in_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "KernelExecutor", lambda: Recorded(CopyPath.KERNEL))
    monkeypatch.setattr(placement, "CopyEngineExecutor", lambda: Recorded(CopyPath.COPY_ENGINE))


def no_table(device: torch.device) -> PlacementTable:
    raise AssertionError("no table is needed here")


class Pinned(torch.Tensor):
    """Memory that says that it is pinned."""

    def is_pinned(self, device: object = None) -> bool:
        return True


def path_of(
    asked: Placement, run_bytes: int, runs: int, *, memory: torch.Tensor | None = None
) -> CopyPath:
    objects = torch.zeros(1, dtype=torch.uint8) if memory is None else memory
    executor = executor_for(asked, GPU, BOTH, lambda device: default_table())
    plan = runs_plan(TransferDirection.H2D, run_bytes, runs)
    return executor.run(plan, CopyMemory((), objects))


@pytest.mark.parametrize("asked", [Placement.AUTO, Placement.KERNEL])
def test_host_memory_is_copied_by_the_native_host_executor(asked: Placement) -> None:
    assert isinstance(executor_for(asked, CPU, BOTH, no_table), HostExecutor)


def test_auto_in_host_memory_goes_on_without_the_native_executor() -> None:
    assert isinstance(executor_for(Placement.AUTO, CPU, NEITHER, no_table), TorchExecutor)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_fallback_is_torch_everywhere(device: torch.device) -> None:
    assert isinstance(executor_for(Placement.FALLBACK, device, BOTH, no_table), TorchExecutor)


@pytest.mark.parametrize(
    ("asked", "device", "ops", "says"),
    [
        (Placement.COPY_ENGINE, CPU, BOTH, "host memory"),
        (Placement.KERNEL, CPU, NEITHER, "_host was not built: run it"),
        (Placement.KERNEL, GPU, NEITHER, r"run ./install.sh"),
        (Placement.COPY_ENGINE, GPU, NEITHER, r"run ./install.sh"),
    ],
)
def test_a_forced_placement_that_is_not_there_stops_the_start(
    asked: Placement, device: torch.device, ops: KVOps, says: str
) -> None:
    with pytest.raises(PlacementRefused, match=says):
        executor_for(asked, device, ops, no_table)


def test_auto_on_a_device_without_extension_is_torch() -> None:
    assert isinstance(executor_for(Placement.AUTO, GPU, NEITHER, no_table), TorchExecutor)


def test_auto_on_a_device_decides_plan_by_plan() -> None:
    pinned = torch.zeros(1, dtype=torch.uint8).as_subclass(Pinned)
    assert path_of(Placement.AUTO, 4096, 64, memory=pinned) is CopyPath.KERNEL
    assert path_of(Placement.AUTO, 4096, 8, memory=pinned) is CopyPath.COPY_ENGINE
    assert path_of(Placement.AUTO, 65536, 64, memory=pinned) is CopyPath.COPY_ENGINE


def test_forced_paths_do_not_look_at_the_plan() -> None:
    pinned = torch.zeros(1, dtype=torch.uint8).as_subclass(Pinned)
    assert path_of(Placement.KERNEL, 1 << 20, 1, memory=pinned) is CopyPath.KERNEL
    assert path_of(Placement.COPY_ENGINE, 16, 1000, memory=pinned) is CopyPath.COPY_ENGINE


@pytest.mark.parametrize("asked", [Placement.AUTO, Placement.KERNEL])
def test_b23_memory_that_could_not_be_pinned_goes_through_the_copy_engine(
    asked: Placement,
) -> None:
    assert path_of(asked, 256, 1000) is CopyPath.COPY_ENGINE


def test_an_empty_plan_is_no_division_by_zero() -> None:
    table = PlacementTable("test", (PlacementRow(1, 1),), (PlacementRow(1, 1),))
    chooser = TablePlacement(table, Recorded(CopyPath.COPY_ENGINE), Recorded(CopyPath.KERNEL))
    plan = CopyPlan(TransferDirection.H2D, (), (), 0, 0)
    assert chooser.run(plan, CopyMemory((), torch.zeros(1))) is CopyPath.COPY_ENGINE
