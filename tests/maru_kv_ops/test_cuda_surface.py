"""The compiled module ``maru_kv_ops._C``, as far as a machine without a GPU shows it.

Built with nvcc and the CUDA build of torch (marker ``cuda_build``). Tensors "on the device" are
stand-ins that say so: what is refused is refused before CUDA is asked, so that no device is needed;
what is accepted gets as far as asking for one, and no further.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import pytest
import torch
from test_transfer_refusals import REFUSED
from transfer_calls import Memory, arguments_of
from transfer_cases import SHAPES, Call, small

from maru_kv_ops import extension, torch_ops, vendor
from maru_kv_ops.formats import FORMATS, EngineKVFormat, PageBufferShapeDesc
from maru_kv_ops.plan import CopyPlan, StridedCopy, TransferDirection

pytestmark = pytest.mark.cuda_build


@pytest.fixture(scope="module")
def native() -> Any:
    module = extension.module()
    assert module is not None, extension.import_error()
    return module


@pytest.fixture
def no_device() -> None:
    if torch.cuda.device_count() > 0:
        pytest.skip("a GPU is here: what is accepted would run, on memory that is not its own")


class DeviceTensor:
    """A tensor of the host that says it lies on a device."""

    def __init__(self, tensor: torch.Tensor, device: str = "cuda:0") -> None:
        self._tensor = tensor
        self.device = torch.device(device)

    def __getattr__(self, name: str) -> object:
        return getattr(self._tensor, name)


def on_device(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return DeviceTensor(argument)
    if isinstance(argument, list) and argument and isinstance(argument[0], torch.Tensor):
        return [DeviceTensor(tensor) for tensor in argument]
    if argument == torch.device("cpu"):
        return torch.device("cuda", 0)
    return argument


def call(native: Any, name: Call, changes: dict[str, object], **of_the_case: object) -> None:
    memory = Memory(small(name, **of_the_case))
    arguments = arguments_of(memory) | changes
    getattr(native, name.value)(**{key: on_device(value) for key, value in arguments.items()})


def asks_for_a_device() -> AbstractContextManager[object]:
    """Return a context in which the arguments are accepted, and CUDA says that it is not there."""
    return pytest.raises(RuntimeError, match=r"CUDA|NVIDIA|driver")


def cuda_was_asked() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call] # theirs


# ---------------------------------------------------------------------------- importing


def in_a_process_of_its_own(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_does_not_initialise_cuda() -> None:
    code = (
        "import maru_kv_ops; assert maru_kv_ops.is_available(), maru_kv_ops.import_error()\n"
        "import torch; print(torch.cuda.is_initialized())"
    )
    assert in_a_process_of_its_own(code) == "False"


@pytest.mark.parametrize("order", ["_C, _host", "_host, _C"])
def test_both_native_modules_live_in_one_process(order: str) -> None:
    code = (
        f"import torch\nfrom maru_kv_ops import {order}\n"
        "assert _C.TransferDirection is not _host.TransferDirection\n"
        "assert _C.PageBufferShapeDesc(nl=2).nl == _host.PageBufferShapeDesc(nl=2).nl\n"
        "print(int(_C.EngineKVFormat.NL_X_NB_BSV_BSS), int(_host.EngineKVFormat.NL_X_NB_BSV_BSS))"
    )
    assert in_a_process_of_its_own(code) == "14 14"


def test_build_info_says_from_what_this_module_was_made(native: Any) -> None:
    info = extension.build_info()
    assert info is not None
    assert info.sources_digest == vendor.sources_digest()
    assert info.kernel_revision == vendor.kernel_revision()
    assert info.torch == torch.__version__
    assert info.cuda.split(".")[0] == str(torch.version.cuda).split(".")[0]
    assert re.fullmatch(r"\d+\.\d+[a-z]?(\+PTX)?([; ]\d+\.\d+[a-z]?(\+PTX)?)*", info.arch_list)
    assert {field.name for field in fields(info)} <= native.build_info().keys()


# ---------------------------------------------------------------------------- names


def test_every_public_name_is_there(native: Any) -> None:
    assert [name for name in extension.PUBLIC_NAMES if not hasattr(native, name)] == []


@pytest.mark.parametrize("name", [one.value for one in Call])
def test_arguments_have_the_names_the_order_and_the_defaults_of_the_torch_operations(
    native: Any, name: str
) -> None:
    first_line = getattr(native, name).__doc__.splitlines()[0]
    listed = re.fullmatch(rf"{name}\((.*)\) -> None", first_line)
    assert listed is not None, first_line
    found = [
        (argument.split(":")[0], argument.partition(" = ")[2] or None)
        for argument in listed[1].split(", ")
    ]
    expected = [
        (
            parameter.name,
            None if parameter.default is inspect.Parameter.empty else str(parameter.default),
        )
        for parameter in inspect.signature(getattr(torch_ops, name)).parameters.values()
    ]
    assert found == expected


def test_enumerations_and_shape_have_the_members_of_their_twins(native: Any) -> None:
    def members(enumeration: Any) -> dict[str, int]:
        return {name: int(value) for name, value in enumeration.__members__.items()}

    assert members(native.EngineKVFormat) == members(EngineKVFormat)
    assert members(native.TransferDirection) == members(TransferDirection)
    shape = native.PageBufferShapeDesc()
    for number, field in enumerate(fields(PageBufferShapeDesc)):
        assert getattr(shape, field.name) == 0
        setattr(shape, field.name, number)
        assert getattr(shape, field.name) == number


# ---------------------------------------------------------------------------- accepted


@pytest.mark.parametrize("direction", TransferDirection)
@pytest.mark.parametrize("number", SHAPES)
@pytest.mark.parametrize("name", Call)
def test_every_format_is_accepted_in_both_directions(
    native: Any, no_device: None, name: Call, number: int, direction: TransferDirection
) -> None:
    changes: dict[str, object] = {"format": number, "direction": direction}
    if "H" not in FORMATS[EngineKVFormat(number)].axes:
        changes["heads"] = 1
    if number == 14:
        changes |= {"dtype": torch.uint8, "head_size": 132}
    with asks_for_a_device():
        call(native, name, {}, **changes)


def enumerations(native: Any) -> Iterator[tuple[object, object]]:
    yield native.TransferDirection.D2H, native.EngineKVFormat.NL_X_NB_BS_NH_CS
    yield TransferDirection.D2H, EngineKVFormat.NL_X_NB_BS_NH_CS
    yield 1, 13


def test_directions_formats_and_shapes_of_any_module_are_accepted(
    native: Any, no_device: None
) -> None:
    for direction, number in enumerations(native):
        for name in Call:
            with asks_for_a_device():
                call(native, name, {"direction": direction, "engine_kv_format": number})
    shape = native.PageBufferShapeDesc(
        kv_size=1, nl=2, nb=3, bs=2, nh=3, hs=8, element_size=2, block_stride_elems=0
    )
    with asks_for_a_device():
        call(native, Call.BLOCKS, {"shape_desc": shape})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda:0")])
def test_a_device_is_named_as_torch_names_it(native: Any, no_device: None, device: object) -> None:
    with asks_for_a_device():
        call(native, Call.MULTI_LAYER, {"paged_memory_device": device})


def test_empty_work_asks_for_no_device(native: Any) -> None:
    call(native, Call.MULTI_LAYER, {}, ids=())
    call(native, Call.MULTI_LAYER, {}, skip=2)
    call(native, Call.SINGLE_LAYER, {}, ids=())
    call(native, Call.BLOCKS, {}, skip=1)


# ---------------------------------------------------------------------------- refused

# Ids lie on the device: whether they are in range is asked with MARU_DEBUG_CHECKS=1, on a GPU.
BY_ITS_ID = ("a slot too high", "slots too high for one layer", "a block too high")
WITHOUT_IDS = [row for row in REFUSED if row[0] not in BY_ITS_ID]


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [row[1:] for row in WITHOUT_IDS],
    ids=[f"{row[1].name.lower()}: {row[0]}" for row in WITHOUT_IDS],
)
def test_what_does_not_belong_together_is_refused_before_cuda_is_asked(
    native: Any, name: Call, changes: dict[str, object], says: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        call(native, name, changes)
    assert not cuda_was_asked()


UNPINNED = {
    Call.MULTI_LAYER: ("key_value", "key_value_ptrs", "slot_mapping"),
    Call.SINGLE_LAYER: ("lmc_key_value_cache", "vllm_key_value_cache", "slot_mapping"),
    Call.BLOCKS: ("paged_buffer_ptrs_tensor", "block_ids"),
}


@pytest.mark.parametrize(
    ("name", "argument"), [(name, one) for name, some in UNPINNED.items() for one in some]
)
def test_host_memory_that_is_not_pinned_is_refused_and_told_how_to_pin_it(
    native: Any, name: Call, argument: str
) -> None:
    arguments = arguments_of(Memory(small(name)))
    given = {
        key: value if key == argument else on_device(value) for key, value in arguments.items()
    }
    with pytest.raises(ValueError, match=rf"{argument}: .* not pinned.*pin_memory.*cudaHost"):
        getattr(native, name.value)(**given)
    assert not cuda_was_asked()


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:", "cuda:x", "cuda:-1", "", 0, None])
def test_what_is_no_cuda_device_is_refused(native: Any, device: object) -> None:
    with pytest.raises(ValueError, match="device: expected a CUDA device"):
        call(native, Call.MULTI_LAYER, {"paged_memory_device": device})


@pytest.mark.parametrize("name", [Call.MULTI_LAYER, Call.BLOCKS])
def test_memory_on_another_device_than_the_cache_is_refused(native: Any, name: Call) -> None:
    device = "paged_memory_device" if name is Call.MULTI_LAYER else "device"
    with pytest.raises(ValueError, match=r"cuda:1.*cuda:0"):
        call(native, name, {device: torch.device("cuda:1")})


# ---------------------------------------------------------------------------- plans

PLAN = CopyPlan(TransferDirection.D2H, (StridedCopy(0, 8, (), (0, 16), (0, 8)),), (24,), 16, 16)
NOTHING = CopyPlan(TransferDirection.D2H, (), (24,), 16, 0)
SKIPPED = CopyPlan(TransferDirection.D2H, (StridedCopy(0, 8, (), (), ()),), (24,), 16, 0)


@pytest.mark.parametrize("path", ["KERNEL", "COPY_ENGINE"])
def test_plans_go_to_a_device_and_empty_ones_nowhere(
    native: Any, no_device: None, path: str
) -> None:
    way = getattr(native.CopyPath, path)
    for plan in (NOTHING, SKIPPED):
        native.run_plan(plan, [4096], 8192, "cuda:0", way)
    with asks_for_a_device():
        native.run_plan(PLAN, [4096], 8192, "cuda:0", way)
    with pytest.raises(ValueError, match="region"):
        native.run_plan(PLAN, [], 8192, "cuda:0", way)
    with pytest.raises(ValueError, match="CUDA device"):
        native.run_plan(PLAN, [4096], 8192, "cpu", way)
    with pytest.raises(TypeError):
        native.run_plan(PLAN, [4096], 8192, "cuda:0", "kernel")
