"""`trine trace memory`: whose memory it is."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from trine.tools.cli.paths import TracePath, one_sentence_errors, require

__all__ = ["memory"]


@click.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, sizes in bytes.")
def memory(path: Path, as_json: bool) -> None:
    """Tell what the memory of a run was for, per FSDP unit, and explain its peak.

    PATH is the folder that a run was recorded to, or the trace file of one rank. The units
    listed are those of the rank with the highest peak.
    """
    require(path)
    with one_sentence_errors():
        from trine.tools.analysis.memory import memory_use
        from trine.tools.reports.memory_table import print_memory
        from trine.tools.sources import read

        use = memory_use(read(path))
    if as_json:
        click.echo(json.dumps({"format": "trine-memory", "version": 1, **asdict(use)}))
    else:
        print_memory(use)
