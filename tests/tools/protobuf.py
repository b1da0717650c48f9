"""A decoder of the protobuf wire format, written from its specification, for tests only."""

from __future__ import annotations

import struct
from collections import defaultdict
from typing import Any

Fields = dict[int, list[Any]]


def decode(content: bytes) -> Fields:
    """Field number to its values in order: an int, or bytes of whatever meaning."""
    fields: Fields = defaultdict(list)
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        if key & 7 == 0:
            value, at = _varint(content, at)
            fields[key >> 3].append(value)
            continue
        if key & 7 == 1:
            size = 8
        else:
            assert key & 7 == 2, f"wire type {key & 7} at {at}"
            size, at = _varint(content, at)
        assert at + size <= len(content)
        fields[key >> 3].append(content[at : at + size])
        at += size
    return dict(fields)


def signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def double(content: bytes) -> float:
    value: float = struct.unpack("<d", content)[0]
    return value


def _varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = content[at]
        at += 1
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return number, at
