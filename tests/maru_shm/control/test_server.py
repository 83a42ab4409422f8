"""Explicit servers, as an operator starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import zmq
from control_cases import NAMESPACE, chain, granted, key, sealed, wait_until

from maru_shm.control import messages as m
from maru_shm.control.address import BadUrl, check_url
from maru_shm.control.client import connect
from maru_shm.control.embedded import answers
from maru_shm.control.errors import RequestRefused, Unreachable
from maru_shm.control.local import LocalServer
from maru_shm.control.pool_lock import PoolInUse, lock_pool
from maru_shm.control.server import PoolCare, ServerLoop, ServerSettings
from maru_shm.control.wire import PROTOCOL_VERSION, decode_reply, encode_request

Start = Callable[[ServerSettings], "subprocess.Popen[str]"]


@pytest.fixture
def settings(short_dir: Path) -> ServerSettings:
    (short_dir / "r").mkdir(mode=0o700)
    return ServerSettings(
        url=f"ipc://{short_dir}/r/s.sock",
        pool_path=str(short_dir / "the.pool"),
        pool_bytes=8 << 20,
    )


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def start(settings: ServerSettings) -> subprocess.Popen[str]:
        server = subprocess.Popen(
            [sys.executable, "-m", "maru_shm.control.server", settings.to_json()],
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(server)
        return server

    yield start
    for server in running:
        server.kill()
        server.communicate()


def wait_ready(server: subprocess.Popen[str]) -> None:
    assert server.stderr is not None
    for line in server.stderr:
        if " ready url=" in line:
            return
    raise AssertionError("the server ended")


def test_settings_survive_the_command_line(settings: ServerSettings) -> None:
    full = replace(settings, pool_care=PoolCare.OWN, linger_s=1.5, segment_bytes=1 << 20)
    assert ServerSettings.from_json(full.to_json()) == full
    with pytest.raises(ValueError, match="Expecting"):
        ServerSettings.from_json("{")


@pytest.mark.parametrize("url", ["ipc:///run/s.sock", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_addresses_on_this_host_are_accepted(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("tcp://10.0.0.7:5555", "CURVE"),
        ("tcp://0.0.0.0:5555", "CURVE"),
        ("tcp://host.example:5555", "CURVE"),
        ("tcp://127.0.0.1", "expected"),
        ("ipc://relative.sock", "expected"),
        ("http://127.0.0.1:80", "expected"),
        ("", "expected"),
    ],
)
def test_other_addresses_are_refused_with_what_would_do(url: str, why: str) -> None:
    with pytest.raises(BadUrl, match=why):
        check_url(url)
    with pytest.raises(BadUrl):
        connect(url, timeout_s=1)


def test_a_stop_keeps_the_operators_pool_and_its_objects(
    settings: ServerSettings, start: Start
) -> None:
    server = start(settings)
    wait_ready(server)
    with connect(settings.url) as client:
        client.commit(sealed(granted(client.reserve(NAMESPACE, chain(3), 5))), 5)
    server.send_signal(signal.SIGINT)
    server.communicate(timeout=20)
    assert server.returncode == 0
    assert not answers(settings.url)
    wait_ready(start(settings))
    with connect(settings.url) as client:
        assert len(client.lookup_prefix(NAMESPACE, [key(n) for n in range(4)], 5).extents) == 3


def test_over_tcp_all_is_the_same(
    settings: ServerSettings, start: Start, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(short_dir / "t"))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    on_tcp = replace(settings, url=f"tcp://127.0.0.1:{port}")
    wait_ready(start(on_tcp))
    with connect(on_tcp.url) as client:
        client.commit(sealed(granted(client.reserve(NAMESPACE, chain(1), 5))), 5)
        assert len(client.lookup_prefix(NAMESPACE, [key(0)], 5).extents) == 1


def test_a_second_server_gets_neither_the_socket_nor_the_pool(
    settings: ServerSettings, start: Start, short_dir: Path
) -> None:
    first = start(settings)
    wait_ready(first)
    same_socket = start(replace(settings, pool_path=str(short_dir / "other.pool")))
    (short_dir / "q").mkdir(mode=0o700)
    same_pool = start(replace(settings, url=f"ipc://{short_dir}/q/s.sock"))
    _, said = same_socket.communicate(timeout=20)
    assert same_socket.returncode == 2
    assert "another server has this socket" in said
    assert not (short_dir / "other.pool").exists()
    _, said = same_pool.communicate(timeout=20)
    assert same_pool.returncode == 2
    assert f"served by process {first.pid}" in said
    connect(settings.url).close()


def test_garbage_where_the_operator_says_the_pool_is_stays_untouched(
    settings: ServerSettings, start: Start
) -> None:
    """Not a pool: a clear error, never a replacement (B21)."""
    garbage = b"somebody's data " * 1000
    Path(settings.pool_path).write_bytes(garbage)
    server = start(settings)
    _, said = server.communicate(timeout=20)
    assert server.returncode == 2
    assert settings.pool_path in said
    assert Path(settings.pool_path).read_bytes() == garbage


def test_the_pools_lock_remembers_where_its_writers_prove_their_lives(short_dir: Path) -> None:
    pool = short_dir / "x.pool"
    first = lock_pool(pool, short_dir / "one")
    assert first.earlier_sessions is None
    with pytest.raises(PoolInUse, match=str(os.getpid())):
        lock_pool(pool, short_dir / "two")
    first.close()
    second = lock_pool(pool, short_dir / "two")
    assert second.earlier_sessions == short_dir / "one"
    second.remove()
    assert lock_pool(pool, short_dir / "three").earlier_sessions is None


def test_strange_frames_are_refused_or_dropped_and_serving_goes_on(
    settings: ServerSettings, start: Start
) -> None:
    wait_ready(start(settings))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(settings.url)
        socket.setsockopt(zmq.RCVTIMEO, 10_000)
        socket.send(b"\x00garbage")
        socket.send_multipart([b"three", b"part", b"message"])
        socket.send(msgpack.packb([PROTOCOL_VERSION + 1, 12, 5]))
        frame = decode_reply(socket.recv())
        assert frame.request_id == 5
        assert isinstance(frame.reply, m.Refused)
        assert frame.reply.code is m.ErrorCode.WRONG_VERSION
        socket.send(msgpack.packb([PROTOCOL_VERSION, 3, 6, "no session"]))
        frame = decode_reply(socket.recv())
        assert frame.request_id == 6
        assert isinstance(frame.reply, m.Refused)
        assert frame.reply.code is m.ErrorCode.BAD_REQUEST
        socket.send(encode_request(7, m.GetStats()))
        assert isinstance(decode_reply(socket.recv()).reply, m.Stats)


def test_a_grant_that_cannot_be_delivered_is_noticed(server: LocalServer, short_dir: Path) -> None:
    """What then happens: ``test_a_reply_that_could_not_be_delivered_is_taken_back``."""
    assert server.service is not None
    loop = ServerLoop(f"ipc://{short_dir}/s.sock", server.service, None)
    try:
        assert not loop.send(b"nobody", 1, m.Done(1, 1))
    finally:
        loop.close()


def test_a_stopped_server_is_unreachable_and_its_session_survives_it(
    settings: ServerSettings, start: Start
) -> None:
    server = start(settings)
    wait_ready(server)
    with connect(settings.url) as client:
        before = client.connection()
        server.send_signal(signal.SIGSTOP)
        pending = client.submit_reserve(NAMESPACE, chain(4), 0.05)
        wait_until(lambda: client.poll() is None and pending.done())
        with pytest.raises(Unreachable):
            pending.take()
        server.send_signal(signal.SIGCONT)
        # What it reserved for the request that was given up comes back by itself.
        wait_until(lambda: client.stats(5).aborted_total == 4)
        assert client.connection() == before


def test_a_client_of_another_runtime_directory_is_refused_with_the_reason(
    settings: ServerSettings, start: Start, monkeypatch: pytest.MonkeyPatch, short_dir: Path
) -> None:
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(short_dir / "theirs"))
    with zmq.Context() as context, context.socket(zmq.ROUTER) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    url = f"tcp://127.0.0.1:{port}"
    wait_ready(start(replace(settings, url=url)))
    monkeypatch.setenv("MARU_RUNTIME_DIR", str(short_dir / "mine"))
    with pytest.raises(RequestRefused, match="MARU_RUNTIME_DIR"):
        connect(url)


def test_nobody_there_is_unreachable_after_the_timeout(settings: ServerSettings) -> None:
    with pytest.raises(Unreachable, match="no server"):
        connect(settings.url, timeout_s=0.2)


def test_a_call_that_waits_notices_the_servers_death_long_before_its_deadline(
    settings: ServerSettings, start: Start
) -> None:
    server = start(settings)
    wait_ready(server)
    with connect(settings.url) as client:
        server.send_signal(signal.SIGSTOP)  # it will not answer any more
        killer = threading.Timer(0.3, server.kill)
        killer.start()
        with pytest.raises(Unreachable, match="lost before it answered"):
            client.stats(timeout_s=60)
        killer.join()


def test_frames_behind_the_first_of_a_message_are_not_taken_for_a_sender(
    settings: ServerSettings, start: Start
) -> None:
    wait_ready(start(settings))
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(settings.url)
        socket.setsockopt(zmq.RCVTIMEO, 20_000)
        for request_id in range(1, 4):
            frame = encode_request(request_id, m.GetStats())
            socket.send_multipart([frame, b"odd", frame, b"peer"])
            assert decode_reply(socket.recv()).request_id == request_id
        with pytest.raises(zmq.Again):
            socket.recv(zmq.NOBLOCK)
    finally:
        context.destroy(linger=0)
