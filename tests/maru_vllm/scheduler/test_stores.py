"""Stores: which chunks are offered when, and how their reservations end."""

from __future__ import annotations

from scripted_engine import SHAPE, Engine, Settings, stored

from maru_shm.control.errors import Unreachable
from maru_shm.control.messages import Committed, ReserveOutcome
from maru_shm.types import Generation
from maru_vllm.metadata import JobOutcome
from maru_vllm.scheduler.shape import ChunkShape


def chunks_offered(engine: Engine) -> list[int]:
    return [int.from_bytes(item.key, "little") for item in engine.plane.all_items("reserve")]


def run(engine: Engine, name: str, num_tokens: int, max_tokens: int = 8):
    """A request whose prompt is computed in one step."""
    request = engine.request(name, num_tokens, max_tokens)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    metadata = engine.step({request: num_tokens})
    return request, metadata


def test_a_chunk_is_reserved_in_its_step_and_copied_in_the_next(engine):
    request, first = run(engine, "a", 20)
    assert first.stores == ()
    assert chunks_offered(engine) == [0, 1]
    request.append_output_token_ids(1)
    second = engine.step({request: 1})
    assert [(s.chunk.first_block, s.chunk.block_ids) for s in second.stores] == [
        (0, (100, 101)),
        (0, (102, 103)),
    ]
    assert engine.step({request: 1}).stores == ()


def test_b04_steps_that_end_inside_chunks_still_store_every_full_chunk(engine):
    """B04: of a chunked prefill all full chunks are stored, not only the first step's."""
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0, num_blocks=16)
    for num_tokens in (5, 13, 3, 19):
        engine.step({request: num_tokens})
    assert chunks_offered(engine) == [0, 1, 2, 3, 4]


def test_each_chunk_names_the_one_it_continues(engine):
    run(engine, "a", 20)
    first, second = engine.plane.all_items("reserve")
    assert first.parent is None
    assert second.parent == first.key
    assert first.length == SHAPE.object_bytes


def test_decoded_chunks_are_stored_when_their_last_token_went_through_a_forward(engine):
    request, _ = run(engine, "a", 14)
    for token in (1, 2):
        request.append_output_token_ids(token)
        engine.step({request: 1})
    assert chunks_offered(engine) == [0, 1]


def test_decoded_chunks_are_left_alone_when_the_setting_says_so():
    engine = Engine(settings=Settings(store_decode=False))
    request, _ = run(engine, "a", 14)
    for token in (1, 2, 3):
        request.append_output_token_ids(token)
        engine.step({request: 1})
    assert chunks_offered(engine) == [0]


def test_speculative_tokens_and_placeholders_are_never_stored(engine):
    """Scheduled tokens behind the known ones are drafts; their KV is not final."""
    request, _ = run(engine, "a", 7)
    request.append_output_token_ids(1)  # 8 known
    engine.step({request: 4})  # one known token and three drafts: computed up to 11
    assert chunks_offered(engine) == [0]
    request.num_computed_tokens = 8
    request.append_output_token_ids(2)
    engine.step({request: 8})  # computed up to 16, known up to 9
    assert chunks_offered(engine) == [0]


def test_b31_the_suffix_after_a_hit_is_stored_and_the_hit_is_not_stored_again(engine):
    """B31: turn after turn the pool grows by what is new."""
    engine.plane.found = 2
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 16, num_blocks=16)
    (job,) = engine.step().loads
    from maru_vllm.metadata import LoadReport

    engine.output(loads=[LoadReport(job.job_id, JobOutcome.DONE)], finished_recving={"a"})
    engine.allocate(request, 0)
    request.num_computed_tokens = 16
    engine.step({request: 24})
    assert chunks_offered(engine) == [2, 3, 4]


def test_a_local_hit_that_the_pool_does_not_have_is_stored(engine):
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 16)
    engine.allocate(request, 0)
    request.num_computed_tokens = 16
    engine.step({request: 4})
    assert chunks_offered(engine) == [0, 1]


def test_b03_blocks_that_a_sibling_connector_fills_are_tracked(engine):
    """B03: `update_state_after_alloc(.., 0)` with real blocks; stored once the request runs."""
    request = engine.request("a", 20)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    engine.step()  # the sibling loads; nothing of ours may be copied yet
    assert chunks_offered(engine) == []
    engine.allocate(request, 0)
    request.num_computed_tokens = 16
    engine.step({request: 4})
    assert chunks_offered(engine) == [0, 1]
    jobs = engine.step({request: 1}).stores
    assert [job.chunk.block_ids for job in jobs] == [(100, 101), (102, 103)]


def test_b03_a_siblings_failed_load_discards_the_copies_built_on_it(engine):
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    engine.output(stores=[stored(job.job_id) for job in jobs], invalid_block_ids={102})
    engine.step()
    assert [len(items) for items in engine.plane.requests("commit")] == [1]
    assert engine.plane.requests("abort") == [(2,)]
    # The chunk is offered again once its blocks were computed again.
    request.num_computed_tokens = 8
    engine.step({request: 12})
    assert chunks_offered(engine) == [0, 1, 1]


def test_objects_that_are_there_or_being_written_make_no_work(engine):
    for outcome in (ReserveOutcome.PRESENT, ReserveOutcome.BEING_WRITTEN):
        engine.plane.outcome = outcome
        request, _ = run(engine, outcome.name, 20)
        assert engine.step({request: 1}).stores == ()
        assert engine.half.finished(request, [100]) is False


def test_without_space_a_request_stops_offering_what_no_prefix_could_reach(engine):
    engine.plane.outcome = ReserveOutcome.NO_SPACE
    request = engine.request("a", 40)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0, num_blocks=16)
    engine.step({request: 10})
    engine.step({request: 10})
    engine.step({request: 10})
    assert chunks_offered(engine) == [0]


def test_the_last_rank_commits_with_checksums_in_part_order():
    shape = ChunkShape(chunk_tokens=8, block_size=4, object_bytes=1024, num_parts=2, num_ranks=2)
    engine = Engine(shape)
    request, _ = run(engine, "a", 8)
    (job,) = engine.step({request: 1}).stores
    engine.output(stores=[stored(job.job_id, part=1)])
    assert engine.plane.requests("commit") == []
    engine.output(stores=[stored(job.job_id, part=0)])
    ((item,),) = engine.plane.requests("commit")
    assert [part.full for part in item.parts] == [1, 2]


def test_a_rank_that_failed_aborts_but_only_after_the_others_stopped_writing():
    shape = ChunkShape(chunk_tokens=8, block_size=4, object_bytes=1024, num_parts=2, num_ranks=2)
    engine = Engine(shape)
    request, _ = run(engine, "a", 8)
    (job,) = engine.step({request: 1}).stores
    engine.output(stores=[stored(job.job_id, outcome=JobOutcome.FAILED)])
    assert engine.plane.requests("abort") == []
    engine.output(stores=[stored(job.job_id, part=1)])
    assert engine.plane.requests("abort") == [(job.chunk.extent.generation,)]
    assert engine.plane.requests("commit") == []


def test_ranks_without_a_part_report_and_do_not_count_as_checksums():
    from maru_vllm.metadata import StoreReport

    shape = ChunkShape(chunk_tokens=8, block_size=4, object_bytes=1024, num_parts=1, num_ranks=2)
    engine = Engine(shape)
    request, _ = run(engine, "a", 8)
    (job,) = engine.step({request: 1}).stores
    engine.output(stores=[StoreReport(job.job_id, JobOutcome.DONE, 0, None)])
    engine.output(stores=[stored(job.job_id)])
    assert len(engine.plane.requests("commit")) == 1


def test_a_finished_request_is_held_while_it_is_copied_and_named_once(engine):
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    assert engine.half.finished(request, [100, 101, 102, 103, 104]) is True
    assert engine.step().hold_requests == {"a"}
    assert engine.step().hold_requests == frozenset()
    engine.output(stores=[stored(job.job_id) for job in jobs], finished_sending={"a"})
    assert not engine.half._requests


def test_a_request_of_one_step_is_held_until_its_reserve_is_answered_and_then_copied(engine):
    """Finished before the server answered: the blocks stay, the store still happens."""
    engine.plane.automatic.discard("reserve")
    request, _ = run(engine, "a", 20, max_tokens=1)
    request.append_output_token_ids(1)
    assert engine.half.finished(request, [100, 101, 102, 103, 104]) is True
    waiting = engine.step()
    assert (waiting.stores, waiting.hold_requests) == ((), frozenset())
    engine.plane.answer("reserve")
    metadata = engine.step()
    assert [job.chunk.block_ids for job in metadata.stores] == [(100, 101), (102, 103)]
    assert metadata.hold_requests == {"a"}


def test_a_held_request_is_let_go_when_the_reserve_is_never_answered(engine):
    engine.plane.automatic.discard("reserve")
    request, _ = run(engine, "a", 20)
    assert engine.half.finished(request, [100, 101, 102, 103, 104]) is True
    engine.plane.sent["reserve"][0].answer(Unreachable("silence"))
    metadata = engine.step()
    assert metadata.stores == ()
    assert metadata.hold_requests == {"a"}


def test_a_request_with_nothing_under_way_is_not_held(engine):
    request, _ = run(engine, "a", 7)
    assert engine.half.finished(request, [100, 101]) is False


def test_a_preempted_requests_copies_are_flushed_and_its_grants_given_back(engine):
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    request.append_output_token_ids(1)
    for token in range(3):
        request.append_output_token_ids(token)
        engine.step({request: 1})  # completes chunk 2 in the last of these steps
    assert chunks_offered(engine) == [0, 1, 2]
    engine.preempt(request)
    metadata = engine.step(preempted=[request])
    assert metadata.flush_stores == {job.job_id for job in jobs}
    assert metadata.stores == ()
    assert engine.plane.requests("abort") == [(Generation(3),)]


def test_a_grant_for_blocks_that_a_preemption_took_is_aborted_when_it_comes(engine):
    engine.plane.automatic.discard("reserve")
    request, _ = run(engine, "a", 20)
    engine.preempt(request)
    engine.step(preempted=[request])
    engine.plane.answer("reserve")
    metadata = engine.step()
    assert metadata.stores == ()
    assert engine.plane.requests("abort") == [(1, 2)]


def test_a_preemption_by_reset_is_seen_although_the_request_is_scheduled_in_the_same_step(engine):
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    engine.preempt(request)
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    metadata = engine.step({request: 20}, preempted=[request])
    assert metadata.flush_stores == {job.job_id for job in jobs}


def test_a_recomputed_chunk_after_preemption_is_offered_again(engine):
    engine.plane.automatic.discard("reserve")
    request, _ = run(engine, "a", 20)
    engine.preempt(request)
    engine.step(preempted=[request])
    engine.half.matched_tokens(request, 0)
    engine.allocate(request, 0)
    engine.step({request: 20})
    assert chunks_offered(engine) == [0, 1, 0, 1]


def test_a_restarted_server_gets_aborts_of_old_generations_once_the_workers_are_done(engine):
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    engine.plane.restart()
    engine.step({request: 1})
    assert engine.plane.requests("abort") == []
    engine.output(stores=[stored(job.job_id) for job in jobs])
    engine.step()
    assert engine.plane.requests("commit") == []
    assert engine.plane.requests("abort") == [(1, 2)]


def test_grants_of_a_session_that_is_gone_are_not_written_but_asked_anew(engine):
    request, _ = run(engine, "a", 20)
    engine.plane.restart()
    assert engine.step({request: 1}).stores == ()
    assert engine.plane.requests("abort") == [(1, 2)]
    assert chunks_offered(engine) == [0, 1, 0, 1]
    assert len(engine.step({request: 1}).stores) == 2


def test_an_abort_that_did_not_arrive_is_sent_again(engine):
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    engine.plane.automatic.discard("abort")
    engine.output(stores=[stored(job.job_id, outcome=JobOutcome.FAILED) for job in jobs])
    engine.plane.sent["abort"][0].answer(Unreachable("silence"))
    engine.step()
    assert engine.plane.requests("abort") == [(1, 2), (1, 2)]


def test_a_commit_without_an_answer_becomes_an_abort(engine):
    request, _ = run(engine, "a", 8)
    (job,) = engine.step({request: 1}).stores
    engine.plane.automatic.discard("commit")
    engine.output(stores=[stored(job.job_id)])
    assert engine.half.has_pending_work()
    engine.plane.sent["commit"][0].answer(Unreachable("silence"))
    engine.step()
    assert engine.plane.requests("abort") == [(job.chunk.extent.generation,)]


def test_a_pool_made_anew_hears_nothing_of_the_old_ones_generations(engine):
    from dataclasses import replace

    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores
    assert engine.plane.standing is not None
    other = replace(engine.plane.standing.pool, uuid=b"v" * 16)
    engine.plane.standing = replace(engine.plane.standing, session=9, epoch=1, pool=other)
    engine.output(stores=[stored(job.job_id) for job in jobs])
    engine.step()
    assert engine.plane.requests("abort") == []
    assert engine.plane.requests("commit") == []


def test_lost_commits_are_counted(engine):
    request, _ = run(engine, "a", 8)
    (job,) = engine.step({request: 1}).stores
    engine.plane.automatic.discard("commit")
    engine.output(stores=[stored(job.job_id)])
    engine.plane.sent["commit"][0].answer(
        Committed(engine.plane.epoch, (job.chunk.extent.generation,))
    )
    engine.step()
    stats = engine.half.take_stats()
    assert stats is not None
    assert stats.data["stores_lost"] == 1
    assert "stored_chunks" not in stats.data


def test_an_error_while_finishing_seals_nothing(engine, monkeypatch):
    """The blocks are freed then, so what is being copied from them may be another request's."""
    request, _ = run(engine, "a", 20)
    jobs = engine.step({request: 1}).stores

    def explode(*_: object) -> bool:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.half, "_finish", explode)
    assert engine.half.finished(request, [100]) is False
    engine.output(stores=[stored(job.job_id) for job in jobs])
    assert engine.plane.requests("commit") == []
    assert engine.plane.requests("abort") == [(1, 2)]


def test_what_was_computed_before_a_reset_is_not_stored_under_the_new_namespace(engine):
    request, _ = run(engine, "a", 12)
    engine.half.reset_cache()
    for token in range(5):
        request.append_output_token_ids(token)
        assert engine.step({request: 1}).stores == ()
    assert chunks_offered(engine) == [0]


def test_the_engine_steps_on_while_copies_are_out_and_not_longer(engine):
    request, _ = run(engine, "a", 8)
    (job,) = engine.step({request: 1}).stores
    engine.preempt(request)
    engine.step(preempted=[request])
    assert engine.half.finished(request, []) is False
    assert engine.half.has_pending_work()
    engine.output(stores=[stored(job.job_id)])
    engine.step()
    assert not engine.half.has_pending_work()
