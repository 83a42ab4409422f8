"""Memory that is known by its address, as tensors."""

from __future__ import annotations

import pytest
import torch

from maru_kv_ops.torch_memory import as_bytes, memory_at, token_rows


def test_host_memory_at_an_address_is_read_and_written_in_place() -> None:
    memory = torch.arange(100, dtype=torch.uint8)

    part = memory_at(memory.data_ptr() + 10, 5, torch.device("cpu"))
    part += 100

    assert memory[9:16].tolist() == [9, 110, 111, 112, 113, 114, 15]
    assert part.data_ptr() == memory.data_ptr() + 10


def test_device_memory_is_handed_to_torch_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device is here: what torch would be given is looked at instead."""
    asked: list[tuple[object, object]] = []

    def as_tensor(memory: object, device: torch.device) -> torch.Tensor:
        asked.append((memory, device))
        return torch.empty(0)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    memory_at((1 << 47) + 3, 1 << 33, torch.device("cuda", 1))

    ((memory, device),) = asked
    assert device == torch.device("cuda", 1)
    assert getattr(memory, "__cuda_array_interface__") == {  # noqa: B009 # mypy knows no such name
        "shape": (1 << 33,),
        "typestr": "|u1",
        "data": ((1 << 47) + 3, False),
        "version": 2,
    }


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64])
def test_any_rows_are_bytes_without_a_copy(dtype: torch.dtype) -> None:
    rows = torch.zeros(6, 9, dtype=dtype)[1::2, 2:7]

    found = as_bytes(rows)

    assert found.shape == (3, 5 * rows.element_size())
    assert found.data_ptr() == rows.data_ptr()


def test_rows_of_one_element_are_bytes_whatever_their_last_stride() -> None:
    rows = torch.zeros(6, 9, dtype=torch.float32)[:, 3:4].as_strided((6, 1), (9, 7), 3)

    assert as_bytes(rows).shape == (6, 4)


def test_skipped_tokens_keep_the_positions_of_the_others() -> None:
    rows = token_rows([5, -1, 0, 7, -3, 2], first=2)

    assert rows.positions.tolist() == [2, 3, 5]
    assert rows.slots.tolist() == [0, 7, 2]
