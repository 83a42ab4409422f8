"""The executor that runs anywhere torch does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from maru_kv_ops import host_rows
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.plan import CopyPlan, Run, TransferDirection
from maru_kv_ops.rows import RowCopy, rows_and_runs

MIN_THREADED_BYTES = 16 * 1024 * 1024
"""Below this many bytes per call a second thread costs more than it gives: waking an idle core
takes as long as a small copy (measured on 2 cores of EPYC 7003)."""

_WIDE_TYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


class TorchExecutor:
    """The baseline: runs every plan on every device that torch knows.

    Caches in host memory are copied through numpy views of the same bytes, with ``threads`` threads
    (its own, never torch's; they inherit the CPU affinity of the thread that first needs them).
    Caches on a device go through ``index_select`` and ``index_copy_`` and a staging tensor there.
    """

    name = "torch"

    def __init__(self, threads: int = 1) -> None:
        """``threads``: how many threads share one call above ``MIN_THREADED_BYTES``."""
        if threads < 1:
            raise ValueError(f"torch executor: {threads} threads; at least 1 is needed")
        self._threads = threads
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        """See ``Executor.run``."""
        memory.check(plan)
        rows, runs = rows_and_runs(plan.copies)
        if all(region.device.type == "cpu" for region in memory.regions):
            self._run_on_host(rows, runs, plan.direction, memory)
        else:
            for copy in rows:
                move_rows(copy, plan.direction, memory)
            for run in runs:
                move_run(run, plan.direction, memory)
        return CopyPath.TORCH

    def close(self) -> None:
        """See ``Executor.close``."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def _run_on_host(
        self,
        rows: Sequence[RowCopy],
        runs: Sequence[Run],
        direction: TransferDirection,
        memory: CopyMemory,
    ) -> None:
        regions = [region.numpy() for region in memory.regions]
        objects = memory.objects.numpy()

        def move(share: Sequence[RowCopy]) -> None:
            for copy in share:
                host_rows.move_rows(copy, direction, regions, objects)

        others: list[Future[None]] = []
        shares: Sequence[Sequence[RowCopy]] = [rows]
        if self._threads > 1 and sum(copy.num_bytes for copy in rows) >= MIN_THREADED_BYTES:
            shares = split_rows(rows, self._threads)
            pool = self._thread_pool()
            others = [pool.submit(move, share) for share in shares[1:]]
        try:
            move(shares[0])
            for run in runs:
                host_rows.move_run(run, direction, regions, objects)
        finally:
            for other in others:
                other.result()

    def _thread_pool(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads - 1, thread_name_prefix="maru-copy")
            return self._pool


def split_rows(rows: Sequence[RowCopy], shares: int) -> list[list[RowCopy]]:
    """Divide rows into ``shares`` lists of nearly equal bytes; together exactly the same rows."""
    total = sum(copy.num_bytes for copy in rows)
    result: list[list[RowCopy]] = [[] for _ in range(shares)]
    share, done = 0, 0
    for copy in rows:
        first = 0
        while first < copy.rows.size:
            room = total * (share + 1) // shares - done
            count = min(int(copy.rows.size) - first, max(1, room // copy.unit))
            result[share].append(copy.part(first, first + count))
            first += count
            done += count * copy.unit
            if done + copy.unit // 2 >= total * (share + 1) // shares and share < shares - 1:
                share += 1
    return result


def move_rows(copy: RowCopy, direction: TransferDirection, memory: CopyMemory) -> None:
    """Move rows with torch's own operators; works on every device, synchronises none.

    On a device a store gathers into a staging tensor there and copies that out in one piece, a load
    the other way round. Staging memory comes from torch's allocator and returns in stream order.
    Where the object memory is not pinned, CUDA itself holds the calling thread during each copy.
    """
    region = memory.regions[copy.region]
    count = (region.numel() - copy.residue) // copy.unit
    cache_rows = region.narrow(0, copy.residue, count * copy.unit)
    object_rows = memory.objects.narrow(0, copy.object_offset, copy.num_bytes)
    wide = _widest_type(copy.unit, copy.residue)
    cache_rows = cache_rows.view(wide).view(count, -1)
    index = torch.from_numpy(copy.rows).to(region.device, non_blocking=True)
    if direction is TransferDirection.D2H:
        staged = cache_rows.index_select(0, index)
        object_rows.copy_(staged.view(torch.uint8).view(-1), non_blocking=True)
    else:
        staged = object_rows.to(region.device, non_blocking=True)
        if wide is not torch.uint8 and staged.storage_offset() % wide.itemsize:
            staged = staged.clone()
        cache_rows.index_copy_(0, index, staged.view(wide).view(len(copy.rows), -1))


def move_run(run: Run, direction: TransferDirection, memory: CopyMemory) -> None:
    """Move one contiguous run with torch's own copy; see ``move_rows``."""
    cache = memory.regions[run.region].narrow(0, run.cache_offset, run.width)
    stored = memory.objects.narrow(0, run.object_offset, run.width)
    if direction is TransferDirection.D2H:
        stored.copy_(cache, non_blocking=True)
    else:
        cache.copy_(stored, non_blocking=True)


def _widest_type(unit: int, residue: int) -> torch.dtype:
    """Return the widest integer type that rows of ``unit`` bytes at ``residue`` can be read as."""
    return next(
        wide for wide in _WIDE_TYPES if unit % wide.itemsize == 0 and residue % wide.itemsize == 0
    )
