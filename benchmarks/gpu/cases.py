"""The calls that are checked: every format, direction and copy unit of every operation.

A copy moves each row in the widest unit (16, 8, 4, 2 or 1 bytes) that both of its addresses and its
length allow. What narrows it differs, so each unit is reached in every way that there is: by the
length of a row, by bases, by the stride between blocks. Sizes are chosen so that no two of them can
be taken for each other: 7 blocks, 4 tokens, 3 heads, 2 layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, unique

import torch

from maru_kv_ops.formats import FORMATS, SCALE_BYTES, Content, EngineKVFormat, FormatFacts
from maru_kv_ops.plan import CopyPlan, Repeat, StridedCopy, TransferDirection

UNITS = (16, 8, 4, 2, 1)


@unique
class Operation(StrEnum):
    """The values are the names of the functions."""

    MULTI_LAYER = "multi_layer_kv_transfer"
    SINGLE_LAYER = "single_layer_kv_transfer"
    BLOCKS = "multi_layer_block_kv_transfer"


@unique
class NarrowedBy(StrEnum):
    """What leaves no wider unit than the one that is checked."""

    ROWS = "row length"
    BASES = "bases"
    STRIDES = "strides"
    NOTHING = "nothing, long rows"
    """Rows of several KiB, in whole units of 16 bytes: more than one piece of a launch."""


@unique
class ObjectPlace(StrEnum):
    """Where objects and staging tensors lie."""

    HOST = "host"
    DEVICE = "device"


@unique
class View(StrEnum):
    """How a layer's tensor or its staging is shown to ``single_layer_kv_transfer``."""

    PHYSICAL = "physical"
    LOGICAL = "logical"
    """Tokens before heads over head-major memory, as engines hand it out."""
    TOKEN_MAJOR = "token-major staging"


@dataclass(frozen=True, slots=True)
class TransferCase:
    """One call of one operation."""

    operation: Operation
    format: EngineKVFormat
    direction: TransferDirection
    unit: int
    narrowed_by: NarrowedBy
    place: ObjectPlace
    view: View = View.PHYSICAL

    def __str__(self) -> str:
        return (
            f"{self.operation} {self.format.name} {_way(self.direction)}, unit {self.unit} by "
            f"{self.narrowed_by}, objects on the {self.place}, {self.view} view"
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a case's cache, in elements where nothing else is said."""

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    head_size: int
    """Of K alone where K and V are fused."""
    run: int
    """Of one head and token."""
    dtype: torch.dtype
    block_padding: int
    row_padding: int
    """Behind each row of an object."""
    shift_bytes: int
    """Before everything."""

    @property
    def width(self) -> int:
        """Of one token and plane."""
        return self.heads * self.run


@dataclass(frozen=True, slots=True)
class Extents:
    """One tensor of a cache: sizes and strides by axis letter, and its elements."""

    sizes: dict[str, int]
    strides: dict[str, int]
    elements: int


def sizes_of(case: TransferCase) -> Sizes | None:
    """The sizes that leave just this unit; None if this format has none that do."""
    facts, unit = FORMATS[case.format], case.unit
    fused = 2 if facts.content is Content.FUSED_HEAD else 1
    dtype = {16: torch.bfloat16, 8: torch.bfloat16, 4: torch.float32, 2: torch.bfloat16}.get(unit)
    if case.narrowed_by is NarrowedBy.ROWS and fused == 2:
        if unit == 1:
            return None  # K and V fused are an even number of bytes
        dtype = {16: torch.float32, 4: torch.bfloat16, 2: torch.uint8}.get(unit, dtype)
    if facts.content is Content.BLOCKED_SCALE or dtype is None:
        dtype = torch.uint8
    long = case.narrowed_by is NarrowedBy.NOTHING
    run_bytes = {NarrowedBy.ROWS: 3 * unit, NarrowedBy.NOTHING: 1024}.get(case.narrowed_by, 64)
    run = run_bytes // dtype.itemsize
    padding = unit // dtype.itemsize if case.narrowed_by is NarrowedBy.STRIDES else 0
    one_head = "H" not in facts.axes
    return Sizes(
        layers=2,
        blocks=40 if long else 7,
        block_tokens=16 if long else 4,
        heads=1 if one_head else 6 if long else 3,
        head_size=run // fused,
        run=run + (SCALE_BYTES if facts.content is Content.BLOCKED_SCALE else 0),
        dtype=dtype,
        block_padding=0 if facts.blocks_are_tight else padding,
        row_padding=0 if case.operation is Operation.BLOCKS else padding,
        shift_bytes=unit if case.narrowed_by is NarrowedBy.BASES else 0,
    )


def extents_of(facts: FormatFacts, sizes: Sizes) -> Extents:
    """Where a tensor's elements lie, from the format's axes."""
    extent = {"B": sizes.blocks, "N": sizes.block_tokens, "H": sizes.heads, "P": 2, "O": 1}
    extent |= {"L": sizes.layers, "S": sizes.blocks * sizes.block_tokens, "C": sizes.run}
    stride = {"C": 1}
    step = sizes.run
    for letter in reversed(facts.axes[:-1]):
        if letter == "B":
            step += sizes.block_padding
        stride[letter] = step
        step *= extent[letter]
    return Extents({letter: extent[letter] for letter in facts.axes}, stride, step)


def transfer_cases() -> Iterator[TransferCase]:
    """Every case of the three operations."""
    for operation in Operation:
        on_host_only = operation is Operation.BLOCKS  # it takes objects by their address
        for facts in FORMATS.values():
            for direction in TransferDirection:
                for place in (ObjectPlace.HOST,) if on_host_only else ObjectPlace:
                    for case in _units_of(operation, facts, direction, place):
                        if sizes_of(case) is not None:
                            yield case


def _units_of(
    operation: Operation, facts: FormatFacts, direction: TransferDirection, place: ObjectPlace
) -> Iterator[TransferCase]:
    for unit in UNITS:
        for narrowed_by in (NarrowedBy.ROWS, NarrowedBy.BASES, NarrowedBy.STRIDES):
            no_stride = facts.blocks_are_tight and operation is Operation.BLOCKS
            if not (narrowed_by is NarrowedBy.STRIDES and no_stride):
                yield TransferCase(operation, facts.format, direction, unit, narrowed_by, place)
    yield TransferCase(operation, facts.format, direction, 16, NarrowedBy.NOTHING, place)
    if operation is Operation.SINGLE_LAYER:
        views = [View.LOGICAL] if facts.head_major else []
        views += [View.TOKEN_MAJOR] if facts.kv_size == 2 else []
        for view in views:
            yield TransferCase(operation, facts.format, direction, 8, NarrowedBy.ROWS, place, view)


# ---------------------------------------------------------------------------- plans


@unique
class PlanShape(StrEnum):
    """How the runs of a plan lie."""

    SCATTERED = "scattered runs"
    REPEATED = "runs repeated along two axes, one of them backwards"
    MANY = "more runs than one launch takes"
    LONG = "runs of several pieces"


@unique
class ObjectMemory(StrEnum):
    """What a plan's objects lie in."""

    PINNED = "pinned"
    PAGEABLE = "pageable"


@dataclass(frozen=True, slots=True)
class PlanCase:
    """One plan, to be run by one executor."""

    shape: PlanShape
    direction: TransferDirection
    unit: int
    memory: ObjectMemory = ObjectMemory.PINNED

    def __str__(self) -> str:
        return f"run_plan {_way(self.direction)}, unit {self.unit}, {self.shape}, {self.memory}"


def plan_cases() -> Iterator[PlanCase]:
    """Every plan that is checked; a kernel takes only those over pinned memory."""
    for shape in PlanShape:
        for direction in TransferDirection:
            for unit in UNITS:
                for memory in ObjectMemory:
                    yield PlanCase(shape, direction, unit, memory)


def plan_of(case: PlanCase) -> CopyPlan:
    """The plan: its addresses and lengths are odd multiples of the unit."""
    runs = {PlanShape.MANY: 501, PlanShape.LONG: 3}.get(case.shape, 5)
    width = (3 if case.shape is not PlanShape.LONG else (1 << 20) // case.unit + 1) * case.unit
    step = width + case.unit * (2 if width // case.unit % 2 else 1)  # again odd
    repeats: tuple[Repeat, ...] = ()
    first, copies = case.unit, 1
    if case.shape is PlanShape.REPEATED:
        repeats = (
            Repeat(2, -3 * runs * step, 3 * runs * width),
            Repeat(3, runs * step, runs * width),
        )
        first, copies = case.unit + 3 * runs * step, 6
    copy = StridedCopy(
        region=0,
        width=width,
        repeats=repeats,
        # 2 has no factor in common with an odd number of runs: a permutation
        cache_starts=tuple(first + (2 * i + 1) % runs * step for i in range(runs)),
        object_starts=tuple(case.unit + i * width for i in range(runs)),
    )
    return CopyPlan(
        direction=case.direction,
        copies=(copy,),
        region_ends=(case.unit + copies * runs * step,),
        object_end=case.unit + copies * runs * width,
        num_bytes=copies * runs * width,
    )


def _way(direction: TransferDirection) -> str:
    return "load" if direction is TransferDirection.H2D else "store"
