"""The three copy operations, in every implementation, against an oracle that counts bytes."""

from __future__ import annotations

import inspect
import mmap
import re
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import IMPLEMENTATIONS, implementation
from transfer_calls import Memory, arguments_of, check
from transfer_cases import SHAPES, Call, Case, cases, small

from maru_kv_ops import torch_ops
from maru_kv_ops.formats import FORMATS, Content, EngineKVFormat, PageBufferShapeDesc
from maru_kv_ops.plan import TransferDirection

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
HEAD_MAJOR = [facts.format for facts in FORMATS.values() if facts.head_major]


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request: pytest.FixtureRequest) -> ModuleType:
    return implementation(request.param)


@pytest.mark.parametrize("call", Call)
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
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


def in_order(tensor: torch.Tensor, letters: str, wanted: str) -> torch.Tensor:
    """Return the tensor with its axes as ``wanted``; an axis that one of them lacks is of one."""
    for letter in wanted:
        if letter not in letters:
            tensor, letters = tensor.unsqueeze(0), letter + letters
    left = "".join(letter for letter in letters if letter not in wanted)
    tensor = tensor.permute([letters.index(letter) for letter in left + wanted])
    for _ in left:
        (tensor,) = tensor
    return tensor


@pytest.mark.parametrize("number", HEAD_MAJOR)
def test_reading_sizes_off_a_logical_shape_would_misplace_7936_elements(
    ops: ModuleType, number: EngineKVFormat
) -> None:
    """64 blocks of 16 tokens, 8 heads of 16 float32; the first 16 tokens are stored."""
    facts = FORMATS[number]
    letters = facts.axes.replace("L", "")
    size = {"P": 2, "B": 64, "H": 8, "N": 16, "C": 16 if facts.kv_size == 2 else 32}
    memory = torch.arange(2 * 64 * 16 * 8 * 16, dtype=torch.float32)
    memory = memory.view([size[letter] for letter in letters])
    handed_out = memory.transpose(-3, -2)  # tokens before heads, as engines show it
    stored = torch.zeros(2, 16, 8 * 16) if facts.kv_size == 2 else torch.zeros(16, 8 * 32)

    ops.single_layer_kv_transfer(stored, handed_out, torch.arange(16), D2H, number)

    right = in_order(memory, letters, "PBNHC")[:, 0]
    assert int((stored.view(right.shape) != right).sum()) == 0
    # The shape of what is handed out, read as memory order, has 16 heads and blocks of 8 tokens.
    misread = memory.view([(size | {"H": 16, "N": 8})[letter] for letter in letters])
    naive = in_order(misread, letters, "PBNHC").flatten(1, 2)[:, :16]
    assert naive.numel() - int((naive[:, :, :8] == right).sum()) == 7936


@pytest.mark.parametrize(
    "number", [number for number in EngineKVFormat if number is not EngineKVFormat.NL_X_NB_BSV_BSS]
)
def test_elements_that_carry_their_indices_arrive_where_these_say(
    ops: ModuleType, number: EngineKVFormat
) -> None:
    """B06: no fused pair is taken for two planes. Physical order comes from torch's permute."""
    facts = FORMATS[number]
    fused = facts.content is Content.FUSED_HEAD
    planes, heads = (2, 3) if "H" in facts.axes else (1, 1)
    layers, blocks, tokens, size = 3, 4, 5, 6
    codes = torch.arange(planes * layers * blocks * tokens * heads * size)
    codes = codes.view(planes, layers, blocks, tokens, heads, size)  # PLBNHC
    entry = facts.axes.replace("S", "BN").replace("O", "").replace("C", "PC" if fused else "C")
    listed = {1: "", layers: "L", 2 * layers: "PL"}[facts.num_pointers(layers)]
    slots = torch.tensor([13, 0, 7, 19, 6])
    kept = codes[:, :, slots // tokens, slots % tokens]  # PLTHC
    if fused:
        kept = kept.permute(1, 2, 3, 0, 4)
    expected = kept.reshape(facts.kv_size, layers, len(slots), -1)

    def transfer(object_: torch.Tensor, cache: torch.Tensor, direction: TransferDirection) -> None:
        count = facts.num_pointers(layers)
        step = cache.numel() // count * cache.element_size()
        addresses = torch.tensor([cache.data_ptr() + i * step for i in range(count)])
        sizes = {"block_size": tokens, "head_size": size}
        where = torch.device("cpu")
        ops.multi_layer_kv_transfer(
            object_, addresses, slots, where, blocks * tokens, direction, number, **sizes
        )

    physical = in_order(codes, "PLBNHC", listed + entry).contiguous()
    stored = torch.full_like(expected, -1)
    transfer(stored, physical, D2H)
    assert torch.equal(stored, expected)

    loaded = torch.full_like(physical, -1)
    transfer(expected.contiguous(), loaded, H2D)
    at_slots = in_order(loaded, listed + entry, "PLBNHC").flatten(2, 3)
    assert torch.equal(at_slots[:, :, slots], codes.flatten(2, 3)[:, :, slots])
    assert int((loaded >= 0).sum()) == expected.numel()


def test_opaque_pages_are_rows_of_one_token(ops: ModuleType) -> None:
    """What the connector's payload of whole pages is: each block of each layer in one piece."""
    page, layers, blocks = 6 * 11, 3, 7
    caches = [torch.randint(0, 256, (blocks, page), dtype=torch.uint8) for _ in range(layers)]
    objects = [torch.zeros(layers, 2, page, dtype=torch.uint8) for _ in range(2)]
    shape = PageBufferShapeDesc(
        kv_size=1, nl=layers, nb=blocks, bs=1, nh=1, hs=page, element_size=1
    )
    pointers = torch.tensor([cache.data_ptr() for cache in caches])
    addresses = [stored.data_ptr() for stored in objects]
    ids = torch.tensor([6, 2, -1, 0])

    ops.multi_layer_block_kv_transfer(
        pointers, addresses, ids, torch.device("cpu"), D2H, shape, 2, 3, 0
    )

    for layer, cache in enumerate(caches):
        assert torch.equal(objects[0][layer], cache[[6, 2]])
        assert torch.equal(objects[1][layer, 1], cache[0])
        assert not objects[1][layer, 0].any()


def test_one_call_takes_any_number_of_objects(ops: ModuleType) -> None:
    check(small(Call.BLOCKS, objects=150, ids=tuple(i % 4 - 1 for i in range(150)), skip=2), ops)


@pytest.mark.parametrize("number", [0, 1, 13])
def test_offsets_beyond_32_bits_are_exact(ops: ModuleType, number: int, tmp_path: Path) -> None:
    """A sparse file stands for a large cache; what a narrower offset would touch stays zero."""
    facts = FORMATS[EngineKVFormat(number)]
    blocks, tokens, width, stride = 4, 2, 24, (3 << 29) + 64  # bytes: 1.5 GiB from block to block
    entries = 2 if facts.axes.startswith("P") else 1
    planes = facts.kv_size
    with (tmp_path / "cache").open("w+b") as file:
        file.truncate(blocks * stride * entries)
        mapping = mmap.mmap(file.fileno(), 0)
    cache = torch.frombuffer(mapping, dtype=torch.uint8)
    row = torch.arange(1, planes * width + 1, dtype=torch.uint8).view(planes, 1, 1, width)
    fixed = {"block_size": tokens, "head_size": 8, "block_stride_elems": stride}
    pointers = torch.tensor([cache.data_ptr()])

    def transfer(object_: torch.Tensor, slot: int, direction: TransferDirection) -> None:
        slots, where = torch.tensor([slot]), torch.device("cpu")
        ops.multi_layer_kv_transfer(
            object_, pointers, slots, where, blocks * tokens, direction, number, **fixed
        )

    transfer(row, 7, H2D)  # the last token of the last block
    plane_stride = blocks * stride if entries == 2 else tokens * width
    for plane in range(planes):
        at = plane * plane_stride + 3 * stride + width
        assert torch.equal(cache[at : at + width], row[plane, 0, 0])
        for narrower in (at % (1 << 32), at % (1 << 31)):
            assert not cache[narrower : narrower + width].any()
    found = torch.zeros_like(row)
    transfer(found, 7, D2H)
    assert torch.equal(found, row)


@pytest.mark.parametrize("types", IMPLEMENTATIONS)
def test_types_of_any_module_name_a_format_a_direction_and_a_shape(
    ops: ModuleType, types: str
) -> None:
    module = implementation(types)
    memory = Memory(small(Call.BLOCKS))
    arguments = arguments_of(memory)
    shape = module.PageBufferShapeDesc()
    for field in fields(PageBufferShapeDesc):
        setattr(shape, field.name, getattr(arguments["shape_desc"], field.name))
    caches, objects = memory.expected()

    ops.multi_layer_block_kv_transfer(
        **arguments
        | {
            "shape_desc": shape,
            "direction": module.TransferDirection.D2H,
            "engine_kv_format": module.EngineKVFormat.NL_X_NB_BS_NH_CS,
        }
    )

    assert [bytes(buffer.tolist()) for buffer in memory.caches] == caches
    assert [bytes(buffer.tolist()) for buffer in memory.objects] == objects


@pytest.mark.parametrize("call", Call)
def test_names_order_and_defaults_of_arguments_are_the_same(call: Call) -> None:
    signature = inspect.signature(getattr(torch_ops, call.value))
    expected = [
        (name, None if parameter.default is parameter.empty else str(parameter.default))
        for name, parameter in signature.parameters.items()
    ]

    native = getattr(implementation("host"), call.value).__doc__.splitlines()[0]

    arguments = native.partition("(")[2].rpartition(") -> ")[0]
    assert re.findall(r"(?:^|, )(\w+): [^=,]+?(?: = (\w+))?(?=, \w+: |$)", arguments) == [
        (name, default or "") for name, default in expected
    ]


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
