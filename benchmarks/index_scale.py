"""What the index costs per request, and whether that depends on how much it holds.

    python benchmarks/index_scale.py --objects 10000 --objects 1000000 --json

Fills one index per size with chains of 128 objects of 1 MiB, in a pool that they fill exactly,
and then measures in turns, medians over the rounds:

- lookup: find and lease one chain, its keys as fresh bytes (as they come off the wire);
- release: end that lease;
- store: reserve and commit one more chain, per object; the pool is full, so each evicts another;
- resident bytes per object while filling, keys included.

Seen on 2 shared cores, 10 thousand against 10 million objects: lookup 21 and 25 us, release 15 and
18 us, store 28 and 31 us per object, 455 bytes per object.

Chains are drawn at random, so with millions of objects their memory is cold. ``--churn 1`` first
replaces every object once, chain by chain, which scatters what lay side by side. Times are CPU
times of the thread, because other work on the machine is not the index's. Bias: one namespace,
chains that do not branch; the cyclic garbage collector is off, as in the server.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from maru_shm.control.messages import CommitItem, ReserveItem
from maru_shm.index.index import Index
from maru_shm.types import Key, Namespace, OwnerToken, PoolGeometry, SessionId

CHAIN_KEYS = 128
OBJECT_BYTES = 1 << 20
SEGMENT_NOMINAL_BYTES = 256 << 20
OBJECTS_PER_SEGMENT = SEGMENT_NOMINAL_BYTES // OBJECT_BYTES
KNOWN_CHAINS = 2000
"""How many chains are kept to be looked up; the others only fill the index."""

NAMESPACE = Namespace(bytes(32))
SESSION = SessionId(1)


@dataclass
class Filled:
    """One index of one size, and what was measured on it."""

    objects: int
    index: Index
    known: list[bytes]
    """Keys of some chains, joined."""
    bytes_per_object: float
    lookup_us: list[float] = field(default_factory=list)
    release_us: list[float] = field(default_factory=list)
    store_us: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Row:
    objects: int
    bytes_per_object: float
    lookup_p50_us: float
    lookup_p99_us: float
    release_p50_us: float
    store_p50_us_per_object: float
    lookup_ratio: float
    """Median of the lookups over that of the smallest index."""


def main(
    objects: Annotated[list[int] | None, typer.Option(help="Objects in the index.")] = None,
    rounds: Annotated[int, typer.Option(help="Requests of each kind and size.")] = 1000,
    churn: Annotated[float, typer.Option(help="Share of objects to replace first.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as last line.")] = False,
) -> None:
    """Measure lookups and stores at several sizes of the index."""
    gc.disable()
    console = Console(stderr=as_json)
    sizes = sorted(objects or [10_000, 1_000_000])
    filled = []
    for size in sizes:
        with console.status(f"filling {size:,} objects"):
            filled.append(fill(size, churn))
    with console.status("measuring"):
        for _ in range(rounds):
            for each in filled:
                measure_lookup(each)
        for _ in range(max(1, rounds // 10)):
            for each in filled:
                measure_store(each)
    rows = [row_of(each, filled[0]) for each in filled]
    console.print(table_of(rows))
    if as_json:
        print(json.dumps({"churn": churn, "rounds": rounds, "rows": [asdict(r) for r in rows]}))


def fill(objects: int, churn: float) -> Filled:
    segments = -(-objects // OBJECTS_PER_SEGMENT)
    segment_bytes = SEGMENT_NOMINAL_BYTES + SEGMENT_NOMINAL_BYTES // 256
    geometry = PoolGeometry((1 << 20) + segments * segment_bytes, segment_bytes, 1 << 20, segments)
    before = resident_bytes()
    index = Index(geometry, 1, time.monotonic)
    index.open_session(SESSION, OwnerToken(1))
    chains = max(1, segments * OBJECTS_PER_SEGMENT // CHAIN_KEYS)
    every = max(1, chains // KNOWN_CHAINS)
    known = [keys for n in range(chains) if (keys := store_chain(index)) and n % every == 0]
    bytes_per_object = (resident_bytes() - before) / (chains * CHAIN_KEYS)
    churned = int(chains * churn)
    if churned:
        known = [keys for n in range(churned) if (keys := store_chain(index)) and n % every == 0]
    return Filled(objects, index, known, bytes_per_object)


def store_chain(index: Index) -> bytes:
    """Store one new chain; its keys, joined."""
    joined = os.urandom(32 * CHAIN_KEYS)
    store(index, chain_items(joined))
    return joined


def chain_items(joined: bytes) -> list[ReserveItem]:
    keys = split(joined)
    return [
        ReserveItem(key, parent, OBJECT_BYTES)
        for key, parent in zip(keys, [None, *keys[:-1]], strict=True)
    ]


def store(index: Index, items: list[ReserveItem]) -> None:
    extents = [result.extent for result in index.reserve(SESSION, NAMESPACE, items).results]
    index.commit(SESSION, [CommitItem(e.generation, ()) for e in extents if e is not None])


def measure_lookup(filled: Filled) -> None:
    """Look one chain up and release it."""
    index = filled.index
    keys = split(random.choice(filled.known))
    begin = time.thread_time()
    found = index.lookup_prefix(SESSION, NAMESPACE, keys)
    found_at = time.thread_time()
    assert found.lease is not None, "the chain is gone"
    index.release(SESSION, [found.lease])
    released_at = time.thread_time()
    assert len(found.extents) == CHAIN_KEYS, "part of the chain is gone"
    filled.lookup_us.append((found_at - begin) * 1e6)
    filled.release_us.append((released_at - found_at) * 1e6)


def measure_store(filled: Filled) -> None:
    """Store one chain, which evicts another."""
    items = chain_items(os.urandom(32 * CHAIN_KEYS))
    begin = time.thread_time()
    store(filled.index, items)
    filled.store_us.append((time.thread_time() - begin) / CHAIN_KEYS * 1e6)


def split(joined: bytes) -> list[Key]:
    """The keys, as new objects whose hash is not known yet."""
    return [Key(joined[at : at + 32]) for at in range(0, len(joined), 32)]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def row_of(filled: Filled, smallest: Filled) -> Row:
    lookup = statistics.median(filled.lookup_us)
    return Row(
        objects=filled.index.counts().objects,
        bytes_per_object=round(filled.bytes_per_object, 1),
        lookup_p50_us=round(lookup, 2),
        lookup_p99_us=round(statistics.quantiles(filled.lookup_us, n=100)[-1], 2),
        release_p50_us=round(statistics.median(filled.release_us), 2),
        store_p50_us_per_object=round(statistics.median(filled.store_us), 2),
        lookup_ratio=round(lookup / statistics.median(smallest.lookup_us), 3),
    )


def table_of(rows: list[Row]) -> Table:
    table = Table(title=f"index, {CHAIN_KEYS} keys of one chain per request")
    for title in ("objects", "B/object", "lookup p50 us", "p99 us", "release p50 us"):
        table.add_column(title, justify="right")
    table.add_column("store p50 us/object", justify="right")
    table.add_column("lookup / smallest", justify="right")
    for row in rows:
        table.add_row(
            f"{row.objects:,}",
            f"{row.bytes_per_object:.0f}",
            f"{row.lookup_p50_us:.1f}",
            f"{row.lookup_p99_us:.1f}",
            f"{row.release_p50_us:.1f}",
            f"{row.store_p50_us_per_object:.0f}",
            f"{row.lookup_ratio:.2f}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
