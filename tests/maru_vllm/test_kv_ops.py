"""Which copy operations are found, and what is said about those that are not."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import maru_kv_ops
from maru_kv_ops import extension, host_executor, torch_ops
from maru_kv_ops.build_record import BUILD_STEP
from maru_vllm.kv_ops import _resolve_kv_ops


@pytest.fixture
def unresolved() -> Iterator[None]:
    """A process that has not looked yet."""
    _resolve_kv_ops.cache_clear()
    yield
    _resolve_kv_ops.cache_clear()


@pytest.fixture
def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "module", lambda: None)
    why = f"maru_kv_ops._C was not built: no nvcc. To build it: {BUILD_STEP}"
    monkeypatch.setattr(maru_kv_ops, "import_error", lambda: why)


@pytest.mark.usefixtures("unresolved", "without_extension")
def test_a_missing_extension_is_one_warning_that_names_the_build_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        first, second = _resolve_kv_ops(), _resolve_kv_ops()
    assert first is second
    assert len(caplog.records) == 1
    said = caplog.records[0].getMessage()
    assert BUILD_STEP in said
    assert "no nvcc" in said
    assert "native host executor" in said


@pytest.mark.usefixtures("unresolved")
def test_with_the_extension_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = ModuleType("maru_kv_ops._C")
    monkeypatch.setattr(extension, "module", lambda: native)
    monkeypatch.setattr(maru_kv_ops, "import_error", lambda: None)
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        ops = _resolve_kv_ops()
    assert not caplog.records
    assert ops.operations_for(torch.device("cuda", 0)) is native


@pytest.mark.usefixtures("unresolved", "without_extension")
def test_a_device_without_extension_gets_torch_and_host_memory_the_native_module() -> None:
    ops = _resolve_kv_ops()
    assert ops.operations_for(torch.device("cuda", 0)) is torch_ops
    assert ops.operations_for(torch.device("cpu")) is host_executor.host_module()


@pytest.mark.usefixtures("unresolved", "without_extension")
def test_without_either_native_module_all_is_said_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(host_executor, "host_module", lambda: None)
    monkeypatch.setattr(host_executor, "host_import_error", lambda: "_host: no compiler")
    with caplog.at_level(logging.WARNING, "maru_vllm"):
        ops = _resolve_kv_ops()
    assert ops.operations_for(torch.device("cpu")) is torch_ops
    (record,) = caplog.records
    assert "_host: no compiler" in record.getMessage()


def test_importing_the_connector_says_it_once() -> None:
    """In a process of its own, where the extension is hidden whatever this one has."""
    script = (
        "import sys; sys.modules['maru_kv_ops._C'] = None\n"
        "import maru_vllm.connector, maru_vllm.kv_ops as kv_ops\n"
        "kv_ops._resolve_kv_ops()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True
    )
    assert (done.stdout + done.stderr).count(BUILD_STEP) == 1
