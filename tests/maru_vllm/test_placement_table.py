"""The table that decides between copy engine and kernel: rows, calibration, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maru_kv_ops.executors import CopyPath
from maru_kv_ops.plan import TransferDirection
from maru_vllm.placement_table import (
    MAX_BYTES,
    OVERRIDE,
    RUN_BYTES,
    PlacementRow,
    PlacementTable,
    TableError,
    calibrate,
    default_table,
    overridden,
    read_table,
    table_path,
    write_table,
)

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
TABLE = PlacementTable(
    "test device",
    loads=(PlacementRow(1, 16), PlacementRow(8192, 64), PlacementRow(32768, None)),
    stores=(PlacementRow(4096, 1),),
)


@pytest.mark.parametrize(
    ("direction", "run_bytes", "runs", "path"),
    [
        (H2D, 1, 15, CopyPath.COPY_ENGINE),
        (H2D, 1, 16, CopyPath.KERNEL),
        (H2D, 8191, 16, CopyPath.KERNEL),
        (H2D, 8192, 16, CopyPath.COPY_ENGINE),
        (H2D, 8192, 64, CopyPath.KERNEL),
        (H2D, 1 << 30, 10**6, CopyPath.COPY_ENGINE),
        (D2H, 1, 1, CopyPath.KERNEL),
        (D2H, 0, 0, CopyPath.COPY_ENGINE),
    ],
)
def test_a_row_counts_from_its_length_and_from_its_number_of_runs(
    direction: TransferDirection, run_bytes: int, runs: int, path: CopyPath
) -> None:
    assert TABLE.choose(direction, run_bytes, runs) is path


class Device:
    """A made-up device, and a clock that its copies move on."""

    def __init__(self, run_s: float, kernel_byte_s: float) -> None:
        self.now = 0.0
        self.run_s, self.kernel_byte_s = run_s, kernel_byte_s
        self.largest = 0

    def measure(
        self, path: CopyPath, direction: TransferDirection, run_bytes: int, runs: int
    ) -> float:
        self.largest = max(self.largest, run_bytes * runs)
        seconds = 1e-5 + run_bytes * runs * self.kernel_byte_s
        if path is CopyPath.COPY_ENGINE:
            seconds = self.run_s * runs + run_bytes * runs * 2e-11
        self.now += seconds
        return seconds

    def clock(self) -> float:
        return self.now


def test_calibration_finds_where_the_two_cross() -> None:
    device = Device(run_s=1e-6, kernel_byte_s=4e-11)
    table = calibrate("made up", device.measure, device.clock, budget_s=60)
    for run_bytes in RUN_BYTES:
        for runs in (4, 64, 1024):
            if run_bytes * runs > MAX_BYTES:
                continue
            engine = device.measure(CopyPath.COPY_ENGINE, H2D, run_bytes, runs)
            kernel = device.measure(CopyPath.KERNEL, H2D, run_bytes, runs)
            faster = CopyPath.KERNEL if kernel < engine else CopyPath.COPY_ENGINE
            assert table.choose(H2D, run_bytes, runs) is faster, (run_bytes, runs)
    assert device.largest <= MAX_BYTES


def test_a_calibration_that_runs_out_of_time_keeps_the_default_for_the_rest() -> None:
    device = Device(run_s=1.0, kernel_byte_s=1e-9)
    table = calibrate("slow", device.measure, device.clock, budget_s=5)
    assert (table.loads, table.stores) == (default_table().loads, default_table().stores)


def test_a_table_is_kept_and_read_again(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path / "deep" / "table.json")
    assert read_table(tmp_path / "deep" / "table.json") == TABLE
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["table.json"]


def test_a_named_table_is_used_instead(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path / "mine.json")
    assert overridden({OVERRIDE: str(tmp_path / "mine.json")}) == TABLE
    assert overridden({}) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expecting value"),
        ("[]", "."),
        ('{"device": "x", "loads": []}', "stores"),
        (json.dumps({"device": "x", "loads": [], "stores": []}), "rising run_bytes"),
        (
            json.dumps(
                {
                    "device": "x",
                    "loads": [{"run_bytes": 2, "kernel_from_runs": 1}] * 2,
                    "stores": [{"run_bytes": 2, "kernel_from_runs": None}],
                }
            ),
            "rising run_bytes",
        ),
        (
            json.dumps(
                {
                    "device": "x",
                    "loads": [{"run_bytes": 2, "kernel_from_runs": "many"}],
                    "stores": [{"run_bytes": 2, "kernel_from_runs": None}],
                }
            ),
            "kernel_from_runs",
        ),
    ],
)
def test_a_bad_table_names_its_file_and_what_to_do(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(TableError, match=says) as refused:
        read_table(path)
    assert str(path) in str(refused.value)
    assert OVERRIDE in str(refused.value)


def test_a_missing_table_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="No such file"):
        overridden({OVERRIDE: str(tmp_path / "none.json")})


def test_the_path_of_a_device_is_one_file_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    path = table_path("NVIDIA H200, CUDA 13.0/x")
    assert path == Path("/caches/maru/placement/NVIDIA-H200-CUDA-13.0-x.json")
