from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker_cases import Store

from maru_shm.control.local import LocalPlane, LocalServer, ScriptedOwners
from maru_shm.control.recovery import recover
from maru_shm.pool.pool import create_pool
from maru_shm.types import OwnerToken


@pytest.fixture
def store() -> Iterator[Store]:
    directory = Path(tempfile.mkdtemp(prefix="maru-w-", dir="/dev/shm"))
    pool = create_pool(directory / "w.pool", "tmpfs", 4 << 20, 1 << 20)
    server = LocalServer(lambda: recover(pool, ScriptedOwners(), lambda: 0.0))
    store = Store(pool, LocalPlane(server, OwnerToken(1)))
    yield store
    for mapped in store.mapped:
        mapped.pool.close()
    pool.close()
    shutil.rmtree(directory)
