"""A shared mapping of a pool, and the thread that populates it.

The first touch of a page through a fresh mapping costs several times the copy itself (measured:
7.5 x for new tmpfs pages, 3.7 x for resident ones), so every process that copies populates its
own mapping in the background. Until that is done copies work, and are slower.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from enum import Enum, unique

import numpy as np

from maru_shm.pool import filesystem
from maru_shm.pool.errors import MediumUnavailable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

SLICE_BYTES = 16 << 20
"""Populated per system call: about 10 ms, during which the process can map and unmap nothing."""
_BACKGROUND_NICE = 19
_PAGE_BYTES = mmap.PAGESIZE


@unique
class Access(Enum):
    """What a mapping allows."""

    READ = "read"
    READ_WRITE = "read_write"


@unique
class Populate(Enum):
    """What populated pages are ready for; the values are the kernel's madvise advices."""

    READ = 22
    WRITE = 23


class SharedMapping:
    """``length`` bytes of a file or device, mapped shared. Owns neither path nor format.

    Thread: ``close`` by the owner only; everything else from any thread.
    """

    def __init__(self, fd: int, length: int, access: Access) -> None:
        """Map; keeps its own duplicate of ``fd``. Raises MediumUnavailable."""
        protection = mmap.PROT_READ
        if access is Access.READ_WRITE:
            protection |= mmap.PROT_WRITE
        self._fd = os.dup(fd)
        try:
            self._mmap: mmap.mmap | None = mmap.mmap(
                self._fd, length, flags=mmap.MAP_SHARED, prot=protection
            )
        except (OSError, ValueError) as error:
            os.close(self._fd)
            raise MediumUnavailable(f"{length} bytes cannot be mapped: {error}") from error
        self.length = length
        self.access = access
        self._buffer: memoryview | None = memoryview(self._mmap)
        pages = np.frombuffer(self._mmap, dtype=np.uint8)
        self.address: int = pages.ctypes.data
        """Address of the first byte in this process, for native code; 0 after ``close``."""
        del pages
        self._populated_bytes = 0
        self._populate_error: str | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def buffer(self) -> memoryview:
        """All bytes (format ``B``), writable as ``access`` says. Raises ValueError once closed."""
        if self._buffer is None:
            raise ValueError("the mapping is closed")
        return self._buffer

    def fileno(self) -> int:
        """The descriptor of what is mapped; closed by ``close``."""
        return self._fd

    @property
    def populated_bytes(self) -> int:
        """Bytes from the start that this process can touch without a page fault."""
        return self._populated_bytes

    @property
    def populate_error(self) -> str | None:
        """Why populating ended early; None while it runs, when it is done or was not begun."""
        return self._populate_error

    def start_populate(
        self,
        how: Populate,
        on_progress: Callable[[int, int], None] | None = None,
        slice_bytes: int = SLICE_BYTES,
    ) -> None:
        """Populate in a daemon thread of the lowest priority; a second call does nothing.

        ``on_progress(populated_bytes, length)`` is called from that thread after every slice.
        """
        if self._thread is not None or self._buffer is None:
            return
        self._thread = threading.Thread(
            target=self._populate,
            args=(how, on_progress, slice_bytes),
            name="maru-populate",
            daemon=True,
        )
        self._thread.start()

    def wait_populated(self, timeout_s: float) -> bool:
        """Wait for the thread of ``start_populate``; whether all bytes are populated now."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._populated_bytes >= self.length

    def close(self) -> None:
        """Stop populating (waits for one slice) and unmap. Idempotent.

        If views of ``buffer`` are still in use elsewhere the memory stays mapped until the last
        of them is gone, so that no thread is left with an address of nothing.
        """
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._buffer is None or self._mmap is None:
            return
        self._buffer.release()
        self._buffer = None
        self.address = 0
        # Views still in use hold the mmap object, which unmaps with the last of them.
        with contextlib.suppress(BufferError):
            self._mmap.close()
        self._mmap = None
        os.close(self._fd)

    def _populate(
        self, how: Populate, on_progress: Callable[[int, int], None] | None, slice_bytes: int
    ) -> None:
        _lower_priority()
        for offset in range(0, self.length, slice_bytes):
            if self._stop.is_set():
                return
            length = min(slice_bytes, self.length - offset)
            self._populate_error = self._populate_slice(how, offset, length)
            if self._populate_error is not None:
                return
            self._populated_bytes = offset + length
            if on_progress is not None:
                on_progress(self._populated_bytes, self.length)

    def _populate_slice(self, how: Populate, offset: int, length: int) -> str | None:
        while _libc.madvise(self.address + offset, length, how.value) != 0:
            if self._stop.is_set():
                return None
            code = ctypes.get_errno()
            if code in (errno.EINTR, errno.EAGAIN):
                continue
            if code == errno.EINVAL:
                return self._touch_slice(offset, length)
            return f"madvise at {offset}: {os.strerror(code)}"
        return None

    def _touch_slice(self, offset: int, length: int) -> str | None:
        """For kernels before 5.14. Reads only: a store could undo another process's store."""
        if not filesystem.is_allocated(self._fd, self.length):
            return "this kernel cannot populate, and touching a sparse file could be fatal"
        pages = np.frombuffer(self.buffer[offset : offset + length], dtype=np.uint8)
        pages[::_PAGE_BYTES].max()
        return None


def _lower_priority() -> None:
    with contextlib.suppress(OSError):  # It is a courtesy only.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BACKGROUND_NICE)
