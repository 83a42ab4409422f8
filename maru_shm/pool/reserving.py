"""Giving a pool's file real blocks before anyone can touch them.

Reserving 4 GiB of tmpfs takes about 1.2 s here (0.3 s per GiB), too long to wait for when a
server starts, so a thread does it in slices, and binding a segment waits for that segment only.
No extent exists in an unbound segment, so no process ever stores to a page without a block.
"""

from __future__ import annotations

import errno
import os
import threading

from maru_shm.pool import filesystem
from maru_shm.pool.errors import NotEnoughSpace, PoolError

SLICE_BYTES = 64 << 20
"""About 20 ms: how long binding a segment may wait for a slice that is not its own."""


class BlockReserver:
    """Allocates blocks of one file from its start to its end.

    Thread: ``ensure`` and ``close`` from the server's thread.
    """

    def __init__(self, path: str, fd: int, length: int, slice_bytes: int = SLICE_BYTES) -> None:
        self._path = path
        self._fd = os.dup(fd)
        self._length = length
        self._slice_bytes = slice_bytes
        self._lock = threading.Lock()
        self._reserved_bytes = length if filesystem.is_allocated(fd, length) else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="maru-reserve", daemon=True)

    def start(self) -> None:
        """Begin in the background; without it ``ensure`` does all the work."""
        self._thread.start()

    @property
    def reserved_bytes(self) -> int:
        """Bytes from the start that have blocks for sure."""
        return self._reserved_bytes

    def ensure(self, offset: int, length: int) -> None:
        """The range has blocks when this returns. Raises NotEnoughSpace, PoolError."""
        end = offset + length
        if end <= self._reserved_bytes:
            return
        with self._lock:
            if end > self._reserved_bytes:
                self._allocate(max(offset, self._reserved_bytes), end)

    def close(self) -> None:
        """Stop the thread (waits for one slice). Idempotent."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _run(self) -> None:
        while not self._stop.is_set() and self._reserved_bytes < self._length:
            with self._lock:
                start = self._reserved_bytes
                end = min(start + self._slice_bytes, self._length)
                try:
                    self._allocate(start, end)
                except PoolError:
                    return  # Binding a segment there meets the same error, and can report it.
                self._reserved_bytes = end

    def _allocate(self, start: int, end: int) -> None:
        try:
            filesystem.allocate(self._fd, start, end - start)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                free = os.fstatvfs(self._fd)
                raise NotEnoughSpace(
                    self._path,
                    end - start,
                    free.f_bavail * free.f_frsize,
                    "Others took what was free when the pool was made: free some.",
                ) from error
            raise PoolError(
                f"{self._path}: no blocks for bytes {start} to {end}: {error.strerror}"
            ) from error
