"""The fields that messages are made of: single values, and many small values as one byte string.

A frame carries its bulk (keys, generations, checksums) in byte strings because msgpack would
otherwise make one object per key and per field: measured here, 128 keys take 3 us this way and
330 us through dacite. All integers are little-endian. (Extents: ``maru_shm.extents``.)

Every function checks what it is given, and raises ValueError, nothing else.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NoReturn, TypeVar

from maru_shm.types import KEY_BYTES, Key

MAX_ITEMS = 16384
"""Keys, generations or leases in one request; at 256 tokens each, a prompt of 4 million tokens."""

MAX_PARTS = 248
"""Parts with checksums of one object: what a 4096-byte header area holds (docs/format.md)."""

MAX_ROWS = 4096
"""Rows in one page of ``ObjectRows``, and sessions in one ``Stats``."""

INT_LIMIT = 1 << 63
"""Integers on their own are below this."""
_MAX_TEXT_BYTES = 4096

ABSENT_KEY = Key(bytes(KEY_BYTES))
"""Where there is no parent."""

Fields = Sequence[Any]
"""A message's fields, in order, as msgpack takes and gives them."""
_Items = TypeVar("_Items", bound=Sequence[Any])

# ------------------------------------------------------------------------- single values


def bad(what: str, value: object) -> NoReturn:
    """Refuse ``value``, which is not ``what`` was expected."""
    raise ValueError(f"expected {what}, found {type(value).__name__}")


def take_int(value: Any) -> int:
    """An integer below 2**63, not negative."""
    if type(value) is not int or not 0 <= value < INT_LIMIT:
        bad("an integer below 2**63", value)
    return value


def take_float(value: Any) -> float:
    """A finite float."""
    if type(value) is not float or not math.isfinite(value):
        bad("a finite float", value)
    return value


def take_text(value: Any) -> str:
    """A text of bounded length."""
    if type(value) is not str or len(value) > _MAX_TEXT_BYTES:
        bad(f"a text of at most {_MAX_TEXT_BYTES} characters", value)
    return value


def take_bytes(value: Any) -> bytes:
    """A byte string."""
    if type(value) is not bytes:
        bad("a byte string", value)
    return value


def digest(value: Any) -> bytes:
    """A byte string of ``KEY_BYTES``; for both directions."""
    if type(value) is not bytes or len(value) != KEY_BYTES:
        bad(f"a byte string of {KEY_BYTES} bytes", value)
    return value


def take_texts(value: Any) -> list[str]:
    """An array of texts."""
    if type(value) is not list:
        bad("an array of texts", value)
    return [take_text(item) for item in value]


def count_fields(fields: Fields, count: int) -> Fields:
    """These fields, if they are so many."""
    if len(fields) != count:
        raise ValueError(f"expected {count} fields, found {len(fields)}")
    return fields


def bounded(items: _Items, bound: int = MAX_ITEMS) -> _Items:
    """These items, if they are not more than ``bound``."""
    if len(items) > bound:
        raise ValueError(f"{len(items)} items in one message; at most {bound} are allowed")
    return items


def clip(text: str) -> str:
    """As much of a text as the other side takes."""
    return text[:_MAX_TEXT_BYTES]


def same_length(*columns: Sequence[Any]) -> None:
    """Refuse columns that do not belong to the same number of items."""
    if len({len(column) for column in columns}) != 1:
        raise ValueError("columns of one message differ in length")


# ------------------------------------------------------------------------- packed values

_ONE_LENGTH = frozenset((KEY_BYTES,))

_MOST_CACHED_KEYS = 1024
"""Longer key strings are sliced: their struct would be big, and no request is that long often."""


@lru_cache(maxsize=64)
def _key_struct(count: int) -> struct.Struct:
    return struct.Struct(f"{KEY_BYTES}s" * count)


def put_keys(keys: Sequence[Key]) -> bytes:
    """``KEY_BYTES`` per key, in order. Raises ValueError for a key of another length."""
    # A wrong length is a caller's mistake that the receiver could only misread.
    if not _ONE_LENGTH.issuperset(map(len, keys)):
        raise ValueError(f"every key must be {KEY_BYTES} bytes long")
    return b"".join(keys)


def put_asked_keys(keys: Sequence[Key]) -> bytes:
    """Like ``put_keys``, for keys that are only asked for; half the time of a lookup's encoding.

    Two wrong lengths that make up for each other pass: they ask for a key that nobody stored,
    since ``put_keys`` lets no such key in.
    """
    packed = b"".join(keys)
    if len(packed) != KEY_BYTES * len(keys):
        raise ValueError(f"every key must be {KEY_BYTES} bytes long")
    return packed


def take_keys(packed: bytes) -> tuple[Key, ...]:
    """The keys of ``put_keys``."""
    count, rest = divmod(len(packed), KEY_BYTES)
    if rest:
        raise ValueError(f"key string of {len(packed)} bytes is not a multiple of {KEY_BYTES}")
    if count <= _MOST_CACHED_KEYS:
        return _key_struct(count).unpack(packed)
    return tuple(Key(packed[at : at + KEY_BYTES]) for at in range(0, len(packed), KEY_BYTES))


def put_u64s(values: Iterable[int]) -> bytes:
    """8 bytes per value, unsigned."""
    numbers = tuple(values)
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def take_u64s(packed: bytes) -> tuple[int, ...]:
    """The values of ``put_u64s``."""
    count, rest = divmod(len(packed), 8)
    if rest:
        raise ValueError(f"integer string of {len(packed)} bytes is not a multiple of 8")
    return struct.unpack(f"<{count}Q", packed)
