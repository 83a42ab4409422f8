"""Random calls of the three copy operations, and an oracle that counts bytes.

The oracle shares nothing with the code under test. It has a table of physical shapes of its own,
walks each of them in nested loops, and finds a byte's place by counting the bytes that come before
it; the object's bytes are counted the same way. ``transfer_calls`` makes the calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product

import torch
from hypothesis import strategies as st

from maru_kv_ops.plan import TransferDirection

# Format number -> (how tensors are listed, axes of one of them outermost first, planes, heads' C).
SHAPES = {
    0: ("one", "BLPNH", 2, 1),
    1: ("layers", "PBNH", 2, 1),
    2: ("layers", "BPNH", 2, 1),
    3: ("layers", "BN", 1, 1),
    4: ("lists", "BNH", 2, 1),
    5: ("layers", "BN", 1, 1),
    6: ("layers", "PBHN", 2, 1),
    7: ("layers", "BPHN", 2, 1),
    8: ("one", "BLPHN", 2, 1),
    9: ("lists", "BNH", 2, 1),
    10: ("layers", "BHN", 1, 2),
    11: ("layers", "BNH", 1, 2),
    12: ("layers", "BHN", 1, 2),
    13: ("layers", "BNH", 1, 2),
    14: ("layers", "BN", 1, 1),
}
TIGHT = (4, 5)
ONE_HEAD = (3, 5, 14)
FUSED = (10, 11)
BLOCKED = 14
SCALE = 4
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


class Call(Enum):
    MULTI_LAYER = "multi_layer_kv_transfer"
    SINGLE_LAYER = "single_layer_kv_transfer"
    BLOCKS = "multi_layer_block_kv_transfer"


@dataclass(frozen=True)
class Case:
    call: Call
    format: int
    direction: TransferDirection
    dtype: torch.dtype
    blocks: int
    block_tokens: int
    heads: int
    layers: int
    head_size: int  # elements; of K alone where K and V are fused
    padding: int  # elements behind each block
    ids: tuple[int, ...]  # slots, or blocks
    skip: int = 0
    objects: int = 1
    token_major: bool = False
    swapped: bool = False  # heads and tokens of the tensor's view the other way round
    split: bool = False  # K and V, or a page's tokens, as an axis of the tensor's view
    block_size_known: bool = True  # to the call; some formats need none
    staging_padding: int = 0  # elements behind each row of the object
    shift: int = 0  # elements before everything: breaks alignment
    seed: int = 0

    @property
    def element(self) -> int:
        return torch.empty(0, dtype=self.dtype).element_size()

    @property
    def run(self) -> int:
        """Elements of one head and token."""
        return self.head_size * SHAPES[self.format][3]

    @property
    def width(self) -> int:
        return self.heads * self.run

    @property
    def planes(self) -> int:
        return SHAPES[self.format][2]

    # ------------------------------------------------------------------ the oracle's places

    def cache_places(self) -> dict[tuple[int, int, int, int, int], list[tuple[int, int, int]]]:
        """(plane, layer, block, token, head) -> [(tensor, first byte, bytes)], in object order."""
        listed, axes, _, _ = SHAPES[self.format]
        extent = {"B": self.blocks, "L": self.layers, "P": 2, "N": self.block_tokens}
        extent["H"] = self.heads
        run = self.run * self.element
        places: dict[tuple[int, int, int, int, int], list[tuple[int, int, int]]] = {}
        tensors = {"one": [(0, 0)], "layers": [(0, n) for n in range(self.layers)]}
        tensors["lists"] = [(p, n) for p in range(2) for n in range(self.layers)]
        for number, (plane, layer) in enumerate(tensors[listed]):
            at = 0
            outer = axes[: axes.index("B") + 1]
            inner = axes[axes.index("B") + 1 :]
            for before in product(*(range(extent[axis]) for axis in outer)):
                for after in product(*(range(extent[axis]) for axis in inner)):
                    index = dict(zip(outer + inner, before + after, strict=True))
                    key = (
                        index.get("P", plane),
                        index.get("L", layer),
                        index["B"],
                        index["N"],
                        index.get("H", 0),
                    )
                    width = run if "H" in axes else run * self.heads
                    if self.format == BLOCKED:
                        first = before[0] * (self.block_tokens * run + self.padding * self.element)
                        token = index["N"]
                        values = run - SCALE
                        places[key] = [
                            (number, first + token * values, values),
                            (number, first + self.block_tokens * values + token * SCALE, SCALE),
                        ]
                    else:
                        places[key] = [(number, at, width)]
                    at += width
                at += self.padding * self.element
        return places

    def tensor_bytes(self) -> int:
        """Bytes of one of the cache's tensors."""
        axes = SHAPES[self.format][1]
        page = self.block_tokens * self.width
        if "L" in axes:
            page *= self.layers
        if "P" in axes and axes.index("P") > axes.index("B"):
            page *= 2
        total = (page + self.padding) * self.blocks
        if axes.startswith("P"):
            total *= 2
        return total * self.element

    def num_tensors(self) -> int:
        listed = SHAPES[self.format][0]
        return {"one": 1, "layers": self.layers, "lists": 2 * self.layers}[listed]

    def tokens(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (object, position in it, block, token in the block) of everything that moves."""
        if self.call is not Call.BLOCKS:
            for position, slot in enumerate(self.ids):
                if slot >= 0 and position >= self.skip:
                    yield 0, position, slot // self.block_tokens, slot % self.block_tokens
            return
        per_object = len(self.ids) // self.objects
        for place, block in enumerate(self.ids):
            if block < 0 or place < self.skip:
                continue
            for token in range(self.block_tokens):
                position = place % per_object * self.block_tokens + token
                yield place // per_object, position, block, token

    def object_tokens(self) -> int:
        if self.call is Call.BLOCKS:
            return len(self.ids) // self.objects * self.block_tokens
        return len(self.ids)

    def object_shape(self) -> tuple[int, ...]:
        """Axes of one object without its width."""
        tokens = self.object_tokens()
        if self.call is not Call.SINGLE_LAYER:
            return (self.planes, self.layers, tokens)
        if self.planes == 1:
            return (tokens,)
        return (tokens, 2) if self.token_major else (2, tokens)

    def object_place(self, plane: int, layer: int, position: int) -> int:
        """Bytes before this row of an object."""
        if self.call is not Call.SINGLE_LAYER:
            wanted: tuple[int, ...] = (plane, layer, position)
        elif self.planes == 1:
            wanted = (position,)
        else:
            wanted = (position, plane) if self.token_major else (plane, position)
        before = 0
        for index in product(*(range(extent) for extent in self.object_shape())):
            if index == wanted:
                return before
            before += (self.width + self.staging_padding) * self.element
        raise AssertionError("no such row")

    def object_bytes(self) -> int:
        rows = 1
        for extent in self.object_shape():
            rows *= extent
        return rows * (self.width + self.staging_padding) * self.element


def small(call: Call, **changes: object) -> Case:
    """A case of two layers and three blocks of two tokens, with these changes."""
    values: dict[str, object] = {
        "call": call,
        "format": 13,
        "direction": TransferDirection.D2H,
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


@st.composite
def cases(draw: st.DrawFn, call: Call, format_number: int | None = None) -> Case:
    """One call, small enough to be checked byte by byte."""
    number = draw(st.integers(0, 14)) if format_number is None else format_number
    direction = draw(st.sampled_from(TransferDirection))
    dtype = draw(st.sampled_from(DTYPES))
    blocks = draw(st.integers(1, 5))
    block_tokens = draw(st.integers(1, 5))
    heads = 1
    if number not in ONE_HEAD:
        heads = draw(st.sampled_from([1, 2, 3, 3, 5, 6, 6, 7, 40, 128]))
    head_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 33]))
    if number == BLOCKED:
        head_size = draw(st.sampled_from([5, 8, 20, 132]))
        dtype = torch.uint8
    if heads > 7:
        head_size = draw(st.sampled_from([1, 2, 3]))
    padding = 0 if number in TIGHT else draw(st.sampled_from([0, 0, 1, 2, 7, 16]))
    rows_alone = number in (*TIGHT, 3) and padding == 0
    skip = 0
    objects = 1
    if call is Call.BLOCKS:
        objects = draw(st.integers(1, 3))
        per_object = draw(st.integers(1, 3))
        count, limit = objects * per_object, blocks
    else:
        count, limit = draw(st.integers(0, 6)), blocks * block_tokens
    ids: list[int] = []
    for _ in range(count):
        one = draw(st.integers(-2, limit - 1))
        if one >= 0 and one in ids and direction is TransferDirection.H2D:
            one = -1  # which of two loads into one slot comes last is nobody's promise
        ids.append(one)
    if call is not Call.SINGLE_LAYER:
        skip = draw(st.integers(0, count))
    return Case(
        call=call,
        format=number,
        direction=direction,
        dtype=dtype,
        blocks=blocks,
        block_tokens=block_tokens,
        heads=heads,
        layers=draw(st.integers(1, 3)),
        head_size=head_size,
        padding=padding,
        ids=tuple(ids),
        skip=skip,
        objects=objects,
        token_major=call is Call.SINGLE_LAYER and draw(st.booleans()),
        swapped=call is Call.SINGLE_LAYER and draw(st.booleans()),
        split=number in (*FUSED, BLOCKED) and draw(st.booleans()),
        block_size_known=not rows_alone or draw(st.booleans()),
        staging_padding=0 if call is Call.BLOCKS else draw(st.sampled_from([0, 0, 1, 5])),
        shift=draw(st.integers(0, 17)),
        seed=draw(st.integers(0, 2**32)),
    )
