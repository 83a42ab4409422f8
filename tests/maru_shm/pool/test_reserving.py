"""Blocks are there before anyone can touch them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pool_cases import NOMINAL_BYTES, POOL_BYTES, SHAPE

from maru_shm.index.effects import BindSegment, WriteFree
from maru_shm.pool import filesystem
from maru_shm.pool.errors import NotEnoughSpace, PoolError
from maru_shm.pool.geometry import segment_offset
from maru_shm.pool.pool import create_pool
from maru_shm.pool.reserving import BlockReserver

LENGTH = 1 << 20


@pytest.fixture
def fd(shm_dir: Path) -> Iterator[int]:
    fd = os.open(shm_dir / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, LENGTH)
    yield fd
    os.close(fd)


def test_ensure_allocates_only_what_it_was_asked_for(fd: int) -> None:
    reserver = BlockReserver("p", fd, LENGTH)
    reserver.ensure(65536, 65536)
    assert os.fstat(fd).st_blocks * 512 == 65536
    assert reserver.reserved_bytes == 0
    reserver.close()


def test_the_thread_allocates_everything_and_changes_no_byte(fd: int) -> None:
    os.pwrite(fd, b"kept", 5000)
    reserver = BlockReserver("p", fd, LENGTH, slice_bytes=65536)
    reserver.start()
    reserver._thread.join(30)
    assert reserver.reserved_bytes == LENGTH
    assert os.fstat(fd).st_blocks * 512 == LENGTH
    assert os.pread(fd, 4, 5000) == b"kept"
    reserver.close()
    reserver.close()


def test_a_file_with_all_its_blocks_needs_nothing(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.posix_fallocate(fd, 0, LENGTH)
    monkeypatch.setattr(filesystem, "allocate", None)
    reserver = BlockReserver("p", fd, LENGTH)
    reserver.ensure(0, LENGTH)
    reserver.close()


def test_a_segment_without_blocks_is_not_bound_and_never_touched(
    shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = create_pool(shm_dir / "a.pool", "tmpfs", POOL_BYTES, NOMINAL_BYTES)

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(filesystem, "allocate", full)
    pool.begin_epoch()
    list(pool.scan())
    with pytest.raises(NotEnoughSpace, match="free some"):
        pool.apply([BindSegment(3, SHAPE)])
    with pytest.raises(PoolError, match="no bound segment"):
        pool.apply([WriteFree(segment_offset(pool.geometry, 3))])
    monkeypatch.undo()
    pool.apply([BindSegment(3, SHAPE), WriteFree(segment_offset(pool.geometry, 3))])
    pool.close()
