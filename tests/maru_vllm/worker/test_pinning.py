"""Pinning the pool's mapping, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from maru_vllm.worker.pinning import CudaRegistry, PinnedMemory


class Registry:
    """Takes down what is registered; fails as it is told."""

    def __init__(self, error: int | Exception = 0) -> None:
        self.error = error
        self.registered: list[tuple[int, int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 # CUDA's
        if isinstance(self.error, Exception):
            raise self.error
        self.registered.append((address, num_bytes, flags))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 # CUDA's
        self.unregistered.append(address)
        return 0


@pytest.fixture
def memory() -> torch.Tensor:
    return torch.zeros(1 << 16, dtype=torch.uint8)


def test_the_whole_mapping_is_registered_once_and_unregistered_at_the_end(
    memory: torch.Tensor,
) -> None:
    registry = Registry()
    pinned = PinnedMemory(memory, registry)
    assert pinned.wait(10)
    pinned.close()
    pinned.close()
    assert registry.registered == [(memory.data_ptr(), 1 << 16, 3)]
    assert registry.unregistered == [memory.data_ptr()]


@pytest.mark.parametrize("error", [2, RuntimeError("operation not permitted")])
def test_b23_forbidden_pinning_is_said_once_and_is_no_failure(
    memory: torch.Tensor, error: int | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry(error)
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        pinned = PinnedMemory(memory, registry)
        assert not pinned.wait(10)
        pinned.close()
    (record,) = caplog.records
    assert "cannot be pinned" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    assert not registry.unregistered


def test_a_close_does_not_wait_for_pinning_and_pinning_undoes_itself(memory: torch.Tensor) -> None:
    may_return, undone = threading.Event(), threading.Event()

    class Slow(Registry):
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 # CUDA's
            assert may_return.wait(60)
            return super().cudaHostRegister(address, num_bytes, flags)

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 # CUDA's
            undone.set()
            return super().cudaHostUnregister(address)

    registry = Slow()
    pinned = PinnedMemory(memory, registry)
    pinned.close()
    assert not registry.registered
    may_return.set()
    assert undone.wait(60)
    assert not pinned.wait(60)
    assert registry.unregistered == [memory.data_ptr()]


def test_the_runtime_is_asked_on_the_workers_device_whatever_thread_asks(
    memory: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    asked_on: list[torch.device] = []

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Runtime(Registry):
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802 # CUDA's
            asked_on.append(current[-1])
            return super().cudaHostRegister(address, num_bytes, flags)

        def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 # CUDA's
            asked_on.append(current[-1])
            return super().cudaHostUnregister(address)

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", on)
    third = torch.device("cuda", 3)
    pinned = PinnedMemory(memory, CudaRegistry(third))
    assert pinned.wait(60)
    pinned.close()
    assert asked_on == [third, third]
