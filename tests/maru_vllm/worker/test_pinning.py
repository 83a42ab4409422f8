"""Pinning the pool's mapping, with a stand-in for the CUDA runtime."""

from __future__ import annotations

import logging

import pytest
import torch

from maru_vllm.worker.pinning import PinnedMemory


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
