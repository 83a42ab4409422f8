"""Where copies run, apart from what they do.

The worker half hands a ``CopyTask`` over and asks later what became of it. ``ThreadCopyRunner``
runs tasks on threads of its own; the simulation brings a runner that a script steps through.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import IntEnum, unique
from typing import Protocol

from maru_kv_ops.executors import CopyPath
from maru_shm.types import PartChecksum
from maru_vllm.metadata import JobOutcome

logger = logging.getLogger(__name__)


@unique
class CopyKind(IntEnum):
    """What a task does; lower values go first: a request waits for a load, nobody for a store."""

    LOAD = 0
    STORE = 1


@dataclass(frozen=True, slots=True)
class CopyResult:
    """What became of one task. When it exists, nothing is copied for that job any more."""

    job_id: int
    kind: CopyKind
    outcome: JobOutcome
    checksum: PartChecksum | None = None
    """Of the part that a store wrote."""
    suspect_generations: tuple[int, ...] = ()
    """Objects that failed a check in a load."""
    seconds: float = 0.0
    """From the start of the task's work to its end, checks included."""
    path: CopyPath | None = None
    """What copied; None where nothing did."""


@dataclass(frozen=True, slots=True)
class CopyTask:
    """One job's copies."""

    job_id: int
    kind: CopyKind
    run: Callable[[], CopyResult]
    """Does the work, on whatever thread the runner chooses; may raise."""


class CopyRunner(Protocol):
    """Runs tasks beside the engine. All methods are called by the worker's one thread.

    Every task that was submitted is reported by ``poll`` exactly once, after it has stopped
    touching the cache and the pool; one that raised, or had not begun before ``close``, as FAILED.
    """

    def submit(self, task: CopyTask) -> None:
        """Take the task over; never blocks."""

    def poll(self) -> list[CopyResult]:
        """Results that have not been reported yet; never blocks."""

    def wait(self, job_ids: Collection[int], deadline_s: float) -> bool:
        """Block until none of these jobs is under way, at most ``deadline_s`` seconds.

        Returns whether that was reached. Results stay for ``poll``.
        """

    def close(self, deadline_s: float) -> bool:
        """Drop what has not begun, wait for what runs; whether nothing runs any more."""


def default_copy_threads() -> int:
    """Two, so that one large load does not hold up the next; four where cores abound.

    Measured here: two threads copy 1.65 x as fast as one between private memory and tmpfs. More
    than four has not been measured.
    """
    return 4 if (os.cpu_count() or 1) >= 16 else 2


class ThreadCopyRunner:
    """Daemon threads over one queue: loads in order of submission, then stores."""

    def __init__(self, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"copy runner: {num_threads} threads; at least 1 is needed")
        self._num_threads = num_threads
        self._changed = threading.Condition()
        # All below under _changed.
        self._queue: list[tuple[CopyKind, int, CopyTask]] = []
        self._submitted = 0
        self._under_way: set[int] = set()
        self._results: list[CopyResult] = []
        self._threads: list[threading.Thread] = []
        self._closing = False

    def submit(self, task: CopyTask) -> None:
        """See ``CopyRunner.submit``. Threads start with the first tasks."""
        with self._changed:
            if self._closing:
                self._results.append(_failed(task))
                return
            self._submitted += 1
            self._under_way.add(task.job_id)
            heapq.heappush(self._queue, (task.kind, self._submitted, task))
            if len(self._threads) < min(self._num_threads, len(self._under_way)):
                thread = threading.Thread(
                    target=self._work, name=f"maru-job-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
            self._changed.notify()

    def poll(self) -> list[CopyResult]:
        """See ``CopyRunner.poll``."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def wait(self, job_ids: Collection[int], deadline_s: float) -> bool:
        """See ``CopyRunner.wait``."""
        wanted = set(job_ids)
        end = time.monotonic() + deadline_s
        with self._changed:
            return self._wait_until(lambda: wanted.isdisjoint(self._under_way), end)

    def close(self, deadline_s: float) -> bool:
        """See ``CopyRunner.close``. Idempotent."""
        end = time.monotonic() + deadline_s
        with self._changed:
            self._closing = True
            for _, _, task in self._queue:
                self._under_way.discard(task.job_id)
                self._results.append(_failed(task))
            self._queue.clear()
            self._changed.notify_all()
            finished = self._wait_until(lambda: not self._under_way, end)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return finished

    def _wait_until(self, reached: Callable[[], bool], end: float) -> bool:
        # Not Condition.wait_for: a thread that dies with the interpreter would never notify.
        while not reached():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, 0.5))
        return True

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._closing:
                        return
                    self._changed.wait()
                _, _, task = heapq.heappop(self._queue)
            result = run_task(task)
            del task  # holds the mapping and the caches
            with self._changed:
                self._under_way.discard(result.job_id)
                self._results.append(result)
                self._changed.notify_all()


def run_task(task: CopyTask) -> CopyResult:
    """Run a task; whatever it raises becomes a FAILED result and one line in the log."""
    began = time.perf_counter()
    try:
        return replace(task.run(), seconds=time.perf_counter() - began)
    except Exception:
        logger.exception(
            "Maru: %s job %d failed; the request recomputes what it wanted to load, a chunk to "
            "store is dropped",
            task.kind.name.lower(),
            task.job_id,
        )
        return _failed(task)


def _failed(task: CopyTask) -> CopyResult:
    return CopyResult(job_id=task.job_id, kind=task.kind, outcome=JobOutcome.FAILED)
