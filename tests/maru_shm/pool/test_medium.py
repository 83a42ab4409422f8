"""Media: what they refuse before a byte is written, and what a DAX device says of itself."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from pool_cases import NOMINAL_BYTES, POOL_BYTES, SHAPE, DaxStandIn, store

from maru_shm.index.effects import BindSegment
from maru_shm.pool import filesystem, medium
from maru_shm.pool import flush as flush_module
from maru_shm.pool.errors import (
    MediumUnavailable,
    NoSuchPool,
    NotEnoughSpace,
    PoolError,
    PoolExists,
)
from maru_shm.pool.flush import flush_kind
from maru_shm.pool.medium import DaxMedium, medium_for, open_medium
from maru_shm.pool.pool import create_pool, open_pool, remove_pool
from maru_shm.pool.reading import Verify, read

needs_flush_extension = pytest.mark.skipif(
    flush_kind() in ("none", "not built"), reason=f"cache-line flushes: {flush_kind()}"
)


def test_b22_too_small_a_tmpfs_is_an_error_with_needed_and_free_bytes(shm_dir: Path) -> None:
    path = shm_dir / "sub" / "big.pool"
    with pytest.raises(NotEnoughSpace) as caught:
        create_pool(path, "tmpfs", 1 << 50)
    assert caught.value.needed_bytes > 1 << 50
    assert 0 < caught.value.free_bytes < 1 << 45
    assert str(caught.value.needed_bytes) in str(caught.value)
    assert str(caught.value.free_bytes) in str(caught.value)
    assert not path.parent.exists()


def test_b22_too_little_memory_is_the_same_error(shm_dir: Path) -> None:
    with (
        patch.object(filesystem, "available_memory_bytes", lambda: 1000),
        pytest.raises(NotEnoughSpace, match="MemAvailable"),
    ):
        create_pool(shm_dir / "a.pool", "tmpfs", POOL_BYTES)
    assert os.listdir(shm_dir) == []


def test_b22_space_that_others_take_meanwhile_is_the_same_error(shm_dir: Path) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    with patch.object(filesystem, "allocate", full), pytest.raises(NotEnoughSpace):
        create_pool(shm_dir / "a.pool", "tmpfs", POOL_BYTES)
    assert os.listdir(shm_dir) == []


def test_tmpfs_refuses_a_path_elsewhere(tmp_path: Path) -> None:
    if medium_for(str(tmp_path)) == "tmpfs":
        pytest.skip("the temporary directory is on tmpfs")
    with pytest.raises(MediumUnavailable, match="not on tmpfs"):
        create_pool(tmp_path / "a.pool", "tmpfs", POOL_BYTES)


def test_a_file_on_any_mount_works(tmp_path: Path) -> None:
    pool = create_pool(tmp_path / "a.pool", "file", POOL_BYTES, NOMINAL_BYTES)
    pool.begin_epoch()
    list(pool.scan())
    pool.apply([BindSegment(0, SHAPE)])
    assert read(pool, store(pool, b"x" * 100), Verify.FULL) == b"x" * 100
    pool.close()


def test_where_blocks_cannot_be_allocated_the_file_is_filled_when_it_is_made(
    tmp_path: Path,
) -> None:
    def missing(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no such thing")

    with patch.object(filesystem, "allocate", missing):
        pool = create_pool(tmp_path / "a.pool", "file", POOL_BYTES, NOMINAL_BYTES)
        assert os.stat(pool.path).st_blocks * 512 >= POOL_BYTES
        pool.begin_epoch()
        list(pool.scan())
        pool.apply([BindSegment(0, SHAPE)])
        pool.close()


def test_a_directory_or_device_is_no_pool_file(shm_dir: Path) -> None:
    for path in (shm_dir, Path("/dev/null")):
        with pytest.raises(MediumUnavailable):
            open_pool(path, "tmpfs")


def test_an_unknown_medium_names_those_there_are() -> None:
    with pytest.raises(MediumUnavailable, match="'floppy'; there are tmpfs, file, dax"):
        open_medium("floppy")


def test_medium_for_guesses_by_what_is_there(shm_dir: Path) -> None:
    assert medium_for(str(shm_dir / "not" / "yet.pool")) == "tmpfs"
    assert medium_for("/dev/dax7.0") == "dax"
    assert medium_for("/proc/x") == "file"


@needs_flush_extension
def test_a_dax_device_is_used_whole_and_aligned(dax: DaxStandIn) -> None:
    pool = create_pool(dax.path, dax.medium, None, NOMINAL_BYTES)
    assert pool.geometry.pool_bytes == POOL_BYTES
    assert pool.geometry.num_segments == 14
    pool.begin_epoch()
    list(pool.scan())
    pool.apply([BindSegment(0, SHAPE)])
    extent = store(pool, b"x" * 100)
    member = open_pool(dax.path, dax.medium, expect_uuid=pool.uuid)
    assert read(member, extent, Verify.FULL) == b"x" * 100
    member.close()
    pool.close()


@needs_flush_extension
def test_a_part_of_a_dax_device_is_rounded_down_to_its_alignment(dax: DaxStandIn) -> None:
    pool = create_pool(dax.path, dax.medium, 300_000, NOMINAL_BYTES)
    assert pool.geometry.pool_bytes == 300_000 // 65536 * 65536
    pool.close()


@needs_flush_extension
def test_a_dax_pool_is_believed_after_a_reboot(dax: DaxStandIn) -> None:
    pool = create_pool(dax.path, dax.medium, None, NOMINAL_BYTES)
    pool.begin_epoch()
    list(pool.scan())
    pool.apply([BindSegment(0, SHAPE)])
    extent = store(pool, b"x" * 100)
    pool.close()
    with patch("maru_shm.pool.pool._BOOT_ID", Path("/nonexistent")):
        again = open_pool(dax.path, dax.medium)
        again.begin_epoch()
        (found,) = again.scan()
    assert [o.generation for o in found.sealed] == [extent.generation]
    again.close()


@needs_flush_extension
def test_b22_a_dax_device_too_small_says_needed_and_free(dax: DaxStandIn) -> None:
    with pytest.raises(NotEnoughSpace) as caught:
        create_pool(dax.path, dax.medium, POOL_BYTES * 2, NOMINAL_BYTES)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (POOL_BYTES * 2, POOL_BYTES)
    assert not any(dax.path.read_bytes())


@needs_flush_extension
def test_a_dax_device_that_holds_something_is_not_overwritten(dax: DaxStandIn) -> None:
    dax.path.write_bytes(b"precious".ljust(POOL_BYTES, b"\0"))
    with pytest.raises(PoolExists, match="not Maru's"):
        create_pool(dax.path, dax.medium, None, NOMINAL_BYTES)
    assert dax.path.read_bytes().startswith(b"precious")
    remove_pool(dax.path, dax.medium)
    create_pool(dax.path, dax.medium, None, NOMINAL_BYTES).close()
    with pytest.raises(PoolExists, match="Maru pool already"):
        create_pool(dax.path, dax.medium, None, NOMINAL_BYTES)
    remove_pool(dax.path, dax.medium)
    assert dax.path.exists()
    create_pool(dax.path, dax.medium, None, NOMINAL_BYTES).close()


def test_a_dax_device_that_sysfs_does_not_know_is_refused(dax: DaxStandIn) -> None:
    for attribute, value in (("size", "0"), ("align", "many")):
        dax.say(attribute, value)
        with pytest.raises(MediumUnavailable, match=attribute):
            create_pool(dax.path, dax.medium, None)
        dax.say(attribute, "65536")
    with pytest.raises(MediumUnavailable, match="the kernel does not say"):
        create_pool(dax.path.with_name("dax9.9"), dax.medium, None)


def test_an_ordinary_file_is_no_dax_device_unless_sysfs_is_a_stand_in(shm_dir: Path) -> None:
    (shm_dir / "dax0.0").write_bytes(bytes(POOL_BYTES))
    with pytest.raises(PoolError):
        DaxMedium().open(shm_dir / "dax0.0", medium.Access.READ)
    with pytest.raises(NoSuchPool):
        DaxMedium().open(shm_dir / "dax0.1", medium.Access.READ)


@pytest.mark.parametrize("state", ["missing", "none"])
def test_a_medium_that_needs_flushes_refuses_to_open_without_them(
    dax: DaxStandIn, state: str
) -> None:
    class NoInstructions:
        @staticmethod
        def kind() -> str:
            return "none"

    native = None if state == "missing" else NoInstructions()
    message = "pip install" if state == "missing" else "knows none"
    with patch.object(flush_module, "native_flush", lambda: native):
        for call in (create_pool, open_pool):
            args = (dax.path, dax.medium, None) if call is create_pool else (dax.path, dax.medium)
            with pytest.raises(MediumUnavailable, match=message):
                call(*args)  # type: ignore[operator]
    assert not any(dax.path.read_bytes())
