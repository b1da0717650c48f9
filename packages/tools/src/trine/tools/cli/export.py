"""`trine trace export` and its short form `trine trace merge`: one timeline of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require, require_folder_of
from trine.tools.text import printable

__all__ = ["export", "merge"]

_PROFILED: Final = "a trace of torch.profiler, or a folder with one for each rank"

_path = click.argument("path", type=TracePath(path_type=Path))
_out = click.option(
    "--out",
    type=TracePath(path_type=Path, dir_okay=False),
    required=True,
    help="The timeline to write; open it in https://ui.perfetto.dev.",
)
_profiler = click.option(
    "--profiler",
    type=TracePath(path_type=Path),
    help="A trace of torch.profiler of the same run, or a folder with one for each rank: its "
    "operators and kernels are put beside what was recorded.",
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
@_profiler
def export(path: Path, form: str, out: Path, profiler: Path | None) -> None:
    """Write the traces of a run as one timeline, for other tools.

    PATH is the folder that a run was recorded to, or the trace file of one rank; traces of
    torch.profiler and JSON dumps of the flight recorder, one for each rank, are read too.
    """
    _export(path, form, out, profiler)


@click.command()
@_path
@_out
@_profiler
def merge(path: Path, out: Path, profiler: Path | None) -> None:
    """Merge the traces of a run into one timeline: short for export --format chrome.

    PATH is the folder that a run was recorded to, or the trace file of one rank; traces of
    torch.profiler and JSON dumps of the flight recorder, one for each rank, are read too.
    """
    _export(path, "chrome", out, profiler)


def _export(path: Path, form: str, out: Path, profiler: Path | None) -> None:
    require(path)
    require_folder_of(out)
    if profiler is not None:
        require(profiler, _PROFILED, "--profiler")
    with one_sentence_errors():
        import torch

        from trine.tools import sources, tracing
        from trine.tools.tracing.merge import check_out

        given = [path] if profiler is None else [path, profiler]
        torch.set_num_threads(1)  # sorting gains nothing from more
        if profiler and any(each.suffix == ".trine" for each in sources.source_files(profiler)):
            raise click.UsageError(
                f"--profiler: {str(profiler)!r} is a recording. Expected {_PROFILED}."
            )
        files = [file for each in given for file in sources.source_files(each)]
        check_out(files, out, "timeline", "timeline.json")
        traces = sources.read(path)
        if profiler is not None:
            traces = sources.join_profiler(traces, sources.read(profiler))
        write = tracing.write_perfetto if form == "perfetto" else tracing.write_timeline
        write(traces, out)
    read, world_size = len(traces), traces[0].header.world_size
    ranks = f"{read}" if read == world_size else f"{read} of {world_size}"
    click.echo(
        f"{printable(str(out))}: ranks {ranks}, {sum(len(trace.events) for trace in traces)} events"
    )
