"""Finding and starting servers, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from control_cases import NAMESPACE, Embedded, chain, granted, is_running, key, sealed, wait_until

from maru_shm.control.client import Client, connect, connect_later
from maru_shm.control.embedded import EmbeddedServer, answers, find_or_start
from maru_shm.control.errors import ServerStartFailed, Unreachable
from maru_shm.control.session_lock import join_session_lock
from maru_shm.pool.pool import open_pool
from maru_shm.pool.reading import read

POOL_BYTES = 8 << 20

CONNECT_AND_TELL = """
import json, sys
from maru_shm.control.client import connect
with connect(pool_bytes=8 << 20, timeout_s=60) as client:
    print(json.dumps(client.stats(5).server_pid), flush=True)
    sys.stdin.read()
"""


def store(client: Client, count: int, fill: bytes = b"x") -> None:
    connection = client.wait_connected(5)
    pool = open_pool(connection.pool.path, connection.pool.medium)
    extents = granted(client.reserve(NAMESPACE, chain(count), 5))
    for number, extent in enumerate(extents):
        pool.payload(extent)[:] = (fill + bytes([number])) * (extent.length // 2)
    assert client.commit(sealed(extents), 5).lost == ()
    pool.close()


def found(client: Client, count: int) -> int:
    grant = client.lookup_prefix(NAMESPACE, [key(number) for number in range(count)], 5)
    if grant.lease is not None:
        client.release([grant.lease], 5)
    return len(grant.extents)


def test_of_many_starters_exactly_one_starts_the_server(embedded: Embedded) -> None:
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECT_AND_TELL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    pids = []
    for starter in starters:
        assert starter.stdout is not None
        pids.append(json.loads(starter.stdout.readline()))
    for starter in starters:
        starter.communicate(timeout=30)
    assert [starter.returncode for starter in starters] == [0] * 8
    assert len(set(pids)) == 1
    assert embedded.runtime.log.read_text().count("ready url=") == 1


def test_the_server_is_nobodys_child_and_holds_none_of_our_files(embedded: Embedded) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    find_or_start(EmbeddedServer(embedded.runtime, POOL_BYTES))
    pid = embedded.server_pid()
    assert pid is not None
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    assert int(parent) != os.getpid()
    assert os.getsid(pid) != os.getsid(0)
    os.close(writer)
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_clean_stop_removes_the_pool_and_the_socket(embedded: Embedded) -> None:
    with connect(pool_bytes=POOL_BYTES) as client:
        store(client, 1)
        assert embedded.runtime.pool.exists()
    embedded.kill(signal.SIGTERM)
    assert not embedded.runtime.pool.exists()
    assert not answers(embedded.runtime.url)
    with connect(pool_bytes=POOL_BYTES) as client:
        assert found(client, 1) == 0


def test_the_server_leaves_after_its_last_session(embedded: Embedded) -> None:
    find_or_start(EmbeddedServer(embedded.runtime, POOL_BYTES, linger_s=0.6))
    pid = embedded.server_pid()
    assert pid is not None
    client = connect()
    time.sleep(1.5)
    assert is_running(pid)
    client.close()
    wait_until(lambda: not is_running(pid))
    assert not embedded.runtime.pool.exists()


def test_a_killed_servers_pool_is_adopted_with_everything_sealed(embedded: Embedded) -> None:
    """SIGKILL leaves shared memory behind; the next start takes it over (B21, B24)."""
    with connect(pool_bytes=POOL_BYTES) as client:
        store(client, 5)
        before = client.wait_connected(5)
        embedded.kill()
        assert embedded.runtime.pool.exists()
        # Nothing but the client's own polling brings the server back.
        wait_until(lambda: client.poll() is None and client.connection() not in (None, before))
        after = client.wait_connected(5)
        assert after.epoch == before.epoch + 1
        assert after.pool.uuid == before.pool.uuid
        grant = client.lookup_prefix(NAMESPACE, [key(number) for number in range(5)], 5)
        pool = open_pool(after.pool.path, after.pool.medium)
        for number, extent in enumerate(grant.extents):
            assert extent is not None
            assert read(pool, extent) == (b"x" + bytes([number])) * 500
        assert len(grant.extents) == 5
        pool.close()


def test_calls_of_a_client_whose_server_was_killed_fail_typed_and_then_work_again(
    embedded: Embedded,
) -> None:
    with connect(pool_bytes=POOL_BYTES) as client:
        store(client, 2)
        embedded.kill()
        deadline = time.monotonic() + 20
        while True:
            try:
                assert found(client, 3) == 2
                break
            except Unreachable:
                assert time.monotonic() < deadline


@pytest.mark.parametrize("garbage", [b"", b"garbage" * 10_000])
def test_what_is_no_pool_is_replaced_where_the_pool_is_the_servers_own(
    embedded: Embedded, garbage: bytes
) -> None:
    embedded.runtime.pool.parent.mkdir(mode=0o700, exist_ok=True)
    embedded.runtime.pool.write_bytes(garbage)
    with connect(pool_bytes=POOL_BYTES) as client:
        store(client, 1)
        assert found(client, 1) == 1


def test_a_server_that_cannot_start_says_why_and_where_its_log_is(embedded: Embedded) -> None:
    with pytest.raises(ServerStartFailed) as failed:
        connect(pool_bytes=1 << 50, timeout_s=60)
    assert "needs" in str(failed.value)
    assert "free" in str(failed.value)
    assert str(embedded.runtime.log) in str(failed.value)


def test_connecting_later_never_waits_and_never_raises(embedded: Embedded) -> None:
    with connect_later(pool_bytes=POOL_BYTES) as client:
        assert client.connection() is None
        assert client.submit_lookup_prefix(NAMESPACE, [key(0)], 1).done()
        wait_until(lambda: client.poll() is None and client.connection() is not None)
        store(client, 1)


def test_a_killed_clients_reservations_come_back(embedded: Embedded) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys\n"
            f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "from control_cases import *\n"
            "from maru_shm.control.client import connect\n"
            "client = connect(timeout_s=30)\n"
            "assert len(granted(client.reserve(NAMESPACE, chain(3), 5))) == 3\n"
            "print(client.connection().lock_path, flush=True)\n"
            "sys.stdin.read()\n",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with connect(pool_bytes=POOL_BYTES) as client:
        assert holder.stdout is not None
        worker = join_session_lock(holder.stdout.readline().strip())
        assert client.stats(5).reservations == 3
        holder.kill()
        holder.communicate()
        # Its worker (this process holds the worker's lock) may still be writing.
        time.sleep(1.2)
        assert client.stats(5).reservations == 3
        worker.close()
        wait_until(lambda: client.stats(5).reservations == 0)
        assert len(client.stats(5).sessions) == 1


def test_a_living_writers_slots_stay_out_of_use_over_a_server_restart(
    embedded: Embedded,
) -> None:
    with connect(pool_bytes=POOL_BYTES) as client:
        extents = granted(client.reserve(NAMESPACE, chain(2), 5))
        embedded.kill()
        wait_until(lambda: client.poll() is None and client.connection() is None)
        client.wait_connected(20)
        assert client.stats(5).quarantined == 2
        again = granted(client.reserve(NAMESPACE, chain(2), 5))
        assert not {extent.offset for extent in again} & {extent.offset for extent in extents}
        assert client.abort([extent.generation for extent in extents], 5).count == 2
        assert client.stats(5).quarantined == 0
