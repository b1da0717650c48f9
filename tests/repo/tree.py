"""The files of this repository, as the tests beside this file look at them."""

from __future__ import annotations

import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("core", "distributed", "tools")


@cache
def files() -> tuple[Path, ...]:
    """List the repository's files, those not yet committed too, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    paths = map(Path, listing.stdout.rstrip("\0").split("\0"))
    return tuple(path for path in paths if (ROOT / path).exists())


def project(package: str) -> dict[str, Any]:
    """Read the `[project]` table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text(encoding="utf-8")
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table
