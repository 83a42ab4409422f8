"""``maru server``, ``stat``, ``ls`` and ``verify`` on a real server and its pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from maru_cli.failures import ExitStatus
from maru_cli.looking import looking
from maru_cli.serving.workplace import Workplace

if TYPE_CHECKING:
    from conftest import Maru, RunningServer, StartServer


@pytest.mark.parametrize("command", ["stat", "ls", "verify"])
def test_without_a_server_it_says_so_in_one_line_and_status_2(
    command: str, maru: Maru, runtime_dir: Path
) -> None:
    finished = maru(command, "--runtime-dir", runtime_dir)
    assert finished.status == ExitStatus.NOTHING_THERE
    assert finished.out == ""
    assert finished.err.startswith(f"maru: no server at ipc://{runtime_dir}/server.sock")
    assert finished.err.count("\n") == 1


def test_looking_starts_no_server(maru: Maru, runtime_dir: Path) -> None:
    maru("stat", "--runtime-dir", runtime_dir)
    assert list(runtime_dir.iterdir()) == []


def test_the_servers_ready_line_says_what_stat_says(maru: Maru, server: RunningServer) -> None:
    stat = maru("stat", "--json", "--runtime-dir", server.runtime_dir)
    assert stat.status == ExitStatus.OK
    assert stat.json["server_pid"] == server.ready["pid"] == server.process.pid
    assert stat.json["pool"]["path"] == server.ready["pool"]
    assert stat.json["pool"]["geometry"]["pool_bytes"] == server.ready["pool_bytes"]
    assert stat.json["url"] == server.ready["url"]


def test_stat_shows_people_the_pool_and_its_sessions(maru: Maru, server: RunningServer) -> None:
    with server.client():
        stat = maru("stat", "--runtime-dir", server.runtime_dir)
    assert server.ready["pool"] in stat.out
    assert f"process {server.process.pid}" in stat.out
    assert "test (pid" in stat.out


def test_with_json_standard_output_is_one_line(maru: Maru, server: RunningServer) -> None:
    server.store([b"x" * 5000])
    for command in ("stat", "ls", "verify", "doctor"):
        assert maru(command, "--json", "--runtime-dir", server.runtime_dir).out.count("\n") == 1


def test_ls_lists_every_object(maru: Maru, server: RunningServer) -> None:
    server.store([b"a" * 1000, b"b" * 70_000])
    listed = maru("ls", "--json", "--runtime-dir", server.runtime_dir).json["objects"]
    assert [row["extent"]["length"] for row in listed] == [1000, 70_000]
    assert [row["key"] for row in listed] == [f"{0:064x}", f"{1:064x}"]
    assert {row["state"] for row in listed} == {"sealed"}
    limited = maru("ls", "--json", "--limit", "1", "--runtime-dir", server.runtime_dir)
    assert len(limited.json["objects"]) == 1


def test_ls_pages_through_more_objects_than_a_page_holds(server: RunningServer) -> None:
    extents = server.store([bytes(100)] * 7)
    with looking(None, server.runtime_dir) as looker:
        rows = list(looker.objects(page_rows=3))
    assert [row.extent for row in rows] == extents


def test_a_whole_pool_verifies(maru: Maru, server: RunningServer) -> None:
    server.store([b"a" * 1000, b"b" * 70_000])
    for where in (("--runtime-dir", server.runtime_dir), (server.pool,)):
        verified = maru("verify", "--json", *where)
        assert verified.status == ExitStatus.OK
        assert verified.json["verdicts"] == {"ok": 2}
        assert verified.json["payload_bytes"] == 71_000


def test_one_flipped_byte_is_found_and_named(maru: Maru, server: RunningServer) -> None:
    _, second = server.store([b"a" * 1000, b"b" * 70_000])
    with server.pool.open("r+b") as file:
        file.seek(second.offset + 12_345)
        file.write(b"!")
    verified = maru("verify", "--json", "--runtime-dir", server.runtime_dir)
    assert verified.status == ExitStatus.FAILED
    assert verified.json["verdicts"] == {"ok": 1, "bad_checksum": 1}
    (damage,) = verified.json["damage"]
    assert (damage["key"], damage["generation"]) == (f"{1:064x}", second.generation)


def test_the_pool_of_a_killed_server_verifies(maru: Maru, server: RunningServer) -> None:
    server.store([b"a" * 1000])
    server.kill()
    assert maru("verify", "--json", server.pool).json["verdicts"] == {"ok": 1}


def test_what_is_no_pool_is_said_in_one_line_and_status_2(maru: Maru, tmp_path: Path) -> None:
    foreign = tmp_path / "notes.txt"
    foreign.write_text("not a pool\n" * 10_000)
    for path, words in ((foreign, "not a Maru pool"), (tmp_path / "nowhere", "no such pool")):
        verified = maru("verify", path)
        assert verified.status == ExitStatus.NOTHING_THERE
        assert words in verified.err
        assert verified.err.count("\n") == 1
        assert verified.out == ""


def test_ctrl_c_stops_the_server_cleanly_and_takes_its_own_pool_along(
    server: RunningServer,
) -> None:
    assert server.pool.exists()
    assert server.interrupt() == ExitStatus.OK
    assert not server.pool.exists()


def test_a_pool_named_with_path_stays(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("--path", tmp_path / "my.pool")
    assert server.pool == tmp_path / "my.pool"
    assert server.interrupt() == ExitStatus.OK
    assert server.pool.exists()


def test_a_second_server_on_the_same_socket_says_why_it_does_not_start(
    maru: Maru, server: RunningServer
) -> None:
    second = maru("server", "--pool-size", "8MiB", "--runtime-dir", server.runtime_dir)
    assert second.status == ExitStatus.FAILED
    assert "another server has this socket" in second.err


def test_a_size_that_is_none_is_refused_with_what_is_allowed(maru: Maru) -> None:
    refused = maru("server", "--pool-size", "lots")
    assert refused.status == ExitStatus.FAILED
    assert '"4GiB"' in refused.err


def test_objects_that_the_demo_damages_fail_verification(
    maru: Maru, server: RunningServer, tmp_path: Path
) -> None:
    from maru_cli.demo.scenario import flip_bytes

    server.store([b"a" * 1000, b"b" * 70_000])
    (tmp_path / "run").symlink_to(server.runtime_dir)
    assert flip_bytes(Workplace(tmp_path)) == 2
    verified = maru("verify", "--json", "--runtime-dir", server.runtime_dir)
    assert verified.json["verdicts"] == {"bad_checksum": 2}
