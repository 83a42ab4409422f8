"""What can go wrong between a client and the server.

    MaruError
    |- ControlError             the request has no answer that could be used
    |  |- Unreachable           no server, or it did not answer before the deadline; state unknown
    |  |- RequestRefused        the server answered with a refusal (``code``, ``message``)
    |  |- BadFrame              the bytes received are not a message of this protocol
    |  |  |- WrongVersion       they are one of another version (names both)
    |- ServerStartFailed        an embedded server could not be started; names its log file
    |- PoolError                see maru_shm.pool.errors

None of these is a miss: a miss is a reply. Only ``RequestRefused`` with UNKNOWN_SESSION means
that re-opening the session helps; clients do that by themselves.
"""

from __future__ import annotations

from maru_shm.control.messages import ErrorCode
from maru_shm.errors import MaruError as MaruError


class ControlError(MaruError):
    """A request has no usable answer; whether it took effect is not known."""


class Unreachable(ControlError):
    """No server there, or no answer before the deadline."""


class BadFrame(ControlError):
    """The bytes are not a message of this protocol and version; they were dropped."""

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id
        """Which request it was, where that much could be read."""


class WrongVersion(BadFrame):
    """A message of another protocol version; the text names both."""


class RequestRefused(ControlError):
    """The server understood who asks and said no."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code.name.lower()}: {message}")
        self.code = code
        self.message = message


class ServerStartFailed(MaruError):
    """No embedded server could be started or found in time; the message names its log file."""
