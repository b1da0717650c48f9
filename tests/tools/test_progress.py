"""The line that says how far a command is."""

from __future__ import annotations

import io

import pytest

from trine.tools.cli import progress
from trine.tools.cli.progress import Progress


class Terminal(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def test_what_is_done_at_once_shows_nothing() -> None:
    terminal = Terminal()

    with Progress("ranks read", 3, terminal) as shown:
        assert list(shown.over("abc")) == ["a", "b", "c"]

    assert terminal.getvalue() == ""


def test_what_takes_long_is_counted_and_the_line_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    terminal = Terminal()

    with Progress("ranks read", 2, terminal) as shown:
        list(shown.over("ab"))

    width = len("2 of 2 ranks read")
    assert terminal.getvalue() == ("\r1 of 2 ranks read\r2 of 2 ranks read\r" + " " * width + "\r")


def test_a_file_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.0)
    file = io.StringIO()

    with Progress("ranks read", 2, file) as shown:
        list(shown.over("ab"))

    assert file.getvalue() == ""
