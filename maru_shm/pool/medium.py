"""Where a pool's bytes live: tmpfs, a file on any mount, or a DAX character device.

A medium opens and makes the file descriptor that a pool is mapped from, and says what the code
above has to mind: alignment, cache lines, what is left after a reboot. It knows nothing of a
pool's format.

SIGBUS: a store to a mapped page for which the file system has no block kills the process. So
blocks are allocated for real (``BlockReserver``) before any extent is given out, and the space is
checked before the file is made at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from abc import ABC, abstractmethod
from enum import Enum, unique
from pathlib import Path

from maru_shm.pool import filesystem
from maru_shm.pool.errors import (
    MediumUnavailable,
    NoSuchPool,
    NotEnoughSpace,
    PoolError,
    PoolExists,
)
from maru_shm.pool.flush import Coherence
from maru_shm.pool.format import PAGE_BYTES
from maru_shm.pool.mapping import Access, Populate

SYSFS = Path("/sys")
_UNFINISHED = ".new"


@unique
class Persistence(Enum):
    """What a medium holds after the host was started again."""

    THIS_BOOT = "this_boot"
    """Nothing, or bytes that were written out in any order: not to be trusted."""
    FLUSHED = "flushed"
    """All that was flushed, in the order of the fences."""


@unique
class Blocks(Enum):
    """How a medium's file gets its blocks."""

    ON_DEMAND = "on_demand"
    """Sparse until allocated."""
    FIXED = "fixed"
    """They are all there from the start."""


class Medium(ABC):
    """One kind of place for a pool. Stateless; all paths are absolute or relative to the cwd."""

    name: str
    coherence: Coherence
    persistence: Persistence
    blocks: Blocks
    populate: Populate
    """How a mapping of it is best populated."""

    @abstractmethod
    def alignment(self, path: Path) -> int:
        """Bytes that a pool's size must be a multiple of."""

    @abstractmethod
    def size_bytes(self, path: Path, fd: int) -> int:
        """Bytes that an open ``fd`` of this medium can map."""

    @abstractmethod
    def check_space(self, path: Path, pool_bytes: int) -> None:
        """Raise NotEnoughSpace, MediumUnavailable or PoolExists if a pool cannot be made there.

        Writes nothing."""

    @abstractmethod
    def begin(self, path: Path, pool_bytes: int, head_bytes: int) -> tuple[int, Path]:
        """Make room for a new pool: an open fd, and the path it has until ``finish``.

        The first ``head_bytes`` have real blocks: they are written before any segment is bound.
        """

    @abstractmethod
    def finish(self, unfinished: Path, path: Path) -> None:
        """The pool's superblock is complete: let it appear at ``path``. Raises PoolExists."""

    @abstractmethod
    def discard(self, unfinished: Path) -> None:
        """Making the pool failed: leave nothing behind."""

    @abstractmethod
    def remove(self, path: Path) -> None:
        """Take away what is at ``path``, pool or not. Mappings of it stay valid."""

    def open(self, path: Path, access: Access) -> int:
        """An open fd of what is at ``path``. Raises NoSuchPool, MediumUnavailable."""
        flags = os.O_RDONLY if access is Access.READ else os.O_RDWR
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except FileNotFoundError:
            raise NoSuchPool(f"{path}: no such pool") from None
        except NotADirectoryError:
            raise NoSuchPool(f"{path}: no such pool") from None
        except OSError as error:
            raise MediumUnavailable(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            self._check_kind(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _check_kind(self, path: Path, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise MediumUnavailable(
                f"{path}: medium {self.name!r} is an ordinary file, and this is none; "
                f"use --medium dax for a DAX device"
            )


class FileMedium(Medium):
    """A file on any mount: disk, DAX mount (fsdax) of this host, hugetlbfs.

    Coherent between the processes of one host. Bytes on a disk are written out in any order,
    so a pool is not believed after a reboot.
    """

    name = "file"
    coherence = Coherence.COHERENT
    persistence = Persistence.THIS_BOOT
    blocks = Blocks.ON_DEMAND
    populate = Populate.READ
    """For writing would make every page dirty, and a disk write it out."""

    def alignment(self, path: Path) -> int:
        """The file system's block: 4 KiB, or the huge page of a hugetlbfs."""
        return max(PAGE_BYTES, filesystem.block_bytes(path))

    def size_bytes(self, path: Path, fd: int) -> int:
        """The file's length."""
        return os.fstat(fd).st_size

    def check_space(self, path: Path, pool_bytes: int) -> None:
        """Compare with what the file system has left."""
        if path.exists():
            raise PoolExists(f"{path}: exists already; remove it or choose another path")
        self._require(path, pool_bytes, filesystem.free_bytes(path), f"Free some in {path.parent}/")

    def begin(self, path: Path, pool_bytes: int, head_bytes: int) -> tuple[int, Path]:
        """A file of that size under a temporary name beside ``path``, mode 0600."""
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            _sweep_unfinished(path)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise MediumUnavailable(
                f"{path}: cannot be made in {path.parent}: {error.strerror}"
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            os.ftruncate(fd, pool_bytes)
            self._allocate_head(path, fd, pool_bytes, head_bytes)
        except BaseException:
            os.close(fd)
            self.discard(unfinished)
            raise
        return fd, unfinished

    def finish(self, unfinished: Path, path: Path) -> None:
        """Rename without replacing anything."""
        try:
            os.link(unfinished, path)
        except FileExistsError:
            raise PoolExists(f"{path}: made by someone else at the same time") from None
        except OSError as error:
            raise MediumUnavailable(f"{path}: cannot be made: {error.strerror}") from error
        finally:
            self.discard(unfinished)

    def discard(self, unfinished: Path) -> None:
        """Unlink the temporary name."""
        unfinished.unlink(missing_ok=True)

    def remove(self, path: Path) -> None:
        """Unlink."""
        path.unlink(missing_ok=True)

    def _require(self, path: Path, needed: int, free: int | None, advice: str) -> None:
        if free is not None and free < needed:
            raise NotEnoughSpace(str(path), needed, free, f"{advice} or ask for a smaller pool.")

    def _allocate_head(self, path: Path, fd: int, pool_bytes: int, head_bytes: int) -> None:
        try:
            filesystem.allocate(fd, 0, head_bytes)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = filesystem.free_bytes(path) or 0
                raise NotEnoughSpace(
                    str(path), pool_bytes, free, "Others took what was free: free some."
                ) from error
            if not filesystem.unsupported(error):
                raise MediumUnavailable(f"{path}: no blocks to be had: {error.strerror}") from error
            # No fallocate here (NFSv3, 9p, ...): only bytes that were written are sure to be there.
            _write_zeros(path, fd, pool_bytes)


class TmpfsMedium(FileMedium):
    """A file on tmpfs, usually under /dev/shm: the default."""

    name = "tmpfs"
    populate = Populate.WRITE

    def check_space(self, path: Path, pool_bytes: int) -> None:
        """Compare with the mount's size limit and with the memory that is left."""
        kind = filesystem.filesystem_type(path)
        if kind not in ("tmpfs", ""):
            raise MediumUnavailable(
                f"{path}: lies on {kind}, not on tmpfs; use a path under /dev/shm, or medium 'file'"
            )
        super().check_space(path, pool_bytes)
        memory = filesystem.available_memory_bytes()
        self._require(path, pool_bytes, memory, "Memory is short (MemAvailable): free some")


class DaxMedium(Medium):
    """A DAX character device (``/dev/daxX.Y``): memory behind CXL, shared by hosts.

    Not coherent: other hosts and device writes do not snoop this host's caches. Size and
    alignment come from ``<sysfs_root>/bus/dax/devices/<name>/``; a test gives a root of its own
    and an ordinary file in place of the device.
    """

    name = "dax"
    coherence = Coherence.NEEDS_FLUSH
    persistence = Persistence.FLUSHED
    blocks = Blocks.FIXED
    populate = Populate.WRITE

    def __init__(self, sysfs_root: Path = SYSFS) -> None:
        self._sysfs_root = sysfs_root

    def alignment(self, path: Path) -> int:
        """The device's ``align``: 4 KiB, 2 MiB or 1 GiB."""
        return self._attribute(path, "align")

    def size_bytes(self, path: Path, fd: int) -> int:
        """The device's ``size``."""
        return self._attribute(path, "size")

    def check_space(self, path: Path, pool_bytes: int) -> None:
        """Compare with the device's size, and refuse a device that holds something."""
        if not path.exists():
            raise MediumUnavailable(f"{path}: no such device; `daxctl list` shows them")
        size = self._attribute(path, "size")
        if size < pool_bytes:
            raise NotEnoughSpace(str(path), pool_bytes, size, "The device is no larger.")

    def begin(self, path: Path, pool_bytes: int, head_bytes: int) -> tuple[int, Path]:
        """The device itself: there is nothing to make."""
        return self.open(path, Access.READ_WRITE), path

    def finish(self, unfinished: Path, path: Path) -> None:
        """Nothing: the superblock is there."""

    def discard(self, unfinished: Path) -> None:
        """Nothing: without a superblock the device holds no pool."""

    def remove(self, path: Path) -> None:
        """A device stays; ``maru_shm.pool.pool.remove_pool`` clears its superblock."""

    def _check_kind(self, path: Path, fd: int) -> None:
        mode = os.fstat(fd).st_mode
        stand_in = stat.S_ISREG(mode) and self._sysfs_root != SYSFS
        if not (stat.S_ISCHR(mode) or stand_in):
            raise MediumUnavailable(
                f"{path}: is not a character device; medium 'dax' takes /dev/daxX.Y, "
                f"a file on a DAX mount is medium 'file'"
            )

    def _attribute(self, path: Path, name: str) -> int:
        file = self._sysfs_root / "bus/dax/devices" / path.name / name
        try:
            value = int(file.read_text().strip(), 0)
        except (OSError, ValueError) as error:
            raise MediumUnavailable(
                f"{path}: the kernel does not say its {name} ({file}: {error}); "
                f"is it a DAX device in mode devdax?"
            ) from error
        if value <= 0:
            raise MediumUnavailable(f"{path}: {file} says {value}")
        return value


MEDIUM_NAMES = (TmpfsMedium.name, FileMedium.name, DaxMedium.name)


def open_medium(name: str, *, sysfs_root: Path = SYSFS) -> Medium:
    """The medium called ``name``, one of ``MEDIUM_NAMES``. Raises MediumUnavailable."""
    match name:
        case TmpfsMedium.name:
            return TmpfsMedium()
        case FileMedium.name:
            return FileMedium()
        case DaxMedium.name:
            return DaxMedium(sysfs_root)
    raise MediumUnavailable(f"no medium {name!r}; there are {', '.join(MEDIUM_NAMES)}")


def medium_for(path: str) -> str:
    """The name of the medium that ``path`` most likely means; it need not exist yet."""
    try:
        if stat.S_ISCHR(os.stat(path).st_mode):
            return DaxMedium.name
    except OSError:
        if path.startswith("/dev/dax"):
            return DaxMedium.name
    return TmpfsMedium.name if filesystem.filesystem_type(Path(path)) == "tmpfs" else "file"


def _sweep_unfinished(path: Path) -> None:
    """Remove what makers of this pool left that were killed: files nobody holds a lock on."""
    for leftover in path.parent.glob(f".{path.name}.*{_UNFINISHED}"):
        try:
            fd = os.open(leftover, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink(missing_ok=True)
        except OSError:
            pass  # Its maker lives.
        finally:
            os.close(fd)


def _write_zeros(path: Path, fd: int, length: int) -> None:
    zeros = memoryview(bytes(4 << 20))
    done = 0
    while done < length:
        try:
            done += os.pwrite(fd, zeros[: length - done], done)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise NotEnoughSpace(str(path), length, done, "Free some") from error
            raise PoolError(f"{path}: cannot be filled: {error.strerror}") from error
