"""`trine trace export` and its short form `trine trace merge`: one timeline of all ranks."""

from __future__ import annotations

from pathlib import Path

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require, require_folder_of

__all__ = ["export", "merge"]

_path = click.argument("path", type=TracePath(path_type=Path))
_out = click.option(
    "--out",
    type=TracePath(path_type=Path, dir_okay=False),
    required=True,
    help="The timeline to write; open it in https://ui.perfetto.dev.",
)


@click.command()
@_path
@click.option(
    "--format",
    "form",
    type=click.Choice(["chrome", "perfetto"]),
    required=True,
    help="Chrome: trace JSON, which many viewers read. Perfetto: protobuf, half the size; "
    "arrows join the ranks' parts of a collective.",
)
@_out
def export(path: Path, form: str, out: Path) -> None:
    """Write the traces of a run as one timeline, for other tools.

    PATH is the folder that a run was recorded to, or the trace file of one rank.
    """
    _export(path, form, out)


@click.command()
@_path
@_out
def merge(path: Path, out: Path) -> None:
    """Merge the traces of a run into one timeline: short for export --format chrome.

    PATH is the folder that a run was recorded to, or the trace file of one rank.
    """
    _export(path, "chrome", out)


def _export(path: Path, form: str, out: Path) -> None:
    require(path)
    require_folder_of(out)
    with one_sentence_errors():
        from trine.tools import tracing

        write = tracing.write_perfetto if form == "perfetto" else tracing.write_timeline
        traces = tracing.merge(path, out, write)
    read, world_size = len(traces), traces[0].header.world_size
    ranks = f"{read}" if read == world_size else f"{read} of {world_size}"
    click.echo(f"{out}: ranks {ranks}, {sum(len(trace.events) for trace in traces)} events")
