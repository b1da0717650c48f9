"""The text that the demo trains on: some bytes, and windows into them."""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Text", "Windows", "read_text"]

_MOST_BYTES = 64 * 2**20  # more would take long to read and change nothing
_NOT_THE_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True)
class Text:
    """Bytes to train on.

    Attributes:
        title: what they are, for a reader.
        data: uint8, one dimension.
    """

    title: str
    data: Tensor


def read_text(path: Path | None, *, at_least: int) -> Text:
    """The bytes of a file, of all text files of a folder, or of Python's standard library.

    Files are taken in the order of their names, so every rank reads the same.

    Args:
        path: a file or folder; None takes the library of the running interpreter.
        at_least: how many bytes there must be.

    Raises:
        ValueError: if there is nothing to read or too little; the message is for users.
    """
    if path is None:
        title = f"the standard library of Python {platform.python_version()}"
        library = Path(sysconfig.get_paths()["stdlib"])
        content = _read_folder(library, _is_python, skip=_NOT_THE_LIBRARY)
    else:
        title = str(path)
        content = _read(path)
    if len(content) < at_least:
        what = "is empty" if not content else f"holds {len(content)} bytes of text"
        raise ValueError(
            f"{title} {what}, but training needs at least {at_least}. Give a longer text."
        )
    return Text(title, torch.frombuffer(bytearray(content), dtype=torch.uint8))


class Windows:
    """Random windows into a text, the same for the same seed.

    Args:
        text: where to look.
        batch: how many windows at once.
        length: bytes in each.
        seed: choose one per rank, so that ranks see different windows.
    """

    def __init__(self, text: Text, *, batch: int, length: int, seed: int) -> None:
        self._data = text.data
        self._shape = (batch, 1)
        self._span = torch.arange(length)
        self._last_start = len(text.data) - length
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        """The next windows, int64 `[batch, length]`."""
        starts = torch.randint(self._last_start + 1, self._shape, generator=self._generator)
        return self._data[starts + self._span].long()


def _read(path: Path) -> bytes:
    try:
        if path.is_dir():
            return _read_folder(path, _is_text)
        if path.exists() and not path.is_file():
            # A pipe could be read once, by one rank; a device may never end.
            raise ValueError(
                f"{path} is neither a file nor a folder. Give a file or folder of text."
            )
        return _read_file(path, _MOST_BYTES)
    except FileNotFoundError:
        raise ValueError(f"There is no {path}. Give a file or folder of text.") from None
    except OSError as error:
        where = error.filename or path
        raise ValueError(f"{where} cannot be read: {error.strerror}. Give another text.") from None


def _read_folder(
    root: Path, wanted: Callable[[Path], bool], skip: frozenset[str] = frozenset()
) -> bytes:
    parts: list[bytes] = []
    room = _MOST_BYTES
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(n for n in subfolders if n not in skip and n[0] != ".")
        for name in sorted(names):
            path = Path(folder, name)
            if wanted(path):
                parts.append(_read_file(path, room))
                room -= len(parts[-1])
                if room == 0:
                    return b"".join(parts)
    return b"".join(parts)


def _read_file(path: Path, at_most: int) -> bytes:
    with path.open("rb") as file:
        # Files that the kernel makes up have no size, and some wait for events when read.
        return file.read(at_most) if os.fstat(file.fileno()).st_size else b""


def _is_python(path: Path) -> bool:
    return path.suffix == ".py" and path.is_file()


def _is_text(path: Path) -> bool:
    if path.name.startswith(".") or not path.is_file():
        return False
    return b"\0" not in _read_file(path, 8192)
