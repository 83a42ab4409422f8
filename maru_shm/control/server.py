"""The server's body: one process, one thread, one socket, one pool.

    python -m maru_shm.control.server '<ServerSettings as JSON>'

is how an embedded server is started; ``maru server`` calls ``serve``. Imports stay few (no
terminal libraries), because a first engine waits for this to come up.

Start: lock the socket's name, lock the pool, open or make the pool, rebuild the index, bind, say
that it is ready. Only then does anybody find the socket, so a socket that answers is a server
that serves. Stop: on SIGTERM or SIGINT, or when ``linger_s`` have passed without a session.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, unique
from pathlib import Path

import dacite
import zmq

from maru_shm.control import messages as m
from maru_shm.control.address import check_url
from maru_shm.control.errors import BadFrame, WrongVersion
from maru_shm.control.file_lock import FileLock, try_lock
from maru_shm.control.pool_lock import PoolLock, lock_pool
from maru_shm.control.recovery import LEASE_TERM_S, recover
from maru_shm.control.runtime_dir import make_private_dir, runtime_dir_of
from maru_shm.control.service import Service
from maru_shm.control.sessions import LockFiles
from maru_shm.control.wire import MAX_FRAME_BYTES, decode_request, encode_reply
from maru_shm.errors import MaruError
from maru_shm.pool.errors import NoSuchPool, NotAPool, PoolFormatError
from maru_shm.pool.pool import Pool, create_pool, open_pool, remove_pool

log = logging.getLogger(__name__)

TEND_S = 0.5
"""How often dead clients and overdue leases are looked for; one probe of a lock file takes a few
microseconds."""

_TICK_MS = 250
"""The longest that a signal waits for the loop to look up."""

_QUEUED_REPLIES = 10_000
"""Per client. One that reads none of so many is treated as gone: its grants are taken back."""


# As plain integers: the operators of pyzmq's flag types cost microseconds each.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class SocketInUse(MaruError):
    """Another server has this socket."""


@unique
class PoolCare(Enum):
    """Whose the pool file is; the values are what settings say."""

    KEEP = "keep"
    """The operator's: it stays when the server leaves, and what is no pool is never touched."""
    OWN = "own"
    """The server's: removed on a clean exit; something unusable in its place is replaced."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """All that a server is told."""

    url: str
    """``ipc://<path>`` or ``tcp://<loopback address>:<port>``."""
    pool_path: str
    pool_bytes: int | None
    """Size if the pool must be made; None takes all of a DAX device. A pool that is there is
    taken as it is."""
    medium: str = "tmpfs"
    pool_care: PoolCare = PoolCare.KEEP
    linger_s: float | None = None
    """Leave so long after the last session ended (or, without one, after the start); None: stay."""
    segment_bytes: int | None = None
    """Nominal size of a segment, a power of two; None: chosen by the pool's size."""
    lease_term_s: float = LEASE_TERM_S
    policy: str = "lru"

    def to_json(self) -> str:
        """For a command line."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "pool_care": self.pool_care.value})

    @staticmethod
    def from_json(text: str) -> ServerSettings:
        """The settings of ``to_json``. Raises ValueError or dacite.DaciteError."""
        return dacite.from_dict(
            ServerSettings, json.loads(text), dacite.Config(cast=[PoolCare], strict=True)
        )


def serve(
    settings: ServerSettings,
    *,
    on_ready: Callable[[Pool], None] | None = None,
    on_populate: Callable[[int, int], None] | None = None,
) -> None:
    """Serve until a signal or the end of ``linger_s``. Returns after a clean stop.

    ``on_ready(pool)`` is called once the socket is bound, in this thread; ``on_populate(done_bytes,
    all_bytes)`` while the mapping is populated, in the populating thread.

    Raises MaruError (BadUrl, SocketInUse, PoolError, RuntimeDirUnusable) if it cannot start; then
    nothing was changed but directories made. Thread: the main one (it handles signals).
    """
    began = time.perf_counter()
    check_url(settings.url)
    runtime = runtime_dir_of(settings.url)
    runtime.prepare()
    with _locked_socket(settings.url), _served_pool(settings, runtime.sessions) as (pool, lock):
        owners = LockFiles(runtime.sessions, _others(lock.earlier_sessions, runtime.sessions))
        service = recover(
            pool,
            owners,
            time.monotonic,
            lease_term_s=settings.lease_term_s,
            policy=settings.policy,
        )
        owners.sweep()
        loop = ServerLoop(settings.url, service, settings.linger_s)
        loop.stop_on_signals()
        pool.start_populate(on_populate)
        # The index holds many small objects without cycles; a full collection would visit them
        # all, in the middle of a request.
        gc.collect()
        gc.freeze()
        gc.disable()
        log.info(
            "ready url=%s pool=%s bytes=%d epoch=%d pid=%d after %.0f ms",
            settings.url,
            pool.path,
            pool.geometry.pool_bytes,
            service.epoch,
            os.getpid(),
            1e3 * (time.perf_counter() - began),
        )
        if on_ready is not None:
            on_ready(pool)
        loop.run()


class ServerLoop:
    """Carries frames between a socket and a service until told to stop."""

    def __init__(self, url: str, service: Service, linger_s: float | None) -> None:
        """Binds. Raises SocketInUse."""
        self._service = service
        self._linger_s = linger_s
        self._stopping_for: str | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 100)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_REPLIES)
        self._socket.setsockopt(zmq.RCVTIMEO, _TICK_MS)
        try:
            self._socket.bind(url)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise SocketInUse(f"{url}: cannot be bound: {error.strerror}") from None

    def stop(self, reason: str) -> None:
        """Leave the loop soon. Safe in a signal handler."""
        self._stopping_for = reason

    def stop_on_signals(self) -> None:
        """Let SIGTERM and SIGINT stop the loop. Thread: the main one, before it says "ready"."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda got, _: self.stop(signal.Signals(got).name))

    def run(self) -> None:
        """Serve until ``stop`` or the end of the linger. Closes the socket."""
        next_tending = time.monotonic() + TEND_S
        last_session_at = time.monotonic()
        try:
            while self._stopping_for is None:
                self._serve_one()
                now = time.monotonic()
                if now < next_tending:
                    continue
                next_tending = now + TEND_S
                self._tend()
                if self._service.num_sessions:
                    last_session_at = now
                elif self._linger_s is not None and now - last_session_at >= self._linger_s:
                    self.stop(f"{self._linger_s:.0f} s without a session")
            log.info("leaving: %s", self._stopping_for)
        finally:
            self.close()

    def close(self) -> None:
        """Close the socket; replies on their way have a moment to leave."""
        self._context.destroy(linger=100)

    def _serve_one(self) -> None:
        # Part by part: the multipart calls of pyzmq cost several microseconds more.
        try:
            sender = self._socket.recv()
        except zmq.Again:
            return
        self._answer(sender, self._socket.recv())
        # A message is one frame; what an odd peer sends behind it must not be taken for a sender.
        # Looked for last, where nobody waits for it.
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv()

    def _answer(self, sender: bytes, frame: bytes) -> None:
        try:
            received = decode_request(frame)
        except BadFrame as error:
            if error.request_id is not None:
                code = m.ErrorCode.BAD_REQUEST
                if isinstance(error, WrongVersion):
                    code = m.ErrorCode.WRONG_VERSION
                self.send(sender, error.request_id, self._service.refuse(code, str(error)))
            return
        reply = self._service.handle(received.request)
        if not self.send(sender, received.request_id, reply):
            self._service.take_back(received.request, reply)

    def send(self, receiver: bytes, request_id: int, reply: m.Reply) -> bool:
        """Send a reply; false if its receiver is not connected any more, or does not read."""
        try:
            frame = encode_reply(request_id, reply)
        except ValueError as error:
            log.exception("a reply could not be encoded")
            frame = encode_reply(request_id, self._service.refuse(m.ErrorCode.INTERNAL, str(error)))
        try:
            self._socket.send(receiver, _NOBLOCK_MORE)
            self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError:
            # It hung up, or has stopped reading long ago.
            return False
        return True

    def _tend(self) -> None:
        try:
            self._service.tend()
        except Exception:
            log.exception("tending failed; serving goes on")


@contextmanager
def _locked_socket(url: str) -> Iterator[None]:
    """Own the name of an ipc socket: binding alone would steal it from a living server."""
    lock: FileLock | None = None
    if url.startswith("ipc://"):
        path = Path(url.removeprefix("ipc://"))
        lock = try_lock(path.with_name(f"{path.name}.lock"))
        if lock is None:
            raise SocketInUse(f"{url}: another server has this socket; use it, or stop it first")
    try:
        yield
    finally:
        if lock is not None:
            lock.close()


@contextmanager
def _served_pool(settings: ServerSettings, sessions: Path) -> Iterator[tuple[Pool, PoolLock]]:
    path = Path(settings.pool_path)
    if settings.pool_care is PoolCare.OWN:
        make_private_dir(path.parent)
    lock = lock_pool(path, sessions)
    try:
        pool = _open_or_create(settings)
        try:
            yield pool, lock
        finally:
            pool.close()
        if settings.pool_care is PoolCare.OWN:
            remove_pool(path, settings.medium)
            lock.remove()
    finally:
        lock.close()


def _open_or_create(settings: ServerSettings) -> Pool:
    try:
        return open_pool(settings.pool_path, settings.medium)
    except NoSuchPool:
        pass
    except (NotAPool, PoolFormatError) as error:
        if settings.pool_care is PoolCare.KEEP:
            raise
        log.warning("%s; replaced by a new pool", error)
        remove_pool(settings.pool_path, settings.medium)
    return create_pool(
        settings.pool_path, settings.medium, settings.pool_bytes, settings.segment_bytes
    )


def _others(earlier: Path | None, sessions: Path) -> tuple[Path, ...]:
    return () if earlier is None or earlier == sessions else (earlier,)


def main(arguments: list[str]) -> int:
    """Entry of an embedded server; its output is its log."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s"
    )
    try:
        settings = ServerSettings.from_json(arguments[0])
        serve(settings)
    except (IndexError, ValueError, dacite.DaciteError) as error:
        log.error("cannot start: bad settings: %s", error)
        return 2
    except MaruError as error:
        log.error("cannot start: %s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
