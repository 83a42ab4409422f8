"""Small pools that a test owns, and a stand-in for a DAX device."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_cases import NOMINAL_BYTES, POOL_BYTES, SHAPE, DaxStandIn

from maru_shm.index.effects import BindSegment
from maru_shm.pool.medium import DaxMedium
from maru_shm.pool.pool import Pool, create_pool


@pytest.fixture
def shm_dir() -> Iterator[Path]:
    """An empty directory on tmpfs."""
    directory = Path(tempfile.mkdtemp(prefix="maru-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def dax(shm_dir: Path) -> DaxStandIn:
    """A 1 MiB device with 64 KiB alignment."""
    path = shm_dir / "dax0.0"
    path.touch()
    os.truncate(path, POOL_BYTES)
    stand_in = DaxStandIn(path, DaxMedium(sysfs_root=shm_dir / "sys"))
    stand_in.sysfs.mkdir(parents=True)
    stand_in.say("size", f"{POOL_BYTES}\n")
    stand_in.say("align", "65536\n")
    return stand_in


@pytest.fixture
def pool(shm_dir: Path) -> Iterator[Pool]:
    """A tmpfs pool as its server sees it: epoch 1, scanned, segment 0 bound to ``SHAPE``."""
    made = create_pool(shm_dir / "test.pool", "tmpfs", POOL_BYTES, NOMINAL_BYTES)
    made.begin_epoch()
    assert list(made.scan()) == []
    made.apply([BindSegment(0, SHAPE)])
    yield made
    made.close()
