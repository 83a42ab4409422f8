"""What can go wrong with a pool's bytes.

    PoolError
    |- NoSuchPool          nothing at that path
    |- PoolExists          creating: something is there already; it was not touched
    |- NotAPool            something is there, but it was not made by Maru
    |- PoolFormatError     made by Maru, but not usable: other version, truncated, damaged
    |- PoolReplaced        a pool is there, but another one than the caller was told of
    |- NotEnoughSpace      the medium has no room; ``needed_bytes`` and ``free_bytes``
    |- MediumUnavailable   the medium does not fit the path, or this host cannot use it
    |- ObjectGone          reading: the object was replaced; the copy must be discarded
    |- ObjectCorrupt       reading: header or payload fails its checksum; report it as suspect

After each of the first seven nothing is mapped, and nothing at the path was changed.
"""

from __future__ import annotations

from maru_shm.errors import MaruError


class PoolError(MaruError):
    """Base of every error about a pool's bytes."""


class NoSuchPool(PoolError):
    """Nothing is at the path."""


class PoolExists(PoolError):
    """A pool was to be made where something is already; it was not touched."""


class NotAPool(PoolError):
    """The bytes at the path were not written by Maru."""


class PoolFormatError(PoolError):
    """Made by Maru, but unusable here: another format version, truncated or damaged."""


class PoolReplaced(PoolError):
    """The pool at the path has another uuid than expected: ask the server again."""


class NotEnoughSpace(PoolError):
    """The medium cannot hold the pool; nothing was written."""

    def __init__(self, path: str, needed_bytes: int, free_bytes: int, advice: str) -> None:
        super().__init__(
            f"{path}: the pool needs {needed_bytes} bytes, but only {free_bytes} are free. {advice}"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class MediumUnavailable(PoolError):
    """The medium does not fit the path, or this host cannot use it safely."""


class ObjectGone(PoolError):
    """The extent's generation is not in its header any more: whatever was read is void."""


class ObjectCorrupt(PoolError):
    """The object's header or payload fails its checksum."""
