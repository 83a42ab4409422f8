"""Which jobs are under way, who waits for them, and what is still to be said about them.

Pure bookkeeping: no threads, no memory, no vLLM. Every job ends in exactly one report, every
loading request in exactly one ``finished_recving``, every held request in exactly one
``finished_sending``, whatever becomes of the copies, and whether or not it was aborted meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from maru_vllm.metadata import JobOutcome, LoadJob, LoadReport, StoreJob, StoreReport
from maru_vllm.worker.copy_runner import CopyKind, CopyResult


@dataclass(frozen=True, slots=True)
class Reports:
    """What one step has to say. Taken once, then forgotten."""

    loads: tuple[LoadReport, ...]
    stores: tuple[StoreReport, ...]
    finished_sending: frozenset[str]
    finished_recving: frozenset[str]
    failed_recving: frozenset[str]
    """A subset of ``finished_recving``."""


class JobBook:
    """Jobs of one worker. Not thread-safe: the worker's thread only."""

    def __init__(self, part: int) -> None:
        """``part``: which part of the objects this rank writes."""
        self._part = part
        self._loading: dict[int, str] = {}
        self._storing: dict[int, str] = {}
        self._stores_of: dict[str, int] = {}
        self._held: set[str] = set()
        self._spoiled: set[int] = set()
        self._load_reports: list[LoadReport] = []
        self._store_reports: list[StoreReport] = []
        self._finished_sending: set[str] = set()
        self._finished_recving: set[str] = set()
        self._failed_recving: set[str] = set()

    def begin_load(self, job: LoadJob) -> bool:
        """Note a load that is about to be submitted; False if it is under way already."""
        if job.job_id in self._loading:
            return False
        self._loading[job.job_id] = job.request_id
        return True

    def begin_store(self, job: StoreJob) -> bool:
        """Note a store that is about to be submitted; False if it is under way already."""
        if job.job_id in self._storing:
            return False
        self._storing[job.job_id] = job.request_id
        self._stores_of[job.request_id] = self._stores_of.get(job.request_id, 0) + 1
        return True

    def hold(self, request_ids: Iterable[str]) -> None:
        """Report these finished requests as sent once their last store is done."""
        for request_id in request_ids:
            if request_id in self._stores_of:
                self._held.add(request_id)
            else:
                self._finished_sending.add(request_id)

    def stores_under_way(self, job_ids: Iterable[int]) -> set[int]:
        """Those of the jobs that are stores and have no result yet."""
        return {job_id for job_id in job_ids if job_id in self._storing}

    def spoil(self, job_ids: Iterable[int]) -> None:
        """The source blocks of these stores may be overwritten now: whatever is read is void."""
        self._spoiled.update(self.stores_under_way(job_ids))

    def finish(self, result: CopyResult) -> None:
        """Note what became of a job; a result for no job under way changes nothing."""
        if result.kind is CopyKind.LOAD:
            self._finish_load(result)
        else:
            self._finish_store(result)

    @property
    def idle(self) -> bool:
        """Whether no job is under way and nothing is left to report."""
        return not (
            self._loading
            or self._storing
            or self._held
            or self._load_reports
            or self._store_reports
            or self._finished_sending
            or self._finished_recving
        )

    def take(self) -> Reports:
        """What is to be reported since the last call."""
        reports = Reports(
            loads=tuple(self._load_reports),
            stores=tuple(self._store_reports),
            finished_sending=frozenset(self._finished_sending),
            finished_recving=frozenset(self._finished_recving),
            failed_recving=frozenset(self._failed_recving),
        )
        self._load_reports.clear()
        self._store_reports.clear()
        self._finished_sending.clear()
        self._finished_recving.clear()
        self._failed_recving.clear()
        return reports

    def _finish_load(self, result: CopyResult) -> None:
        request_id = self._loading.pop(result.job_id, None)
        if request_id is None:
            return
        self._load_reports.append(
            LoadReport(
                job_id=result.job_id,
                outcome=result.outcome,
                suspect_generations=result.suspect_generations,
                path=result.path,
            )
        )
        self._finished_recving.add(request_id)
        if result.outcome is not JobOutcome.DONE:
            self._failed_recving.add(request_id)

    def _finish_store(self, result: CopyResult) -> None:
        request_id = self._storing.pop(result.job_id, None)
        if request_id is None:
            return
        outcome = result.outcome
        if result.job_id in self._spoiled:
            self._spoiled.discard(result.job_id)
            outcome = JobOutcome.FAILED
        self._store_reports.append(
            StoreReport(
                job_id=result.job_id,
                outcome=outcome,
                part=self._part,
                checksum=result.checksum if outcome is JobOutcome.DONE else None,
                path=result.path,
            )
        )
        left = self._stores_of.pop(request_id) - 1
        if left:
            self._stores_of[request_id] = left
        elif request_id in self._held:
            self._held.discard(request_id)
            self._finished_sending.add(request_id)
