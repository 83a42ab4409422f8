"""Load and store of one request's chunks against plain memcpy of the same bytes.

The pool's side is tmpfs memory, mapped and populated as a worker maps the pool; the engine's side
is a paged cache in the asked layout, the request's blocks shuffled among others. Planning is part
of the measured time. memcpy moves the same objects between the same pool memory and one private
buffer, aligned to a page, with the same number of threads.

memcpy goes object by object, as the pool holds them. One single call over all of them is reported
beside it: above a threshold (192 MiB on the machine that this was written on) glibc turns to
non-temporal stores, which no copy of pages through glibc can reach.

All are measured in turns in every round, over memory that is larger than the caches. Rates are
medians over the rounds; ratios are medians of each round's ratio, because what else runs on the
machine changes between rounds more than within one.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.errors import ExecutorMissing
from maru_kv_ops.executors import CopyMemory, Executor
from maru_kv_ops.host_executor import HostExecutor, host_is_available
from maru_kv_ops.layouts import CacheExtents, KVLayout, layout_strides
from maru_kv_ops.plan import PagePlanner, TransferDirection
from maru_kv_ops.torch_executor import TorchExecutor
from maru_kv_ops.views import ObjectView, object_view_for

EXECUTORS: dict[str, Callable[[int], Executor]] = {
    "host": lambda threads: HostExecutor(threads=threads),
    "torch": lambda threads: TorchExecutor(threads=threads),
}
"""Executors for host memory that can be measured, by name; each is made from a number of threads.
Those of a GPU are measured by benchmarks/gpu_check.py."""

SWEEP_THREADS = (1, 2)
SWEEP_PAGE_KIB = (4, 16, 32, 256)
"""Pages of one layer: a token of an 8B model, its blocks of 4, 8 and 64 tokens."""


def default_executor() -> str:
    """What the connector uses for a cache in host memory here."""
    return "host" if host_is_available() else "torch"


TMPFS = Path("/dev/shm")

WORKING_SET_BYTES = 256 * 1024 * 1024
"""Pool memory that the rounds go through at least: several times the largest last-level cache."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not named by Python 3.11's mmap

Bytes = npt.NDArray[np.uint8]


class CopyBenchError(Exception):
    """The benchmark cannot be run as asked; the message says why and what to change."""


@dataclass(frozen=True, slots=True)
class CopyBenchSettings:
    """One request's KV and how it is copied. The defaults are an 8B model with GQA in bf16."""

    executor: str = field(default_factory=default_executor)
    threads: int = 1
    layout: KVLayout = KVLayout.LBHNC
    block_size: int = 32
    tokens: int = 2048
    chunk_tokens: int = 256
    layers: int = 32
    kv_heads: int = 8
    head_size: int = 128
    element_bytes: int = 2
    rounds: int = 7

    def check(self) -> None:
        """Raise ``CopyBenchError`` for values that do not go together."""
        if self.executor not in EXECUTORS:
            raise CopyBenchError(
                f"no executor named '{self.executor}'; there is {', '.join(sorted(EXECUTORS))}"
            )
        for name in ("threads", "block_size", "tokens", "layers", "kv_heads", "rounds"):
            if getattr(self, name) < 1:
                raise CopyBenchError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        if self.chunk_tokens % self.block_size or self.tokens % self.chunk_tokens:
            raise CopyBenchError(
                f"{self.tokens} tokens in chunks of {self.chunk_tokens} in blocks of "
                f"{self.block_size}: each must be a multiple of the next"
            )

    @property
    def bytes_per_token(self) -> int:
        """K and V of all layers and heads."""
        return self.layers * self.kv_heads * 2 * self.head_size * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """K and V of one layer and block."""
        return self.bytes_per_token // self.layers * self.block_size


@dataclass(frozen=True, slots=True)
class CopyBenchResult:
    """Medians; 1 GB is 10^9 bytes. A ratio of 1 is as fast as memcpy."""

    executor: str
    threads: int
    layout: str
    block_size: int
    page_bytes: int
    """K and V of one layer and block."""
    tokens: int
    rounds: int
    num_bytes: int
    """Bytes of one load, and of one store."""
    load_gbps: float
    store_gbps: float
    memcpy_gbps: float
    """Both directions together."""
    memcpy_load_gbps: float
    """Out of the pool's memory, what ``load_ratio`` compares with."""
    memcpy_store_gbps: float
    """Into the pool's memory, what ``store_ratio`` compares with."""
    memcpy_one_call_gbps: float
    """Both directions together, each thread's share in one call."""
    load_ratio: float
    store_ratio: float
    plan_share: float
    """Part of the load's time that goes into planning."""


def run_copy_bench(
    settings: CopyBenchSettings, on_round: Callable[[int, int], None] | None = None
) -> CopyBenchResult:
    """Measure; takes seconds and about four times the request's bytes of memory.

    ``on_round(done, of)`` is called after every round. Before anything is timed, one store and one
    load are checked byte for byte. Raises ``CopyBenchError``.
    """
    settings.check()
    with (
        closing(_Transfers(settings)) as transfers,
        ThreadPoolExecutor(settings.threads) as copiers,
    ):
        transfers.prove()
        return _measure(settings, transfers, copiers, on_round)


def sweep_settings(base: CopyBenchSettings) -> list[CopyBenchSettings]:
    """The same request in pages of every size of the sweep, with every number of threads.

    Raises ``CopyBenchError`` where a token of ``base`` is longer than the smallest page.
    """
    token_bytes = base.page_bytes // base.block_size
    if SWEEP_PAGE_KIB[0] * 1024 % token_bytes:
        raise CopyBenchError(
            f"a token has {token_bytes} bytes per layer, which does not divide pages of "
            f"{SWEEP_PAGE_KIB[0]} KiB"
        )
    return [
        replace(base, threads=threads, block_size=kib * 1024 // token_bytes)
        for threads in SWEEP_THREADS
        for kib in SWEEP_PAGE_KIB
    ]


@dataclass(frozen=True, slots=True)
class _Round:
    """Seconds of one round."""

    load: float
    store: float
    memcpy_load: float
    memcpy_store: float
    memcpy_one_call: float
    """Both directions."""
    plan: float


def _measure(
    settings: CopyBenchSettings,
    transfers: _Transfers,
    copiers: ThreadPoolExecutor,
    on_round: Callable[[int, int], None] | None,
) -> CopyBenchResult:
    num_bytes = settings.bytes_per_token * settings.tokens
    private = np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    _one_round(settings, transfers, copiers, private, 0)  # warms up
    rounds = []
    for number in range(settings.rounds):
        request = number % transfers.requests
        rounds.append(_one_round(settings, transfers, copiers, private, request))
        if on_round is not None:
            on_round(number + 1, settings.rounds)

    def gbps(size: int, seconds: Callable[[_Round], float]) -> float:
        return size / statistics.median(map(seconds, rounds)) / 1e9

    return CopyBenchResult(
        executor=settings.executor,
        threads=settings.threads,
        layout=settings.layout.name,
        block_size=settings.block_size,
        page_bytes=settings.page_bytes,
        tokens=settings.tokens,
        rounds=settings.rounds,
        num_bytes=num_bytes,
        load_gbps=gbps(num_bytes, lambda r: r.load),
        store_gbps=gbps(num_bytes, lambda r: r.store),
        memcpy_gbps=gbps(2 * num_bytes, lambda r: r.memcpy_load + r.memcpy_store),
        memcpy_load_gbps=gbps(num_bytes, lambda r: r.memcpy_load),
        memcpy_store_gbps=gbps(num_bytes, lambda r: r.memcpy_store),
        memcpy_one_call_gbps=gbps(2 * num_bytes, lambda r: r.memcpy_one_call),
        load_ratio=statistics.median(r.memcpy_load / r.load for r in rounds),
        store_ratio=statistics.median(r.memcpy_store / r.store for r in rounds),
        plan_share=statistics.median(r.plan / r.load for r in rounds),
    )


def _one_round(
    settings: CopyBenchSettings,
    transfers: _Transfers,
    copiers: ThreadPoolExecutor,
    private: Bytes,
    request: int,
) -> _Round:
    pool = transfers.pool_bytes_of(request)
    object_bytes = settings.bytes_per_token * settings.chunk_tokens

    def memcpy(target: Bytes, source: Bytes, piece: int) -> None:
        cuts = [target.size * share // settings.threads for share in range(settings.threads + 1)]
        shares = [
            copiers.submit(_copy_pieces, target[first:last], source[first:last], piece)
            for first, last in pairwise(cuts[1:])
        ]
        _copy_pieces(target[: cuts[1]], source[: cuts[1]], piece)
        for share in shares:
            share.result()

    def one_call() -> None:
        memcpy(pool, private, private.size)
        memcpy(private, pool, private.size)

    return _Round(
        memcpy_store=_seconds(lambda: memcpy(pool, private, object_bytes)),
        store=_seconds(lambda: transfers.copy(request, TransferDirection.D2H)),
        memcpy_load=_seconds(lambda: memcpy(private, pool, object_bytes)),
        load=_seconds(lambda: transfers.copy(request, TransferDirection.H2D)),
        plan=_seconds(lambda: transfers.plan_only(request, TransferDirection.H2D)),
        memcpy_one_call=_seconds(one_call),
    )


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _copy_pieces(target: Bytes, source: Bytes, piece: int) -> None:
    for first in range(0, target.size, piece):
        np.copyto(target[first : first + piece], source[first : first + piece])


class _Transfers:
    """A paged cache, and the chunks of several requests in pool memory."""

    def __init__(self, settings: CopyBenchSettings) -> None:
        self._request_bytes = settings.bytes_per_token * settings.tokens
        self.requests = max(1, -(-WORKING_SET_BYTES // self._request_bytes))
        self._pool = _populated_tmpfs(self.requests * self._request_bytes)
        self._tensors = _layer_tensors(settings)
        self._caches = paged_caches(
            [CacheTensor(tensor, "BHNC") for tensor in self._tensors], _num_blocks(settings)
        )
        blocks_per_chunk = settings.chunk_tokens // settings.block_size
        self._chunk = object_view_for(
            self._caches.views, blocks_per_chunk, settings.layout.object_order
        )
        self._planner = PagePlanner(self._caches.views, self._chunk)
        blocks = list(range(_num_blocks(settings)))
        random.Random(0).shuffle(blocks)
        self._chunk_blocks = [
            blocks[first : first + blocks_per_chunk]
            for first in range(0, settings.tokens // settings.block_size, blocks_per_chunk)
        ]
        self._memory = CopyMemory(self._caches.regions, self._pool)
        try:
            self._executor = EXECUTORS[settings.executor](settings.threads)
        except ExecutorMissing as error:
            raise CopyBenchError(str(error)) from None

    def close(self) -> None:
        """Stop the executor's threads; the memory goes with the object."""
        self._executor.close()

    def pool_bytes_of(self, request: int) -> Bytes:
        """Where the request's chunks lie."""
        first = request * self._request_bytes
        return self._pool.numpy()[first : first + self._request_bytes]

    def copy(self, request: int, direction: TransferDirection) -> None:
        """Load or store all chunks of one request, one plan each."""
        for place, blocks in self._chunks(request):
            self._executor.run(self._planner.plan(place, 0, blocks, direction), self._memory)

    def plan_only(self, request: int, direction: TransferDirection) -> None:
        """Plan what ``copy`` would do."""
        for place, blocks in self._chunks(request):
            self._planner.plan(place, 0, blocks, direction)

    def prove(self) -> None:
        """Raise ``CopyBenchError`` unless a load brings back what a store took away."""
        used = torch.tensor([block for blocks in self._chunk_blocks for block in blocks])
        before = [tensor[used] for tensor in self._tensors]
        self.copy(0, TransferDirection.D2H)
        for tensor in self._tensors:
            tensor[used] = 0
        self.copy(0, TransferDirection.H2D)
        for layer, (tensor, expected) in enumerate(zip(self._tensors, before, strict=True)):
            if not torch.equal(tensor[used], expected):
                raise CopyBenchError(
                    f"executor '{self._executor.name}' did not bring back the bytes of layer "
                    f"{layer} that it stored; its speed is not worth measuring"
                )

    def _chunks(self, request: int) -> Iterator[tuple[ObjectView, list[int]]]:
        size = self._chunk.chunk_bytes
        first = request * len(self._chunk_blocks)
        for number, blocks in enumerate(self._chunk_blocks, start=first):
            yield self._chunk.at(number * size, size), blocks


def _num_blocks(settings: CopyBenchSettings) -> int:
    """Twice the request's, so that its shuffled blocks have strangers between them."""
    return 2 * settings.tokens // settings.block_size


def _layer_tensors(settings: CopyBenchSettings) -> list[torch.Tensor]:
    """``[block, head, token, bytes]`` per layer over one storage, random bytes everywhere."""
    extents = CacheExtents(
        layers=settings.layers,
        blocks=_num_blocks(settings),
        heads=settings.kv_heads,
        tokens=settings.block_size,
        content_bytes=2 * settings.head_size * settings.element_bytes,
    )
    strides = layout_strides(settings.layout, extents)
    storage = torch.randint(0, 256, (strides.total_bytes,), dtype=torch.uint8)
    return [
        storage.as_strided(
            (extents.blocks, extents.heads, extents.tokens, extents.content_bytes),
            (strides.block, strides.head, strides.token, 1),
            layer * strides.layer,
        )
        for layer in range(settings.layers)
    ]


def _populated_tmpfs(size: int) -> torch.Tensor:
    """Map ``size`` bytes of an unnamed file in tmpfs, every page resident and mapped."""
    free = shutil.disk_usage(TMPFS).free
    if free < size:
        raise CopyBenchError(
            f"{TMPFS} has {free} bytes free, {size} are needed; ask for fewer tokens or enlarge it"
        )
    with tempfile.TemporaryFile(dir=TMPFS) as file:
        os.ftruncate(file.fileno(), size)
        memory = mmap.mmap(file.fileno(), size)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError:  # a kernel before 5.14
        tensor.zero_()
    return tensor
