"""Looking at a server from outside: without a session, and without ever starting one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from maru_cli.failures import NothingThere
from maru_shm.control.address import check_url
from maru_shm.control.client import SocketTransport
from maru_shm.control.embedded import answers
from maru_shm.control.errors import RequestRefused
from maru_shm.control.messages import (
    GetStats,
    ListObjects,
    ObjectRow,
    ObjectRows,
    Refused,
    Reply,
    Request,
    Stats,
)
from maru_shm.control.runtime_dir import RuntimeDir, find_runtime_dir
from maru_shm.types import Generation

ANSWER_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
_WAIT_S = 0.02

R = TypeVar("R", bound=Reply)


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """Where a pool lies."""

    path: str
    medium: str


def chosen_runtime_dir(path: Path | None) -> RuntimeDir:
    """The runtime directory of the ``--runtime-dir`` option, or this user's."""
    return find_runtime_dir() if path is None else RuntimeDir(path.absolute())


class Looker:
    """Asks one server questions that need no session. Use ``looking`` to get one."""

    def __init__(self, url: str, transport: SocketTransport) -> None:
        self.url = url
        self._transport = transport
        self._ids = itertools.count(1)

    def stats(self) -> Stats:
        """What the server says of itself now."""
        return self._ask(GetStats(), Stats)

    def objects(self, page_rows: int = 1000) -> Iterator[ObjectRow]:
        """All objects in ascending generations, a page at a time; the pool may change meanwhile."""
        after = Generation(0)
        while rows := self._ask(ListObjects(after, page_rows), ObjectRows).rows:
            yield from rows
            after = rows[-1].extent.generation

    def _ask(self, request: Request, kind: type[R]) -> R:
        """Raises NothingThere when no answer comes, RequestRefused when the server says no."""
        request_id = next(self._ids)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while not self._transport.send(request_id, request):
            if time.monotonic() > deadline:
                raise no_server(self.url)
            time.sleep(_WAIT_S)  # the socket connects by itself, and tells nobody
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            frame = self._transport.receive_within(deadline - time.monotonic())
            if frame is not None and frame.request_id == request_id:
                if isinstance(frame.reply, Refused):
                    raise RequestRefused(frame.reply.code, frame.reply.message)
                if isinstance(frame.reply, kind):
                    return frame.reply
        raise NothingThere(f"the server at {self.url} did not answer within {ANSWER_TIMEOUT_S} s")


@contextmanager
def looking(server_url: str | None, runtime_dir: Path | None) -> Iterator[Looker]:
    """Connect to the server that the options mean. Raises NothingThere, BadUrl."""
    url = server_url or chosen_runtime_dir(runtime_dir).url
    check_url(url)
    if url.startswith("ipc://") and not answers(url):
        raise no_server(url)
    transport = SocketTransport(url, None)
    try:
        yield Looker(url, transport)
    finally:
        transport.close()


def no_server(url: str) -> NothingThere:
    """Nobody answers at ``url``: what to do."""
    return NothingThere(
        f"no server at {url}. Start an engine with Maru, or `maru server`; or name another one "
        f"with --server-url or --runtime-dir"
    )


def running_pool(server_url: str | None, runtime_dir: Path | None) -> PoolPlace:
    """The pool of the server that the options mean. Raises NothingThere, BadUrl."""
    with looking(server_url, runtime_dir) as looker:
        pool = looker.stats().pool
        return PoolPlace(pool.path, pool.medium)
