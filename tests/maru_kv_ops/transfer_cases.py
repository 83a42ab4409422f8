"""Random calls of the three copy operations, and an oracle that counts bytes.

The oracle shares nothing with the code under test. It has a table of physical shapes of its own,
walks each of them in nested loops, and finds a byte's place by counting the bytes that come before
it; the object's bytes are counted the same way. Both memories are filled at random, with slack
around everything, so that a byte too many shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import product
from typing import Protocol

import torch
from hypothesis import strategies as st

from maru_kv_ops.formats import PageBufferShapeDesc
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
BLOCKED = 14
SCALE = 4
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)
SLACK = 64


class Operations(Protocol):
    """What torch_ops, _host and _C have in common."""

    def multi_layer_kv_transfer(self, *args: object, **named: object) -> None: ...
    def single_layer_kv_transfer(self, *args: object, **named: object) -> None: ...
    def multi_layer_block_kv_transfer(self, *args: object, **named: object) -> None: ...


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
        listed, axes, planes, _ = SHAPES[self.format]
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
        assert planes in (1, 2)
        return places

    def tensor_bytes(self) -> int:
        """Bytes of one of the cache's tensors."""
        listed, axes, _, _ = SHAPES[self.format]
        page = self.block_tokens * self.width
        if "L" in axes:
            page *= self.layers
        if "P" in axes and axes.index("P") > axes.index("B"):
            page *= 2
        total = (page + self.padding) * self.blocks
        if axes.startswith("P"):
            total *= 2
        assert listed
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


class Memory:
    """The buffers of one case, filled at random."""

    def __init__(self, case: Case) -> None:
        rng = random.Random(case.seed)

        def buffer(size: int) -> torch.Tensor:
            # Elements stay aligned to their size; wider units need not be.
            total = SLACK + case.shift * case.element + size + SLACK
            return torch.tensor(list(rng.randbytes(-(-total // 16) * 16)), dtype=torch.uint8)

        self.case = case
        self.start = SLACK + case.shift * case.element
        self.caches = [buffer(case.tensor_bytes()) for _ in range(case.num_tensors())]
        self.objects = [buffer(case.object_bytes()) for _ in range(case.objects)]

    def expected(self) -> tuple[list[bytearray], list[bytearray]]:
        """Every buffer after the call."""
        case = self.case
        caches = [bytearray(buffer.numpy().tobytes()) for buffer in self.caches]
        objects = [bytearray(buffer.numpy().tobytes()) for buffer in self.objects]
        places = case.cache_places()
        layers = 1 if case.call is Call.SINGLE_LAYER else case.layers
        heads = range(case.heads) if "H" in SHAPES[case.format][1] else range(1)
        for number, position, block, token in case.tokens():
            for plane, layer in product(range(case.planes), range(layers)):
                at = self.start + case.object_place(plane, layer, position)
                for head in heads:
                    for tensor, first, size in places[plane, layer, block, token, head]:
                        first += self.start
                        if case.direction is TransferDirection.H2D:
                            caches[tensor][first : first + size] = objects[number][at : at + size]
                        else:
                            objects[number][at : at + size] = caches[tensor][first : first + size]
                        at += size
        return caches, objects

    def call(self, ops: Operations) -> None:
        """Make the call."""
        case = self.case
        ids = torch.tensor(case.ids, dtype=torch.int64)
        pointers = torch.tensor([buffer.data_ptr() + self.start for buffer in self.caches])
        stride = 0
        if case.padding:
            stride = case.tensor_bytes() // case.element // case.blocks
            stride //= 2 if SHAPES[case.format][1].startswith("P") else 1
        if case.call is Call.MULTI_LAYER:
            ops.multi_layer_kv_transfer(
                self.object_tensor(0),
                pointers,
                ids,
                torch.device("cpu"),
                case.blocks * case.block_tokens,
                case.direction,
                case.format,
                block_size=case.block_tokens,
                head_size=case.head_size,
                skip_prefix_n_tokens=case.skip,
                block_stride_elems=stride,
            )
        elif case.call is Call.SINGLE_LAYER:
            listed = SHAPES[case.format][0] == "lists"
            tensors = [self.layer_tensor(0)]
            if listed:
                tensors.append(self.layer_tensor(case.layers))
            ops.single_layer_kv_transfer(
                self.object_tensor(0),
                tensors if listed else tensors[0],
                ids,
                case.direction,
                case.format,
                token_major=case.token_major,
            )
        else:
            ops.multi_layer_block_kv_transfer(
                pointers,
                [buffer.data_ptr() + self.start for buffer in self.objects],
                ids,
                torch.device("cpu"),
                case.direction,
                PageBufferShapeDesc(
                    kv_size=case.planes,
                    nl=case.layers,
                    nb=case.blocks,
                    bs=case.block_tokens,
                    nh=case.heads,
                    hs=case.run,
                    element_size=case.element,
                    block_stride_elems=stride,
                ),
                case.object_tokens(),
                case.format,
                case.skip,
            )

    def object_tensor(self, number: int) -> torch.Tensor:
        case = self.case
        shape = case.object_shape()
        strides = []
        step = case.width + case.staging_padding
        for extent in reversed(shape):
            strides.insert(0, step)
            step *= extent
        flat = self.objects[number][self.start % case.element :].view(case.dtype)
        return flat.as_strided((*shape, case.width), (*strides, 1), self.start // case.element)

    def layer_tensor(self, number: int) -> torch.Tensor:
        """The tensor of layer 0 as an engine hands it out."""
        case = self.case
        _, axes, _, _ = SHAPES[case.format]
        flat = self.caches[number].view(case.dtype)
        extent = {"B": case.blocks, "P": 2, "N": case.block_tokens, "H": case.heads, "C": case.run}
        extent["L"] = case.layers
        strides: dict[str, int] = {"C": 1}
        step = case.run
        for axis in reversed(axes):
            if axis == "B":
                step += case.padding
            strides[axis] = step
            step *= extent[axis]
        letters = axes.replace("L", "") + "C"
        if case.format == BLOCKED:
            return flat.as_strided(
                (case.blocks, case.block_tokens * case.run),
                (strides["B"], 1),
                self.start // case.element,
            )
        if case.format in TIGHT:
            letters = letters.replace("BN", "N")
            extent["N"] = case.blocks * case.block_tokens
        if case.swapped and "H" in letters and case.format not in TIGHT:
            letters = letters.translate(str.maketrans("HN", "NH"))
        tensor = flat.as_strided(
            [extent[axis] for axis in letters],
            [strides[axis] for axis in letters],
            self.start // case.element,
        )
        return tensor.unsqueeze(1) if case.format == 5 else tensor


def check(case: Case, ops: Operations) -> None:
    """Make the call and compare every byte of every buffer with the oracle's."""
    memory = Memory(case)
    caches, objects = memory.expected()
    memory.call(ops)
    for name, found, expected in (
        ("cache", memory.caches, caches),
        ("object", memory.objects, objects),
    ):
        for number, (buffer, wanted) in enumerate(zip(found, expected, strict=True)):
            got = buffer.numpy().tobytes()
            if got != bytes(wanted):
                wrong = [i for i in range(len(got)) if got[i] != wanted[i]]
                raise AssertionError(
                    f"{name} {number}: {len(wrong)} wrong bytes, the first at "
                    f"{wrong[0] - memory.start}: {case}"
                )


@st.composite
def cases(draw: st.DrawFn, call: Call, format_number: int | None = None) -> Case:
    """One call, small enough to be checked byte by byte."""
    number = draw(st.integers(0, 14)) if format_number is None else format_number
    direction = draw(st.sampled_from(TransferDirection))
    dtype = torch.uint8 if number == BLOCKED else draw(st.sampled_from(DTYPES))
    blocks = draw(st.integers(1, 5))
    block_tokens = draw(st.integers(1, 5))
    heads = 1
    if number not in ONE_HEAD:
        heads = draw(st.sampled_from([1, 2, 3, 3, 5, 40]))
    head_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 33]))
    if number == BLOCKED:
        head_size = draw(st.sampled_from([5, 8, 20, 132]))
    padding = 0 if number in TIGHT else draw(st.sampled_from([0, 0, 1, 2, 7, 16]))
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
        staging_padding=0 if call is Call.BLOCKS else draw(st.sampled_from([0, 0, 1, 5])),
        shift=draw(st.integers(0, 17)),
        seed=draw(st.integers(0, 2**32)),
    )
