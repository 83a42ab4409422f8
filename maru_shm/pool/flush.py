"""Making stores visible beyond this host's caches, and stores from beyond visible here.

On a medium that is coherent between all its users cache lines need no help; on shared CXL
memory a writer writes its lines back and a reader drops its own before it reads. Either way the
order of stores matters: x86-64 keeps it by itself, other machines need a barrier, which the
same extension provides.

Thread: all functions may be called from any thread, on ranges that do not overlap.
"""

from __future__ import annotations

import importlib
import platform
from enum import Enum, unique
from types import ModuleType
from typing import Protocol

from maru_shm.pool.errors import MediumUnavailable

_ORDERED_MACHINES = frozenset({"x86_64", "AMD64"})
_HOW_TO_BUILD = (
    "Install a C compiler (e.g. `apt install gcc python3-dev`) and run "
    "`pip install --force-reinstall --no-deps maru` (in a checkout: `pip install -e .`); "
    "`maru doctor` shows the state"
)


@unique
class Coherence(Enum):
    """Whether everyone who maps a medium sees stores without help."""

    COHERENT = "coherent"
    NEEDS_FLUSH = "needs_flush"


class CacheLines(Protocol):
    """What a pool does around its stores and loads. Offsets and lengths in bytes."""

    def write_back(self, buffer: memoryview, offset: int, length: int) -> None:
        """Bytes stored in the range are on the medium when the next ``fence`` returns."""

    def invalidate(self, buffer: memoryview, offset: int, length: int) -> None:
        """Loads from the range after the next ``fence`` come from the medium."""

    def fence(self) -> None:
        """Stores, write-backs and invalidations before it come before loads and stores after."""


class OrderedByMachine:
    """Coherent medium on a machine that keeps stores and loads in order: nothing to do."""

    def write_back(self, buffer: memoryview, offset: int, length: int) -> None:
        """Nothing: the caches are coherent."""

    def invalidate(self, buffer: memoryview, offset: int, length: int) -> None:
        """Nothing: the caches are coherent."""

    def fence(self) -> None:
        """Nothing: x86-64 does not reorder stores with stores or loads with loads."""


class FencedOnly(OrderedByMachine):
    """Coherent medium on a weakly ordered machine: barriers, no flushes."""

    def __init__(self, native: ModuleType) -> None:
        self._native = native

    def fence(self) -> None:
        """A full barrier."""
        self._native.fence()


class Flushed(FencedOnly):
    """Medium that is not coherent: write back, invalidate, barrier."""

    def write_back(self, buffer: memoryview, offset: int, length: int) -> None:
        """Write the range's dirty lines back."""
        self._native.write_back(buffer, offset, length)

    def invalidate(self, buffer: memoryview, offset: int, length: int) -> None:
        """Drop the range's lines."""
        self._native.invalidate(buffer, offset, length)


def native_flush() -> ModuleType | None:
    """The extension ``maru_shm._cxl_flush``, or None where it was not built."""
    try:
        return importlib.import_module("maru_shm._cxl_flush")
    except ImportError:
        return None


def flush_kind() -> str:
    """For people: the instruction in use (``clwb``, ...), ``none``, or ``not built``."""
    native = native_flush()
    return "not built" if native is None else str(native.kind())


def cache_lines(coherence: Coherence, path: str) -> CacheLines:
    """How a pool at ``path`` treats cache lines on this host.

    Raises MediumUnavailable if it needs instructions that this installation does not have.
    """
    native = native_flush()
    if coherence is Coherence.NEEDS_FLUSH:
        if native is None:
            raise MediumUnavailable(
                f"{path}: this medium is not coherent between hosts and needs cache-line flushes, "
                f"but the extension maru_shm._cxl_flush is not built. {_HOW_TO_BUILD}."
            )
        if native.kind() == "none":
            raise MediumUnavailable(
                f"{path}: this medium needs cache-line flushes, and maru_shm._cxl_flush knows none "
                f"for {platform.machine()}. Use a coherent medium on this host."
            )
        return Flushed(native)
    if platform.machine() in _ORDERED_MACHINES:
        return OrderedByMachine()
    if native is None:
        raise MediumUnavailable(
            f"{path}: {platform.machine()} reorders stores, and the extension "
            f"maru_shm._cxl_flush that has the barriers is not built. {_HOW_TO_BUILD}."
        )
    return FencedOnly(native)
