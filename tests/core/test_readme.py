"""The README's example does what the README says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "core" / "README.md"


def test_the_example_prints_what_stands_below_it() -> None:
    blocks = dict(re.findall(r"```(python|text)\n(.*?)```", README.read_text("utf-8"), re.DOTALL))
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        exec(compile(blocks["python"], str(README), "exec"), {})

    assert printed.getvalue() == blocks["text"]
