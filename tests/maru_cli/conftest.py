"""Running ``maru`` in the test's own process, and a real server to look at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from maru_cli import app
from maru_shm.control.client import Client, connect
from maru_shm.control.messages import CommitItem, ReserveItem
from maru_shm.pool import open_pool
from maru_shm.pool.checksum import part_checksum
from maru_shm.types import Extent, Key, Namespace

NAMESPACE = Namespace(b"n" * 32)


@dataclass(frozen=True)
class Finished:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


Maru = Callable[..., Finished]


@pytest.fixture
def maru(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Maru]:
    before = signal.getsignal(signal.SIGTERM)
    for name in ("MARU_SERVER_URL", "MARU_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str | os.PathLike[str]) -> Finished:
        monkeypatch.setattr(sys, "argv", ["maru", *map(os.fspath, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            app.main()
        said = capsys.readouterr()
        code = left.value.code
        assert isinstance(code, int)
        return Finished(int(code), said.out, said.err)

    yield run
    signal.signal(signal.SIGTERM, before)


@dataclass
class RunningServer:
    """``maru server`` in a process of its own."""

    process: subprocess.Popen[str]
    runtime_dir: Path
    ready: Any
    """Its JSON line."""

    @property
    def pool(self) -> Path:
        return Path(self.ready["pool"])

    def interrupt(self) -> int:
        """What Ctrl-C does; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(10)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def client(self) -> Client:
        return connect(self.ready["url"], timeout_s=10, who="test")

    def store(self, payloads: Sequence[bytes]) -> list[Extent]:
        """Seal one object per payload, with keys 0, 1, ..."""
        with self.client() as client:
            items = [
                ReserveItem(Key(index.to_bytes(32, "big")), None, len(payload))
                for index, payload in enumerate(payloads)
            ]
            results = client.reserve(NAMESPACE, items, timeout_s=10).results
            extents = [result.extent for result in results if result.extent is not None]
            assert len(extents) == len(payloads), results
            info = client.wait_connected(timeout_s=10).pool
            pool = open_pool(info.path, info.medium)
            commits = []
            for extent, payload in zip(extents, payloads, strict=True):
                view = pool.payload(extent)
                view[:] = payload
                commits.append(CommitItem(extent.generation, (part_checksum(view),)))
                view.release()
            pool.close()
            assert client.commit(commits, timeout_s=10).lost == ()
        return extents


StartServer = Callable[..., RunningServer]


@pytest.fixture
def start_server(runtime_dir: Path) -> Iterator[StartServer]:
    started: list[RunningServer] = []

    def start(*arguments: str | os.PathLike[str]) -> RunningServer:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "maru_cli", "server", "--json", "--pool-size", "8MiB"),
                *("--runtime-dir", str(runtime_dir), *map(os.fspath, arguments)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            _, err = process.communicate()
            raise AssertionError(f"the server ended with {process.returncode}: {err}")
        started.append(RunningServer(process, runtime_dir, json.loads(line)))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.communicate()


@pytest.fixture
def server(start_server: StartServer) -> RunningServer:
    return start_server()
