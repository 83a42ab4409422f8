"""Where a user's server and its clients meet: socket, locks, log; and where the pool lies.

    $MARU_RUNTIME_DIR, else $XDG_RUNTIME_DIR/maru, else /tmp/maru-<uid>      mode 0700
      server.sock        the embedded server's socket
      server.sock.lock   held by that server while it lives
      server.lock        held by whoever is starting it
      server.log
      sessions/          one lock file per client, held by it and its workers
    /dev/shm/maru-<uid>/<digest of the runtime directory>.pool

Whoever may reach the socket may read every cached byte, so the directory is refused unless it
belongs to this user alone.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from maru_shm.errors import MaruError

_MAX_SOCKET_PATH_BYTES = 107
"""Of ``sockaddr_un`` on Linux, without the closing zero."""

_TMPFS = Path("/dev/shm")


class RuntimeDirUnusable(MaruError):
    """The runtime directory cannot be trusted or made; the message says what to change."""


@dataclass(frozen=True, slots=True)
class RuntimeDir:
    """The names of everything in one runtime directory. Making it is ``prepare``'s."""

    path: Path

    @property
    def url(self) -> str:
        """The embedded server's address."""
        return f"ipc://{self.socket}"

    @property
    def socket(self) -> Path:
        """The embedded server's socket."""
        return self.path / "server.sock"

    @property
    def start_lock(self) -> Path:
        """Locked by whoever is starting the embedded server."""
        return self.path / "server.lock"

    @property
    def log(self) -> Path:
        """The embedded server's log."""
        return self.path / "server.log"

    @property
    def sessions(self) -> Path:
        """The clients' lock files."""
        return self.path / "sessions"

    @property
    def pool(self) -> Path:
        """The embedded server's pool. One of its own for each runtime directory."""
        digest = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:16]
        return _TMPFS / f"maru-{os.getuid()}" / f"{digest}.pool"

    def prepare(self) -> None:
        """Make the directories. Raises RuntimeDirUnusable."""
        make_private_dir(self.path)
        make_private_dir(self.sessions)
        check_socket_path(self.socket)


def find_runtime_dir(environ: Mapping[str, str] = os.environ) -> RuntimeDir:
    """The runtime directory of this user and environment; it may not exist yet."""
    if chosen := environ.get("MARU_RUNTIME_DIR"):
        return RuntimeDir(Path(chosen).absolute())
    session_dir = environ.get("XDG_RUNTIME_DIR")
    # In containers the variable often names a directory that nobody made.
    if session_dir and os.access(session_dir, os.W_OK):
        return RuntimeDir(Path(session_dir).absolute() / "maru")
    return RuntimeDir(Path(f"/tmp/maru-{os.getuid()}"))


def runtime_dir_of(url: str) -> RuntimeDir:
    """Where clients of the server at ``url`` keep their lock files: beside an ipc socket, in the
    user's own runtime directory for everything else."""
    if url.startswith("ipc://"):
        return RuntimeDir(Path(url.removeprefix("ipc://")).absolute().parent)
    return find_runtime_dir()


def make_private_dir(path: Path) -> None:
    """Make ``path`` with mode 0700, or check that it is a directory of this user alone.

    Raises RuntimeDirUnusable.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise RuntimeDirUnusable(
            f"{path}: {error.strerror}; set MARU_RUNTIME_DIR to a directory of your own"
        ) from None
    if not stat.S_ISDIR(found.st_mode):
        raise RuntimeDirUnusable(f"{path} is not a directory; set MARU_RUNTIME_DIR to another one")
    if found.st_uid != os.getuid():
        raise RuntimeDirUnusable(
            f"{path} belongs to user {found.st_uid}, this process runs as {os.getuid()}; set "
            "MARU_RUNTIME_DIR to a directory of your own"
        )
    if found.st_mode & 0o077:
        raise RuntimeDirUnusable(
            f"{path} is open to others (mode {stat.S_IMODE(found.st_mode):o}); cached KV would be "
            f"too. chmod 700 it, or set MARU_RUNTIME_DIR to another directory"
        )


def check_socket_path(path: Path) -> None:
    """Raises RuntimeDirUnusable if the kernel could not bind a socket of this name."""
    length = len(os.fsencode(path))
    if length > _MAX_SOCKET_PATH_BYTES:
        raise RuntimeDirUnusable(
            f"{path}: {length} bytes are too long for a socket's name (at most "
            f"{_MAX_SOCKET_PATH_BYTES}); set MARU_RUNTIME_DIR to a shorter directory"
        )
