"""The example is run as a newcomer would run it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from maru_shm.control.client import connect
from maru_shm.control.errors import Unreachable
from maru_shm.control.runtime_dir import RuntimeDir

EXAMPLE = Path(__file__).parents[2] / "examples" / "shared_pool.py"


@pytest.fixture
def runtime() -> Iterator[RuntimeDir]:
    path = Path(tempfile.mkdtemp(prefix="maru-t-", dir="/dev/shm"))
    runtime = RuntimeDir(path)
    yield runtime
    try:
        with connect(runtime.url, timeout_s=1) as client:
            life = os.pidfd_open(client.stats(5).server_pid)
        signal.pidfd_send_signal(life, signal.SIGKILL)
        os.close(life)
    except Unreachable:
        pass
    for left in runtime.pool.parent.glob(f"{runtime.pool.name}*"):
        left.unlink()
    shutil.rmtree(path)


def test_one_process_stores_and_another_reads_in_place(runtime: RuntimeDir) -> None:
    environment = {**os.environ, "MARU_RUNTIME_DIR": str(runtime.path)}
    for expected in ("writer: stored", "there already"):
        run = subprocess.run(
            [sys.executable, str(EXAMPLE)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        assert expected in run.stdout
        assert "reader: found 192 bytes" in run.stdout
        assert "comes second finds it already computed." in run.stdout


def test_the_store_needs_neither_torch_nor_vllm() -> None:
    probe = (
        "import sys\n"
        "import maru_shm.control.client, maru_shm.control.local, maru_shm.control.server\n"
        "print([name for name in ('torch', 'vllm', 'typer', 'rich') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
