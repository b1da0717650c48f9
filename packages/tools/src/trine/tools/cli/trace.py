"""`trine trace`: read what ranks recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

# The packages that read traces import torch, by way of trine.core. Commands import
# them when they run, so that `trine --help` need not wait for it.

__all__ = ["trace"]


class _Path(click.Path):
    """A path; an empty one, as an unset variable gives, does not mean the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("a path is expected, and it is empty.", param, ctx)
        return super().convert(value, param, ctx)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def trace() -> None:
    """Merge and sum up the traces of a run."""


@trace.command()
@click.argument("path", type=_Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns, sizes in bytes.")
def summary(path: Path, as_json: bool) -> None:
    """Show where the communication time of a run went, per FSDP unit.

    PATH is the folder that a run was recorded to, or the trace file of one rank.
    """
    _require(path)
    with _one_sentence_errors():
        from trine.tools.reports import print_summary, summarize
        from trine.tools.tracing import read_traces

        result = summarize(read_traces(path))
        if as_json:
            click.echo(json.dumps({"format": "trine-summary", "version": 1, **asdict(result)}))
        else:
            print_summary(result)


@trace.command()
@click.argument("path", type=_Path(path_type=Path))
@click.option(
    "--out",
    type=_Path(path_type=Path, dir_okay=False),
    required=True,
    help="The timeline to write, Chrome trace JSON; open it in https://ui.perfetto.dev.",
)
def merge(path: Path, out: Path) -> None:
    """Merge the traces of a run into one timeline.

    PATH is the folder that a run was recorded to, or the trace file of one rank.
    """
    _require(path)
    if not out.parent.is_dir():
        raise click.UsageError(
            f"--out is {str(out)!r}, but its folder does not exist. Make it first."
        )
    with _one_sentence_errors():
        from trine.tools import tracing

        traces = tracing.merge(path, out)
    read, world_size = len(traces), traces[0].header.world_size
    ranks = f"{read}" if read == world_size else f"{read} of {world_size}"
    click.echo(f"{out}: ranks {ranks}, {sum(len(trace.events) for trace in traces)} events")


def _require(path: Path) -> None:
    if not path.exists():
        raise click.UsageError(
            f"{str(path)!r} does not exist. Expected the folder of a run or the trace of a rank."
        )


@contextmanager
def _one_sentence_errors() -> Iterator[None]:
    from trine.core.errors import TrineError

    try:
        yield
    except TrineError as error:
        raise click.ClickException(str(error)) from error
