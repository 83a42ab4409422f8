"""Client and server in one process, without sockets.

For simulations and tests of whatever uses a ``ControlPlane``: the same client logic (``Exchange``)
and the same server logic (``Service``) as in production, with a transport in between that a script
controls. A script can delay requests and replies, lose requests, take the server down with all
that is under way, and start it again over the same pool.

Time in here is ticks: one per ``LocalPlane.poll``. Delays count ticks of the plane that asked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, unique

from maru_shm.control import messages as m
from maru_shm.control.blocking import BlockingExchange
from maru_shm.control.service import Service
from maru_shm.control.wire import (
    ReplyFrame,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from maru_shm.types import OwnerToken

Clock = Callable[[], float]


@unique
class Fate(Enum):
    """What becomes of one request."""

    DELIVERED = 1
    LOST = 2
    """It never reaches the server, and nobody learns of it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the transport treats one request and its reply; messages never overtake each other."""

    fate: Fate = Fate.DELIVERED
    request_ticks: int = 0
    """Ticks until the server handles the request; 0: before ``submit`` returns."""
    reply_ticks: int = 0
    """Ticks from there until the reply is in; 0: the next ``poll`` sees it."""


PROMPT = Delivery()


class ScriptedOwners:
    """Owners whose life and death a script decides; see ``sessions.Owners``."""

    def __init__(self) -> None:
        self.dead: set[OwnerToken] = set()
        """Owners without any living process."""

    def lock_path(self, owner: OwnerToken) -> str:
        """A name; no such file is made."""
        return f"local:{owner:016x}"

    def watch(self, owner: OwnerToken) -> bool:
        """See ``Owners``."""
        return owner not in self.dead

    def reap(self, owner: OwnerToken) -> bool:
        """See ``Owners``."""
        return owner in self.dead


class LocalServer:
    """A server that planes talk to directly, and that can be taken down and started again."""

    def __init__(self, start: Callable[[], Service]) -> None:
        """``start`` recovers the pool and begins a new epoch, as a starting server does."""
        self._start = start
        self._incarnation = 0
        self.service: Service | None = start()
        """None while the server is down."""

    @property
    def incarnation(self) -> int:
        """Changes whenever the server goes down: what was on its way then is lost."""
        return self._incarnation

    def kill(self) -> None:
        """SIGKILL: the service and every message under way are gone, the pool is as it is."""
        self.service = None
        self._incarnation += 1

    def start(self) -> None:
        """Start again over the same pool. Does nothing if it is up."""
        if self.service is None:
            self.service = self._start()


@dataclass(slots=True)
class _Travelling:
    due: int
    incarnation: int
    request_id: int
    request: m.Request
    reply: m.Reply | None
    reply_ticks: int


class LocalTransport:
    """Carries messages between one plane and a ``LocalServer``; see ``exchange.Transport``."""

    def __init__(self, server: LocalServer, idle: Callable[[], None]) -> None:
        self._server = server
        self._idle = idle
        self._now = 0
        self._requests: deque[_Travelling] = deque()
        self._replies: deque[_Travelling] = deque()
        self.deliver: Callable[[m.Request], Delivery] = lambda _: PROMPT

    def tick(self) -> None:
        """Time goes on by one."""
        self._now += 1
        self._move()

    def send(self, request_id: int, request: m.Request) -> bool:
        """See ``Transport``."""
        if self._server.service is None:
            return False
        self._drop_stale()
        # Through the wire's bytes and back: what cannot be said there cannot be said here.
        frame = decode_request(encode_request(request_id, request))
        delivery = self.deliver(request)
        if delivery.fate is Fate.DELIVERED:
            earliest = self._requests[-1].due if self._requests else 0
            self._requests.append(
                _Travelling(
                    due=max(earliest, self._now + delivery.request_ticks),
                    incarnation=self._server.incarnation,
                    request_id=frame.request_id,
                    request=frame.request,
                    reply=None,
                    reply_ticks=delivery.reply_ticks,
                )
            )
            self._move()
        return True

    def receive(self) -> ReplyFrame | None:
        """See ``Transport``."""
        self._drop_stale()
        if self._replies and self._replies[0].due <= self._now:
            arrived = self._replies.popleft()
            assert arrived.reply is not None
            return decode_reply(encode_reply(arrived.request_id, arrived.reply))
        return None

    def receive_within(self, timeout_s: float) -> ReplyFrame | None:
        """See ``Transport``; whatever drives this process's time goes on by one step, and the
        caller's next ``poll`` is the tick that brings the reply."""
        self._idle()
        return None

    def has_peer(self) -> bool:
        """See ``Transport``."""
        return self._server.service is not None

    def look_for_server(self) -> None:
        """See ``Transport``: here the script starts servers."""

    def close(self) -> None:
        """Requests under way still arrive; their replies go nowhere."""
        while self._requests:
            self._now = max(self._now, self._requests[0].due)
            self._move()
        self._replies.clear()

    def _drop_stale(self) -> None:
        """What was on its way when the server went down is lost, both ways."""
        for way in (self._requests, self._replies):
            while way and way[0].incarnation != self._server.incarnation:
                way.popleft()

    def _move(self) -> None:
        self._drop_stale()
        service = self._server.service
        while service is not None and self._requests and self._requests[0].due <= self._now:
            moving = self._requests.popleft()
            moving.reply = service.handle(moving.request)
            earliest = self._replies[-1].due if self._replies else 0
            moving.due = max(earliest, self._now + moving.reply_ticks)
            self._replies.append(moving)


class LocalPlane(BlockingExchange):
    """One client of a ``LocalServer``: a ``ControlPlane``, and ``Client``'s synchronous face.

    The synchronous calls need a clock that goes on by itself, or by ``idle``.
    """

    def __init__(
        self,
        server: LocalServer,
        owner: OwnerToken,
        *,
        lock_path: str | None = None,
        client: str = "local",
        clock: Clock = time.monotonic,
        idle: Callable[[], None] = lambda: time.sleep(0.001),
    ) -> None:
        """``lock_path``: where the server expects the owner's proof of life; by default the name
        that ``ScriptedOwners`` expects. Polls once, so that a server that is up is connected."""
        self._local = LocalTransport(server, idle)
        path = ScriptedOwners().lock_path(owner) if lock_path is None else lock_path
        super().__init__(self._local, m.OpenSession(owner, path, client), clock)
        self.poll()
        self.poll()

    @property
    def deliver(self) -> Callable[[m.Request], Delivery]:
        """The script: asked once per request, in the order of sending."""
        return self._local.deliver

    @deliver.setter
    def deliver(self, script: Callable[[m.Request], Delivery]) -> None:
        self._local.deliver = script

    def poll(self) -> None:
        """One tick, then see ``ControlPlane``."""
        self._local.tick()
        super().poll()
