"""One byte string per value: the typed, length-prefixed encoding below every identity.

Two values that differ, in content or in type, never have the same encoding, and the encoding of
a value does not depend on the process, the platform or the Python version. All numbers are
little-endian. A value is a tag byte and its body:

    N                           None
    F, T                        False, True
    i  u32 n, n bytes           int: two's complement, as few bytes as hold it (0 has one)
    f  8 bytes                  float: IEEE 754 binary64
    s  u64 n, n bytes           str: UTF-8 (lone surrogates as their three bytes)
    b  u64 n, n bytes           bytes
    t  u64 n, n values          tuple or list
    m  u64 n, n times (s, value)  mapping with str keys, in the order of the keys' encodings

The encoding is frozen by tests/maru_vllm/golden; a change of it needs another version number in
``identity.KEY_FORMAT`` and ``namespace.NAMESPACE_FORMAT``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_U64 = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_F64 = struct.Struct("<d")


class UnencodableError(TypeError):
    """The value, or something inside it, is of a type that has no encoding here."""


def encode(value: object) -> bytes:
    """The encoding of ``value``. Raises UnencodableError."""
    match value:
        case None:
            return b"N"
        case bool():
            return b"T" if value else b"F"
        case int():
            body = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"i" + _U32.pack(len(body)) + body
        case float():
            return b"f" + _F64.pack(value)
        case str():
            body = value.encode("utf-8", "surrogatepass")
            return b"s" + _U64.pack(len(body)) + body
        case bytes():
            return b"b" + _U64.pack(len(value)) + value
        case tuple() | list():
            return b"t" + _U64.pack(len(value)) + b"".join(map(encode, value))
        case Mapping():
            return b"m" + _U64.pack(len(value)) + b"".join(_encode_items(value))
    raise UnencodableError(
        f"{type(value).__module__}.{type(value).__qualname__} has no encoding in an identity"
    )


def _encode_items(mapping: Mapping[object, object]) -> list[bytes]:
    items = []
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise UnencodableError(f"a mapping with the key {key!r}, which is not a str")
        items.append((encode(key), encode(value)))
    return [part for pair in sorted(items) for part in pair]
