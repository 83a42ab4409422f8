"""One server per pool: a lock beside the pool that its server holds for as long as it lives.

The lock file also notes where the holder's clients keep their proofs of life. A later server with
another runtime directory looks there too, before it takes a writer for dead.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from maru_shm.control.file_lock import FileLock, try_lock
from maru_shm.control.runtime_dir import make_private_dir
from maru_shm.pool.errors import PoolError


class PoolInUse(PoolError):
    """Another server serves this pool."""


class PoolLock:
    """This process's hold on a pool."""

    def __init__(self, lock: FileLock, earlier_sessions: Path | None) -> None:
        self._lock = lock
        self.earlier_sessions = earlier_sessions
        """Where the pool's last server kept its clients' lock files."""

    def remove(self) -> None:
        """The pool is gone: take the lock file away."""
        self._lock.remove()

    def close(self) -> None:
        """Leave the pool to the next server. Idempotent."""
        self._lock.close()


def lock_pool(pool: Path, sessions: Path) -> PoolLock:
    """Become the server of the pool at ``pool`` (a file, there or not, or a device).

    Raises PoolInUse.
    """
    path = _lock_path(pool)
    lock = try_lock(path)
    if lock is None:
        try:
            holder = f"process {_note(path.read_bytes())['pid']}"
        except (OSError, KeyError):
            holder = "another process"
        raise PoolInUse(f"{pool}: is served by {holder} already; use that server, or stop it first")
    earlier = _note(lock.read()).get("sessions")
    lock.write(json.dumps({"pid": os.getpid(), "sessions": str(sessions)}).encode())
    return PoolLock(lock, Path(earlier) if isinstance(earlier, str) else None)


def _lock_path(pool: Path) -> Path:
    if not pool.is_char_device():
        return pool.with_name(f"{pool.name}.lock")
    # Nothing can be made beside a device.
    directory = Path("/dev/shm") / f"maru-{os.getuid()}"
    make_private_dir(directory)
    digest = hashlib.sha256(os.fsencode(pool.resolve())).hexdigest()[:16]
    return directory / f"{digest}.device.lock"


def _note(raw: bytes) -> dict[str, object]:
    try:
        note = json.loads(raw)
    except ValueError:
        return {}
    return note if isinstance(note, dict) else {}
