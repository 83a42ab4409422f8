from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import maru_kv_ops
from maru_cli.failures import ExitStatus
from maru_kv_ops.build_record import BUILD_STEP
from maru_vllm.placement_table import PlacementRow, PlacementTable, table_path, write_table

if TYPE_CHECKING:
    from conftest import Finished, Maru, RunningServer


def _check(finished: Finished, subject: str) -> dict[str, str]:
    (check,) = (c for c in finished.json["checks"] if c["subject"] == subject)
    return check


def test_a_host_without_a_server_is_fine(maru: Maru, runtime_dir: Path) -> None:
    report = maru("doctor", "--json", "--pool-size", "64MiB", "--runtime-dir", runtime_dir)
    assert report.status == ExitStatus.OK
    assert report.json["usable"] is True
    assert "the first engine starts it" in _check(report, "server")["found"]
    assert list(runtime_dir.iterdir()) in ([], [runtime_dir / "sessions"])


def test_it_names_the_running_server_and_its_pool(maru: Maru, server: RunningServer) -> None:
    report = maru("doctor", "--json", "--runtime-dir", server.runtime_dir)
    assert f"process {server.process.pid}" in _check(report, "server")["found"]
    assert server.ready["pool"] in _check(report, "pool")["found"]


def test_too_little_shared_memory_is_a_problem_with_advice(maru: Maru, runtime_dir: Path) -> None:
    report = maru("doctor", "--json", "--pool-size", "1024TiB", "--runtime-dir", runtime_dir)
    assert report.status == ExitStatus.FAILED
    assert report.json["usable"] is False
    pool = _check(report, "pool")
    assert pool["state"] == "problem"
    assert "would take 1024.0 TiB" in pool["found"]
    assert "--shm-size" in pool["advice"]


def test_a_runtime_dir_open_to_others_is_a_problem(maru: Maru, runtime_dir: Path) -> None:
    runtime_dir.chmod(0o755)
    report = maru("doctor", "--json", "--runtime-dir", runtime_dir)
    assert report.status == ExitStatus.FAILED
    assert "chmod 700" in _check(report, "runtime dir")["advice"]


def test_a_named_server_that_does_not_answer_is_a_problem(maru: Maru, runtime_dir: Path) -> None:
    url = f"ipc://{runtime_dir}/other.sock"
    report = maru("doctor", "--json", "--server-url", url, "--runtime-dir", runtime_dir)
    assert report.status == ExitStatus.FAILED
    assert _check(report, "server")["state"] == "problem"


def test_people_get_the_advice_too(maru: Maru, runtime_dir: Path) -> None:
    report = maru("doctor", "--pool-size", "1024TiB", "--runtime-dir", runtime_dir)
    assert "PROBLEM: pool: give /dev/shm more space" in report.out


def test_what_the_build_left_out_is_said_with_the_step_that_builds_it(
    maru: Maru, runtime_dir: Path
) -> None:
    report = maru("doctor", "--json", "--runtime-dir", runtime_dir)
    kernels = _check(report, "maru_kv_ops._C")
    if maru_kv_ops.is_available():
        assert kernels["state"] == "ok"
    else:
        assert kernels["advice"] == maru_kv_ops.import_error()
        assert BUILD_STEP in kernels["advice"]
    assert _check(report, "maru_kv_ops._host")["state"] == "ok"


def test_the_placement_table_is_printed(
    maru: Maru, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    report = maru("doctor", "--json", "--runtime-dir", runtime_dir)
    found = _check(report, "placement table")["found"]
    assert found.startswith("not measured")
    assert "28.0 KiB: never" in found

    measured = PlacementTable("some GPU", (PlacementRow(1, 7),), (PlacementRow(1, None),))
    write_table(measured, table_path("some GPU"))
    report = maru("doctor", "--json", "--runtime-dir", runtime_dir)
    found = _check(report, "placement table")["found"]
    assert found == "some GPU: kernel for loads 1 B: from 7 runs; stores 1 B: never"


def test_a_placement_table_that_cannot_be_used_is_a_problem(
    maru: Maru, runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    monkeypatch.setenv("MARU_PLACEMENT_TABLE", str(tmp_path / "bad.json"))
    report = maru("doctor", "--json", "--runtime-dir", runtime_dir)
    assert report.status == ExitStatus.FAILED
    assert str(tmp_path / "bad.json") in _check(report, "placement table")["advice"]
