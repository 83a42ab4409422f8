from __future__ import annotations

import os
from pathlib import Path

import pytest

from maru_shm.control.runtime_dir import (
    RuntimeDir,
    RuntimeDirUnusable,
    find_runtime_dir,
    make_private_dir,
    runtime_dir_of,
)


def test_the_variable_wins_then_the_sessions_directory_then_tmp(tmp_path: Path) -> None:
    both = {"MARU_RUNTIME_DIR": "/a/b", "XDG_RUNTIME_DIR": str(tmp_path)}
    assert find_runtime_dir(both).path == Path("/a/b")
    assert find_runtime_dir({"XDG_RUNTIME_DIR": str(tmp_path)}).path == tmp_path / "maru"
    in_tmp = Path(f"/tmp/maru-{os.getuid()}")
    assert find_runtime_dir({"XDG_RUNTIME_DIR": "/nobody/made/this"}).path == in_tmp
    assert find_runtime_dir({}).path == in_tmp


def test_directories_are_made_for_their_user_alone(tmp_path: Path) -> None:
    RuntimeDir(tmp_path / "deep" / "r").prepare()
    assert (tmp_path / "deep" / "r").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "deep" / "r" / "sessions").stat().st_mode & 0o777 == 0o700


def test_a_directory_open_to_others_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o777)
    shared.chmod(0o755)
    with pytest.raises(RuntimeDirUnusable, match=r"mode 755.*chmod 700"):
        make_private_dir(shared)
    assert shared.stat().st_mode & 0o777 == 0o755


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(RuntimeDirUnusable, match="belongs to user"):
        make_private_dir(theirs)


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(RuntimeDirUnusable, match="not a directory"):
        make_private_dir(tmp_path / "link")


def test_a_name_too_long_for_a_socket_is_refused_with_the_limit(tmp_path: Path) -> None:
    with pytest.raises(RuntimeDirUnusable, match="107"):
        RuntimeDir(tmp_path / ("x" * 120)).prepare()


def test_every_runtime_directory_has_a_pool_of_its_own() -> None:
    assert RuntimeDir(Path("/a")).pool != RuntimeDir(Path("/b")).pool


def test_clients_of_an_ipc_server_meet_it_beside_its_socket() -> None:
    assert runtime_dir_of("ipc:///run/x/my.sock").sessions == Path("/run/x/sessions")
    assert runtime_dir_of("tcp://127.0.0.1:5000").path == find_runtime_dir().path
