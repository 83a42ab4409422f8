"""Where pages lie: a view of a tensor is described by its strides, or refused, never mistaken."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch

from maru_kv_ops.errors import TransferRefused
from maru_kv_ops.formats import FORMATS, EngineKVFormat
from maru_kv_ops.geometry import (
    PageGeometry,
    PoolSizes,
    TensorShape,
    check_rows,
    layer_geometry,
    pointer_index,
    pool_geometry,
)

# A layer's axes in memory, by format; NH != BS, and neither is 2.
LAYERS = {1: "PBNHC", 2: "BPNHC", 6: "PBHNC", 7: "BPHNC", 9: "BNHC", 12: "BHNC", 13: "BNHC"}
SIZES = {"P": 2, "B": 7, "N": 5, "H": 3, "C": 8}
WIDTH = SIZES["H"] * SIZES["C"]


def described(tensor: torch.Tensor, number: int) -> PageGeometry:
    shape = TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size())
    return layer_geometry(FORMATS[EngineKVFormat(number)], shape, WIDTH)


@pytest.mark.parametrize("equal", [False, True], ids=["NH != BS", "NH == BS"])
@pytest.mark.parametrize("number", LAYERS)
def test_every_order_of_a_layers_axes_is_described_as_it_is_or_refused(
    number: int, equal: bool
) -> None:
    """B05, for all views that engines could hand out of memory in the format's order."""
    letters = LAYERS[number]
    sizes = SIZES | ({"N": SIZES["H"]} if equal else {})
    memory = torch.zeros([sizes[letter] for letter in letters])
    stride = dict(zip(letters, memory.stride(), strict=True))
    works = 0
    for order in permutations(letters[:-1]):
        view = memory.permute([letters.index(letter) for letter in (*order, "C")])
        try:
            pages = described(view, number)
        except TransferRefused:
            continue
        works += 1
        (part,) = pages.parts
        assert pages.block_stride == stride["B"] * 4
        assert pages.plane_stride == stride.get("P", 0) * 4
        assert (part.slot_stride, part.head_stride) == (stride["N"] * 4, stride["H"] * 4)
        assert (pages.num_slots, pages.block_tokens) == (7 * sizes["N"], sizes["N"])
    assert works == 2, "memory order, and heads and tokens the other way round"


@pytest.mark.parametrize("number", LAYERS)
def test_memory_in_the_order_of_another_format_is_refused(number: int) -> None:
    """Heads outside tokens, or inside: a wrong format number is no layout of its own."""
    letters = LAYERS[number].translate(str.maketrans("HN", "NH"))
    memory = torch.zeros([SIZES[letter] for letter in letters])

    with pytest.raises(TransferRefused, match="expected the tensor of one layer"):
        described(memory, number)


def test_k_and_v_as_an_axis_of_their_own_are_the_fused_content() -> None:
    fused = torch.zeros(7, 3, 5, 8)

    assert described(fused.view(7, 3, 5, 2, 4), 10) == described(fused, 12)
    assert described(fused.view(7, 3, 5, 2, 4).transpose(1, 2), 10) == described(fused, 12)
    with pytest.raises(TransferRefused):
        described(torch.zeros(2, 7, 3, 5, 4).permute(1, 2, 3, 0, 4), 10)  # K and V apart in memory


def test_a_pool_without_padding_is_what_torch_calls_contiguous() -> None:
    for number, facts in FORMATS.items():
        sizes = {"L": 3, "P": 2, "B": 7, "N": 5, "H": 4, "S": 35, "O": 1, "C": 8}
        if "H" not in facts.axes:
            sizes |= {"H": 1}
        memory = torch.empty([sizes[x] for x in facts.axes], dtype=torch.uint8, device="meta")
        stride = dict(zip(facts.axes, memory.stride(), strict=True))

        pages = pool_geometry(facts, PoolSizes(3, 7, 5, sizes["H"], 8, 0))

        assert pages.block_stride == stride.get("B", stride.get("S", 0) * 5), number
        assert pages.plane_stride == stride.get("P", 0), number
        assert pages.layer_stride == stride.get("L", 0), number
        if len(pages.parts) == 1:
            (part,) = pages.parts
            assert part.slot_stride == stride.get("N", stride.get("S")), number
            assert part.head_stride == stride.get("H", part.run_bytes), number


def test_a_page_with_scales_has_all_values_before_all_scales() -> None:
    facts = FORMATS[EngineKVFormat.NL_X_NB_BSV_BSS]

    values, scales = pool_geometry(facts, PoolSizes(1, 7, 64, 1, 132, 0)).parts

    assert (values.cache_offset, values.object_offset) == (0, 0)
    assert (values.run_bytes, values.slot_stride) == (128, 128)
    assert (scales.cache_offset, scales.object_offset) == (64 * 128, 128)
    assert (scales.run_bytes, scales.slot_stride) == (4, 4)


def test_padding_between_blocks_lies_between_blocks_only() -> None:
    facts = FORMATS[EngineKVFormat.NL_X_TWO_NB_BS_NH_HS]
    tight = pool_geometry(facts, PoolSizes(1, 7, 5, 1, 24, 0))

    padded = pool_geometry(facts, PoolSizes(1, 7, 5, 1, 24, 5 * 24 + 8))

    assert padded.parts == tight.parts
    assert (padded.block_stride, padded.plane_stride) == (5 * 24 + 8, 7 * (5 * 24 + 8))


def test_offsets_stay_exact_where_32_and_53_bits_end() -> None:
    facts = FORMATS[EngineKVFormat.NL_X_TWO_NB_NH_BS_HS]
    blocks = (1 << 40) + 1

    pages = pool_geometry(facts, PoolSizes(1, blocks, 16, 8, 256, 0))

    assert pages.plane_stride == blocks * 16 * 8 * 256
    assert pages.plane_stride > 1 << 53
    with pytest.raises(TransferRefused, match="63 bits"):
        pool_geometry(facts, PoolSizes(1, 1 << 48, 16, 8, 256, 0))


def test_addresses_are_listed_k_before_v_where_each_has_tensors() -> None:
    def order(number: int) -> list[int]:
        facts = FORMATS[EngineKVFormat(number)]
        return [pointer_index(facts, 3, plane, layer) for plane in (0, 1) for layer in (0, 1, 2)]

    assert order(9) == [0, 1, 2, 3, 4, 5]
    assert order(7) == [0, 1, 2, 0, 1, 2]
    assert order(8) == [0] * 6


def test_rows_may_have_gaps_and_any_order_but_no_byte_twice() -> None:
    check_rows("rows", TensorShape((4, 2, 8), (20, 10, 1), 2))
    check_rows("rows", TensorShape((4, 2, 8), (8, 32, 1), 2))  # token-major memory
    check_rows("rows", TensorShape((0, 2, 8), (1, 1, 1), 2))
    with pytest.raises(TransferRefused, match="share memory"):
        check_rows("rows", TensorShape((4, 2, 8), (8, 16, 1), 2))
