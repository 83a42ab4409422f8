from __future__ import annotations

import logging
import tempfile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from maru_kv_ops.host_executor import HostExecutor
from maru_kv_ops.torch_executor import TorchExecutor
from maru_vllm import assembly
from maru_vllm.layout import LayoutRefused
from maru_vllm.placement import PlacementRefused
from maru_vllm.settings import Settings, SettingsError
from maru_vllm.support import NotSupported

SPEC = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=64, dtype=torch.bfloat16)


def cache(num_groups: int = 1) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layer_names=["a", "b"], kv_cache_spec=SPEC)] * num_groups,
        kv_cache_layout="LBHNC",
    )


def engine(extra: dict[str, object] | None = None, tp: int = 1) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        cache_config=SimpleNamespace(kv_cache_layout="LBHNC"),
        kv_transfer_config=SimpleNamespace(
            kv_role="kv_both", kv_connector_extra_config=extra or {}
        ),
    )


def test_both_halves_derive_the_same_sizes() -> None:
    plan = assembly.engine_plan(engine(tp=2), cache())
    shape = assembly.chunk_shape(plan.layout)
    assert (shape.num_parts, shape.num_ranks, shape.block_size) == (2, 2, 32)
    assert shape.object_bytes == 2 * plan.layout.part_bytes == 2 * 8 * 2 * SPEC.page_size_bytes


@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"maru_pol_size": 1}, SettingsError, "maru_pool_size"),
        ({"maru_kv_chunk_tokens": 100}, SettingsError, "multiple of"),
        ({"maru_async_store": False}, NotSupported, "maru_async_store"),
    ],
)
def test_bad_settings_stop_the_engines_start_and_are_named(
    extra: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        assembly.engine_plan(engine(extra), cache())


def test_a_cache_that_is_not_stored_stops_the_engines_start() -> None:
    with pytest.raises(LayoutRefused, match="2 KV cache groups"):
        assembly.engine_plan(engine(), cache(num_groups=2))


def test_an_engine_without_a_server_starts_with_one_clear_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="maru-a-") as directory:
        monkeypatch.setenv("MARU_RUNTIME_DIR", f"{directory}/run")
        monkeypatch.setattr(assembly, "START_WAIT_S", 0.05)
        with caplog.at_level(logging.WARNING):
            client = assembly._connect(Settings(server_url=f"ipc://{directory}/nobody.sock"))
        assert client.connection() is None
        client.close()
    warnings = [r for r in caplog.records if r.name == assembly.__name__]
    assert len(warnings) == 1
    assert "nobody.sock" in warnings[0].getMessage()


@pytest.mark.parametrize(
    ("placement", "executor"),
    [("auto", HostExecutor), ("kernel", HostExecutor), ("fallback", TorchExecutor)],
)
def test_a_worker_copies_by_what_the_placement_asks_for(
    placement: str, executor: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "get_tensor_model_parallel_rank", lambda: 0)
    half = assembly.worker_half(engine({"maru_placement": placement}), cache())
    assert isinstance(half._executor, executor)
    half.shutdown()


def test_a_placement_that_is_not_there_stops_the_engines_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly, "get_tensor_model_parallel_rank", lambda: 0)
    with pytest.raises(PlacementRefused, match=r"copy_engine.*use \"auto\""):
        assembly.worker_half(engine({"maru_placement": "copy_engine"}), cache())
