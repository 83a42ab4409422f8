from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from worker_cases import load_job, result, store_job

from maru_shm.types import Extent, Generation, PartChecksum
from maru_vllm.metadata import JobOutcome
from maru_vllm.worker.copy_runner import CopyKind, CopyResult
from maru_vllm.worker.jobs import JobBook

NOWHERE = Extent(0, 0, Generation(1))


def test_a_load_is_reported_once_and_its_request_with_it() -> None:
    book = JobBook(part=0)
    assert book.begin_load(load_job(1, NOWHERE, (), request="a"))
    assert not book.begin_load(load_job(1, NOWHERE, (), request="a"))
    book.finish(result(1))
    book.finish(result(1))
    reports = book.take()
    assert [report.job_id for report in reports.loads] == [1]
    assert reports.finished_recving == {"a"}
    assert not reports.failed_recving
    assert not book.take().finished_recving
    assert book.idle


def test_a_failed_load_is_reported_as_finished_too() -> None:
    book = JobBook(part=0)
    book.begin_load(load_job(1, NOWHERE, (), request="a"))
    book.finish(result(1, outcome=JobOutcome.STALE))
    reports = book.take()
    assert reports.finished_recving == reports.failed_recving == {"a"}


def test_a_held_request_is_sent_when_its_last_store_is_done_also_if_that_failed() -> None:
    book = JobBook(part=0)
    book.begin_store(store_job(1, NOWHERE, (), request="a"))
    book.begin_store(store_job(2, NOWHERE, (), request="a"))
    book.hold({"a"})
    book.finish(result(1, CopyKind.STORE))
    assert not book.take().finished_sending
    book.finish(result(2, CopyKind.STORE, JobOutcome.FAILED))
    assert book.take().finished_sending == {"a"}
    assert book.idle


def test_a_held_request_without_stores_is_sent_at_once() -> None:
    book = JobBook(part=0)
    book.hold({"a"})
    assert book.take().finished_sending == {"a"}


def test_a_request_that_is_not_held_is_never_reported_as_sent() -> None:
    book = JobBook(part=0)
    book.begin_store(store_job(1, NOWHERE, (), request="a"))
    book.finish(result(1, CopyKind.STORE))
    assert not book.take().finished_sending


def test_a_store_whose_blocks_were_reused_under_it_has_failed_whatever_it_says() -> None:
    book = JobBook(part=2)
    book.begin_store(store_job(1, NOWHERE, ()))
    book.spoil({1, 7})
    book.finish(CopyResult(1, CopyKind.STORE, JobOutcome.DONE, checksum=PartChecksum(1, 2)))
    (report,) = book.take().stores
    assert (report.outcome, report.checksum, report.part) == (JobOutcome.FAILED, None, 2)


def test_a_result_of_an_unknown_job_says_nothing_to_the_engine() -> None:
    book = JobBook(part=0)
    book.finish(result(5))
    book.finish(result(5, CopyKind.STORE))
    reports = book.take()
    assert not reports.loads
    assert not reports.stores
    assert not reports.finished_recving


@given(st.data())
def test_every_job_and_every_waiting_request_is_reported_exactly_once(data: st.DataObject) -> None:
    book = JobBook(part=0)
    open_jobs: list[tuple[CopyKind, int]] = []
    requests = [f"r{i}" for i in range(4)]
    held: set[str] = set()
    begun = {CopyKind.LOAD: 0, CopyKind.STORE: 0}
    reported = {CopyKind.LOAD: 0, CopyKind.STORE: 0}
    sent: list[str] = []
    received = 0

    def take() -> None:
        nonlocal received
        reports = book.take()
        reported[CopyKind.LOAD] += len(reports.loads)
        reported[CopyKind.STORE] += len(reports.stores)
        sent.extend(reports.finished_sending)
        received += len(reports.finished_recving)
        assert reports.failed_recving <= reports.finished_recving

    for job_id in range(data.draw(st.integers(0, 12))):
        request = data.draw(st.sampled_from(requests))
        kind = data.draw(st.sampled_from(CopyKind))
        # A request has one load at a time, and none of its own once it is finished.
        if request not in held:
            if kind is CopyKind.LOAD:
                request = f"load-{job_id}"
                book.begin_load(load_job(job_id, NOWHERE, (), request=request))
            else:
                book.begin_store(store_job(job_id, NOWHERE, (), request=request))
            begun[kind] += 1
            open_jobs.append((kind, job_id))
        if data.draw(st.booleans()) and request in requests and request not in held:
            held.add(request)
            book.hold({request})
        if open_jobs and data.draw(st.booleans()):
            kind, done = open_jobs.pop(data.draw(st.integers(0, len(open_jobs) - 1)))
            book.finish(result(done, kind, data.draw(st.sampled_from(JobOutcome))))
        if data.draw(st.booleans()):
            take()
    for kind, job_id in open_jobs:
        book.finish(result(job_id, kind))
    take()
    assert reported == begun
    assert received == begun[CopyKind.LOAD]
    assert sorted(sent) == sorted(held)
    assert book.idle
