"""What only the torch operations have; test_transfers.py runs them over everything else."""

from __future__ import annotations

import pytest
import torch
from transfer_calls import Memory, arguments_of
from transfer_cases import Call, small

from maru_kv_ops import torch_ops
from maru_kv_ops.errors import TransferRefused
from maru_kv_ops.extension import PUBLIC_NAMES


def test_what_the_extension_offers_to_callers_of_the_field_is_here_too() -> None:
    assert sorted(torch_ops.__all__) == sorted(set(PUBLIC_NAMES) - {"run_plan", "CopyPath"})
    assert all(hasattr(torch_ops, name) for name in torch_ops.__all__)


@pytest.mark.parametrize("call", [Call.MULTI_LAYER, Call.BLOCKS])
def test_a_null_address_is_refused_instead_of_followed(call: Call) -> None:
    memory = Memory(small(call))
    arguments = arguments_of(memory)
    name = "key_value_ptrs" if call is Call.MULTI_LAYER else "paged_buffer_ptrs_tensor"
    arguments[name] = torch.tensor([memory.caches[0].data_ptr(), 0])

    with pytest.raises(TransferRefused, match=f"{name}: a null address at position 1"):
        getattr(torch_ops, call.value)(**arguments)


def test_an_unknown_device_is_refused_before_anything_moves() -> None:
    memory = Memory(small(Call.MULTI_LAYER))
    before = [buffer.clone() for buffer in memory.objects]

    with pytest.raises(RuntimeError, match="device"):
        torch_ops.multi_layer_kv_transfer(
            **arguments_of(memory) | {"paged_memory_device": "nowhere"}  # type: ignore[arg-type] # any
        )

    assert all(torch.equal(old, new) for old, new in zip(before, memory.objects, strict=True))
