"""What the CUDA executors ask of their memory, and what they say without the extension.

No device is needed: the regions are stand-ins that say where they lie, the extension one that takes
the call down.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maru_kv_ops import extension
from maru_kv_ops.build_record import BUILD_STEP
from maru_kv_ops.device_executors import CopyEngineExecutor, KernelExecutor
from maru_kv_ops.errors import ExecutorMissing, MemoryMismatch
from maru_kv_ops.executors import CopyMemory
from maru_kv_ops.plan import CopyPlan, StridedCopy, TransferDirection

EXECUTORS = [KernelExecutor, CopyEngineExecutor]
KERNEL, COPY_ENGINE = object(), object()


@dataclass(frozen=True)
class Memory:
    """As much of a flat uint8 tensor as an executor asks for."""

    device: torch.device
    address: int
    size: int = 64
    pinned: bool = False
    dtype: torch.dtype = torch.uint8
    shape: tuple[int, ...] = (64,)

    def dim(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def stride(self) -> tuple[int, ...]:
        return (1,)

    def numel(self) -> int:
        return self.size

    def data_ptr(self) -> int:
        return self.address

    def is_pinned(self) -> bool:
        return self.pinned


class Extension(SimpleNamespace):
    """Takes down what would be queued."""

    def __init__(self) -> None:
        super().__init__(CopyPath=SimpleNamespace(KERNEL=KERNEL, COPY_ENGINE=COPY_ENGINE))
        self.calls: list[tuple[object, ...]] = []

    def run_plan(self, *arguments: object) -> None:
        self.calls.append(arguments)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    stand_in = Extension()
    monkeypatch.setattr(extension, "module", lambda: stand_in)
    return stand_in.calls


def memory(*devices: str, pinned: bool = True) -> CopyMemory:
    regions: Any = tuple(
        Memory(torch.device(device), 1000 * (number + 1)) for number, device in enumerate(devices)
    )
    objects: Any = Memory(torch.device("cpu"), 9000, pinned=pinned)
    return CopyMemory(regions, objects)


PLAN = CopyPlan(
    direction=TransferDirection.D2H,
    copies=(StridedCopy(0, 8, (), (0, 16), (0, 8)),),
    region_ends=(24,),
    object_end=16,
    num_bytes=16,
)
NOTHING = CopyPlan(TransferDirection.D2H, (), (24,), 16, 0)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_without_the_extension_making_one_says_why_and_what_to_run(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extension, "module", lambda: None)
    monkeypatch.setattr(extension, "import_error", lambda: f"no nvcc. To build it: {BUILD_STEP}")
    with pytest.raises(ExecutorMissing) as raised:
        executor()
    assert executor.name in str(raised.value)
    assert "no nvcc" in str(raised.value)
    assert BUILD_STEP in str(raised.value)


@pytest.mark.parametrize(
    ("executor", "path"), [(KernelExecutor, KERNEL), (CopyEngineExecutor, COPY_ENGINE)]
)
def test_a_plan_is_queued_with_the_addresses_and_the_device_of_its_memory(
    executor: Any, path: object, calls: list[tuple[object, ...]]
) -> None:
    served = executor().run(PLAN, memory("cuda:1", "cuda:1"))
    assert served.value == executor.name
    assert calls == [(PLAN, [1000, 2000], 9000, torch.device("cuda:1"), path)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_plan_without_copies_queues_nothing(
    executor: Any, calls: list[tuple[object, ...]]
) -> None:
    executor().run(NOTHING, memory("cuda:0", pinned=False))
    assert calls == []


def test_kernels_need_pinned_object_memory_and_copy_engines_do_not(
    calls: list[tuple[object, ...]],
) -> None:
    with pytest.raises(MemoryMismatch, match="cudaHostRegister"):
        KernelExecutor().run(PLAN, memory("cuda:0", pinned=False))
    assert calls == []
    CopyEngineExecutor().run(PLAN, memory("cuda:0", pinned=False))
    assert len(calls) == 1


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("devices", [("cpu",), ("cuda:0", "cuda:1")])
def test_caches_elsewhere_or_on_several_devices_are_refused(
    executor: Any, devices: tuple[str, ...], calls: list[tuple[object, ...]]
) -> None:
    with pytest.raises(MemoryMismatch, match="one CUDA device"):
        executor().run(PLAN, memory(*devices))
    assert calls == []


@pytest.mark.parametrize("executor", EXECUTORS)
def test_memory_smaller_than_the_plan_is_refused(
    executor: Any, calls: list[tuple[object, ...]]
) -> None:
    large = CopyPlan(PLAN.direction, PLAN.copies, (65,), 16, 16)
    with pytest.raises(MemoryMismatch, match="65"):
        executor().run(large, memory("cuda:0"))
    assert calls == []
