"""The test's own look into a pool, and its hand on the server: reading, damaging, killing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from maru_cli.failures import NothingThere
from maru_cli.looking import looking
from maru_shm.control.messages import ObjectRow, ObjectState, Stats
from maru_shm.control.runtime_dir import RuntimeDir
from maru_shm.pool import Verify, open_pool
from maru_shm.pool.mapping import Access
from maru_shm.pool.walk import DAMAGE, Finding, walk

STOP_S = 10.0
POLL_S = 0.05


class Store:
    """One runtime directory's server and pool. Never starts a server."""

    def __init__(self, runtime_dir: Path) -> None:
        self._runtime = RuntimeDir(runtime_dir)

    def stats(self) -> Stats:
        with looking(self._runtime.url, None) as looker:
            return looker.stats()

    def rows(self) -> list[ObjectRow]:
        with looking(self._runtime.url, None) as looker:
            return list(looker.objects())

    def generations(self) -> set[int]:
        return {row.extent.generation for row in self.rows() if row.state is ObjectState.SEALED}

    def corrupt(self, generations: Iterable[int]) -> int:
        """Flip a bit in every 64th byte of these objects' payloads; a second time flips them back.
        Returns how many objects there were."""
        wanted = set(generations)
        info = self.stats().pool
        pool = open_pool(info.path, info.medium)
        try:
            hit = [row.extent for row in self.rows() if row.extent.generation in wanted]
            for extent in hit:
                payload = pool.payload(extent)
                payload[::64] = bytes(byte ^ 0x40 for byte in payload[::64])
                payload.release()
            return len(hit)
        finally:
            pool.close()

    def damaged(self) -> list[Finding]:
        info = self.stats().pool
        pool = open_pool(info.path, info.medium, access=Access.READ)
        try:
            return [f for f in walk(pool, Verify.FULL) if f.verdict in DAMAGE]
        finally:
            pool.close()

    def kill_server(self) -> None:
        os.kill(self.stats().server_pid, signal.SIGKILL)

    def wait_for_server(self, timeout_s: float) -> None:
        self.wait_until(lambda stats: True, timeout_s)

    def wait_until(self, condition: Callable[[Stats], bool], timeout_s: float) -> None:
        """Raises TimeoutError with the last that was seen."""
        give_up = time.monotonic() + timeout_s
        while True:
            try:
                seen: object = self.stats()
            except NothingThere as error:
                seen = error
            if isinstance(seen, Stats) and condition(seen):
                return
            if time.monotonic() > give_up:
                raise TimeoutError(f"not within {timeout_s} s; last seen: {seen}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End the server if one runs, and remove what it leaves when it was killed."""
        if self._runtime.socket.exists():
            try:
                os.kill(self.stats().server_pid, signal.SIGTERM)
            except (NothingThere, ProcessLookupError):
                pass
            else:
                give_up = time.monotonic() + STOP_S
                while self._runtime.socket.exists() and time.monotonic() < give_up:
                    time.sleep(POLL_S)
        self._runtime.pool.unlink(missing_ok=True)
