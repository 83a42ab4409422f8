"""Keys, chains and a clock for the tests of the control plane."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from maru_shm.control import messages as m
from maru_shm.control.messages import ReserveItem
from maru_shm.control.runtime_dir import RuntimeDir
from maru_shm.types import Extent, Key, Namespace, PartChecksum

NAMESPACE = Namespace(b"n" * 32)


def key(number: int) -> Key:
    return Key(number.to_bytes(32, "big"))


def chain(count: int, length: int = 1000) -> tuple[ReserveItem, ...]:
    return tuple(
        ReserveItem(key(number), key(number - 1) if number else None, length)
        for number in range(count)
    )


class FakeClock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def granted(reserved: m.Reserved) -> list[Extent]:
    return [result.extent for result in reserved.results if result.extent is not None]


def sealed(extents: list[Extent]) -> list[m.CommitItem]:
    return [m.CommitItem(extent.generation, (PartChecksum(1, 2),)) for extent in extents]


def is_running(pid: int) -> bool:
    """Whether the process lives; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool], timeout_s: float = 20) -> None:
    """Poll for something that another process does; fails the test if it never comes."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


class Embedded:
    """A runtime directory of its own, and whatever server comes up in it."""

    def __init__(self, path: Path) -> None:
        self.runtime = RuntimeDir(path)

    def server_pid(self) -> int | None:
        """The living server's process, by the note in its pool's lock file."""
        try:
            note = json.loads(
                self.runtime.pool.with_name(f"{self.runtime.pool.name}.lock").read_text()
            )
        except (OSError, ValueError):
            return None
        pid = int(note["pid"])
        return pid if is_running(pid) else None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """End the server by its pid and wait until it is gone."""
        pid = self.server_pid()
        if pid is not None:
            os.kill(pid, number)
            wait_until(lambda: not is_running(pid))

    def clean(self) -> None:
        self.kill()
        self.runtime.pool.unlink(missing_ok=True)
        self.runtime.pool.with_name(f"{self.runtime.pool.name}.lock").unlink(missing_ok=True)
