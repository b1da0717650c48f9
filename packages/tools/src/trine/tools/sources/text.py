"""The text of a file that may be compressed, within bounds that a hostile one cannot pass."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from trine.tools.errors import TraceFileError
from trine.tools.text import format_nbytes, printable

__all__ = ["MAX_TEXT_BYTES", "read_text"]

MAX_TEXT_BYTES: Final = 1 << 30

_MAX_RATIO: Final = 200  # traces shrink to a fortieth
_SMALL_BYTES: Final = 64 << 20  # below, no ratio is suspicious
_CHUNK: Final = 1 << 20
_GZIP: Final = b"\x1f\x8b"


def read_text(path: Path) -> str:
    """The text of a file, unpacked if it is compressed by gzip.

    What is not UTF-8 is replaced by the character that says so.

    Raises:
        TraceFileError: if it cannot be read, is too large, or is a compression bomb.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    parts: list[str] = []
    size = 0
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            for chunk in _unpacked(file, path) if packed else iter(lambda: file.read(_CHUNK), b""):
                size += len(chunk)
                if size > MAX_TEXT_BYTES:
                    raise TraceFileError(
                        f"{printable(str(path))} is larger than {format_nbytes(MAX_TEXT_BYTES)}"
                        f"{' when unpacked' if packed else ''}, which is the most that is read. "
                        "Profile fewer steps."
                    )
                parts.append(decode(chunk))
    except OSError as error:
        raise TraceFileError(
            f"{printable(str(path))} cannot be read: {error.strerror or error}."
        ) from error
    parts.append(decode(b"", final=True))
    return "".join(parts)


def _unpacked(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """What a gzip file holds, in chunks of bounded size; it may have several members."""
    name = printable(str(path))
    member = zlib.decompressobj(wbits=31)
    packed = unpacked = 0
    while chunk := file.read(_CHUNK):
        packed += len(chunk)
        while chunk:
            try:
                made = member.decompress(chunk, _CHUNK)
            except zlib.error as error:
                raise TraceFileError(f"{name} cannot be unpacked: {error}.") from error
            unpacked += len(made)
            if unpacked > max(_SMALL_BYTES, _MAX_RATIO * packed):
                raise TraceFileError(
                    f"{name} unpacks to more than {_MAX_RATIO} times its size. No trace does, so "
                    "it is not read."
                )
            yield made
            chunk = member.unconsumed_tail
            if member.eof:
                chunk = member.unused_data.lstrip(b"\0")
                member = zlib.decompressobj(wbits=31) if chunk else member
    while made := member.decompress(member.unconsumed_tail, _CHUNK):
        yield made
    if not member.eof:
        raise TraceFileError(f"{name} is cut off: it does not end as a gzip file does.")
