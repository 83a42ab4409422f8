"""Hits: what the half answers when vLLM asks, and what becomes of the leases."""

from __future__ import annotations

import pytest
from scripted_engine import SHAPE, Engine, Settings

from maru_shm.control.errors import Unreachable
from maru_shm.control.messages import LeaseGrant
from maru_vllm.metadata import JobOutcome, LoadReport
from maru_vllm.scheduler.loads import BlocksMismatch, chunk_copies
from maru_vllm.settings import LoadMode


def test_a_lookup_starts_when_the_request_arrives_and_asks_for_its_full_chunks(engine):
    engine.request("a", 20)
    (keys,) = engine.plane.requests("lookup")
    assert len(keys) == 2  # 20 tokens, chunks of 8


def test_a_hit_counts_what_lies_beyond_the_local_hit(engine):
    engine.plane.found = 3
    request = engine.request("a", 40)
    assert engine.half.matched_tokens(request, 0) == (24, True)
    assert engine.half.matched_tokens(request, 12) == (12, True)


def test_a_hit_no_longer_than_the_local_one_is_none(engine):
    engine.plane.found = 2
    request = engine.request("a", 40)
    assert engine.half.matched_tokens(request, 16) == (0, False)


def test_a_load_starts_inside_a_chunk_where_the_local_hit_ends(engine):
    engine.plane.found = 2
    request = engine.request("a", 20)
    assert engine.half.matched_tokens(request, 4) == (12, True)
    engine.allocate(request, 12)
    (job,) = engine.step().loads
    assert [(c.first_block, c.block_ids) for c in job.chunks] == [(1, (101,)), (0, (102, 103))]


def test_b30_a_prompt_of_exactly_n_chunks_hits_in_full(engine):
    """B30: with async loads vLLM itself keeps one token to compute."""
    engine.plane.found = 2
    request = engine.request("a", 16)
    assert engine.half.matched_tokens(request, 0) == (16, True)


def test_b30_a_synchronous_full_hit_leaves_the_last_block_to_compute():
    engine = Engine(settings=Settings(load_mode=LoadMode.LAYER_BY_LAYER))
    engine.plane.found = 2
    request = engine.request("a", 16)
    assert engine.half.matched_tokens(request, 0) == (12, False)


def test_a_pending_lookup_is_asked_again_but_only_for_so_long(engine):
    engine.plane.automatic.discard("lookup")
    request = engine.request("a", 16)
    engine.now += 5.0  # time in the queue does not count
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.step()
    engine.now += 0.019
    assert engine.half.matched_tokens(request, 0) == (None, False)
    engine.step()
    engine.now += 0.002
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_an_answer_after_the_patience_ended_is_used_if_the_scheduler_asks_once_more(engine):
    engine.plane.automatic.discard("lookup")
    engine.plane.found = 1
    request = engine.request("a", 16)
    engine.half.matched_tokens(request, 0)
    engine.now += 1.0
    assert engine.half.matched_tokens(request, 0) == (0, False)
    engine.step()
    engine.plane.answer("lookup")
    assert engine.half.matched_tokens(request, 0) == (8, True)


def test_a_late_grant_of_a_request_that_went_on_is_released(engine):
    engine.plane.automatic.discard("lookup")
    engine.plane.found = 1
    request = engine.request("a", 16)
    engine.half.matched_tokens(request, 0)
    engine.now += 1.0
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    engine.step({request: 16})
    assert engine.half.has_pending_work()
    engine.plane.answer("lookup")
    engine.output()
    assert engine.plane.requests("release") == [(1,)]
    assert not engine.half._lookups.awaits_answer


def test_a_lease_that_is_not_used_goes_back_when_blocks_are_allocated(engine):
    engine.plane.found = 2
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 16)
    engine.allocate(request, 0)
    engine.step({request: 24})
    assert engine.plane.requests("release") == [(1,)]


def test_a_lease_of_an_aborted_request_goes_back(engine):
    engine.plane.found = 2
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 0)
    assert engine.half.finished(request, []) is False
    engine.step()
    assert engine.plane.requests("release") == [(1,)]


def test_a_lease_is_held_until_every_rank_reported_the_load():
    shape = type(SHAPE)(chunk_tokens=8, block_size=4, object_bytes=1024, num_parts=2, num_ranks=2)
    engine = Engine(shape)
    engine.plane.found = 2
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16)
    (job,) = engine.step().loads
    engine.output(loads=[LoadReport(job.job_id, JobOutcome.DONE)])
    assert engine.plane.requests("release") == []
    engine.output(loads=[LoadReport(job.job_id, JobOutcome.DONE)], finished_recving={"a"})
    assert engine.plane.requests("release") == [(1,)]


def test_a_lease_is_renewed_while_its_load_runs_and_not_more_often_than_needed(engine):
    engine.plane.found = 2
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16)
    engine.step()
    engine.now += 16.0  # of 30
    engine.step()
    engine.step()
    assert engine.plane.requests("renew") == [(1,)]


def test_a_second_allocation_after_an_async_load_changes_nothing(engine):
    engine.plane.found = 2
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16)
    (job,) = engine.step().loads
    engine.output(loads=[LoadReport(job.job_id, JobOutcome.DONE)], finished_recving={"a"})
    engine.allocate(request, 0)
    request.num_computed_tokens = 16
    assert engine.step({request: 4}).loads == ()
    assert engine.plane.requests("release") == [(1,)]


@pytest.mark.parametrize("outcome", [JobOutcome.FAILED, JobOutcome.STALE, JobOutcome.SUSPECT])
def test_b10_a_failed_load_is_not_looked_up_again(engine, outcome):
    """B10: what did not arrive is a miss, and no reason for an endless retry."""
    engine.plane.found = 2
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16)
    (job,) = engine.step().loads
    engine.output(
        loads=[LoadReport(job.job_id, outcome)], finished_recving={"a"}, failed_recving={"a"}
    )
    assert engine.half.matched_tokens(request, 0) == (0, False)
    engine.allocate(request, 0)
    engine.step({request: 20})
    # What was recomputed is offered to the pool again.
    assert len(engine.plane.all_items("reserve")) == 2


def test_suspect_objects_are_reported_and_stale_ones_are_not(engine):
    engine.plane.found = 2
    for name, outcome, suspects in (("a", JobOutcome.SUSPECT, (2,)), ("b", JobOutcome.STALE, ())):
        request = engine.request(name, 20)
        engine.half.matched_tokens(request, 0)
        engine.allocate(request, 16)
        (job,) = engine.step().loads
        engine.output(loads=[LoadReport(job.job_id, outcome, suspects)])
    assert engine.plane.requests("suspect") == [(2,)]


def test_a_load_that_no_rank_reported_ends_when_the_engine_says_so(engine):
    engine.plane.found = 1
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 8)
    engine.step()
    engine.output(finished_recving={"a"})
    assert engine.plane.requests("release") == [(1,)]
    assert not engine.half.has_pending_work()


def test_an_abort_during_a_load_keeps_the_lease_and_does_not_hold_the_blocks_twice(engine):
    """B08: vLLM keeps the blocks until the load is reported; we must not ask for it as well."""
    engine.plane.found = 1
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 8)
    (job,) = engine.step().loads
    assert engine.half.finished(request, [100, 101]) is False
    engine.step()
    assert engine.plane.requests("release") == []
    engine.output(loads=[LoadReport(job.job_id, JobOutcome.DONE)], finished_recving={"a"})
    assert engine.plane.requests("release") == [(1,)]


def test_b11_a_preempted_request_is_looked_up_again(engine):
    """B11: after preemption everything the pool has by then is loaded."""
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    engine.step({request: 20})
    engine.preempt(request)
    engine.step(preempted=[request])
    engine.plane.found = 2
    assert engine.half.matched_tokens(request, 0) == (16, True)


def test_a_grant_that_grew_old_in_the_queue_is_asked_anew(engine):
    engine.plane.found = 1
    request = engine.request("a", 20)
    engine.now += 11.0  # more than a third of the term
    engine.plane.found = 2
    assert engine.half.matched_tokens(request, 0) == (16, True)
    engine.step()
    engine.step()
    assert engine.plane.requests("release") == [(1,)]


def test_a_grant_of_a_session_that_is_gone_is_not_used_nor_released(engine):
    engine.plane.found = 1
    request = engine.request("a", 20)
    engine.plane.restart()
    engine.plane.found = 0
    assert engine.half.matched_tokens(request, 0) == (0, False)
    engine.allocate(request, 0)
    engine.step({request: 20})
    assert engine.plane.requests("release") == []


def test_without_a_server_there_is_no_hit_and_nobody_waits(engine):
    engine.plane.standing = None
    request = engine.request("a", 20)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    engine.allocate(request, 0)
    metadata = engine.step({request: 20})
    assert (metadata.pool, metadata.loads, metadata.stores) == (None, (), ())
    assert not engine.half.has_pending_work()


def test_a_lookup_that_failed_is_a_miss(engine):
    engine.plane.automatic.discard("lookup")
    request = engine.request("a", 20)
    engine.plane.sent["lookup"][0].answer(Unreachable("silence"))
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_requests_miss_until_the_identity_is_known(engine):
    engine.keys.known = None
    engine.plane.found = 2
    request = engine.request("a", 20)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    from scripted_engine import NAMESPACE

    engine.keys.known = NAMESPACE
    engine.step()
    assert engine.half.matched_tokens(request, 0) == (16, True)


def test_a_request_that_must_not_read_a_cache_is_never_looked_up(engine):
    engine.plane.found = 2
    request = engine.request("a", 20)
    request.skip_reading_prefix_cache = True
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_allocation_without_a_lease_becomes_a_load_that_fails(engine):
    """The engine waits for a load that cannot be built; the wait must end, in a recompute."""
    request = engine.request("a", 20)
    engine.allocate(request, 16)
    (job,) = engine.step().loads
    assert [int(c.extent.generation) for c in job.chunks] == [0]


def test_an_exception_inside_never_reaches_the_engine(engine, monkeypatch):
    request = engine.request("a", 20)

    def explode(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.half._lookups, "ask", explode)
    assert engine.half.matched_tokens(request, 0) == (0, False)
    stats = engine.half.take_stats()
    assert stats is not None
    assert stats.data["internal_errors"] == 1


def test_a_reset_moves_the_engine_to_a_namespace_of_its_own(engine, monkeypatch):
    spaces: list[bytes] = []
    submit = engine.plane.submit_lookup_prefix

    def spy(namespace, keys, timeout_s):
        spaces.append(namespace)
        return submit(namespace, keys, timeout_s)

    monkeypatch.setattr(engine.plane, "submit_lookup_prefix", spy)
    engine.request("a", 20)
    assert engine.half.reset_cache() is True
    engine.request("b", 20)
    assert len(spaces) == 2
    assert spaces[0] != spaces[1]
    assert len(spaces[1]) == 32


def test_a_reply_of_another_epoch_than_the_question_is_no_grant(engine):
    engine.plane.automatic.discard("lookup")
    request = engine.request("a", 20)
    (pending,) = engine.plane.sent["lookup"]
    pending.answer(LeaseGrant(engine.plane.epoch + 1, None, ()))
    assert engine.half.matched_tokens(request, 0) == (0, False)


def test_blocks_that_do_not_reach_are_refused():
    from maru_shm.types import Extent, Generation

    extents = [Extent(0, 1024, Generation(1))]
    with pytest.raises(BlocksMismatch, match="allocated"):
        chunk_copies(SHAPE, extents, [1], 0, 8)
    with pytest.raises(BlocksMismatch, match="do not lie on blocks"):
        chunk_copies(SHAPE, extents, [1, 2], 0, 7)


def test_a_load_into_its_own_step_that_cannot_be_built_names_the_blocks_that_it_owes():
    """vLLM counts them as computed: the worker has to report them as invalid."""
    engine = Engine(settings=Settings(load_mode=LoadMode.LAYER_BY_LAYER))
    request = engine.request("a", 20)
    engine.allocate(request, 16, num_blocks=5)  # without a lease
    (job,) = engine.step({request: 4}).loads
    (chunk,) = job.chunks
    assert chunk.block_ids == (100, 101, 102, 103, 104)
    assert chunk.extent.generation == 0


def test_blocks_that_were_not_loaded_and_all_behind_them_leave_vllms_prefix_cache():
    engine = Engine(settings=Settings(load_mode=LoadMode.LAYER_BY_LAYER))
    engine.plane.found = 2
    request = engine.request("a", 20)
    assert engine.half.matched_tokens(request, 0) == (16, False)
    engine.allocate(request, 16, num_blocks=5)
    (job,) = engine.step({request: 4}).loads
    report = LoadReport(job.job_id, JobOutcome.FAILED)
    engine.output(loads=[report], invalid_block_ids={102, 103})
    assert engine.evicted == {102, 103, 104}
    assert engine.half.matched_tokens(request, 0) == (0, False), "it is tried once"


def test_the_lease_of_a_load_into_its_own_step_goes_back_with_that_step():
    engine = Engine(settings=Settings(load_mode=LoadMode.LAYER_BY_LAYER))
    engine.plane.found = 2
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16)
    (job,) = engine.step({request: 4}).loads
    assert not engine.plane.requests("release")
    engine.output(loads=[LoadReport(job.job_id, JobOutcome.DONE)])
    assert len(engine.plane.requests("release")) == 1
    assert engine.evicted == set()
