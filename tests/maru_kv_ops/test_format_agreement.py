"""The two tables of formats say the same: ``formats.py`` and ``csrc/formats.h``.

The header is read as text, so this holds where neither a compiler nor torch is.
"""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from maru_kv_ops.formats import (
    FORMATS,
    SCALE_BYTES,
    Content,
    EngineKVFormat,
    Entries,
    PageBufferShapeDesc,
)
from maru_kv_ops.header_interface import interface
from maru_kv_ops.plan import TransferDirection
from maru_kv_ops.vendor import CSRC

HEADER = interface({"formats.h": (CSRC / "formats.h").read_text()})
ENTRIES = {
    Entries.ONE_TENSOR: "kOneTensor",
    Entries.PER_LAYER: "kPerLayer",
    Entries.PER_PLANE_AND_LAYER: "kPerPlaneAndLayer",
}
CONTENT = {
    Content.HEAD: "kHead",
    Content.FUSED_HEAD: "kFusedHead",
    Content.BLOCKED_SCALE: "kBlockedScale",
}


def _declaration(name: str) -> str:
    (text,) = HEADER[name]
    return text


def _enumerators(name: str) -> dict[str, int]:
    found = re.findall(r"(\w+) = (\d+)", _declaration(name).partition("{")[2])
    return {key: int(value) for key, value in found}


def _rows() -> dict[str, dict[str, str]]:
    """The rows of ``kFormats`` by format, each as field -> last word of its value."""
    names = re.findall(r"(\w+);", _declaration("FormatFacts").partition("constexpr")[0])
    rows = re.findall(r"\{([^{}]+)\}", _declaration("kFormats").partition("=")[2])
    split = [[value.rpartition("::")[2].strip(' "') for value in row.split(",")] for row in rows]
    return {values[0]: dict(zip(names, values, strict=True)) for values in split}


def _planes(facts_axes: str, entries: Entries) -> str:
    if entries is Entries.PER_PLANE_AND_LAYER:
        return "kOwnTensor"
    if "P" not in facts_axes:
        return "kNone"
    inside = facts_axes.index("B") < facts_axes.index("P")
    return "kInsideBlock" if inside else "kOutsideBlock"


def test_formats_have_the_same_names_and_numbers() -> None:
    assert _enumerators("EngineKVFormat") == {f.name: f.value for f in EngineKVFormat}
    assert _declaration("kNumFormats").endswith(f"= {len(EngineKVFormat)}")


def test_directions_have_the_same_names_and_numbers() -> None:
    assert _enumerators("TransferDirection") == {d.name: int(d) for d in TransferDirection}


@pytest.mark.parametrize("kv_format", EngineKVFormat, ids=lambda kv_format: kv_format.name)
def test_every_format_has_the_same_facts(kv_format: EngineKVFormat) -> None:
    facts = FORMATS[kv_format]
    assert _rows()[kv_format.name] == {
        "format": kv_format.name,
        "name": kv_format.name,
        "entries": ENTRIES[facts.entries],
        "planes": _planes(facts.axes, facts.entries),
        "page": "kHeadMajor" if facts.head_major else "kTokenMajor",
        "run": CONTENT[facts.content],
        "blocks_are_tight": "true" if facts.blocks_are_tight else "false",
    }


def test_no_table_has_a_row_more() -> None:
    assert list(_rows()) == [f.name for f in FORMATS] == [f.name for f in EngineKVFormat]


def test_the_scale_of_a_token_has_the_same_size() -> None:
    assert _declaration("kScaleBytes").endswith(f"= {SCALE_BYTES}")


def test_the_shape_has_the_same_fields_and_defaults() -> None:
    found = re.findall(r"int64_t (\w+) = (\d+);", _declaration("PageBufferShapeDesc"))
    shape = PageBufferShapeDesc()
    assert found == [(field.name, str(getattr(shape, field.name))) for field in fields(shape)]
