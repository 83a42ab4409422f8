"""A small real pool, a service over it, and planes to talk to it without sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from control_cases import Embedded, FakeClock

from maru_shm.control.local import LocalPlane, LocalServer, ScriptedOwners
from maru_shm.control.recovery import recover
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


@pytest.fixture
def embedded(short_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Embedded]:
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(short_dir / "r"))
    found = Embedded(short_dir / "r")
    yield found
    found.clean()
