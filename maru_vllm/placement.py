"""``maru_placement``: which executor copies, decided where the cache lies and, on a GPU, per plan.

cache in host memory   auto         the native host executor; torch where it was not built
                       kernel       the native host executor, or the engine does not start
                       copy_engine  refused: host memory has none
                       fallback     torch
cache on a GPU         auto         copy engine or kernel by the placement table; torch where the
                                    extension was not built
                       kernel, copy_engine   that, or the engine does not start
                       fallback     torch, layer by layer
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from maru_kv_ops.device_executors import CopyEngineExecutor, KernelExecutor
from maru_kv_ops.executors import CopyMemory, CopyPath, Executor
from maru_kv_ops.host_executor import HostExecutor
from maru_kv_ops.plan import CopyPlan
from maru_kv_ops.torch_executor import TorchExecutor
from maru_vllm.kv_ops import KVOps
from maru_vllm.placement_table import PlacementRow, PlacementTable
from maru_vllm.settings import Placement

THREADS_PER_COPY = 2
"""Threads that share one large copy: 1.65 x one thread between private memory and tmpfs here."""


class PlacementRefused(ValueError):
    """``maru_placement`` asks for what this installation or this device does not have."""


class TablePlacement:
    """Copy engine or kernel, plan by plan. A kernel reaches pinned memory only: see B23's test."""

    name = "auto"

    def __init__(self, table: PlacementTable, engine: Executor, kernel: Executor) -> None:
        self._table = table
        self._by_path = {CopyPath.COPY_ENGINE: engine, CopyPath.KERNEL: kernel}

    def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
        """See ``Executor.run``."""
        runs = sum(copy.num_runs for copy in plan.copies)
        mean_run = plan.num_bytes // runs if runs else 0
        path = self._table.choose(plan.direction, mean_run, runs)
        if path is CopyPath.KERNEL and not memory.objects.is_pinned():
            path = CopyPath.COPY_ENGINE
        return self._by_path[path].run(plan, memory)

    def close(self) -> None:
        """See ``Executor.close``."""
        for executor in self._by_path.values():
            executor.close()


ALWAYS_KERNEL = PlacementTable("any", (PlacementRow(1, 1),), (PlacementRow(1, 1),))


def executor_for(
    placement: Placement,
    device: torch.device,
    ops: KVOps,
    table_of: Callable[[torch.device], PlacementTable],
) -> Executor:
    """The executor for a cache on ``device``; called at start-up.

    Raises ``PlacementRefused``, and what ``table_of`` raises, which is asked only where it counts.
    """
    if placement is Placement.FALLBACK:
        return TorchExecutor(threads=THREADS_PER_COPY)
    if device.type == "cpu":
        return _host_executor(placement, ops)
    if ops.native is None:
        if placement is Placement.AUTO:
            return TorchExecutor(threads=THREADS_PER_COPY)
        raise PlacementRefused(
            f'maru_placement is "{placement.value}", but {ops.native_missing}. Or use "auto"'
        )
    engine = CopyEngineExecutor()
    if placement is Placement.COPY_ENGINE:
        return engine
    table = ALWAYS_KERNEL if placement is Placement.KERNEL else table_of(device)
    return TablePlacement(table, engine, KernelExecutor())


def _host_executor(placement: Placement, ops: KVOps) -> Executor:
    if placement is Placement.COPY_ENGINE:
        raise PlacementRefused(
            'maru_placement is "copy_engine", but this engine keeps its KV cache in host memory, '
            'where there is no copy engine; use "auto"'
        )
    if ops.host is not None:
        return HostExecutor(threads=THREADS_PER_COPY)
    if placement is Placement.KERNEL:
        raise PlacementRefused(f'maru_placement is "kernel", but {ops.host_missing}. Or use "auto"')
    return TorchExecutor(threads=THREADS_PER_COPY)
