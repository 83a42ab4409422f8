"""Bandwidth of each copy path over run length and number of runs, against plain copies.

For ``gpu_check.py``. A measurement is a function from what is copied to seconds, so that the grid,
the ratios and the report are tested without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from maru_kv_ops.device_executors import CopyEngineExecutor, KernelExecutor
from maru_kv_ops.executors import CopyMemory, CopyPath, Executor
from maru_kv_ops.plan import CopyPlan, TransferDirection
from maru_kv_ops.torch_executor import TorchExecutor
from maru_vllm.worker.calibration import runs_plan

RUN_BYTES = (512, 4 << 10, 16 << 10, 32 << 10, 128 << 10, 1 << 20)
RUNS = (16, 128, 1024, 8192)
MIN_BYTES, MAX_BYTES = 256 << 10, 128 << 20
"""Of one copy: less measures launches only, more adds nothing."""
PATHS = (CopyPath.COPY_ENGINE, CopyPath.KERNEL, CopyPath.TORCH)
REPEATS = 5


class Traffic(StrEnum):
    """What runs at once."""

    LOAD = "load"
    STORE = "store"
    BOTH = "both"
    """A load and a store of the same size, on two streams; bytes of both count."""


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    path: CopyPath
    traffic: Traffic
    run_bytes: int
    runs: int
    gbps: float
    """10^9 bytes per second."""
    ratio: float
    """Over a plain pinned copy of as many bytes, of the same traffic, in the same run."""


@dataclass(frozen=True, slots=True)
class Plain:
    """What the ratios stand over, and a copy inside the device, in 10^9 bytes per second."""

    load_gbps: float
    store_gbps: float
    both_gbps: float
    device_gbps: float

    def of(self, traffic: Traffic) -> float:
        """The plain copy of this traffic."""
        by_traffic = {
            Traffic.LOAD: self.load_gbps,
            Traffic.STORE: self.store_gbps,
            Traffic.BOTH: self.both_gbps,
        }
        return by_traffic[traffic]


def grid() -> Iterator[tuple[int, int]]:
    """Run lengths and numbers of runs whose copy is neither too small nor too large."""
    for run_bytes in RUN_BYTES:
        for runs in RUNS:
            if MIN_BYTES <= run_bytes * runs <= MAX_BYTES:
                yield run_bytes, runs


class Device(Protocol):
    """Times copies; seconds of one, the best of some."""

    def plain(self) -> Plain:
        """Plain copies of ``MAX_BYTES``."""

    def copy(self, path: CopyPath, traffic: Traffic, run_bytes: int, runs: int) -> float:
        """One plan by one path."""


def measure(
    device: Device, plain: Plain, budget_s: float, on_point: Callable[[], None]
) -> list[Point]:
    """The whole grid, or as much of it as ``budget_s`` allows: rows by rising size."""
    end = time.monotonic() + budget_s
    points: list[Point] = []
    for run_bytes, runs in grid():
        for traffic in Traffic:
            for path in PATHS:
                if time.monotonic() > end:
                    return points
                moved = run_bytes * runs * (2 if traffic is Traffic.BOTH else 1)
                gbps = moved / device.copy(path, traffic, run_bytes, runs) / 1e9
                points.append(Point(path, traffic, run_bytes, runs, gbps, gbps / plain.of(traffic)))
                on_point()
    return points


class CudaDevice:
    """The real one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cache = torch.empty(4 * MAX_BYTES, dtype=torch.uint8, device=device)
        self._pinned = torch.empty(2 * MAX_BYTES, dtype=torch.uint8, pin_memory=True)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]  # type: ignore[no-untyped-call] # torch has no types for it
        self._executors: dict[CopyPath, Executor] = {
            CopyPath.COPY_ENGINE: CopyEngineExecutor(),
            CopyPath.KERNEL: KernelExecutor(),
            CopyPath.TORCH: TorchExecutor(),
        }

    def plain(self) -> Plain:
        """See ``Device``."""
        size = MAX_BYTES

        def load() -> None:
            self._cache[:size].copy_(self._pinned[:size], non_blocking=True)

        def store() -> None:
            self._pinned[size:].copy_(self._cache[size : 2 * size], non_blocking=True)

        def inside() -> None:
            self._cache[:size].copy_(self._cache[size : 2 * size], non_blocking=True)

        return Plain(
            load_gbps=size / self._seconds([load]) / 1e9,
            store_gbps=size / self._seconds([store]) / 1e9,
            both_gbps=2 * size / self._seconds([load, store]) / 1e9,
            device_gbps=size / self._seconds([inside]) / 1e9,
        )

    def copy(self, path: CopyPath, traffic: Traffic, run_bytes: int, runs: int) -> float:
        """See ``Device``."""
        half = 2 * MAX_BYTES
        load = self._queue(
            path,
            runs_plan(TransferDirection.H2D, run_bytes, runs),
            CopyMemory((self._cache[:half],), self._pinned[:MAX_BYTES]),
        )
        store = self._queue(
            path,
            runs_plan(TransferDirection.D2H, run_bytes, runs),
            CopyMemory((self._cache[half:],), self._pinned[MAX_BYTES:]),
        )
        wanted = {Traffic.LOAD: [load], Traffic.STORE: [store], Traffic.BOTH: [load, store]}
        return self._seconds(wanted[traffic])

    def _queue(self, path: CopyPath, plan: CopyPlan, memory: CopyMemory) -> Callable[[], None]:
        executor = self._executors[path]
        return lambda: (executor.run(plan, memory), None)[1]

    def _seconds(self, actions: list[Callable[[], None]]) -> float:
        """From the first call to the last byte, calls included; the best of some."""
        best = float("inf")
        for _ in range(1 + REPEATS):  # the first one warms up
            torch.cuda.synchronize(self._device)
            began = time.perf_counter()
            for action, stream in zip(actions, self._streams, strict=False):
                with torch.cuda.stream(stream):
                    action()
            torch.cuda.synchronize(self._device)
            best = min(best, time.perf_counter() - began)
        return best
