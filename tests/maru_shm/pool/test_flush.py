"""The flush extension on real memory, and the choice of what a medium needs."""

from __future__ import annotations

import mmap
import platform
import shutil
from types import ModuleType
from unittest.mock import patch

import pytest

from maru_shm.pool import flush
from maru_shm.pool.errors import MediumUnavailable
from maru_shm.pool.flush import Coherence, Flushed, OrderedByMachine, cache_lines, native_flush


@pytest.fixture
def native() -> ModuleType:
    module = native_flush()
    if module is None:
        pytest.skip("maru_shm._cxl_flush is not built")
    return module


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")
def test_where_a_compiler_is_the_extension_is_installed() -> None:
    """So that the tests which need it are never skipped for want of a build."""
    assert native_flush() is not None, "install Maru again and read what setup.py says"


def test_flushing_changes_no_byte(native: ModuleType) -> None:
    memory = mmap.mmap(-1, 1 << 20)
    content = bytes(range(256)) * 4096
    memory[:] = content
    for offset, length in [(0, 1 << 20), (1, 1), (63, 2), (4095, 200_000), (1 << 20, 0)]:
        native.write_back(memory, offset, length)
        native.invalidate(memory, offset, length)
        native.fence()
    assert memory[:] == content


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (0, 101), (101, 0), (100, 1), (2**62, 2**62)]
)
def test_a_range_outside_the_buffer_is_refused(
    native: ModuleType, offset: int, length: int
) -> None:
    for function in (native.write_back, native.invalidate):
        with pytest.raises(ValueError, match="outside a buffer of 100 bytes"):
            function(bytearray(100), offset, length)


def test_what_is_no_contiguous_buffer_is_refused(native: ModuleType) -> None:
    with pytest.raises(TypeError):
        native.write_back(0x1000, 0, 10)
    with pytest.raises(BufferError):
        native.write_back(memoryview(bytearray(100))[::2], 0, 10)


def test_the_instruction_fits_the_processor(native: ModuleType) -> None:
    kind = native.kind()
    assert native.line_bytes() in (16, 32, 64, 128, 256)
    if platform.machine() == "x86_64":
        with open("/proc/cpuinfo") as info:
            flags = next(line for line in info if line.startswith("flags")).split()
        best = [name for name in ("clwb", "clflushopt", "clflush") if name in flags]
        assert kind == best[0]
    elif platform.machine() == "aarch64":
        assert kind == "dc-cvac/civac"
    else:
        assert kind == "none"


def test_a_coherent_medium_on_an_ordered_machine_needs_nothing() -> None:
    with (
        patch.object(flush.platform, "machine", lambda: "x86_64"),
        patch.object(flush, "native_flush", lambda: None),
    ):
        assert type(cache_lines(Coherence.COHERENT, "p")) is OrderedByMachine


def test_a_weakly_ordered_machine_needs_the_barriers_of_the_extension() -> None:
    calls: list[str] = []

    class Native:
        @staticmethod
        def fence() -> None:
            calls.append("fence")

    with patch.object(flush.platform, "machine", lambda: "aarch64"):
        with (
            patch.object(flush, "native_flush", lambda: None),
            pytest.raises(MediumUnavailable, match="aarch64 reorders"),
        ):
            cache_lines(Coherence.COHERENT, "p")
        with patch.object(flush, "native_flush", Native):
            lines = cache_lines(Coherence.COHERENT, "p")
    lines.write_back(memoryview(b"x"), 0, 1)
    assert calls == []
    lines.fence()
    assert calls == ["fence"]


def test_a_medium_that_is_not_coherent_is_flushed(native: ModuleType) -> None:
    lines = cache_lines(Coherence.NEEDS_FLUSH, "p")
    assert isinstance(lines, Flushed)
    lines.write_back(memoryview(bytearray(100)), 10, 20)
    lines.invalidate(memoryview(bytearray(100)), 10, 20)
    lines.fence()
