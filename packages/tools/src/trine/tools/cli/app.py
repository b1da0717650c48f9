"""The command `trine` and what other packages add to it.

Kept light: `trine --version` imports no torch.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from io import TextIOWrapper

import click

from trine.tools import __version__
from trine.tools.cli.plan import plan
from trine.tools.cli.trace import trace
from trine.tools.text import printable

__all__ = ["ENTRY_POINT_GROUP", "main"]

ENTRY_POINT_GROUP = "trine.commands"

_PASS_EVERYTHING = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,
}


class _Group(click.Group):
    """Our commands, then those of the entry points, looked up only when needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_plugins()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _plugins().get(cmd_name)
        return None if entry is None else _plugin_command(entry)


def _plugins() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _plugin_command(entry: EntryPoint) -> click.Command:
    try:
        main = entry.load()
        if not callable(main):
            raise TypeError(f"{entry.value} is not callable")
    except Exception as error:  # a broken package must not take the others down with it
        return _broken_command(entry, error)

    @click.pass_context
    def run(ctx: click.Context, arguments: tuple[str, ...]) -> None:
        ctx.exit(_status(main, arguments))

    doc = (main.__doc__ or "").strip()
    return click.Command(
        entry.name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings=dict(_PASS_EVERYTHING),
        add_help_option=False,  # the command has its own
        short_help=doc.splitlines()[0] if doc else "",
    )


def _status(main: Callable[[list[str]], int | None], arguments: tuple[str, ...]) -> int:
    from trine.core.errors import TrineError

    try:
        return main(list(arguments)) or 0
    except TrineError as error:
        raise click.ClickException(printable(str(error))) from error


def _broken_command(entry: EntryPoint, error: Exception) -> click.Command:
    reason = printable(f"{type(error).__name__}: {error}")

    def fail(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(
            f"The command {entry.name!r} ({entry.value}) cannot be loaded. {reason}"
        )

    return click.Command(
        entry.name,
        callback=fail,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings=dict(_PASS_EVERYTHING),
        add_help_option=False,
        short_help=f"(cannot be loaded: {reason})",
    )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="trine", message="%(prog)s (trine-tools) %(version)s")
def main() -> None:
    """Record, merge and understand what training runs do.

    Packages of Trine add commands here when they are installed.
    """
    # A name that the terminal's encoding lacks is no reason for a traceback.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # torch says so where numpy is absent, which none of our commands needs.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


main.add_command(plan)
main.add_command(trace)
