"""The formats that the connector's layer loads can name, and those that each operation takes."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from maru_kv_ops import torch_ops
from maru_kv_ops.formats import FORMATS, Content, EngineKVFormat, Entries, FormatFacts
from maru_kv_ops.host_executor import host_module
from maru_kv_ops.plan import TransferDirection
from maru_kv_ops.staging import PRODUCED

BLOCKS, TOKENS, HEADS, HEAD = 3, 4, 2, 6
SLOTS = [9, 2, 7]


def operations() -> list[object]:
    """Every module that offers the operations for host memory here."""
    found = [pytest.param(torch_ops, id="torch")]
    missing = pytest.mark.skipif(host_module() is None, reason="maru_kv_ops._host is not built")
    found.append(pytest.param(host_module(), id="host", marks=missing))
    return found


def layer_of(facts: FormatFacts) -> tuple[torch.Tensor | list[torch.Tensor], int]:
    """One layer's cache in a format, and the elements of one token and plane."""
    width = HEADS * HEAD
    content = HEAD
    if facts.content is Content.FUSED_HEAD:
        width, content = 2 * width, 2 * HEAD
    if "H" not in facts.axes:
        width = content = 2 * HEAD
    size = {
        "B": BLOCKS,
        "N": TOKENS,
        "S": BLOCKS * TOKENS,
        "H": HEADS,
        "P": 2,
        "O": 1,
        "C": content,
    }
    shape = [size[letter] for letter in facts.axes if letter != "L"]
    tensors = [
        torch.zeros(shape, dtype=torch.uint8)
        for _ in range(2 if facts.entries is Entries.PER_PLANE_AND_LAYER else 1)
    ]
    return (tensors if len(tensors) > 1 else tensors[0]), width


@pytest.mark.parametrize("module", operations())
@pytest.mark.parametrize("format", list(EngineKVFormat))
def test_every_format_of_the_table_is_taken_and_comes_back(
    module: ModuleType, format: EngineKVFormat
) -> None:
    facts = FORMATS[format]
    cache, width = layer_of(facts)
    shape = (len(SLOTS), width) if facts.kv_size == 1 else (2, len(SLOTS), width)
    staging = torch.arange(torch.Size(shape).numel()).to(torch.uint8).reshape(shape)
    slots = torch.tensor(SLOTS)
    module.single_layer_kv_transfer(staging, cache, slots, TransferDirection.H2D, format)
    back = torch.zeros_like(staging)
    module.single_layer_kv_transfer(back, cache, slots, TransferDirection.D2H, format)
    assert torch.equal(back, staging)


@pytest.mark.parametrize("module", operations())
def test_what_layer_loads_can_name_is_in_the_table_and_nothing_beyond_it_is_taken(
    module: ModuleType,
) -> None:
    assert set(PRODUCED) <= set(FORMATS)
    staging, slots = torch.zeros(1, 4, dtype=torch.uint8), torch.tensor([0])
    cache = torch.zeros(1, 1, 4, dtype=torch.uint8)
    for number in (-1, len(FORMATS)):
        with pytest.raises(ValueError, match="format"):
            module.single_layer_kv_transfer(staging, cache, slots, TransferDirection.H2D, number)
