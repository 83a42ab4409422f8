"""The field's table of formats: what its rows say, and what follows from them."""

from __future__ import annotations

import pytest

from maru_kv_ops.formats import FORMATS, Content, EngineKVFormat, Entries, PageBufferShapeDesc

LETTERS = {
    "NL": "L",
    "NB": "B",
    "TWO": "P",
    "BS": "N",
    "NH": "H",
    "NBBS": "S",
    "ONE": "O",
    "HS": "C",
    "CS": "C",
}
BLOCKED_SCALE = EngineKVFormat.NL_X_NB_BSV_BSS


def axes_in_the_name(name: str) -> str:
    """The letters of one entry's axes: what follows the last list boundary."""
    entry = name.rpartition("_X_")[2].removesuffix("_TWO_HS") if "_X_" in name else name
    letters = "".join(LETTERS[word] for word in entry.split("_"))
    return letters if letters.endswith("C") else letters + "C"


@pytest.mark.parametrize("number", [row for row in EngineKVFormat if row is not BLOCKED_SCALE])
def test_the_axes_of_a_row_are_those_of_its_name(number: EngineKVFormat) -> None:
    assert FORMATS[number].axes == axes_in_the_name(number.name)


def test_numbers_are_those_that_the_field_uses() -> None:
    assert [(int(row), row.name) for row in EngineKVFormat] == [
        (0, "NB_NL_TWO_BS_NH_HS"),
        (1, "NL_X_TWO_NB_BS_NH_HS"),
        (2, "NL_X_NB_TWO_BS_NH_HS"),
        (3, "NL_X_NB_BS_HS"),
        (4, "TWO_X_NL_X_NBBS_NH_HS"),
        (5, "NL_X_NBBS_ONE_HS"),
        (6, "NL_X_TWO_NB_NH_BS_HS"),
        (7, "NL_X_NB_TWO_NH_BS_HS"),
        (8, "NB_NL_TWO_NH_BS_HS"),
        (9, "TWO_X_NL_X_NB_BS_NH_HS"),
        (10, "NL_X_NB_NH_BS_TWO_HS"),
        (11, "NL_X_NB_BS_NH_TWO_HS"),
        (12, "NL_X_NB_NH_BS_CS"),
        (13, "NL_X_NB_BS_NH_CS"),
        (14, "NL_X_NB_BSV_BSS"),
    ]
    assert list(FORMATS) == list(EngineKVFormat)
    assert all(row.format is number for number, row in FORMATS.items())


def test_k_and_v_are_two_planes_unless_they_are_fused_or_one_latent() -> None:
    two_planes = {int(number) for number, row in FORMATS.items() if row.kv_size == 2}

    assert two_planes == {0, 1, 2, 4, 6, 7, 8, 9}


def test_a_cache_is_named_by_one_address_or_one_per_layer_or_two() -> None:
    addresses = {int(number): row.num_pointers(5) for number, row in FORMATS.items()}

    assert [number for number, count in addresses.items() if count == 1] == [0, 8]
    assert [number for number, count in addresses.items() if count == 10] == [4, 9]
    assert sorted(set(addresses.values())) == [1, 5, 10]


def test_heads_lie_outside_tokens_in_five_formats() -> None:
    assert [int(number) for number, row in FORMATS.items() if row.head_major] == [6, 7, 8, 10, 12]


def test_the_older_fused_names_are_the_same_bytes_as_the_newer() -> None:
    for older, newer in ((10, 12), (11, 13)):
        one, other = FORMATS[EngineKVFormat(older)], FORMATS[EngineKVFormat(newer)]
        assert (one.entries, one.axes, one.content) == (other.entries, other.axes, other.content)
        assert one.content is Content.FUSED_HEAD


def test_only_rows_that_lie_alone_need_no_block_size() -> None:
    assert [int(number) for number, row in FORMATS.items() if not row.needs_block_size] == [3, 4, 5]
    assert [int(number) for number, row in FORMATS.items() if row.blocks_are_tight] == [4, 5]


def test_lists_are_what_the_names_say() -> None:
    for number, row in FORMATS.items():
        expected = Entries.ONE_TENSOR
        if number.name.startswith("NL_X_"):
            expected = Entries.PER_LAYER
        if number.name.startswith("TWO_X_NL_X_"):
            expected = Entries.PER_PLANE_AND_LAYER
        assert row.entries is expected, number.name


def test_a_shape_is_made_empty_and_filled_by_attributes_as_callers_of_the_field_do() -> None:
    shape = PageBufferShapeDesc()
    assert shape == PageBufferShapeDesc(0, 0, 0, 0, 0, 0, 0, 0)

    shape.kv_size, shape.nl, shape.nb, shape.bs = 2, 32, 64, 16
    shape.nh, shape.hs, shape.element_size, shape.block_stride_elems = 8, 128, 2, 0

    assert shape == PageBufferShapeDesc(
        kv_size=2, nl=32, nb=64, bs=16, nh=8, hs=128, element_size=2, block_stride_elems=0
    )
    with pytest.raises(AttributeError):
        shape.block_size = 16  # type: ignore[attr-defined] # a name that the shape does not have
