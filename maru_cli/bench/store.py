"""What a lookup-and-lease of a prompt's keys costs, against the same bytes over a bare socket.

Both sides run in turns in one process, each against a process of its own: the store's client
against an embedded server, and a ZeroMQ DEALER against a ROUTER that answers every message with
as many bytes as the store's reply has. What lies between the two figures is Maru: encoding,
decoding, 128 index lookups, one lease.

The bare side is a plain echo: one ``send`` and one ``recv`` here, ``recv_multipart`` and
``send_multipart`` there. (Part by part, as the store's server does it, the echo would be about a
fifth faster.) The store's side ends with a lease whose length and first extent have been looked
at. Both move so little that wake-ups and cold caches dominate: the same code that takes 40 us in a
loop takes 80 between two wake-ups, and a slower machine has the better ratio.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq

from maru_shm.control.client import Client, connect
from maru_shm.control.embedded import EmbeddedServer, find_or_start
from maru_shm.control.messages import CommitItem, LookupPrefix, ReserveItem, ReserveOutcome
from maru_shm.control.runtime_dir import RuntimeDir
from maru_shm.control.wire import encode_reply, encode_request
from maru_shm.types import Key, Namespace, SessionId

_NAMESPACE = Namespace(b"\x01" * 32)
_PAYLOAD_BYTES = 64
_SLOT_BYTES = 384
"""Header area and payload of so small an object, rounded up generously."""
_FILL_BATCH = 512
_TIMEOUT_S = 10.0

_ECHO = """
import sys
import zmq
socket = zmq.Context().socket(zmq.ROUTER)
socket.bind(sys.argv[1])
reply = bytes(int(sys.argv[2]))
print("ready", flush=True)
while True:
    sender, _ = socket.recv_multipart()
    socket.send_multipart((sender, reply))
"""


@dataclass(frozen=True, slots=True)
class StoreBenchSettings:
    """What to measure."""

    objects: int = 10_000
    """Objects in the index before the first lookup; at least ``keys``."""
    keys: int = 128
    """Per lookup, one chain, all found."""
    rounds: int = 9
    calls_per_round: int = 300


@dataclass(frozen=True, slots=True)
class StoreBenchResult:
    """Medians over the rounds; microseconds."""

    lookup_p50_us: float
    lookup_p99_us: float
    bare_p50_us: float
    ratio_p50: float
    """Median over the rounds of that round's lookup over that round's bare round trip."""
    objects: int
    request_bytes: int
    reply_bytes: int


def run_store_bench(
    settings: StoreBenchSettings, on_progress: Callable[[float], None] = lambda _: None
) -> StoreBenchResult:
    """Measure. ``on_progress`` is told the fraction that is done.

    Starts a server and an echo process in a runtime directory of their own and ends both.
    """
    with _runtime_dir() as runtime:
        objects = max(settings.objects, settings.keys)
        with _server(runtime, objects), connect(runtime.url, who="maru bench store") as client:
            keys = _fill(client, objects, settings.keys, lambda part: on_progress(0.5 * part))
            grant = client.lookup_prefix(_NAMESPACE, keys, _TIMEOUT_S)
            if len(grant.extents) != settings.keys:
                raise RuntimeError(f"{len(grant.extents)} of {settings.keys} keys were found")
            request = encode_request(1, LookupPrefix(SessionId(1 << 40), _NAMESPACE, tuple(keys)))
            reply = encode_reply(1, grant)
            with _bare_round_trip(runtime, request, len(reply)) as bare:
                return _measure(
                    settings,
                    bare,
                    _lookup(client, keys),
                    objects,
                    (len(request), len(reply)),
                    lambda part: on_progress(0.5 + 0.5 * part),
                )


def _measure(
    settings: StoreBenchSettings,
    bare: Callable[[], float],
    lookup: Callable[[], float],
    objects: int,
    frame_bytes: tuple[int, int],
    on_progress: Callable[[float], None],
) -> StoreBenchResult:
    """In turns, call by call, so that both sides meet the same machine."""
    lookup_p50, lookup_p99, bare_p50 = [], [], []
    for number in range(-1, settings.rounds):  # the first only warms up
        pairs = [(bare(), lookup()) for _ in range(settings.calls_per_round)]
        if number >= 0:
            bare_p50.append(statistics.median(pair[0] for pair in pairs))
            times = [pair[1] for pair in pairs]
            lookup_p50.append(statistics.median(times))
            lookup_p99.append(statistics.quantiles(times, n=100)[98])
        on_progress((number + 2) / (settings.rounds + 1))
    return StoreBenchResult(
        lookup_p50_us=1e6 * statistics.median(lookup_p50),
        lookup_p99_us=1e6 * statistics.median(lookup_p99),
        bare_p50_us=1e6 * statistics.median(bare_p50),
        ratio_p50=statistics.median(
            ours / theirs for ours, theirs in zip(lookup_p50, bare_p50, strict=True)
        ),
        objects=objects,
        request_bytes=frame_bytes[0],
        reply_bytes=frame_bytes[1],
    )


def _lookup(client: Client, keys: list[Key]) -> Callable[[], float]:
    def once() -> float:
        began = time.perf_counter()
        grant = client.lookup_prefix(_NAMESPACE, keys, _TIMEOUT_S)
        whole = len(grant.extents) == len(keys) and grant.extents[0] is not None
        took = time.perf_counter() - began
        if not whole:
            raise RuntimeError(f"{len(grant.extents)} of {len(keys)} keys were found")
        if grant.lease is not None:
            client.release([grant.lease], _TIMEOUT_S)
        return took

    return once


def _fill(
    client: Client, objects: int, chain: int, on_progress: Callable[[float], None]
) -> list[Key]:
    """Objects in chains of ``chain``; returns the keys of a chain from the middle."""
    keys = [Key(number.to_bytes(8, "big") * 4) for number in range(objects)]
    for first in range(0, objects, _FILL_BATCH):
        items = [
            ReserveItem(keys[n], keys[n - 1] if n % chain else None, _PAYLOAD_BYTES)
            for n in range(first, min(first + _FILL_BATCH, objects))
        ]
        results = client.reserve(_NAMESPACE, items, _TIMEOUT_S).results
        if any(result.outcome is not ReserveOutcome.GRANTED for result in results):
            raise RuntimeError("the pool has no room for so many objects")
        generations = [r.extent.generation for r in results if r.extent is not None]
        client.commit([CommitItem(generation, ()) for generation in generations], _TIMEOUT_S)
        on_progress(min(1.0, (first + _FILL_BATCH) / objects))
    middle = objects // chain // 2 * chain
    return keys[middle : middle + chain]


@contextmanager
def _runtime_dir() -> Iterator[RuntimeDir]:
    path = Path(tempfile.mkdtemp(prefix="maru-bench-"))
    try:
        yield RuntimeDir(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _server(runtime: RuntimeDir, objects: int) -> Iterator[None]:
    pool_bytes = max(64 << 20, 2 * objects * _SLOT_BYTES)
    find_or_start(EmbeddedServer(runtime, pool_bytes, linger_s=60))
    with connect(runtime.url, who="maru bench store") as client:
        life = os.pidfd_open(client.stats(_TIMEOUT_S).server_pid)
    try:
        yield
    finally:
        signal.pidfd_send_signal(life, signal.SIGTERM)
        os.close(life)


@contextmanager
def _bare_round_trip(
    runtime: RuntimeDir, request: bytes, reply_bytes: int
) -> Iterator[Callable[[], float]]:
    url = f"ipc://{runtime.path}/echo.sock"
    echo = subprocess.Popen(
        [sys.executable, "-c", _ECHO, url, str(reply_bytes)], stdout=subprocess.PIPE
    )
    context = zmq.Context()
    try:
        assert echo.stdout is not None
        echo.stdout.readline()
        socket = context.socket(zmq.DEALER)
        socket.connect(url)

        def once() -> float:
            began = time.perf_counter()
            socket.send(request)
            socket.recv()
            return time.perf_counter() - began

        yield once
    finally:
        context.destroy(linger=0)
        echo.kill()
        echo.communicate()
