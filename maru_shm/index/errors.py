"""What the index refuses. A refusal changes nothing: every check comes before the first change."""

from __future__ import annotations

from maru_shm.errors import MaruError
from maru_shm.types import SessionId


class IndexRefusalError(MaruError):
    """Base of what ``Index`` raises for a caller's mistake."""


class UnknownSession(IndexRefusalError):
    """The session was never opened at this epoch, or has been closed."""

    def __init__(self, session: SessionId) -> None:
        super().__init__(
            f"session {session} is not open at this server; it ended or belongs to an earlier "
            "epoch: open a session again"
        )
        self.session = session


class InvalidLength(IndexRefusalError):
    """A reservation asks for less than one byte."""

    def __init__(self, length: int) -> None:
        super().__init__(f"an object of {length} bytes cannot be reserved; ask for 1 or more")
        self.length = length


class UnknownPolicy(IndexRefusalError):
    """No eviction policy has this name."""

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"no eviction policy {name!r}; choose one of {', '.join(known)}")
        self.name = name
