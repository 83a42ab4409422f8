"""Which placement table a device gets, with a stand-in for the device."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from maru_kv_ops.executors import CopyPath
from maru_kv_ops.plan import TransferDirection
from maru_vllm.placement_table import (
    OVERRIDE,
    PlacementRow,
    PlacementTable,
    TableError,
    default_table,
    kept_tables,
    write_table,
)
from maru_vllm.worker import calibration
from maru_vllm.worker.calibration import runs_plan, table_of_device

GPU = torch.device("cuda", 0)


class Device:
    """A GPU whose kernel is always faster, or that has no memory left."""

    def __init__(self) -> None:
        self.measured = 0
        self.fails = False
        self.emptied = 0

    def measure(
        self, path: CopyPath, direction: TransferDirection, run_bytes: int, runs: int
    ) -> float:
        if self.fails:
            raise RuntimeError("CUDA out of memory")
        self.measured += 1
        return 1.0 if path is CopyPath.KERNEL else 2.0

    def empty_cache(self) -> None:
        self.emptied += 1


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Device:
    device = Device()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    monkeypatch.setattr(calibration, "device_measure", lambda asked: device.measure)
    driver = tmp_path / "driver-version"
    driver.write_text("580.65\n")
    monkeypatch.setattr(calibration, "DRIVER_VERSION", driver)
    return device


def test_the_first_start_measures_and_the_second_reads_what_the_first_kept(gpu: Device) -> None:
    first = table_of_device(GPU)
    measured = gpu.measured
    assert measured > 0
    assert first.device == "Some GPU, driver 580.65"
    assert first.choose(TransferDirection.H2D, 1 << 20, 10**4) is CopyPath.KERNEL
    assert table_of_device(GPU) == first
    assert gpu.measured == measured
    assert kept_tables() == [first]
    assert gpu.emptied == 1, "what measuring took of the device's memory is given back"


def test_another_driver_is_measured_by_itself(
    gpu: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table_of_device(GPU)
    measured = gpu.measured
    monkeypatch.setattr(calibration, "DRIVER_VERSION", tmp_path / "not shown")
    assert table_of_device(GPU).device.startswith("Some GPU, CUDA ")
    assert gpu.measured == 2 * measured


def test_a_table_that_the_operator_names_comes_first(
    gpu: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = PlacementTable("mine", (PlacementRow(1, 3),), (PlacementRow(1, None),))
    write_table(mine, tmp_path / "mine.json")
    monkeypatch.setenv(OVERRIDE, str(tmp_path / "mine.json"))
    assert table_of_device(GPU) == mine
    assert gpu.measured == 0

    (tmp_path / "mine.json").write_text("{}")
    with pytest.raises(TableError, match=OVERRIDE):
        table_of_device(GPU)


def test_a_kept_table_that_is_damaged_is_measured_anew(
    gpu: Device, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first = table_of_device(GPU)
    (kept,) = (tmp_path / "cache" / "maru" / "placement").iterdir()
    kept.write_text("half a fi")
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        assert table_of_device(GPU) == first
    assert str(kept) in caplog.text
    assert kept_tables() == [first]


def test_a_device_that_cannot_be_measured_starts_with_the_default_table(
    gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.fails = True
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        assert table_of_device(GPU) == default_table()
    assert "out of memory" in caplog.text
    assert kept_tables() == [], "the next start tries again"


def test_what_cannot_be_kept_is_used_all_the_same(
    gpu: Device, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        assert table_of_device(GPU).device == "Some GPU, driver 580.65"
    assert str(tmp_path / "cache") in caplog.text


def test_a_measured_plan_has_the_runs_that_it_is_measured_for() -> None:
    plan = runs_plan(TransferDirection.D2H, 512, 3)
    (copy,) = plan.copies
    assert [(run.cache_offset, run.object_offset, run.width) for run in copy.runs()] == [
        (0, 0, 512),
        (1024, 512, 512),
        (2048, 1024, 512),
    ]
