"""What the three copy operations refuse, in every implementation, before anything moves."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from implementations import IMPLEMENTATIONS, implementation
from transfer_calls import Memory, arguments_of
from transfer_cases import Call, small

from maru_kv_ops.formats import PageBufferShapeDesc


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return implementation(request.param)


REFUSED = [
    ("an unknown format", Call.MULTI_LAYER, {"engine_kv_format": 15}, "15 is no known format"),
    ("an unknown direction", Call.MULTI_LAYER, {"direction": 2}, "2 is neither H2D"),
    ("a slot too high", Call.MULTI_LAYER, {"slot_mapping": torch.tensor([1, 6])}, "slot 6"),
    ("slots of 32 bits", Call.MULTI_LAYER, {"slot_mapping": torch.tensor([1, 2]).int()}, "int64"),
    ("too few slots", Call.MULTI_LAYER, {"slot_mapping": torch.tensor([1])}, "found 1"),
    ("too few pointers", Call.MULTI_LAYER, {"key_value_ptrs": torch.tensor([8])}, "found 1"),
    ("too long a skip", Call.MULTI_LAYER, {"skip_prefix_n_tokens": 3}, "3 of 2"),
    ("no block size", Call.MULTI_LAYER, {"block_size": 0}, "block_size"),
    ("odd page buffer", Call.MULTI_LAYER, {"page_buffer_size": 5}, "no multiple"),
    ("overlapping blocks", Call.MULTI_LAYER, {"block_stride_elems": 1}, "block stride"),
    ("another plane count", Call.MULTI_LAYER, {"engine_kv_format": 1}, "key_value"),
    ("a head size that does not divide", Call.MULTI_LAYER, {"engine_kv_format": 12, "head_size": 5},
     "head_size"),
    ("slots too high for one layer", Call.SINGLE_LAYER, {"slot_mapping": torch.tensor([1, 6])},
     "slot 6"),
    ("a cache of another type", Call.SINGLE_LAYER,
     {"vllm_key_value_cache": torch.zeros(3, 2, 3, 8)}, "float"),
    ("a cache of another shape", Call.SINGLE_LAYER,
     {"vllm_key_value_cache": torch.zeros(3, 2, 3, 9, dtype=torch.float16)}, "expected the tensor"),
    ("a list for one tensor", Call.SINGLE_LAYER,
     {"vllm_key_value_cache": [torch.zeros(3, 2, 3, 8, dtype=torch.float16)] * 2}, "found 2"),
    ("a block too high", Call.BLOCKS, {"block_ids": torch.tensor([3])}, "block 3"),
    ("objects that do not divide", Call.BLOCKS, {"object_ptrs": [8, 8]}, "divided among 2"),
    ("a null object", Call.BLOCKS, {"object_ptrs": [0]}, "null"),
    ("another chunk length", Call.BLOCKS, {"chunk_tokens": 4}, "chunk_tokens"),
    ("another plane count", Call.BLOCKS, {"shape_desc": PageBufferShapeDesc(2, 2, 3, 2, 3, 8, 2)},
     "kv_size"),
    ("an empty shape", Call.BLOCKS, {"shape_desc": PageBufferShapeDesc()}, "shape_desc"),
    ("too long a skip", Call.BLOCKS, {"skip_prefix_n_blocks": 2}, "2 of 1"),
    ("no shape at all", Call.BLOCKS, {"shape_desc": None}, "shape_desc: expected"),
    ("too few pointers", Call.BLOCKS, {"paged_buffer_ptrs_tensor": torch.tensor([8])}, "found 1"),
    ("scales of two heads", Call.BLOCKS,
     {"engine_kv_format": 14, "shape_desc": PageBufferShapeDesc(1, 2, 3, 2, 2, 66, 1)}, "nh 2"),
    ("a token that is only a scale", Call.BLOCKS,
     {"engine_kv_format": 14, "shape_desc": PageBufferShapeDesc(1, 2, 3, 2, 1, 4, 1)}, "scale"),
    ("padding where blocks are tight", Call.BLOCKS,
     {"engine_kv_format": 5, "shape_desc": PageBufferShapeDesc(1, 2, 3, 2, 3, 8, 2, 64)},
     "no padding"),
    ("sizes beyond 63 bits", Call.BLOCKS,
     {"shape_desc": PageBufferShapeDesc(1, 2, 1 << 58, 2, 3, 8, 2)}, "63 bits"),
    ("no direction", Call.MULTI_LAYER, {"direction": None}, "direction: expected"),
    ("no tensor", Call.MULTI_LAYER, {"key_value": [1.0]}, "key_value: expected a tensor"),
    ("no tensor", Call.SINGLE_LAYER, {"vllm_key_value_cache": None}, "expected a tensor"),
    ("two axes of slots", Call.MULTI_LAYER, {"slot_mapping": torch.tensor([[1, 2]])},
     "one contiguous dimension"),
    ("rows with holes", Call.MULTI_LAYER,
     {"key_value": torch.zeros(1, 2, 2, 48, dtype=torch.float16)[..., ::2]},
     "contiguous last axis"),
    ("rows on top of each other", Call.MULTI_LAYER,
     {"key_value": torch.zeros(1, 2, 1, 24, dtype=torch.float16).expand(1, 2, 2, 24)},
     "share memory"),
    ("two planes of a fused format", Call.SINGLE_LAYER,
     {"lmc_key_value_cache": torch.zeros(2, 2, 24, dtype=torch.float16)},
     "lmc_key_value_cache: expected"),
    ("the other order of heads and tokens", Call.SINGLE_LAYER, {"engine_kv_format": 12},
     "expected the tensor"),
    ("blocks that share memory", Call.SINGLE_LAYER,
     {"vllm_key_value_cache": torch.zeros(1, 2, 3, 8, dtype=torch.float16).expand(3, 2, 3, 8)},
     "expected the tensor"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "changes", "says"),
    [row[1:] for row in REFUSED],
    ids=[f"{row[1].name.lower()}: {row[0]}" for row in REFUSED],
)
def test_what_does_not_belong_together_is_refused_before_anything_moves(
    ops: ModuleType, call: Call, changes: dict[str, object], says: str
) -> None:
    memory = Memory(small(call))
    arguments = arguments_of(memory)
    before = [buffer.clone() for buffer in (*memory.caches, *memory.objects)]
    with pytest.raises((ValueError, TypeError), match=says):
        getattr(ops, call.value)(**(arguments | changes))
    after = (*memory.caches, *memory.objects)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
