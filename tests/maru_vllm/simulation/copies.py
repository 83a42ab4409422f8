"""A copy runner that does nothing until the script says so."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import Enum, unique

from maru_vllm.metadata import JobOutcome
from maru_vllm.worker.copy_runner import CopyKind, CopyResult, CopyTask, run_task


@unique
class Pace(Enum):
    """When copies run by themselves."""

    NEXT_STEP = "next step"
    """Those of earlier steps, at the end of each step."""
    AT_ONCE = "at once"
    """As soon as they are submitted: the fastest thread there could be."""
    NEVER = "never"
    """Only when the script says so, or when the worker waits for them."""


class ScriptedCopies:
    """``CopyRunner`` of one simulated worker."""

    def __init__(self) -> None:
        self.pace = Pace.NEXT_STEP
        self.failing: Callable[[CopyTask], bool] = lambda _: False
        """Asked when a copy ends: whether it ends as failed, with its bytes half written."""
        self.waited_for: list[int] = []
        """Jobs that the worker waited for."""
        self._tasks: list[CopyTask] = []
        self._old: set[int] = set()
        self._results: list[CopyResult] = []

    # ------------------------------------------------------------------ the script's side

    @property
    def under_way(self) -> list[CopyTask]:
        """Submitted and not run."""
        return list(self._tasks)

    def finish_all(self, kind: CopyKind | None = None) -> None:
        """Run all copies, or all of one kind."""
        for task in self.under_way:
            if kind in (None, task.kind):
                self.finish(task)

    def finish(self, task: CopyTask) -> None:
        """Run one copy."""
        self._tasks.remove(task)
        result = run_task(task)
        if self.failing(task):
            result = CopyResult(task.job_id, task.kind, JobOutcome.FAILED)
        self._results.append(result)

    def end_of_step(self) -> None:
        """The engine's step is over; copies of earlier steps are too, by the pace."""
        if self.pace is Pace.NEXT_STEP:
            for task in self.under_way:
                if task.job_id in self._old:
                    self.finish(task)
        self._old = {task.job_id for task in self._tasks}

    # ------------------------------------------------------------------ CopyRunner

    def submit(self, task: CopyTask) -> None:
        self._tasks.append(task)
        if self.pace is Pace.AT_ONCE:
            self.finish(task)

    def poll(self) -> list[CopyResult]:
        results, self._results = self._results, []
        return results

    def wait(self, job_ids: Collection[int], deadline_s: float) -> bool:
        for task in self.under_way:
            if task.job_id in job_ids:
                self.waited_for.append(task.job_id)
                self.finish(task)
        return True

    def close(self, deadline_s: float) -> bool:
        for task in self.under_way:
            self._tasks.remove(task)
            self._results.append(CopyResult(task.job_id, task.kind, JobOutcome.FAILED))
        return True
