"""The server that nobody has to start: found, or started under a lock, detached.

Of any number of processes that look at once exactly one starts it, the others find it. The server
belongs to none of them: it is no child of the engine (whoever kills an engine's children must
not take the server of the others), has no terminal and none of its open files, and leaves by
itself ``linger_s`` after its last session.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import maru_shm
from maru_shm.control.errors import MaruError, ServerStartFailed
from maru_shm.control.file_lock import FileLock, try_lock
from maru_shm.control.runtime_dir import RuntimeDir
from maru_shm.control.server import PoolCare, ServerSettings
from maru_shm.pool.filesystem import available_memory_bytes, free_bytes

log = logging.getLogger(__name__)

LINGER_S = 300.0
"""Long enough to restart an engine, short enough that a forgotten pool gives its memory back."""

START_TIMEOUT_S = 20.0
"""A start takes about half a second; a pool of many objects on a busy host takes longer."""

DEFAULT_POOL_BYTES = 4 << 30

_LOOK_S = 0.01
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 30.0

_DETACH = (
    "import os, sys\n"
    "child = os.fork()\n"
    "if child:\n"
    "    print(child)\n"
    "else:\n"
    "    log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)\n"
    "    os.dup2(log, 1); os.dup2(log, 2); os.close(log)\n"
    "    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)
"""Run by a bare interpreter in between: it forks, so that the server's parent is init."""


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """Which server to find or start."""

    runtime: RuntimeDir
    pool_bytes: int | None = None
    """Of the pool, if it must be made; None: ``default_pool_bytes``."""
    linger_s: float = LINGER_S


def default_pool_bytes(directory: Path) -> int:
    """4 GiB, or half of what the filesystem and the memory behind it have free if that is less."""
    room = [
        free // 2 for free in (free_bytes(directory), available_memory_bytes()) if free is not None
    ]
    return min(DEFAULT_POOL_BYTES, *room) if room else DEFAULT_POOL_BYTES


def answers(url: str) -> bool:
    """Whether a server has the ipc socket at ``url``. Takes microseconds, never blocks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        error = probe.connect_ex(url.removeprefix("ipc://"))
    # EAGAIN: somebody listens, and is busy.
    return error in (0, errno.EAGAIN, errno.EINPROGRESS)


def find_or_start(server: EmbeddedServer, timeout_s: float = START_TIMEOUT_S) -> str:
    """The url of this user's server, which is up when this returns.

    Raises ServerStartFailed (with the server's own words) and RuntimeDirUnusable. Blocks: up to
    ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    runtime = server.runtime
    runtime.prepare()
    if answers(runtime.url):
        return runtime.url
    lock = _start_lock(runtime, deadline)
    try:
        if not answers(runtime.url):
            _start(server, deadline)
    finally:
        lock.close()
    return runtime.url


def _start_lock(runtime: RuntimeDir, deadline: float) -> FileLock:
    while (lock := try_lock(runtime.start_lock)) is None:
        if time.monotonic() >= deadline:
            raise ServerStartFailed(
                f"somebody else has been starting the server for too long and holds "
                f"{runtime.start_lock}; its log is {runtime.log}"
            )
        time.sleep(_LOOK_S)  # flock has no wait with a deadline
    return lock


def _start(server: EmbeddedServer, deadline: float) -> None:
    runtime = server.runtime
    pool_bytes = server.pool_bytes
    if pool_bytes is None:
        pool_bytes = default_pool_bytes(runtime.pool.parent.parent)
    settings = ServerSettings(
        url=runtime.url,
        pool_path=str(runtime.pool),
        pool_bytes=pool_bytes,
        pool_care=PoolCare.OWN,
        linger_s=server.linger_s,
    )
    log_begins_at = runtime.log.stat().st_size if runtime.log.exists() else 0
    pid = _launch(settings, runtime)
    log.info("started a Maru server, process %d, log %s", pid, runtime.log)
    with suppress(ProcessLookupError):
        life = os.pidfd_open(pid)
        try:
            while time.monotonic() < deadline:
                if answers(runtime.url):
                    return
                if select.select([life], [], [], _LOOK_S)[0]:
                    break
        finally:
            os.close(life)
    if answers(runtime.url):
        return
    raise ServerStartFailed(
        f"the Maru server did not come up: {_last_words(runtime.log, log_begins_at)} "
        f"(log: {runtime.log})"
    )


def _launch(settings: ServerSettings, runtime: RuntimeDir) -> int:
    """Start the server process, detached; returns its pid."""
    # The child must find the same maru_shm, however this process found it.
    root = str(Path(maru_shm.__file__).resolve().parent.parent)
    search = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), root)))
    started = subprocess.run(
        [
            sys.executable,
            *("-S", "-E", "-c", _DETACH, str(runtime.log)),
            *("-m", "maru_shm.control.server", settings.to_json()),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        cwd="/",
        env={**os.environ, "PYTHONPATH": search},
        timeout=START_TIMEOUT_S,
        check=False,
    )
    if started.returncode or not started.stdout.strip().isdigit():
        raise ServerStartFailed(
            f"no process could be started: {started.stderr.decode(errors='replace').strip()}"
        )
    return int(started.stdout)


def _last_words(path: Path, begin: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(begin)
            lines = file.read()[-4096:].decode(errors="replace").split("\n")
    except OSError:
        lines = []
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else "it said nothing"


class BackgroundStart:
    """Starts the server again and again, if need be, without ever blocking its caller.

    For the serving path. A daemon thread does the waiting, one at a time, with a back-off.
    """

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._thread: threading.Thread | None = None
        self._retry_s = _FIRST_RETRY_S
        self._next_at = 0.0
        self._complained = ""
        self._error: MaruError | None = None

    def nudge(self) -> MaruError | None:
        """Nobody answers: see to it. Returns at once: why the last attempt failed, if it did."""
        now = time.monotonic()
        if (self._thread is not None and self._thread.is_alive()) or now < self._next_at:
            return self._error
        if answers(self._server.runtime.url):
            return None
        self._error = None
        self._next_at = now + self._retry_s
        self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)
        self._thread = threading.Thread(target=self._run, name="maru-start-server", daemon=True)
        self._thread.start()
        return None

    def _run(self) -> None:
        try:
            find_or_start(self._server)
        except (MaruError, OSError, subprocess.SubprocessError) as error:
            self._error = error if isinstance(error, MaruError) else ServerStartFailed(str(error))
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning("no Maru server, so all is a miss: %s", error)
        else:
            self._retry_s = _FIRST_RETRY_S
