"""A case as a call: memory filled at random, the arguments, and the comparison with the oracle.

There is slack around everything, so that a byte too many shows.
"""

from __future__ import annotations

import inspect
import random
from itertools import product
from typing import Protocol

import torch
from transfer_cases import BLOCKED, FUSED, SHAPES, TIGHT, Call, Case

from maru_kv_ops import torch_ops
from maru_kv_ops.formats import PageBufferShapeDesc
from maru_kv_ops.plan import TransferDirection

SLACK = 64


class Operations(Protocol):
    """What torch_ops, _host and _C have in common."""

    def multi_layer_kv_transfer(self, *args: object, **named: object) -> None: ...
    def single_layer_kv_transfer(self, *args: object, **named: object) -> None: ...
    def multi_layer_block_kv_transfer(self, *args: object, **named: object) -> None: ...


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
                block_size=case.block_tokens if case.block_size_known else 0,
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
        if case.format == BLOCKED and not case.split:
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
        if case.format in FUSED and case.split:
            tensor = tensor.unflatten(3, (2, case.head_size))  # type: ignore[no-untyped-call] # theirs
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


class _Recorded:
    """Takes a call down instead of making it."""

    def __init__(self) -> None:
        self.arguments: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        def record(*args: object, **named: object) -> None:
            signature = inspect.signature(getattr(torch_ops, name))
            bound = signature.bind(*args, **named)
            bound.apply_defaults()
            self.arguments = dict(bound.arguments)

        return record


def arguments_of(memory: Memory) -> dict[str, object]:
    """Return the call that ``memory`` would make, by the names of its arguments."""
    recorded = _Recorded()
    memory.call(recorded)  # type: ignore[arg-type] # it has every attribute
    return recorded.arguments
