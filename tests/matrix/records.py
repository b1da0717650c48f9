"""The files in which a run of the matrix is written down: one per session, one JSON per line.

The session of nox writes the first line and the last, `tests.matrix.plugin` those between.
Lines are appended, each by one call, so several processes can write and none need end well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["append", "read"]


def append(file: Path, **record: object) -> None:
    """Add one line.

    Args:
        file: made if it is not there.
        **record: what to write; strings and numbers.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(record) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """The lines, in the order in which they were written."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]
