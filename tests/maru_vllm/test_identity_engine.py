"""Identity of an engine from vLLM's own configuration objects and files on disk."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from maru_vllm import engine_facts, weights
from maru_vllm.engine_facts import IdentityRefused, Packing, fields_from_vllm, packing_from_vllm
from maru_vllm.engine_identity import EngineIdentity
from maru_vllm.fingerprint import DigestCache
from maru_vllm.layout import chunk_layout
from maru_vllm.namespace import NamespaceFields, namespace_digest
from maru_vllm.settings import KVPayload, Settings
from maru_vllm.weights import WeightsUnknown, weights_source

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}
PACKING = Packing("cpu", ("vllm.CPUAttentionBackend",), "x86_64")
LAYERS = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]


def model_at(root: Path) -> Path:
    root.mkdir(parents=True)
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "model.safetensors").write_bytes(b"weights" * 100)
    return root


def config_of(root: Path, **arguments: Any) -> VllmConfig:
    given: dict[str, Any] = {
        "max_model_len": 512,
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    return EngineArgs(model=str(root), **(given | arguments)).create_engine_config()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_at(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def base(model: Path) -> VllmConfig:
    return config_of(model)


@pytest.fixture
def config(base: VllmConfig) -> VllmConfig:
    return copy.deepcopy(base)


def caches(block_size: int = 32, **spec: Any) -> KVCacheConfig:
    given: dict[str, Any] = {"num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
    group = KVCacheGroupSpec(LAYERS, FullAttentionSpec(block_size=block_size, **(given | spec)))
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[group], kv_cache_layout="LBHNC"
    )


def fields(
    vllm_config: VllmConfig,
    settings: Settings | None = None,
    kv_cache_config: KVCacheConfig | None = None,
    packing: Packing = PACKING,
    layout_name: str = "LBHNC",
) -> NamespaceFields:
    settings = settings or Settings()
    kv_cache_config = kv_cache_config or caches()
    layout = chunk_layout(kv_cache_config, layout_name, settings.kv_chunk_tokens, 1)
    return fields_from_vllm(vllm_config, kv_cache_config, settings, b"f", layout, packing)


def names_of(vllm_config: VllmConfig, settings: Settings | None = None) -> list[str]:
    return sorted(f.name for f in weights_source(vllm_config, settings or Settings()).files)


def identity_of(
    root: Path, cache: Path, settings: Settings | None = None, **arguments: Any
) -> EngineIdentity:
    settings = settings or Settings()
    kv_cache_config = caches()
    return EngineIdentity(
        config_of(root, **arguments),
        kv_cache_config,
        settings,
        chunk_layout(kv_cache_config, "LBHNC", settings.kv_chunk_tokens, 1),
        packing=PACKING,
        cache=DigestCache(cache),
    )


def namespace_of(identity: EngineIdentity) -> bytes:
    deadline = time.monotonic() + 30
    while (chain := identity.chain()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return chain.namespace


def warnings_of_maru(caplog: pytest.LogCaptureFixture) -> list[str]:
    """vLLM logs too, and what it logs depends on what ran before."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("maru_vllm") and record.levelno >= logging.WARNING
    ]


def test_copies_of_a_model_in_two_places_are_one_and_new_weights_in_one_place_are_two(
    tmp_path: Path,
) -> None:
    """B28, from the model's directory to the namespace."""
    here = model_at(tmp_path / "here")
    shutil.copytree(here, tmp_path / "there")
    first = namespace_of(identity_of(here, tmp_path / "c"))
    assert namespace_of(identity_of(tmp_path / "there", tmp_path / "c")) == first
    (here / "model.safetensors").write_bytes(b"Weights" * 100)
    assert namespace_of(identity_of(here, tmp_path / "c")) != first


def _set(path: str, value: Any) -> Callable[[VllmConfig], None]:
    def change(vllm_config: VllmConfig) -> None:
        *owners, name = path.split(".")
        owner: Any = vllm_config
        for step in owners:
            owner = getattr(owner, step)
        object.__setattr__(owner, name, value)

    return change


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.dtype", torch.float16),
        ("model_config.quantization", "fp8"),
        ("model_config.hf_config.rope_theta", 5e5),
        ("model_config.hf_config.hidden_act", "gelu"),
        ("cache_config.cache_dtype", "fp8_e5m2"),
        ("parallel_config.tensor_parallel_size", 2),
        ("parallel_config.pipeline_parallel_size", 2),
        ("parallel_config.decode_context_parallel_size", 2),
        ("parallel_config.prefill_context_parallel_size", 2),
        ("parallel_config.cp_kv_cache_interleave_size", 16),
    ],
)
def test_what_changes_kv_changes_the_namespace(config: VllmConfig, path: str, value: Any) -> None:
    before = namespace_digest(fields(config))
    _set(path, value)(config)
    assert namespace_digest(fields(config)) != before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model_config.model", "/elsewhere"),
        ("model_config.hf_config._name_or_path", "/elsewhere"),
        ("model_config.served_model_name", "alias"),
        ("model_config.max_model_len", 256),
        ("model_config.seed", 7),
        ("cache_config.enable_prefix_caching", False),
        ("cache_config.gpu_memory_utilization", 0.5),
        ("scheduler_config.max_num_batched_tokens", 100),
    ],
)
def test_what_does_not_change_kv_does_not_keep_engines_apart(
    config: VllmConfig, path: str, value: Any
) -> None:
    before = namespace_digest(fields(config))
    _set(path, value)(config)
    assert namespace_digest(fields(config)) == before


def test_overrides_of_the_models_configuration_count(model: Path, base: VllmConfig) -> None:
    overridden = config_of(model, hf_overrides={"rms_norm_eps": 1e-3})
    assert namespace_digest(fields(overridden)) != namespace_digest(fields(base))


def test_the_length_counts_only_where_the_rotary_embedding_depends_on_it(
    config: VllmConfig,
) -> None:
    assert fields(config).rope_length == 0
    scaled = {"rope_type": "longrope", "factor": 2.0}
    _set("model_config.hf_text_config.rope_parameters", scaled)(config)
    assert fields(config).rope_length == 512
    _set("model_config.hf_text_config.rope_parameters", {"full_attention": scaled})(config)
    assert fields(config).rope_length == 512


@pytest.mark.parametrize(
    "settings",
    [
        Settings(cache_namespace="a"),
        Settings(model_id="m"),
        Settings(kv_chunk_tokens=512),
        Settings(kv_payload=KVPayload.TOKENS),
    ],
)
def test_the_settings_that_separate_do(base: VllmConfig, settings: Settings) -> None:
    assert namespace_digest(fields(base, settings)) != namespace_digest(fields(base))


@pytest.mark.parametrize(
    "spec",
    [{"num_kv_heads": 1}, {"head_size": 64}, {"dtype": torch.float16}, {"sliding_window": 128}],
)
def test_the_specification_of_the_caches_counts(base: VllmConfig, spec: dict[str, Any]) -> None:
    changed = fields(base, kv_cache_config=caches(**spec))
    assert namespace_digest(changed) != namespace_digest(fields(base))


def test_pages_are_kept_apart_by_layout_block_size_and_packing_and_tokens_are_not(
    base: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digests(settings: Settings) -> list[bytes]:
        other_packing = [
            Packing("cuda 9.0", PACKING.attention_backends, "x86_64"),
            Packing("cpu", ("vllm.Other",), "x86_64"),
            Packing("cpu", PACKING.attention_backends, "x86_64 avx512 amx"),
        ]
        found = [
            fields(base, settings),
            fields(base, settings, caches(block_size=64)),
            fields(base, settings, layout_name="BLNHC"),
            *(fields(base, settings, packing=packing) for packing in other_packing),
        ]
        with monkeypatch.context() as patched:
            patched.setattr(engine_facts.vllm, "__version__", "0.31.0")
            found.append(fields(base, settings))
        return [namespace_digest(f) for f in found]

    assert len(set(digests(Settings()))) == 7
    assert len(set(digests(Settings(kv_payload=KVPayload.TOKENS)))) == 1


def test_scales_taken_from_the_first_requests_are_refused(config: VllmConfig) -> None:
    _set("cache_config.calculate_kv_scales", True)(config)
    with pytest.raises(IdentityRefused, match="calculate_kv_scales"):
        fields(config)


def test_a_configuration_that_has_no_encoding_is_refused_by_name(config: VllmConfig) -> None:
    _set("model_config.hf_config.odd", object())(config)
    with pytest.raises(IdentityRefused, match=r"model configuration .* builtins.object"):
        fields(config)


def test_the_packing_of_this_host_names_the_backend_and_its_instructions(
    base: VllmConfig,
) -> None:
    found = packing_from_vllm(base)
    assert found == packing_from_vllm(base)
    if found.device == "cpu":
        assert found.attention_backends == (
            "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
        )
        assert found.instruction_set.startswith(os.uname().machine)


# ------------------------------------------------------------------------ which files


def test_all_files_that_a_loader_may_choose_from_count_and_tokenizers_do_not(
    tmp_path: Path, config: VllmConfig
) -> None:
    root = model_at(tmp_path / "m")
    for name in ("tokenizer.json", "README.md", "pytorch_model.bin", "modeling.py", "params.json"):
        (root / name).write_bytes(b"x")
    for name in ("sub/extra.safetensors", "original/consolidated.safetensors"):
        (root / name).parent.mkdir()
        (root / name).write_bytes(b"x")
    _set("model_config.model", str(root))(config)
    assert names_of(config) == [
        "model/config.json",
        "model/model.safetensors",
        "model/params.json",
        "model/sub/extra.safetensors",
    ]
    _set("model_config.trust_remote_code", True)(config)
    assert "model/modeling.py" in names_of(config)
    _set("load_config.load_format", "npcache")(config)
    assert "model/pytorch_model.bin" in names_of(config)
    assert "model/model.safetensors" not in names_of(config)


def test_the_draft_models_files_count_too(tmp_path: Path, config: VllmConfig) -> None:
    draft = copy.deepcopy(config.model_config)
    draft.model = str(model_at(tmp_path / "draft"))

    class Speculative:
        draft_model_config = draft
        draft_load_config = None

    _set("speculative_config", Speculative())(config)
    assert "draft/model.safetensors" in names_of(config)
    draft.model = config.model_config.model
    assert not [name for name in names_of(config) if name.startswith("draft/")]


def test_a_single_file_is_its_own_model(tmp_path: Path, config: VllmConfig) -> None:
    (tmp_path / "m.gguf").write_bytes(b"x")
    _set("model_config.model", str(tmp_path / "m.gguf"))(config)
    assert names_of(config) == ["model/m.gguf"]


def test_dummy_weights_are_known_by_their_rule(config: VllmConfig) -> None:
    _set("load_config.load_format", "dummy")(config)
    source = weights_source(config, Settings())
    assert not source.files
    _set("model_config.seed", 99)(config)
    assert weights_source(config, Settings()).stated != source.stated != b""


def test_a_model_of_the_hub_is_found_in_its_cache(tmp_path: Path, config: VllmConfig) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--org--name"
    blob = repository / "blobs" / "b10b"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(b"weights")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)
    _set("model_config.model", "org/name")(config)
    _set("load_config.download_dir", str(tmp_path))(config)
    source = weights_source(config, Settings())
    assert [(f.name, f.path.resolve()) for f in source.files] == [("model/model.safetensors", blob)]
    assert source.loaded_since_ns is None


@pytest.mark.parametrize(
    "change",
    [
        _set("model_config.model", "s3://bucket/model"),
        _set("model_config.model", "org/absent"),
        _set("load_config.load_format", "tensorizer"),
        _set("model_config.hf_config.text_model_id", "org/other"),
    ],
)
def test_weights_that_are_not_in_files_need_the_operators_word(
    config: VllmConfig, change: Callable[[VllmConfig], None]
) -> None:
    change(config)
    with pytest.raises(WeightsUnknown, match="Set maru_model_id"):
        weights_source(config, Settings())
    one = weights_source(config, Settings(model_id="m-v1"))
    assert not one.files
    assert one.stated != weights_source(config, Settings(model_id="m-v2")).stated


def test_an_engine_whose_weights_cannot_be_told_starts_and_misses_with_one_warning(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        identity = identity_of(model, tmp_path, load_format="tensorizer")
        assert [identity.chain() for _ in range(3)] == [None] * 3
    (warning,) = warnings_of_maru(caplog)
    assert "Set maru_model_id" in warning


def test_weights_that_changed_while_the_engine_started_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """B28: the engine may have loaded what stood there before."""
    monkeypatch.setattr(weights.multiprocessing, "parent_process", lambda: object())
    identity = identity_of(model_at(tmp_path / "m"), tmp_path / "c")
    deadline = time.monotonic() + 30
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        while not warnings_of_maru(caplog) and time.monotonic() < deadline:
            assert identity.chain() is None
            time.sleep(0.01)
        assert identity.chain() is None
    (warning,) = warnings_of_maru(caplog)
    assert "changed while this engine was starting" in warning


def test_an_engine_core_in_a_process_of_its_own_began_before_it_read_weights(
    monkeypatch: pytest.MonkeyPatch, config: VllmConfig
) -> None:
    assert weights_source(config, Settings()).loaded_since_ns is None
    monkeypatch.setattr(weights.multiprocessing, "parent_process", lambda: object())
    since = weights_source(config, Settings()).loaded_since_ns
    assert since is not None
    assert time.time_ns() - 3600 * 10**9 < since < time.time_ns() + 10**9
