"""One vLLM API server as a child process, and several of them started side by side.

Servers are started with ``python -m vllm.entrypoints.openai.api_server``, because the CPU wheel's
``vllm serve`` looks for a distribution named ``vllm`` and does not start. Each server leads a
session of its own, so that whatever it started can be stopped with it and with nothing else.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from maru_cli.failures import CommandFailed

START_DEADLINE_S = 420.0
"""One server takes 33 s on two free cores, three about 70 s; other work on them makes it longer."""
STOP_DEADLINE_S = 20.0
PATIENT_LOOKUP_MS = 2000
"""Three engines on two cores: the server may wait longer for a core than the default of 20 ms, and
a late answer counts as no hit. An answer that is there is used at once all the same."""
POLL_S = 0.5
LOG_LINES_SHOWN = 25


@dataclass(frozen=True, slots=True)
class MaruSettings:
    """How a server uses Maru."""

    runtime_dir: Path
    """Where its embedded Maru server is found or started; see docs/settings.md."""
    extra_config: dict[str, object] = field(default_factory=dict)
    """More ``kv_connector_extra_config``, keys with their ``maru_`` prefix."""

    def kv_transfer_config(self) -> str:
        """The value of ``--kv-transfer-config``."""
        return json.dumps(
            {
                "kv_connector": "MaruKVConnector",
                "kv_connector_module_path": "maru_vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "maru_lookup_timeout_ms": PATIENT_LOOKUP_MS,
                    **self.extra_config,
                },
            }
        )


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One API server, apart from its port, which is chosen when it starts."""

    name: str
    """For people, and the log file's name."""
    model: Path
    work_dir: Path
    max_model_len: int
    maru: MaruSettings | None
    """None: plain vLLM."""

    def arguments(self, port: int) -> list[str]:
        """The command line behind the interpreter."""
        arguments = [
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", "model"),
            *("--host", "127.0.0.1", "--port", str(port)),
            # vLLM's "auto" makes bfloat16 of it, which most CPUs emulate some 20 times slower.
            *("--dtype", "float32"),
            *("--max-model-len", str(self.max_model_len)),
            # A whole prompt in one step: cold runs and runs without Maru have equal batch shapes.
            *("--max-num-batched-tokens", str(self.max_model_len)),
            *("--enforce-eager", "--enable-prompt-tokens-details"),
        ]
        if self.maru is not None:
            arguments += ["--kv-transfer-config", self.maru.kv_transfer_config()]
        return arguments

    def environment(self) -> dict[str, str]:
        """The parent's environment and what all servers of one comparison must share."""
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        # The CPU platform binds one core without a connector and all with one: a false 2x.
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", _all_cores())
        environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if self.maru is not None:
            environment["MARU_RUNTIME_DIR"] = str(self.maru.runtime_dir)
        return environment


def _all_cores() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ApiServer:
    """A running API server. Not thread-safe, except that requests may come from any thread."""

    def __init__(self, settings: ServerSettings) -> None:
        self.name = settings.name
        self.port = _free_port()
        self.log_path = settings.work_dir / f"{settings.name}.log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, *settings.arguments(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings.environment(),
                cwd=settings.work_dir,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the API server's own process, and of the session that it leads."""
        return self._process.pid

    def is_ready(self) -> bool:
        """Whether it answers. Raises CommandFailed, with the log's end, if it has ended."""
        status = self._process.poll()
        if status is not None:
            raise CommandFailed(
                f"the vLLM server {self.name!r} ended with status {status}. {self.log_tail()}"
            )
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()

    def log_text(self) -> str:
        """Everything it printed so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self) -> str:
        """The log's last lines, introduced, for an error message."""
        lines = self.log_text().splitlines()[-LOG_LINES_SHOWN:]
        return f"Its log ({self.log_path}) ends:\n" + "\n".join(lines)

    def ask_to_stop(self) -> None:
        """Send the polite signal; returns at once."""
        if self._process.poll() is None:
            self._process.terminate()

    def stop(self) -> None:
        """End the server and what it started; bounded by ``STOP_DEADLINE_S``."""
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_DEADLINE_S)
        # Its engine process, should that have survived, is in the session that it led.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def serving(
    all_settings: Sequence[ServerSettings], report: Callable[[str], None]
) -> Iterator[list[ApiServer]]:
    """Start all servers at once, give them when every one answers, stop them at the end.

    ``report`` is called twice a second while waiting, with what is being waited for. Raises
    CommandFailed when a server ends, or does not answer within ``START_DEADLINE_S``.
    """
    servers: list[ApiServer] = []
    try:
        servers.extend(ApiServer(settings) for settings in all_settings)
        _wait_until_ready(servers, report)
        yield servers
    finally:
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()


def _wait_until_ready(servers: Sequence[ApiServer], report: Callable[[str], None]) -> None:
    started = time.monotonic()
    waiting = list(servers)
    while waiting := [server for server in waiting if not server.is_ready()]:
        elapsed_s = time.monotonic() - started
        if elapsed_s > START_DEADLINE_S:
            raise CommandFailed(
                f"the vLLM server {waiting[0].name!r} did not answer within"
                f" {START_DEADLINE_S:.0f} s. {waiting[0].log_tail()}"
            )
        names = ", ".join(server.name for server in waiting)
        report(f"starting vLLM servers: waiting for {names} ({elapsed_s:.0f} s)")
        time.sleep(POLL_S)  # readiness can only be asked for
