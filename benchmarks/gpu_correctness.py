"""Every format, direction and copy unit of the three operations, against the torch baseline.

For ``gpu_check.py``, and without a GPU for its test: everything here takes the operations and the
device. Both sides of a case start from the same random bytes; one copy runs through the operations
under test, one through the baseline, and then all bytes of cache and objects are compared, slack
around them included. The baseline itself is held against an oracle in the test suite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch

from maru_kv_ops.cache_tensors import CacheTensor, paged_caches
from maru_kv_ops.executors import CopyMemory, Executor
from maru_kv_ops.formats import FORMATS, Content, EngineKVFormat, FormatFacts, PageBufferShapeDesc
from maru_kv_ops.layouts import CacheExtents, KVLayout, layout_strides
from maru_kv_ops.plan import PagePlanner, TransferDirection, join_plans
from maru_kv_ops.torch_executor import TorchExecutor
from maru_kv_ops.views import object_view_for

UNITS = (16, 8, 4, 2, 1)
"""Bytes of one access, widest first: bases and rows of a case are multiples of exactly this."""
LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, PADDING = 3, 6, 5, 4, 2
SLACK = 256


class Operation(Enum):
    """Which of the three."""

    MULTI_LAYER = "multi_layer_kv_transfer"
    SINGLE_LAYER = "single_layer_kv_transfer"
    BLOCKS = "multi_layer_block_kv_transfer"


class Operations(Protocol):
    """The functions under test: a module, or the baseline."""

    multi_layer_kv_transfer: Callable[..., None]
    single_layer_kv_transfer: Callable[..., None]
    multi_layer_block_kv_transfer: Callable[..., None]


@dataclass(frozen=True)
class Case:
    """One call."""

    operation: Operation
    format: EngineKVFormat
    direction: TransferDirection
    unit: int

    def __str__(self) -> str:
        return (
            f"{self.operation.value}, format {int(self.format)} {self.format.name}, "
            f"{self.direction.name}, unit {self.unit}"
        )


def all_cases() -> Iterator[Case]:
    """Every combination."""
    for operation in Operation:
        for format_number in EngineKVFormat:
            for direction in TransferDirection:
                for unit in UNITS:
                    yield Case(operation, format_number, direction, unit)


@dataclass
class Memory:
    """Buffers of one case; ``caches`` on the device, ``objects`` in pinned host memory.

    The staging of one layer lies on the device: that is how the connector loads layer by layer, and
    a kernel is launched otherwise for it.
    """

    caches: list[torch.Tensor]
    objects: list[torch.Tensor]
    start: int

    def clone(self) -> Memory:
        """The same bytes in memory of its own, pinned where the original is."""
        return Memory(
            [cache.clone() for cache in self.caches],
            [_like(stored) for stored in self.objects],
            self.start,
        )

    def differs_from(self, other: Memory) -> str | None:
        """Where the two differ, or None."""
        for name, ours, theirs in (
            ("cache", self.caches, other.caches),
            ("object", self.objects, other.objects),
        ):
            for number, (one, two) in enumerate(zip(ours, theirs, strict=True)):
                wrong = int((one != two).sum())
                if wrong:
                    return f"{wrong} wrong bytes in {name} {number}"
        return None


def _like(stored: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(stored, pin_memory=stored.is_pinned())
    return copy.copy_(stored)


@dataclass(frozen=True)
class Sizes:
    """Of one case, in bytes (elements are bytes here)."""

    facts: FormatFacts
    heads: int
    head_size: int
    padding: int

    @property
    def run(self) -> int:
        """One head and token."""
        return self.head_size * (2 if self.facts.content is Content.FUSED_HEAD else 1)

    @property
    def width(self) -> int:
        """One token and plane."""
        return self.heads * self.run

    @property
    def block_bytes(self) -> int:
        """From one block to the next."""
        page = BLOCK_TOKENS * self.width
        if "L" in self.facts.axes:
            page *= LAYERS
        if "P" in self.facts.axes and not self.facts.axes.startswith("P"):
            page *= 2
        return page + self.padding

    @property
    def tensor_bytes(self) -> int:
        """One of the cache's tensors."""
        return self.block_bytes * BLOCKS * (2 if self.facts.axes.startswith("P") else 1)


def sizes_of(case: Case) -> Sizes:
    """Row lengths and strides whose widest common unit is the case's."""
    facts = FORMATS[case.format]
    heads = 1 if facts.content is Content.BLOCKED_SCALE or "H" not in facts.axes else HEADS
    head_size = 5 * case.unit
    if facts.content is Content.BLOCKED_SCALE:
        head_size = 5 * case.unit + 4
    padding = 0 if facts.blocks_are_tight else PADDING * case.unit
    return Sizes(facts, heads, head_size, padding)


def check(case: Case, operations: Operations, baseline: Operations, device: torch.device) -> None:
    """Raise ``AssertionError`` naming the case unless both leave the same bytes behind."""
    ours = _memory(case, device)
    theirs = ours.clone()
    _call(case, operations, ours, device)
    _call(case, baseline, theirs, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    difference = ours.differs_from(theirs)
    if difference is not None:
        raise AssertionError(f"{case}: {difference}")


def _memory(case: Case, device: torch.device) -> Memory:
    sizes = sizes_of(case)
    start = SLACK + case.unit
    torch.manual_seed(int(case.format) * 100 + case.unit)

    def buffer(num_bytes: int) -> torch.Tensor:
        return torch.randint(0, 256, (start + num_bytes + SLACK,), dtype=torch.uint8)

    planes = sizes.facts.kv_size
    tokens = 2 * BLOCK_TOKENS
    count, rows = 1, planes * LAYERS * tokens
    if case.operation is Operation.BLOCKS:
        count, rows = 2, planes * LAYERS * tokens
    objects = [buffer(rows * sizes.width) for _ in range(count)]
    if case.operation is Operation.SINGLE_LAYER:
        objects = [stored.to(device) for stored in objects]
    elif device.type == "cuda":
        objects = [stored.pin_memory() for stored in objects]
    tensors = sizes.facts.num_pointers(LAYERS)
    return Memory([buffer(sizes.tensor_bytes).to(device) for _ in range(tensors)], objects, start)


def _call(case: Case, operations: Operations, memory: Memory, device: torch.device) -> None:
    sizes = sizes_of(case)
    facts = sizes.facts
    pointers = torch.tensor([cache.data_ptr() + memory.start for cache in memory.caches])
    pointers = pointers.to(device)
    tokens = 2 * BLOCK_TOKENS
    slots = torch.tensor([*range(BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS + 1), -1, 0, 29, 17, 2])
    slots = slots[:tokens].to(device)
    stride = sizes.block_bytes if sizes.padding else 0
    if case.operation is Operation.BLOCKS:
        shape = PageBufferShapeDesc(
            facts.kv_size, LAYERS, BLOCKS, BLOCK_TOKENS, sizes.heads, sizes.run, 1, stride
        )
        operations.multi_layer_block_kv_transfer(
            pointers,
            [stored.data_ptr() + memory.start for stored in memory.objects],
            torch.tensor([5, -1, 0, 3]).to(device),
            device,
            case.direction,
            shape,
            tokens,
            case.format,
            1,
        )
        return
    rows = memory.objects[0][memory.start :]
    shape_of_object = (facts.kv_size, LAYERS, tokens, sizes.width)
    count = facts.kv_size * LAYERS * tokens * sizes.width
    key_value = rows[:count].view(shape_of_object)
    if case.operation is Operation.MULTI_LAYER:
        operations.multi_layer_kv_transfer(
            key_value,
            pointers,
            slots,
            device,
            BLOCKS * BLOCK_TOKENS,
            case.direction,
            case.format,
            block_size=BLOCK_TOKENS,
            head_size=sizes.head_size,
            skip_prefix_n_tokens=1,
            block_stride_elems=stride,
        )
        return
    staging = key_value[:, 1] if facts.kv_size == 2 else key_value[0, 1]
    tensors = [_layer_tensor(sizes, cache, memory.start) for cache in _of_one_layer(facts, memory)]
    operations.single_layer_kv_transfer(
        staging, tensors if len(tensors) > 1 else tensors[0], slots, case.direction, case.format
    )


def _of_one_layer(facts: FormatFacts, memory: Memory) -> list[torch.Tensor]:
    step = LAYERS if facts.num_pointers(1) == 2 else len(memory.caches)
    return memory.caches[::step]


def _layer_tensor(sizes: Sizes, cache: torch.Tensor, start: int) -> torch.Tensor:
    """Layer 0 in its format's physical shape."""
    axes = sizes.facts.axes
    extent = {"B": BLOCKS, "P": 2, "N": BLOCK_TOKENS, "H": sizes.heads, "O": 1, "L": LAYERS}
    extent |= {"S": BLOCKS * BLOCK_TOKENS, "C": sizes.run}
    stride = {"C": 1}
    step = sizes.run
    for axis in reversed(axes[:-1]):
        if axis == "B":
            step += sizes.padding
        stride[axis] = step
        step *= extent[axis]
    shown = axes.replace("L", "")
    return cache.as_strided(
        [extent[axis] for axis in shown], [stride[axis] for axis in shown], start
    )


# ---------------------------------------------------------------------------- plans


def check_plans(executor: Executor, layout: KVLayout, unit: int, device: torch.device) -> None:
    """Store and load chunks of a cache in ``layout``; raise unless torch does the same.

    The object memory starts ``unit`` bytes off, so that units of every width occur.
    """
    extents = CacheExtents(LAYERS, 2 * BLOCKS, HEADS, BLOCK_TOKENS, 6 * unit)
    strides = layout_strides(layout, extents)
    torch.manual_seed(unit)
    storage = torch.randint(0, 256, (strides.total_bytes,), dtype=torch.uint8).to(device)
    caches = paged_caches(
        [
            CacheTensor(
                storage.as_strided(
                    (extents.blocks, extents.heads, extents.tokens, extents.content_bytes),
                    (strides.block, strides.head, strides.token, 1),
                    layer * strides.layer,
                ),
                "BHNC",
            )
            for layer in range(LAYERS)
        ],
        extents.blocks,
    )
    chunk = object_view_for(caches.views, 3, layout.object_order)
    planner = PagePlanner(caches.views, chunk)
    objects = torch.randint(0, 256, (unit + 2 * chunk.chunk_bytes + SLACK,), dtype=torch.uint8)
    if device.type == "cuda":
        objects = objects.pin_memory()
    ours = Memory(list(caches.regions), [objects], 0)
    for direction in (TransferDirection.D2H, TransferDirection.H2D):
        places = [
            chunk.at(unit + number * chunk.chunk_bytes, chunk.chunk_bytes) for number in range(2)
        ]
        plan = join_plans(
            [
                planner.plan(places[0], 0, (7, 1, 4), direction),
                planner.plan(places[1], 1, (0, -1), direction),
            ]
        )
        theirs = ours.clone()
        executor.run(plan, CopyMemory(tuple(ours.caches), ours.objects[0]))
        TorchExecutor().run(plan, CopyMemory(tuple(theirs.caches), theirs.objects[0]))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        difference = ours.differs_from(theirs)
        if difference is not None:
            raise AssertionError(
                f"plan in layout {layout.value}, {direction.name}, unit {unit} by "
                f"{executor.name}: {difference}"
            )


@dataclass(frozen=True)
class Verdict:
    """What a run of checks found."""

    checked: int
    failures: tuple[str, ...]


def run_checks(
    operations: Operations,
    baseline: Operations,
    executors: list[Executor],
    device: torch.device,
    on_check: Callable[[], Any] = lambda: None,
) -> Verdict:
    """All cases and all layouts; goes on after a failure, so that one run names them all."""
    verdict = Verdict(0, ())

    def attempt(what: str, action: Callable[[], None]) -> None:
        nonlocal verdict
        failures = verdict.failures
        try:
            action()
        except AssertionError as error:
            failures += (str(error),)
        except (ValueError, TypeError, RuntimeError) as error:
            failures += (f"{what}: {type(error).__name__}: {error}",)
        verdict = replace(verdict, checked=verdict.checked + 1, failures=failures)
        on_check()

    for case in all_cases():
        attempt(str(case), lambda case=case: check(case, operations, baseline, device))  # type: ignore[misc] # the default binds the loop's case
    for executor in executors:
        for layout in KVLayout:
            for unit in UNITS:
                attempt(
                    f"plan in {layout.value} by {executor.name}, unit {unit}",
                    lambda e=executor, n=layout, u=unit: check_plans(e, n, u, device),  # type: ignore[misc] # likewise
                )
    return verdict


def num_checks(num_executors: int) -> int:
    """How many checks ``run_checks`` makes."""
    return sum(1 for _ in all_cases()) + num_executors * len(KVLayout) * len(UNITS)
