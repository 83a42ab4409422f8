"""The client: a session at a server, over a socket.

    with connect() as client:                          # this user's server, started if need be
        grant = client.lookup_prefix(namespace, keys, timeout_s=1)

``connect`` waits for a session; ``connect_later`` returns at once with a client that keeps trying
as it is polled, and answers "unreachable" meanwhile: that is what an engine uses.

Thread: a client belongs to the thread that made it. Process: likewise (see ``exchange``).
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq

from maru_shm.control import messages as m
from maru_shm.control.address import check_url
from maru_shm.control.blocking import BlockingExchange
from maru_shm.control.embedded import BackgroundStart, EmbeddedServer
from maru_shm.control.errors import BadFrame
from maru_shm.control.runtime_dir import RuntimeDir, find_runtime_dir, runtime_dir_of
from maru_shm.control.session_lock import create_session_lock
from maru_shm.control.wire import MAX_FRAME_BYTES, ReplyFrame, decode_reply, encode_request
from maru_shm.errors import MaruError
from maru_shm.types import OwnerToken

_QUEUED_MESSAGES = 10_000
_FAREWELL_MS = 200
"""How long ``close`` may take to get its last message out."""


# As plain integers: the operators of pyzmq's flag types cost microseconds each.
_NOBLOCK = int(zmq.NOBLOCK)
_SLICE_MS = 100
"""The longest wait in one piece: then a client looks whether the server is still there. Most calls
wait with this very limit, and the socket is told of it once."""

_POLLIN = int(zmq.POLLIN)
_POLLOUT = int(zmq.POLLOUT)


class SocketTransport:
    """Messages over one ZeroMQ DEALER socket; see ``exchange.Transport``.

    The socket stays the same for the client's life; ZeroMQ connects it again by itself. With
    ZMQ_IMMEDIATE nothing queues up for a server that is not there.
    """

    def __init__(self, url: str, start: BackgroundStart | None) -> None:
        self._start = start
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 100)
        self._socket.connect(url)
        self._receive_ms = -1
        self._events = 0

    def send(self, request_id: int, request: m.Request) -> bool:
        """See ``Transport``."""
        frame = encode_request(request_id, request)
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def receive(self) -> ReplyFrame | None:
        """See ``Transport``. Frames that are no replies of this protocol are dropped."""
        # Asking first is cheaper than the exception of a receive in vain.
        while self._look() & _POLLIN:
            try:
                return decode_reply(self._socket.recv(_NOBLOCK))
            except zmq.Again:
                return None
            except BadFrame:
                continue
        return None

    def receive_within(self, timeout_s: float) -> ReplyFrame | None:
        """See ``Transport``."""
        limit_ms = _SLICE_MS if timeout_s >= _SLICE_MS / 1e3 else max(1, int(timeout_s * 1e3))
        if limit_ms != self._receive_ms:
            self._receive_ms = limit_ms
            self._socket.setsockopt(zmq.RCVTIMEO, limit_ms)
        try:
            return decode_reply(self._socket.recv())
        except (zmq.Again, BadFrame):
            return None

    def has_peer(self) -> bool:
        """See ``Transport``. With ZMQ_IMMEDIATE a socket without a peer takes no message. As of
        the last ``receive``."""
        return bool(self._events & _POLLOUT)

    def _look(self) -> int:
        self._events = int(self._socket.getsockopt(zmq.EVENTS))
        return self._events

    def look_for_server(self) -> MaruError | None:
        """See ``Transport``."""
        return None if self._start is None else self._start.nudge()

    def close(self) -> None:
        """See ``Transport``."""
        self._context.destroy(linger=_FAREWELL_MS)


class Client(BlockingExchange):
    """A session at a server, over a socket. Made by ``connect`` and ``connect_later``."""

    def __init__(self, url: str, runtime: RuntimeDir, start: BackgroundStart | None, who: str):
        runtime.prepare()
        self.url = url
        owner = OwnerToken(secrets.randbits(62) + 1)
        self._lock = create_session_lock(runtime.sessions, owner)
        super().__init__(
            SocketTransport(url, start),
            m.OpenSession(owner, str(self._lock.path), f"{who} (pid {os.getpid()})"),
            time.monotonic,
        )

    def close(self) -> None:
        """Say goodbye and let go of everything, in well under a second. Idempotent.

        Workers of this client that still write keep its reservations until they let go of the
        lock file.
        """
        if os.getpid() == self._pid:
            # First: the server looks at once whether anybody is left who may write.
            self._lock.close()
        super().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(
    url: str | None = None,
    *,
    pool_bytes: int | None = None,
    timeout_s: float = 20.0,
    who: str | None = None,
) -> Client:
    """A client whose session stands.

    ``url`` None: this user's own server, found or started; ``pool_bytes`` is the size of the pool
    that it then makes. ``who``: shown by ``maru stat``; by default the program's name.
    Raises Unreachable, RequestRefused, ServerStartFailed, BadUrl, RuntimeDirUnusable.
    """
    client = connect_later(url, pool_bytes=pool_bytes, who=who)
    try:
        client.wait_connected(timeout_s)
    except BaseException:
        client.close()
        raise
    return client


def connect_later(
    url: str | None = None, *, pool_bytes: int | None = None, who: str | None = None
) -> Client:
    """A client without a session yet: ``poll`` brings it, as soon as there is a server.

    Raises BadUrl and RuntimeDirUnusable: what no waiting will mend.
    """
    name = who or Path(sys.argv[0] or "python").name
    if url is not None:
        check_url(url)
        return Client(url, runtime_dir_of(url), None, name)
    runtime = find_runtime_dir()
    return Client(runtime.url, runtime, BackgroundStart(EmbeddedServer(runtime, pool_bytes)), name)
