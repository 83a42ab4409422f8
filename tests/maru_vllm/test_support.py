from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from maru_vllm.settings import KVPayload, Settings, TransferMode
from maru_vllm.support import NotSupported, check_supported


def engine(**parallel: int) -> Any:
    sizes = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        speculative_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=False),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
    )


def test_the_default_settings_are_served() -> None:
    check_supported(engine(), Settings())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (Settings(async_store=False), "maru_async_store"),
        (Settings(kv_payload=KVPayload.TOKENS), "maru_kv_payload"),
        (Settings(transfer_mode=TransferMode.SERVER_DRIVEN), "maru_transfer_mode"),
    ],
)
def test_a_setting_that_is_not_built_yet_is_refused_by_its_name(
    settings: Settings, names: str
) -> None:
    with pytest.raises(NotSupported, match=names):
        check_supported(engine(), settings)


@pytest.mark.parametrize(
    ("size", "option"),
    [
        ("pipeline_parallel_size", "--pipeline-parallel-size is 2"),
        ("decode_context_parallel_size", "--decode-context-parallel-size is 2"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size is 2"),
    ],
)
def test_kv_that_is_split_in_ways_not_stored_is_refused(size: str, option: str) -> None:
    with pytest.raises(NotSupported, match=option):
        check_supported(engine(**{size: 2}), Settings())


def test_draft_models_with_kv_of_their_own_are_refused_and_others_are_not() -> None:
    drafting = engine()
    drafting.speculative_config = SimpleNamespace(method="eagle", uses_draft_kv_cache=lambda: True)
    with pytest.raises(NotSupported, match="eagle"):
        check_supported(drafting, Settings())
    drafting.speculative_config = SimpleNamespace(method="ngram", uses_draft_kv_cache=lambda: False)
    check_supported(drafting, Settings())


def test_a_producer_is_told_to_be_both() -> None:
    producer = engine()
    producer.kv_transfer_config.kv_role = "kv_producer"
    with pytest.raises(NotSupported, match="kv_both"):
        check_supported(producer, Settings())


def test_all_reasons_are_named_at_once() -> None:
    with pytest.raises(NotSupported) as refusal:
        check_supported(engine(pipeline_parallel_size=2), Settings(async_store=False))
    assert "maru_async_store" in str(refusal.value)
    assert "--pipeline-parallel-size" in str(refusal.value)


@pytest.mark.parametrize(
    "settings", [Settings(overlap_load_with_compute=True), Settings(async_load=False)]
)
def test_loads_into_their_own_step_need_a_scheduler_that_waits_for_its_end(
    settings: Settings,
) -> None:
    """Under async scheduling vLLM delivers what the next step made of a load that failed."""
    check_supported(engine(), settings)
    asynchronous = engine()
    asynchronous.scheduler_config.async_scheduling = True
    with pytest.raises(NotSupported, match="--no-async-scheduling"):
        check_supported(asynchronous, settings)
    check_supported(asynchronous, Settings())
