from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from maru_vllm.metadata import JobOutcome
from maru_vllm.worker.copy_runner import CopyKind, CopyResult, CopyTask, ThreadCopyRunner

LONG_S = 20.0


@pytest.fixture
def runner() -> Iterator[ThreadCopyRunner]:
    runner = ThreadCopyRunner(num_threads=2)
    yield runner
    assert runner.close(LONG_S)


def waiting_task(job_id: int, gate: threading.Event, kind: CopyKind = CopyKind.LOAD) -> CopyTask:
    def run() -> CopyResult:
        assert gate.wait(LONG_S)
        return CopyResult(job_id, kind, JobOutcome.DONE)

    return CopyTask(job_id, kind, run)


def test_several_loads_run_at_once(runner: ThreadCopyRunner) -> None:
    """B32: neither of two tasks ends before both have begun."""
    both_began = threading.Barrier(2)

    def task(job_id: int) -> CopyTask:
        def run() -> CopyResult:
            both_began.wait(LONG_S)
            return CopyResult(job_id, CopyKind.LOAD, JobOutcome.DONE)

        return CopyTask(job_id, CopyKind.LOAD, run)

    runner.submit(task(1))
    runner.submit(task(2))
    assert runner.wait([1, 2], LONG_S)
    assert sorted(result.job_id for result in runner.poll()) == [1, 2]


def test_loads_go_ahead_of_stores_that_were_submitted_before() -> None:
    runner = ThreadCopyRunner(num_threads=1)
    gate, order = threading.Event(), []

    def noting(job_id: int, kind: CopyKind) -> CopyTask:
        def run() -> CopyResult:
            order.append(job_id)
            return CopyResult(job_id, kind, JobOutcome.DONE)

        return CopyTask(job_id, kind, run)

    runner.submit(waiting_task(0, gate))
    runner.submit(noting(1, CopyKind.STORE))
    runner.submit(noting(2, CopyKind.STORE))
    runner.submit(noting(3, CopyKind.LOAD))
    gate.set()
    assert runner.wait([0, 1, 2, 3], LONG_S)
    assert runner.close(LONG_S)
    assert order == [3, 1, 2]


def test_submit_and_poll_do_not_wait_for_copies(runner: ThreadCopyRunner) -> None:
    gate = threading.Event()
    runner.submit(waiting_task(1, gate))
    assert runner.poll() == []
    gate.set()
    assert runner.wait([1], LONG_S)
    assert [result.job_id for result in runner.poll()] == [1]
    assert runner.poll() == []


def test_wait_gives_up_at_its_deadline_and_looks_at_its_own_jobs_only(
    runner: ThreadCopyRunner,
) -> None:
    gate = threading.Event()
    runner.submit(waiting_task(1, gate))
    assert not runner.wait([1], 0.01)
    assert runner.wait([2], LONG_S)
    gate.set()


def test_a_task_that_raises_is_a_failed_job_and_the_thread_lives_on(
    runner: ThreadCopyRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> CopyResult:
        raise OSError("no such page")

    runner.submit(CopyTask(1, CopyKind.STORE, broken))
    gate = threading.Event()
    gate.set()
    runner.submit(waiting_task(2, gate))
    assert runner.wait([1, 2], LONG_S)
    outcomes = {result.job_id: result.outcome for result in runner.poll()}
    assert outcomes == {1: JobOutcome.FAILED, 2: JobOutcome.DONE}
    assert "no such page" in caplog.text


def test_close_drops_what_has_not_begun_and_waits_for_what_has() -> None:
    runner = ThreadCopyRunner(num_threads=1)
    gate, began = threading.Event(), threading.Event()

    def run() -> CopyResult:
        began.set()
        assert gate.wait(LONG_S)
        return CopyResult(1, CopyKind.LOAD, JobOutcome.DONE)

    runner.submit(CopyTask(1, CopyKind.LOAD, run))
    runner.submit(waiting_task(2, gate))
    assert began.wait(LONG_S)
    assert not runner.close(0.01)
    gate.set()
    assert runner.close(LONG_S)
    outcomes = {result.job_id: result.outcome for result in runner.poll()}
    assert outcomes == {1: JobOutcome.DONE, 2: JobOutcome.FAILED}


def test_what_is_submitted_after_close_fails() -> None:
    runner = ThreadCopyRunner(num_threads=1)
    assert runner.close(LONG_S)
    runner.submit(waiting_task(1, threading.Event()))
    assert [result.outcome for result in runner.poll()] == [JobOutcome.FAILED]
