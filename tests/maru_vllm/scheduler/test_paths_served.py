"""What copied is counted: one count for each rank and path, whatever came of the copy."""

from __future__ import annotations

from dataclasses import replace

from scripted_engine import SHAPE, Engine, stored

from maru_kv_ops.executors import CopyPath
from maru_vllm.metadata import JobOutcome, LoadReport
from maru_vllm.stats import LOADS_BY, STORES_BY, MaruStats


def served(engine: Engine) -> dict[str, float]:
    stats = engine.half.take_stats() or MaruStats()
    names = {counter.value for counter in (*LOADS_BY.values(), *STORES_BY.values())}
    return {name: value for name, value in stats.data.items() if name in names}


def begin_load(engine: Engine) -> int:
    engine.plane.found = 2
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16)
    (job,) = engine.step().loads
    return job.job_id


def begin_store(engine: Engine) -> int:
    request = engine.request("a", 8)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    engine.step({request: 8})
    request.append_output_token_ids(1)
    (job,) = engine.step({request: 1}).stores
    return job.job_id


def test_every_rank_counts_its_load_for_the_path_that_served_it() -> None:
    engine = Engine(replace(SHAPE, num_ranks=2))
    job_id = begin_load(engine)
    engine.output(loads=[LoadReport(job_id, JobOutcome.DONE, path=CopyPath.KERNEL)])
    engine.output(loads=[LoadReport(job_id, JobOutcome.DONE, path=CopyPath.COPY_ENGINE)])
    assert served(engine) == {"loads_by_kernel": 1, "loads_by_copy_engine": 1}
    assert served(engine) == {}


def test_a_store_counts_for_the_path_that_served_it() -> None:
    engine = Engine()
    job_id = begin_store(engine)
    engine.output(stores=[replace(stored(job_id), path=CopyPath.HOST)])
    assert served(engine) == {"stores_by_host": 1}


def test_a_copy_that_proved_useless_counts_and_one_that_was_not_made_does_not() -> None:
    engine = Engine()
    job_id = begin_load(engine)
    engine.output(loads=[LoadReport(job_id, JobOutcome.SUSPECT, (1,), CopyPath.TORCH)])
    assert served(engine) == {"loads_by_torch": 1}

    engine = Engine()
    job_id = begin_load(engine)
    engine.output(loads=[LoadReport(job_id, JobOutcome.STALE)])
    assert served(engine) == {}
