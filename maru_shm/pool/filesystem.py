"""What the kernel says about the file system under a path, and space in it."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]

MOUNTINFO = Path("/proc/self/mountinfo")
MEMINFO = Path("/proc/meminfo")


def filesystem_type(path: Path, mountinfo: Path = MOUNTINFO) -> str:
    """Type of the file system that ``path`` is on (or would be made on), e.g. ``tmpfs``.

    Empty where the kernel does not say.
    """
    device = os.stat(_nearest_existing(path)).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        # id parent major:minor root mountpoint options [optional...] - type source options
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            return right.split()[0]
    return ""


def free_bytes(path: Path) -> int | None:
    """Bytes that this user can still store in the file system of ``path``.

    None where the file system sets no limit of its own (hugetlbfs without ``size=``).
    """
    stat = os.statvfs(_nearest_existing(path))
    if stat.f_blocks == 0:
        return None
    return stat.f_bavail * stat.f_frsize


def available_memory_bytes(meminfo: Path = MEMINFO) -> int | None:
    """Memory and swap that new pages can come from; None where the kernel does not say."""
    amounts = {}
    try:
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            amounts[name] = int(value.split()[0]) * 1024
        return amounts["MemAvailable"] + amounts.get("SwapFree", 0)
    except (OSError, KeyError, ValueError, IndexError):
        return None


def block_bytes(path: Path) -> int:
    """Size that file lengths on this file system should be a multiple of."""
    return os.statvfs(_nearest_existing(path)).f_bsize


def allocate(fd: int, offset: int, length: int) -> None:
    """Give the file real blocks in the range, without changing its bytes.

    The system call itself, since ``posix_fallocate`` of the C library falls back to writing
    bytes where it is missing, which would race with stores through a mapping. Raises OSError;
    ``unsupported`` tells the errors that mean the file system has no such call.
    """
    while _libc.fallocate(fd, 0, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def unsupported(error: OSError) -> bool:
    """Whether ``error`` from ``allocate`` means that the file system cannot do it at all."""
    return error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)


def is_allocated(fd: int, length: int) -> bool:
    """Whether the file has blocks for all of its first ``length`` bytes, as far as it shows.

    tmpfs counts exactly its data; elsewhere the count has the file system's own blocks in it,
    and only the absence of holes is proof.
    """
    if os.fstat(fd).st_blocks * 512 < length:
        return False
    if filesystem_type(Path(f"/proc/self/fd/{fd}")) == "tmpfs":
        return True
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) >= length
    except OSError:
        return False


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
