from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from maru_vllm.namespace import (
    NAMESPACE_FORMAT,
    GroupFields,
    NamespaceFields,
    namespace_bytes,
    namespace_digest,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "namespace.json").read_text())

FIELDS = NamespaceFields(
    payload_format=1,
    key_format=b"maru-chunk-key-1",
    model_id="",
    weights=bytes(range(32)),
    model_config=bytes(range(32, 64)),
    architecture="LlamaForCausalLM",
    rope_length=0,
    multimodal=b"",
    model_dtype="torch.bfloat16",
    kv_cache_dtype="auto",
    quantization="",
    speculation="",
    engine_version="0.32.0",
    device="cpu",
    attention_backends=("vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",),
    instruction_set="x86_64 avx512",
    payload="pages",
    kv_layout="LBHNC",
    block_size=32,
    chunk_tokens=256,
    tensor_parallel=2,
    pipeline_parallel=1,
    prefill_context_parallel=1,
    decode_context_parallel=1,
    context_interleave=1,
    num_parts=2,
    groups=(GroupFields(layer_names=("layers.0", "layers.1"), spec=b"spec"),),
    cache_namespace="",
)


def other(value: Any) -> Any:
    """Another value of the same type."""
    match value:
        case int():
            return value + 1
        case str():
            return value + "x"
        case bytes():
            return value + b"x"
        case tuple():
            return (*value[:-1], other(value[-1]))
    first = dataclasses.fields(value)[0].name
    return dataclasses.replace(value, **{first: other(getattr(value, first))})


def test_the_bytes_and_the_digest_are_those_that_were_recorded() -> None:
    """Fails when the encoding or the fields change, which needs another NAMESPACE_FORMAT."""
    assert namespace_bytes(FIELDS).hex() == GOLDEN["bytes"]
    assert namespace_digest(FIELDS).hex() == GOLDEN["digest"]
    assert hashlib.sha256(bytes.fromhex(GOLDEN["bytes"])).hexdigest() == GOLDEN["digest"]
    assert len(NAMESPACE_FORMAT) == 16


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(NamespaceFields)])
def test_each_field_alone_changes_the_namespace(name: str) -> None:
    changed = dataclasses.replace(FIELDS, **{name: other(getattr(FIELDS, name))})
    assert namespace_digest(changed) != namespace_digest(FIELDS)


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(GroupFields)])
def test_each_field_of_a_group_alone_changes_the_namespace(name: str) -> None:
    group = FIELDS.groups[0]
    changed = dataclasses.replace(group, **{name: other(getattr(group, name))})
    assert namespace_digest(dataclasses.replace(FIELDS, groups=(changed,))) != namespace_digest(
        FIELDS
    )


def test_the_order_of_layers_and_the_cut_between_groups_count() -> None:
    one, two = "layers.0", "layers.1"

    def digest(*names: tuple[str, ...]) -> bytes:
        groups = tuple(GroupFields(layer_names=group, spec=b"spec") for group in names)
        return namespace_digest(dataclasses.replace(FIELDS, groups=groups))

    assert len({digest((one, two)), digest((two, one)), digest((one,), (two,))}) == 3


def test_equal_fields_of_two_engines_are_one_namespace() -> None:
    assert namespace_digest(dataclasses.replace(FIELDS)) == namespace_digest(FIELDS)
