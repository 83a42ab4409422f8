from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from control_cases import wait_until

from maru_shm.control.session_lock import (
    SessionLockLost,
    SessionWatch,
    create_session_lock,
    join_session_lock,
)
from maru_shm.control.sessions import LockFiles
from maru_shm.types import OwnerToken

OWNER = OwnerToken(0xABC)


def test_an_owner_lives_as_long_as_anybody_holds_its_file(tmp_path: Path) -> None:
    owners = LockFiles(tmp_path)
    client = create_session_lock(tmp_path, OWNER)
    assert str(client.path) == owners.lock_path(OWNER)
    worker = join_session_lock(client.path)
    assert not owners.reap(OWNER)
    client.close()
    assert not owners.reap(OWNER)
    worker.close()
    assert owners.reap(OWNER)
    assert not client.path.exists()
    assert owners.reap(OWNER)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    owners = LockFiles(tmp_path)
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path\n"
            "from maru_shm.control.session_lock import create_session_lock\n"
            f"lock = create_session_lock(Path({str(tmp_path)!r}), {OWNER})\n"
            "print('held', flush=True); sys.stdin.read()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert not owners.reap(OWNER)
    child.kill()
    child.communicate()
    wait_until(lambda: owners.reap(OWNER))


def test_nobody_joins_an_owner_that_was_found_dead(tmp_path: Path) -> None:
    client = create_session_lock(tmp_path, OWNER)
    client.close()
    descriptor = os.open(client.path, os.O_RDWR)
    assert SessionWatch(client.path).reap()
    with pytest.raises(SessionLockLost, match="gone"):
        join_session_lock(client.path)
    create_session_lock(tmp_path, OWNER)
    os.close(descriptor)


def test_an_unlinked_file_still_proves_its_holders_alive(tmp_path: Path) -> None:
    """Cleaners of temporary files unlink what looks old."""
    owners = LockFiles(tmp_path)
    client = create_session_lock(tmp_path, OWNER)
    assert owners.watch(OWNER)
    client.path.unlink()
    assert not owners.reap(OWNER)
    client.close()
    assert owners.reap(OWNER)


def test_an_owner_without_a_held_file_gives_no_proof_of_life(tmp_path: Path) -> None:
    owners = LockFiles(tmp_path)
    assert not owners.watch(OWNER)
    create_session_lock(tmp_path, OWNER).close()
    assert not owners.watch(OWNER)


def test_owners_of_an_earlier_server_are_found_where_it_kept_them(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    held = create_session_lock(tmp_path / "old", OWNER)
    assert not LockFiles(tmp_path / "new", [tmp_path / "old"]).reap(OWNER)
    assert LockFiles(tmp_path / "new").reap(OWNER)
    held.close()


def test_sweeping_removes_only_what_nobody_holds(tmp_path: Path) -> None:
    held = create_session_lock(tmp_path, OWNER)
    dead = create_session_lock(tmp_path, OwnerToken(1))
    dead.close()
    LockFiles(tmp_path).sweep()
    assert held.path.exists()
    assert not dead.path.exists()
    held.close()
