"""One request under way, as its caller holds it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, unique
from typing import Generic, TypeVar

from maru_shm.control.errors import ControlError

T = TypeVar("T")


@unique
class _State(Enum):
    WAITING = 0
    DONE = 1
    FAILED = 2
    TAKEN = 3


class PendingReply(Generic[T]):
    """A request under way; see ``maru_shm.control.plane.Pending``.

    Dropping it before ``take`` is allowed at any time: what its reply grants is given back.
    """

    __slots__ = ("__weakref__", "_error", "_give_back", "_reply", "_state", "deadline", "kind")

    def __init__(self, kind: type, deadline: float, give_back: Callable[[T], None]) -> None:
        """``give_back`` gets a reply that has come and that nobody will take."""
        self.deadline = deadline
        self.kind = kind
        self._give_back = give_back
        self._state = _State.WAITING
        self._reply: T | None = None
        self._error: ControlError | None = None

    def done(self) -> bool:
        """Whether ``take`` would return or raise now. Only ``poll`` changes the answer."""
        return self._state is not _State.WAITING

    def take(self) -> T:
        """The reply, once. Raises ControlError if it failed, RuntimeError if it is not done."""
        if self._state is _State.DONE:
            self._state = _State.TAKEN
            reply, self._reply = self._reply, None
            return reply  # type: ignore[return-value] # there when DONE
        if self._error is not None:
            raise self._error
        if self._state is _State.TAKEN:
            raise RuntimeError("this reply was taken already")
        raise RuntimeError("no reply yet: poll() until done()")

    def resolve(self, reply: T) -> None:
        """For the exchange: the reply is here."""
        self._reply = reply
        self._state = _State.DONE

    def fail(self, error: ControlError) -> None:
        """For the exchange: there will be no reply."""
        self._error = error
        self._state = _State.FAILED

    def __del__(self) -> None:
        if self._state is _State.DONE and self._reply is not None:
            self._give_back(self._reply)
