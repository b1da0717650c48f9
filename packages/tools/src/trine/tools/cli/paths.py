"""What the commands of `trine trace` share: paths as arguments, faults in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

__all__ = ["NoAnswer", "TracePath", "one_sentence_errors", "require", "require_folder_of"]


class TracePath(click.Path):
    """A path; an empty one, as an unset variable gives, does not mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; see `click.ParamType.convert`."""
        if not value:
            self.fail("a path is expected, and it is empty.", param, ctx)
        return super().convert(value, param, ctx)


def require(
    path: Path, expected: str = "the folder of a run or the trace of a rank", name: str = ""
) -> None:
    """Check that there is something at the path.

    Args:
        path: what the user gave.
        expected: what it should be, in words.
        name: of the option that gave it; "" for an argument.

    Raises:
        click.UsageError: if there is not.
    """
    if not _is_there(path):
        option = f"{name}: " if name else ""
        raise click.UsageError(f"{option}{str(path)!r} does not exist. Expected {expected}.")


def require_folder_of(out: Path) -> None:
    """Check that a file can be put where --out says.

    Raises:
        click.UsageError: if its folder does not exist.
    """
    if not out.parent.is_dir():
        raise click.UsageError(
            f"--out is {str(out)!r}, but its folder does not exist. Make it first."
        )


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # its name is longer than any there can be
        return False


class NoAnswer(click.ClickException):
    """Ends a command whose status 1 is an answer, without one."""

    exit_code = 2


@contextmanager
def one_sentence_errors(
    failure: type[click.ClickException] = click.ClickException,
) -> Iterator[None]:
    """Say what is wrong with a file in one sentence, without a traceback.

    Args:
        failure: what ends the command then; it has the exit status.
    """
    from trine.core.errors import TrineError

    try:
        yield
    except TrineError as error:
        raise failure(str(error)) from error
