"""A shared mapping: populating it, and closing it while it is in use."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maru_shm.pool import mapping as mapping_module
from maru_shm.pool.errors import MediumUnavailable
from maru_shm.pool.mapping import Access, Populate, SharedMapping

LENGTH = 1 << 20


@pytest.fixture
def fd(shm_dir: Path) -> Iterator[int]:
    fd = os.open(shm_dir / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, LENGTH)
    yield fd
    os.close(fd)


def test_the_address_is_that_of_the_buffer(fd: int) -> None:
    for access in Access:
        mapping = SharedMapping(fd, LENGTH, access)
        os.pwrite(fd, b"hello", 4096)
        assert ctypes.string_at(mapping.address + 4096, 5) == b"hello"
        assert bytes(mapping.buffer[4096:4101]) == b"hello"
        mapping.close()


@pytest.mark.parametrize("how", list(Populate))
def test_populating_reaches_every_byte_and_changes_none(fd: int, how: Populate) -> None:
    content = os.urandom(LENGTH)
    os.pwrite(fd, content, 0)
    mapping = SharedMapping(fd, LENGTH, Access.READ_WRITE)
    seen: list[tuple[int, int]] = []
    mapping.start_populate(how, lambda done, total: seen.append((done, total)), LENGTH // 4)
    mapping.start_populate(how)
    assert mapping.wait_populated(30)
    assert seen == [(LENGTH // 4 * (i + 1), LENGTH) for i in range(4)]
    assert mapping.populated_bytes == LENGTH
    assert bytes(mapping.buffer) == content
    mapping.close()


def test_populating_allocates_pages_of_a_sparse_file(fd: int) -> None:
    mapping = SharedMapping(fd, LENGTH, Access.READ_WRITE)
    mapping.start_populate(Populate.WRITE)
    assert mapping.wait_populated(30)
    assert os.fstat(fd).st_blocks * 512 == LENGTH
    mapping.close()


class OldKernel:
    """A libc whose kernel does not know the advice."""

    def madvise(self, address: int, length: int, advice: int) -> int:
        ctypes.set_errno(22)
        return -1


def test_an_old_kernel_touches_what_is_allocated_and_leaves_the_rest(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapping_module, "_libc", OldKernel())
    sparse = SharedMapping(fd, LENGTH, Access.READ_WRITE)
    sparse.start_populate(Populate.WRITE)
    assert not sparse.wait_populated(30)
    assert "sparse" in (sparse.populate_error or "")
    sparse.close()
    os.pwrite(fd, b"x" * LENGTH, 0)
    full = SharedMapping(fd, LENGTH, Access.READ_WRITE)
    full.start_populate(Populate.WRITE)
    assert full.wait_populated(30)
    assert bytes(full.buffer) == b"x" * LENGTH
    full.close()


def test_closing_stops_populating_at_the_next_slice(fd: int) -> None:
    mapping = SharedMapping(fd, LENGTH, Access.READ_WRITE)
    first, go = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        first.set()
        go.wait(30)

    mapping.start_populate(Populate.WRITE, hold, 4096)
    assert first.wait(30)
    mapping._stop.set()
    go.set()
    mapping.close()
    assert mapping.populated_bytes == 4096


def test_closing_with_views_in_use_keeps_their_memory(fd: int) -> None:
    mapping = SharedMapping(fd, LENGTH, Access.READ_WRITE)
    view = mapping.buffer[100:200]
    array = np.frombuffer(mapping.buffer, dtype=np.uint8)
    mapping.close()
    mapping.close()
    view[:5] = b"still"
    assert bytes(array[100:105]) == b"still"
    with pytest.raises(ValueError, match="closed"):
        _ = mapping.buffer
    assert mapping.address == 0
    mapping.start_populate(Populate.READ)
    assert not mapping.wait_populated(0)


def test_more_than_there_is_cannot_be_mapped(fd: int) -> None:
    with pytest.raises(MediumUnavailable):
        SharedMapping(fd, LENGTH * 2, Access.READ)
