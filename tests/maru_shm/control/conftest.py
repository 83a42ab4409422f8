"""A small real pool, a service over it, and planes to talk to it without sockets."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from control_cases import FakeClock, is_running, wait_until

from maru_shm.control.local import LocalPlane, LocalServer, ScriptedOwners
from maru_shm.control.recovery import recover
from maru_shm.control.runtime_dir import RuntimeDir
from maru_shm.pool.pool import Pool, create_pool
from maru_shm.types import OwnerToken


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory on tmpfs whose name leaves room for a socket's (at most 107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="maru-t-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def pool(short_dir: Path) -> Iterator[Pool]:
    pool = create_pool(short_dir / "p.pool", "tmpfs", 4 << 20, 1 << 20)
    yield pool
    pool.close()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def owners() -> ScriptedOwners:
    return ScriptedOwners()


@pytest.fixture
def server(pool: Pool, owners: ScriptedOwners, clock: FakeClock) -> LocalServer:
    return LocalServer(lambda: recover(pool, owners, clock))


@pytest.fixture
def plane(server: LocalServer, clock: FakeClock) -> LocalPlane:
    return LocalPlane(server, OwnerToken(1), clock=clock)


class Embedded:
    """A runtime directory of its own, and whatever server comes up in it."""

    def __init__(self, path: Path) -> None:
        self.runtime = RuntimeDir(path)

    def server_pid(self) -> int | None:
        """The living server's process, by the note in its pool's lock file."""
        try:
            note = json.loads(
                self.runtime.pool.with_name(f"{self.runtime.pool.name}.lock").read_text()
            )
        except (OSError, ValueError):
            return None
        pid = int(note["pid"])
        return pid if is_running(pid) else None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the server by its pid and wait until it is gone."""
        pid = self.server_pid()
        if pid is not None:
            os.kill(pid, number)
            wait_until(lambda: not is_running(pid))

    def clean(self) -> None:
        self.kill()
        self.runtime.pool.unlink(missing_ok=True)
        self.runtime.pool.with_name(f"{self.runtime.pool.name}.lock").unlink(missing_ok=True)


@pytest.fixture
def embedded(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Embedded]:
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(short_dir / "r"))
    found = Embedded(short_dir / "r")
    yield found
    found.clean()
