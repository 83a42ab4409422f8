"""The three copy operations, in every implementation, against an oracle that counts bytes."""

from __future__ import annotations

import inspect
from itertools import product
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import implementations
from transfer_cases import SHAPES, Call, Case, Memory, cases, check

from maru_kv_ops import torch_ops
from maru_kv_ops.formats import FORMATS, EngineKVFormat, PageBufferShapeDesc
from maru_kv_ops.plan import TransferDirection

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
HEAD_MAJOR = [facts.format for facts in FORMATS.values() if facts.head_major]


@pytest.fixture(params=sorted(implementations()), scope="module")
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return implementations()[request.param]


@pytest.mark.parametrize("call", Call)
@settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_every_byte_lands_where_counting_says(
    ops: ModuleType, call: Call, data: st.DataObject
) -> None:
    check(data.draw(cases(call)), ops)


@pytest.mark.parametrize("direction", TransferDirection)
@pytest.mark.parametrize("number", SHAPES)
@pytest.mark.parametrize("call", Call)
def test_every_format_in_both_directions(
    ops: ModuleType, call: Call, number: int, direction: TransferDirection
) -> None:
    """B05, B06: block size, head count and planes differ, blocks are padded, tokens are skipped."""
    one_head = number in (3, 5, 14)
    check(
        Case(
            call=call,
            format=number,
            direction=direction,
            dtype=torch.uint8 if number == 14 else torch.bfloat16,
            blocks=5,
            block_tokens=4,
            heads=1 if one_head else 3,
            layers=3,
            head_size=132 if number == 14 else 8,
            padding=0 if number in (4, 5) else 8,
            ids=(4, -1, 1, 0) if call is Call.BLOCKS else (7, -1, 19, 0, 5, 6),
            skip=1 if call is Call.BLOCKS else 0,
            objects=2 if call is Call.BLOCKS else 1,
        ),
        ops,
    )


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("number", HEAD_MAJOR)
def test_heads_and_tokens_of_a_view_are_never_swapped(
    ops: ModuleType, number: EngineKVFormat, swapped: bool
) -> None:
    """Equal sizes, and sizes of one, leave only the strides and the staging width to tell."""
    for block_tokens, heads, blocks in ((4, 4, 3), (1, 4, 3), (4, 1, 3), (1, 1, 3), (4, 4, 1)):
        check(
            Case(
                call=Call.SINGLE_LAYER,
                format=int(number),
                direction=H2D,
                dtype=torch.float32,
                blocks=blocks,
                block_tokens=block_tokens,
                heads=heads,
                layers=1,
                head_size=4,
                padding=0,
                ids=tuple(range(blocks * block_tokens - 1, -1, -1)),
                swapped=swapped,
            ),
            ops,
        )


@pytest.mark.parametrize("number", [6, 7])
def test_reading_sizes_off_a_logical_shape_would_misplace_7936_elements(
    ops: ModuleType, number: int
) -> None:
    """64 blocks of 16 tokens, 8 heads of 16 float32; 16 tokens, each in a block of its own."""
    blocks, tokens, heads, size = 64, 16, 8, 16
    shape = (2, blocks, heads, tokens, size) if number == 6 else (blocks, 2, heads, tokens, size)
    # Both readings agree on the first head of a block's first token and the last of its last.
    offsets = (0, 15, 0, 15, 1, 3, 5, 7, 8, 10, 12, 14, 1, 3, 5, 7)
    slots = torch.tensor([3 * i * tokens + offset for i, offset in enumerate(offsets)])
    staging = torch.arange(2 * 16 * heads * size, dtype=torch.float32).view(2, 16, heads * size) + 1
    expected, naive = torch.zeros(shape), torch.zeros(shape)
    for plane, (token, slot), head in product(range(2), enumerate(slots.tolist()), range(heads)):
        row = staging[plane, token, head * size : (head + 1) * size]
        block, offset = divmod(slot, tokens)
        page = (plane, block) if number == 6 else (block, plane)
        expected[(*page, head, offset)] = row
        # The same page read as [token, head, ..], as the view's shape suggests.
        naive[page].view(tokens, heads, size)[offset, head] = row
    assert int((naive != expected).sum()) == 7936

    memory = torch.zeros(shape)
    ops.single_layer_kv_transfer(staging, memory.transpose(2, 3), slots, H2D, number)
    assert int((memory != expected).sum()) == 0


def test_empty_work_moves_nothing_and_is_no_error(ops: ModuleType) -> None:
    for call, ids, skip in (
        (Call.MULTI_LAYER, (), 0),
        (Call.MULTI_LAYER, (-1, -1), 0),
        (Call.MULTI_LAYER, (0, 1), 2),
        (Call.SINGLE_LAYER, (), 0),
        (Call.BLOCKS, (-1,), 0),
        (Call.BLOCKS, (0,), 1),
    ):
        check(small(call, ids=ids, skip=skip), ops)


def small(call: Call, **changes: object) -> Case:
    values: dict[str, object] = {
        "call": call,
        "format": 13,
        "direction": D2H,
        "dtype": torch.float16,
        "blocks": 3,
        "block_tokens": 2,
        "heads": 3,
        "layers": 2,
        "head_size": 4,
        "padding": 0,
        "ids": (1,) if call is Call.BLOCKS else (1, 4),
    }
    return Case(**(values | changes))  # type: ignore[arg-type] # names and types as above


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
    ("no shape", Call.BLOCKS, {"skip_prefix_n_blocks": 2}, "2 of 1"),
]  # fmt: skip


class Recorded:
    """Takes a call down instead of making it."""

    def __init__(self) -> None:
        self.named: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        def record(*args: object, **named: object) -> None:
            bound = inspect.signature(getattr(torch_ops, name)).bind(*args, **named)
            bound.apply_defaults()
            self.named = dict(bound.arguments)

        return record


@pytest.mark.parametrize(
    ("call", "changes", "says"),
    [row[1:] for row in REFUSED],
    ids=[f"{row[1].name.lower()}: {row[0]}" for row in REFUSED],
)
def test_what_does_not_belong_together_is_refused_before_anything_moves(
    ops: ModuleType, call: Call, changes: dict[str, object], says: str
) -> None:
    memory = Memory(small(call))
    recorded = Recorded()
    memory.call(recorded)  # type: ignore[arg-type] # it has every attribute
    before = [buffer.clone() for buffer in (*memory.caches, *memory.objects)]
    with pytest.raises((ValueError, TypeError), match=says):
        getattr(ops, call.value)(**(recorded.named | changes))
    after = (*memory.caches, *memory.objects)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
