"""Every case run twice, by the torch baseline and by what is checked, and compared byte for byte.

Both start from equal, random memory with room around it, and whole buffers are compared: a byte too
many shows as well as a byte too few. Nothing here knows CUDA's operations: it takes operations,
executors and a device, and so runs in host memory too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from gpu.cases import (
    NarrowedBy,
    ObjectMemory,
    ObjectPlace,
    Operation,
    PlanCase,
    Sizes,
    TransferCase,
    View,
    extents_of,
    plan_cases,
    plan_of,
    sizes_of,
    transfer_cases,
)
from maru_kv_ops import torch_ops
from maru_kv_ops.executors import CopyMemory, Executor
from maru_kv_ops.formats import FORMATS, PageBufferShapeDesc
from maru_kv_ops.torch_executor import TorchExecutor

SLACK = 256
"""Bytes before and behind everything that moves; keeps the alignment of the allocation."""
MAX_FAILURES = 20
"""After so many nothing more is learned; a CUDA error fails every case that comes behind it."""


class Operations(Protocol):
    """What ``_C``, ``_host`` and ``torch_ops`` have in common."""

    def multi_layer_kv_transfer(self, *args: object, **named: object) -> None: ...
    def single_layer_kv_transfer(self, *args: object, **named: object) -> None: ...
    def multi_layer_block_kv_transfer(self, *args: object, **named: object) -> None: ...


BASELINE = cast(Operations, torch_ops)


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that did not end as the baseline."""

    case: str
    what: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What came of all cases."""

    num_cases: int
    """That were run."""
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Buffers:
    """The memory of one call: flat uint8 tensors."""

    caches: tuple[torch.Tensor, ...]
    objects: tuple[torch.Tensor, ...]

    def copy(self) -> Buffers:
        """The same bytes in memory of the same kinds."""
        return Buffers(tuple(map(_twin, self.caches)), tuple(map(_twin, self.objects)))


def run_checks(
    ops: Operations,
    executors: Mapping[str, Executor],
    device: torch.device,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> CheckReport:
    """Run every case; ``executors`` run the plans, by the name that a failure shows."""
    checks = list(all_checks(ops, executors, device))
    failures: list[Failure] = []
    for number, (name, check) in enumerate(checks, 1):
        try:
            what = check()
        except Exception as error:  # a refusal, or an error of CUDA: reported like wrong bytes
            what = f"{type(error).__name__}: {error}"
        on_case(number, len(checks))
        if what is not None:
            failures.append(Failure(name, what))
            if len(failures) == MAX_FAILURES:
                return CheckReport(number, tuple(failures))
    return CheckReport(len(checks), tuple(failures))


def all_checks(
    ops: Operations, executors: Mapping[str, Executor], device: torch.device
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Name and check of every case. A check says what is wrong, or None."""
    for case in transfer_cases():
        yield str(case), lambda case=case: check_transfer(case, ops, device)  # type: ignore[misc]
    for name, executor in executors.items():
        for plan in plan_cases():
            if name == "kernel" and plan.memory is ObjectMemory.PAGEABLE:
                continue
            yield (
                f"{name}: {plan}",
                lambda plan=plan, executor=executor: check_plan(plan, executor, device),  # type: ignore[misc]
            )


# ---------------------------------------------------------------------------- operations


def check_transfer(case: TransferCase, ops: Operations, device: torch.device) -> str | None:
    """Compare one call with the baseline's."""
    sizes = sizes_of(case)
    assert sizes is not None, f"no case: {case}"
    before = buffers_of(case, sizes, device)
    expected, found = before.copy(), before.copy()
    call(BASELINE, case, sizes, expected, device)
    call(ops, case, sizes, found, device)
    _finish(device)
    return compared(before, expected, found)


def buffers_of(case: TransferCase, sizes: Sizes, device: torch.device) -> Buffers:
    """Random memory for a case."""
    facts = FORMATS[case.format]
    element = sizes.dtype.itemsize
    cache_bytes = extents_of(facts, sizes).elements * element
    rows = 1
    for extent in _object_shape(case, sizes):
        rows *= extent
    object_bytes = rows * (sizes.width + sizes.row_padding) * element
    generator = torch.Generator().manual_seed(1)

    def filled(num_bytes: int) -> torch.Tensor:
        total = -(-(SLACK + sizes.shift_bytes + num_bytes + SLACK) // 16) * 16
        return torch.randint(0, 256, (total,), dtype=torch.uint8, generator=generator)

    caches = [filled(cache_bytes).to(device) for _ in range(facts.num_pointers(sizes.layers))]
    num_objects = 2 if case.operation is Operation.BLOCKS else 1
    objects = [filled(object_bytes) for _ in range(num_objects)]
    if case.place is ObjectPlace.DEVICE:
        objects = [stored.to(device) for stored in objects]
    else:
        objects = [_pinned(stored, device) for stored in objects]
    return Buffers(tuple(caches), tuple(objects))


def call(
    ops: Operations, case: TransferCase, sizes: Sizes, buffers: Buffers, device: torch.device
) -> None:
    """Make the call, with ids and addresses on the device."""
    facts = FORMATS[case.format]
    start = SLACK + sizes.shift_bytes
    addresses = [cache.data_ptr() + start for cache in buffers.caches]
    pointers = torch.tensor(addresses, dtype=torch.int64, device=device)
    ids = torch.tensor(_ids(case, sizes), dtype=torch.int64, device=device)
    padded = extents_of(facts, sizes).strides.get("B", 0) if sizes.block_padding else 0
    if case.operation is Operation.BLOCKS:
        getattr(ops, case.operation)(
            pointers,
            [stored.data_ptr() + start for stored in buffers.objects],
            ids,
            device,
            case.direction,
            PageBufferShapeDesc(
                kv_size=facts.kv_size,
                nl=sizes.layers,
                nb=sizes.blocks,
                bs=sizes.block_tokens,
                nh=sizes.heads,
                hs=sizes.run,
                element_size=sizes.dtype.itemsize,
                block_stride_elems=padded,
            ),
            len(ids) // 2 * sizes.block_tokens,
            case.format,
            1,
        )
    elif case.operation is Operation.MULTI_LAYER:
        ops.multi_layer_kv_transfer(
            _object_tensor(case, sizes, buffers.objects[0]),
            pointers,
            ids,
            device,
            sizes.blocks * sizes.block_tokens,
            case.direction,
            case.format,
            block_size=sizes.block_tokens,
            head_size=sizes.head_size,
            skip_prefix_n_tokens=1,
            block_stride_elems=padded,
        )
    else:
        layers = [buffers.caches[0]]
        if facts.num_pointers(1) == 2:
            layers.append(buffers.caches[sizes.layers])
        tensors = [_layer_tensor(case, sizes, cache) for cache in layers]
        ops.single_layer_kv_transfer(
            _object_tensor(case, sizes, buffers.objects[0]),
            tensors if len(tensors) > 1 else tensors[0],
            ids,
            case.direction,
            case.format,
            token_major=case.view is View.TOKEN_MAJOR,
        )


def _ids(case: TransferCase, sizes: Sizes) -> tuple[int, ...]:
    """Blocks of two objects, or slots; some are skipped, none is named twice."""
    if case.operation is Operation.BLOCKS:
        return (4, 5, -1, 6, 0, 2)
    slots = (7, 19, -1, 4, 0, 5, 6, 26, 27, 9)
    if case.narrowed_by is NarrowedBy.NOTHING:
        slots += tuple(range(28, sizes.blocks * sizes.block_tokens))
    return slots


def _object_shape(case: TransferCase, sizes: Sizes) -> tuple[int, ...]:
    """Axes of one object or staging tensor, without its rows' width."""
    planes = FORMATS[case.format].kv_size
    ids = len(_ids(case, sizes))
    if case.operation is Operation.BLOCKS:
        return (planes, sizes.layers, ids // 2 * sizes.block_tokens)
    if case.operation is Operation.MULTI_LAYER:
        return (planes, sizes.layers, ids)
    if planes == 1:
        return (ids,)
    return (ids, planes) if case.view is View.TOKEN_MAJOR else (planes, ids)


def _object_tensor(case: TransferCase, sizes: Sizes, memory: torch.Tensor) -> torch.Tensor:
    shape = _object_shape(case, sizes)
    strides: list[int] = []
    step = sizes.width + sizes.row_padding
    for extent in reversed(shape):
        strides.insert(0, step)
        step *= extent
    start = (SLACK + sizes.shift_bytes) // sizes.dtype.itemsize
    return memory.view(sizes.dtype).as_strided((*shape, sizes.width), (*strides, 1), start)


def _layer_tensor(case: TransferCase, sizes: Sizes, memory: torch.Tensor) -> torch.Tensor:
    """The first layer, by its real strides."""
    facts = FORMATS[case.format]
    extents = extents_of(facts, sizes)
    letters = facts.axes.replace("L", "")
    if case.view is View.LOGICAL:
        letters = letters.replace("HN", "NH")
    start = (SLACK + sizes.shift_bytes) // sizes.dtype.itemsize
    return memory.view(sizes.dtype).as_strided(
        [extents.sizes[letter] for letter in letters],
        [extents.strides[letter] for letter in letters],
        start,
    )


# ---------------------------------------------------------------------------- plans


def check_plan(case: PlanCase, executor: Executor, device: torch.device) -> str | None:
    """Compare one plan's run with the torch executor's."""
    plan = plan_of(case)
    generator = torch.Generator().manual_seed(2)

    def filled(num_bytes: int) -> torch.Tensor:
        total = -(-(num_bytes + SLACK) // 16) * 16
        return torch.randint(0, 256, (total,), dtype=torch.uint8, generator=generator)

    objects = filled(plan.object_end)
    if case.memory is ObjectMemory.PINNED:
        objects = _pinned(objects, device)
    before = Buffers((filled(plan.region_ends[0]).to(device),), (objects,))
    expected, found = before.copy(), before.copy()
    TorchExecutor().run(plan, CopyMemory(expected.caches, expected.objects[0]))
    executor.run(plan, CopyMemory(found.caches, found.objects[0]))
    _finish(device)
    return compared(before, expected, found)


# ---------------------------------------------------------------------------- memory


def compared(before: Buffers, expected: Buffers, found: Buffers) -> str | None:
    """What differs first, and how much; also if the baseline moved nothing, which checks nothing."""
    for name, wanted, got in (
        *_numbered("cache", expected.caches, found.caches),
        *_numbered("object", expected.objects, found.objects),
    ):
        if not torch.equal(wanted, got):
            wrong = (wanted != got).nonzero().flatten()
            return f"{name}: {len(wrong)} wrong bytes, the first at {int(wrong[0]) - SLACK}"
    pairs = zip(
        (*before.caches, *before.objects), (*expected.caches, *expected.objects), strict=True
    )
    if all(torch.equal(old, new) for old, new in pairs):
        return "the baseline moved nothing"
    return None


def _numbered(
    name: str, expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    for number, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        yield f"{name} {number}", wanted, got


def _pinned(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    return memory.pin_memory() if device.type == "cuda" else memory


def _twin(memory: torch.Tensor) -> torch.Tensor:
    pinned = memory.device.type == "cpu" and torch.cuda.is_available() and memory.is_pinned()
    return memory.clone().pin_memory() if pinned else memory.clone()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
