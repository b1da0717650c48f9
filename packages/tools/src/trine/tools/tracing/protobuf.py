"""The protocol buffers wire format, as much of it as a writer of traces needs.

A message is the concatenation of its fields; each function makes one. Fields may come in
any order, and an unknown one is skipped by readers.
"""

from __future__ import annotations

import struct
from typing import Final

__all__ = ["double", "fixed64", "integer", "message", "text", "varint"]

_VARINT, _FIXED64, _LENGTH = 0, 1, 2
_UINT64: Final = (1 << 64) - 1


def varint(number: int) -> bytes:
    """Seven bits per byte, the lowest first; a negative number as its 64-bit complement."""
    number &= _UINT64
    prefix = b""
    while number >= 1 << 14:
        prefix += _TWO_MORE[number & 0x3FFF]
        number >>= 14
    return prefix + _LAST[number]


def integer(field: int, number: int) -> bytes:
    """A field of type int32, int64, uint32, uint64, bool or an enumeration."""
    return varint(field << 3 | _VARINT) + varint(number)


def fixed64(field: int, number: int) -> bytes:
    """A field of type fixed64."""
    return varint(field << 3 | _FIXED64) + struct.pack("<Q", number)


def double(field: int, number: float) -> bytes:
    """A field of type double."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", number)


def message(field: int, content: bytes) -> bytes:
    """A field that holds another message, or bytes."""
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def text(field: int, content: str) -> bytes:
    """A field of type string. What UTF-8 cannot hold, a lone surrogate, becomes an escape."""
    return message(field, content.encode("utf-8", "backslashreplace"))


# Two bytes at a time: times have six, and there are two for each slice.
_TWO_MORE: Final = [bytes((low | 0x80, high | 0x80)) for high in range(128) for low in range(128)]
_LAST: Final = [
    bytes((low | 0x80, high)) if high else bytes((low,))
    for high in range(128)
    for low in range(128)
]
