"""What a copy has to wait for, and what has to wait for a copy.

Blocks that a step writes are stored after its forward, and blocks that earlier forwards may still
read are loaded into only behind them. On the CPU a forward is over when it returns. On a device
work is queued: the worker's thread marks the place in its stream, and the copy thread makes its own
stream wait for that mark.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Mark(Protocol):
    """A place in the engine's work. Made by the worker's thread, used by a copy thread."""

    def behind(self) -> AbstractContextManager[None]:
        """Run copies behind the mark; they are complete when the context is left."""
        ...


class DeviceOrder(Protocol):
    """Makes marks for one device."""

    def mark(self) -> Mark:
        """Mark the end of all work that the calling thread has submitted so far."""
        ...


class HostOrder:
    """The CPU: everything that was submitted is done."""

    def mark(self) -> HostOrder:
        """See ``DeviceOrder``."""
        return self

    def behind(self) -> AbstractContextManager[None]:
        """See ``Mark``."""
        return nullcontext()


class StreamOrder:
    """A device with streams (CUDA and what torch treats like it). Not yet run on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> StreamMark:
        """See ``DeviceOrder``."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call] # theirs
        event.record(torch.cuda.current_stream(self._device))
        return StreamMark(self._device, event)


class StreamMark:
    """An event in the engine's stream."""

    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    @contextmanager
    def behind(self) -> Iterator[None]:
        """See ``Mark``. Streams come from torch's pool, so one per job costs nothing."""
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call] # theirs
        stream.wait_event(self._event)
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()


def order_for(device: torch.device) -> DeviceOrder:
    """The order of the device that the cache lies on."""
    return HostOrder() if device.type == "cpu" else StreamOrder(device)
