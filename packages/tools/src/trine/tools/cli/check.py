"""`trine trace check`: is a run worse than its baseline? For CI."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click

from trine.tools.cli.paths import NoAnswer, TracePath, one_sentence_errors, require

__all__ = ["check"]

_GENERAL: Final = 0.05
_EXPECTED: Final = "expected a share such as 5% or 0.05, or a part with one, such as exposed=10%"


def _limits(
    context: click.Context, option: click.Parameter, values: Sequence[str]
) -> dict[str, float]:
    """By name of a part, "" for the general one, the share."""
    return dict(_limit(value) for value in values)


def _limit(value: str) -> tuple[str, float]:
    part, equals, text = value.rpartition("=")
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share < math.inf or (equals and not part):
        raise click.BadParameter(f"{value!r}: {_EXPECTED}.")
    if share > 1 and not text.endswith("%"):
        raise click.BadParameter(f"{value!r} is {share:.0%}; {_EXPECTED}.")
    return part, share


@click.command()
@click.argument("path", type=TracePath(path_type=Path))
@click.option(
    "--baseline",
    type=TracePath(path_type=Path),
    required=True,
    help="What `trine trace summary --json` wrote for an earlier run, or that run's folder.",
)
@click.option(
    "--max-regression",
    "limits",
    callback=_limits,
    multiple=True,
    default=[f"{_GENERAL:.0%}"],
    metavar="[PART=]SHARE",
    help="How much step time and sent bytes may grow: 5% or 0.05 (the default). PART=SHARE checks "
    "another part of the step too: compute, exposed, wait, data, optimizer, checkpoint, other, "
    "hidden, between. Can be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, times in ns, sizes in bytes.")
@click.pass_context
def check(
    context: click.Context,
    path: Path,
    baseline: Path,
    limits: dict[str, float],
    as_json: bool,
) -> None:
    """Fail if a run is worse than a baseline, by more than chance explains.

    PATH is the folder that a run was recorded to, or its summary as JSON. The exit status is 0
    if it is no worse, 1 if it is, and 2 if the two cannot be read or compared.
    """
    require(path)
    require(baseline, "what `trine trace summary --json` wrote, or a run's folder", "--baseline")
    with one_sentence_errors(NoAnswer):
        from trine.tools.analysis.check import ALWAYS, Check
        from trine.tools.analysis.check import check as check_run
        from trine.tools.analysis.saved import read_measured
        from trine.tools.errors import NotComparableError
        from trine.tools.reports.check_table import print_check

        wanted = {**dict.fromkeys(ALWAYS, _GENERAL), **limits}
        if (general := wanted.pop("", None)) is not None:
            wanted |= {name: general for name in ALWAYS if name not in limits}
        found: Check
        try:
            found = check_run(read_measured(path), read_measured(baseline), wanted)
        except NotComparableError as error:
            raise click.UsageError(str(error)) from error
    if as_json:
        data = {"format": "trine-check", "version": 1, "passed": not found.worse}
        click.echo(json.dumps({**data, **asdict(found)}))
    else:
        print_check(found)
    context.exit(1 if found.worse else 0)
