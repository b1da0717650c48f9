"""Write a file so that nobody ever sees half of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["written_beside"]


@contextmanager
def written_beside(path: Path) -> Iterator[BinaryIO]:
    """A file of bytes that takes the name `path` when the block ends without an error.

    Until then it has another name in the same folder; after an error it is gone and
    whatever was at `path` is untouched.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.unlink(missing_ok=True)
    try:
        # "x" opens nothing that exists, so a planted link cannot lead elsewhere.
        with partial.open("xb") as file:
            yield file
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
