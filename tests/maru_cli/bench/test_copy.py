"""The copy benchmark measures what it says, or says why it does not."""

from __future__ import annotations

import math
from dataclasses import asdict, replace

import pytest

from maru_cli.bench import copy as copy_bench
from maru_cli.bench.copy import (
    CopyBenchError,
    CopyBenchSettings,
    run_copy_bench,
    sweep_settings,
)
from maru_kv_ops.executors import CopyMemory, CopyPath
from maru_kv_ops.layouts import KVLayout
from maru_kv_ops.plan import CopyPlan, TransferDirection
from maru_kv_ops.torch_executor import TorchExecutor

SMALL = CopyBenchSettings(tokens=64, chunk_tokens=32, block_size=16, layers=2, kv_heads=2, rounds=2)


@pytest.fixture(autouse=True)
def small_working_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy_bench, "WORKING_SET_BYTES", 1)


@pytest.mark.parametrize("layout", list(KVLayout))
def test_every_layout_can_be_measured(layout: KVLayout) -> None:
    rounds: list[tuple[int, int]] = []

    result = run_copy_bench(
        replace(SMALL, layout=layout, threads=2), lambda done, of: rounds.append((done, of))
    )

    assert rounds == [(1, 2), (2, 2)]
    assert result.num_bytes == 64 * 2 * 2 * 2 * 128 * 2
    assert (result.layout, result.threads, result.executor) == (layout.name, 2, "host")
    figures = [value for value in asdict(result).values() if isinstance(value, float)]
    assert len(figures) == 9
    assert all(math.isfinite(value) and value > 0 for value in figures)


def test_an_executor_that_loses_a_byte_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(TorchExecutor):
        name = "forgetful"

        def run(self, plan: CopyPlan, memory: CopyMemory) -> CopyPath:
            path = super().run(plan, memory)
            if plan.direction is TransferDirection.D2H:
                memory.objects[-1] ^= 1
            return path

    monkeypatch.setitem(copy_bench.EXECUTORS, "forgetful", lambda threads: Forgetful(threads))

    with pytest.raises(CopyBenchError, match="'forgetful' did not bring back"):
        run_copy_bench(replace(SMALL, executor="forgetful"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(SMALL, executor="cuda"), "no executor named 'cuda'; there is host, torch"),
        (replace(SMALL, block_size=24), "multiple"),
        (replace(SMALL, tokens=48), "multiple"),
        (replace(SMALL, threads=0), "threads is 0"),
        (replace(SMALL, rounds=0), "rounds is 0"),
        (replace(SMALL, tokens=2**40), "bytes free"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(
    settings: CopyBenchSettings, message: str
) -> None:
    with pytest.raises(CopyBenchError, match=message):
        run_copy_bench(settings)


def test_a_sweep_covers_every_page_size_with_one_and_two_threads() -> None:
    wanted = sweep_settings(CopyBenchSettings())
    kib = [(one.threads, one.page_bytes // 1024) for one in wanted]
    assert kib == [(threads, size) for threads in (1, 2) for size in (4, 16, 32, 256)]
    for one in wanted:
        one.check()


def test_a_sweep_of_tokens_that_no_page_can_hold_is_refused() -> None:
    with pytest.raises(CopyBenchError, match="does not divide"):
        sweep_settings(CopyBenchSettings(kv_heads=32))
