"""The placement table of this process's device: given, kept from before, or measured now."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from maru_kv_ops.device_executors import CopyEngineExecutor, KernelExecutor
from maru_kv_ops.executors import CopyMemory, CopyPath, Executor
from maru_kv_ops.plan import CopyPlan, StridedCopy, TransferDirection
from maru_vllm.placement_table import (
    MAX_BYTES,
    Measure,
    PlacementTable,
    TableError,
    calibrate,
    default_table,
    overridden,
    read_table,
    table_path,
    write_table,
)

logger = logging.getLogger(__name__)

BUDGET_S = 3.0
"""An engine's first start on a kind of device is held up by this once; later starts read a file."""
REPEATS = 3

DRIVER_VERSION = Path("/sys/module/nvidia/version")
"""Linux shows the loaded driver's version here; another driver may copy at another speed."""


def table_of_device(device: torch.device) -> PlacementTable:
    """The table to use on ``device``, a CUDA device. Called at start-up, once per worker.

    Raises ``TableError`` for a table that the operator named and that cannot be used. Anything else
    that goes wrong costs speed, not the engine: then it is the default table.
    """
    given = overridden()
    if given is not None:
        return given
    name = f"{torch.cuda.get_device_name(device)}, {driver_name()}"
    path = table_path(name)
    if path.exists():
        try:
            return read_table(path)
        except TableError as error:
            logger.warning("Maru: %s; measuring anew", error)
    try:
        table = calibrate(name, device_measure(device), time.monotonic, BUDGET_S)
    except RuntimeError as error:  # no memory left on the device
        logger.warning("Maru: %s was not measured (%s); using the default table", name, error)
        return default_table()
    finally:
        torch.cuda.empty_cache()  # vLLM gives what is free now to its KV cache
    try:
        write_table(table, path)
    except OSError as error:
        logger.warning("Maru: measured %s, which every start does again: %s", name, error)
    else:
        logger.info("Maru: measured copy engine against kernel on %s; kept in %s", name, path)
    return table


def driver_name() -> str:
    """The driver, or where it does not say, the CUDA runtime that this process uses."""
    try:
        return f"driver {DRIVER_VERSION.read_text(encoding='ascii').strip()}"
    except OSError:
        return f"CUDA {torch.version.cuda}"


def device_measure(device: torch.device) -> Measure:
    """Measure on the device itself. Allocates twice ``MAX_BYTES`` there and as much pinned."""
    memory = CopyMemory(
        regions=(torch.empty(2 * MAX_BYTES, dtype=torch.uint8, device=device),),
        objects=torch.empty(MAX_BYTES, dtype=torch.uint8, pin_memory=True),
    )
    executors: dict[CopyPath, Executor] = {
        CopyPath.KERNEL: KernelExecutor(),
        CopyPath.COPY_ENGINE: CopyEngineExecutor(),
    }

    def measure(path: CopyPath, direction: TransferDirection, run_bytes: int, runs: int) -> float:
        plan = runs_plan(direction, run_bytes, runs)
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # theirs
        best = float("inf")
        with torch.cuda.stream(stream):
            for _ in range(1 + REPEATS):  # the first one warms up
                stream.synchronize()
                began = time.perf_counter()
                executors[path].run(plan, memory)
                stream.synchronize()
                best = min(best, time.perf_counter() - began)
        return best

    return measure


def runs_plan(direction: TransferDirection, run_bytes: int, runs: int) -> CopyPlan:
    """Runs that are scattered in the cache and follow each other in the object."""
    copy = StridedCopy(
        region=0,
        width=run_bytes,
        repeats=(),
        cache_starts=tuple(2 * i * run_bytes for i in range(runs)),
        object_starts=tuple(i * run_bytes for i in range(runs)),
    )
    return CopyPlan(
        direction=direction,
        copies=(copy,),
        region_ends=(2 * runs * run_bytes,),
        object_end=runs * run_bytes,
        num_bytes=runs * run_bytes,
    )
