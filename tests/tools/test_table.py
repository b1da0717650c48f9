"""The summary as people see it, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from tests.tools.events import comm, event, rank_trace, step
from trine.core.tracing import TraceEvent
from trine.tools.reports import print_summary, summarize, tables
from trine.tools.tracing import RankTrace


def two_ranks() -> list[RankTrace]:
    def events(slower_us: int) -> list[TraceEvent]:
        return [
            comm("all_gather", "(root)", 0, 300, nbytes=65_536, exposed_us=200 + slower_us),
            comm("all_gather", "blocks.0", 400, 1_400, nbytes=131_072, exposed_us=50),
            comm("reduce_scatter", "blocks.0", 5_000, 7_000, nbytes=131_072, exposed_us=250),
            step(0, 10_000),
        ]

    return [
        rank_trace(*events(0), rank=0, world_size=2),
        rank_trace(*events(100), rank=1, world_size=2),
    ]


def printed(*traces: RankTrace) -> str:
    out = io.StringIO()
    print_summary(summarize(traces), out)
    return out.getvalue()


PLAIN = """\
2 ranks, 1 step
step time 10.0 ms mean, 10.0 ms median, 10.0 ms first; slowest rank 0: 10.0 ms
sent 320 KiB per rank
below: per step, mean over ranks; max is the rank with the most

                    all-                   reduce-
                  gather                   scatter           exposed  exposed    of
unit      calls     time      sent  calls     time     sent     mean      max  step
-----------------------------------------------------------------------------------
(root)        1   300 us  64.0 KiB                            250 us   300 us  2.5%
blocks.0      1  1.00 ms   128 KiB      1  2.00 ms  128 KiB   300 us   300 us  3.0%
total         2  1.30 ms   192 KiB      1  2.00 ms  128 KiB   550 us           5.5%
"""


def test_elsewhere_than_on_a_terminal_the_table_is_plain_text() -> None:
    assert printed(*two_ranks()) == PLAIN


def test_a_terminal_gets_the_same_cells_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()

    def terminal(**kwargs: object) -> Console:
        return Console(file=out, width=80, force_terminal=True, color_system=None, highlight=False)

    monkeypatch.setattr(tables, "Console", terminal)
    print_summary(summarize(two_ranks()), out)

    shown = out.getvalue().splitlines()
    assert max(len(line) for line in shown) <= 80
    assert [line.split() for line in shown[-3:]] == [
        line.split() for line in PLAIN.splitlines()[-3:]
    ]
    assert shown[1] == PLAIN.splitlines()[1]


def test_names_cannot_style_or_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "[red]a[/red]\x1b[2J\n\u202e[/nonsense]"
    trace = rank_trace(comm("all_gather", name, 0, 5))
    out = io.StringIO()

    def terminal(**kwargs: object) -> Console:
        return Console(file=out, width=200, force_terminal=True, color_system=None)

    plain = printed(trace)
    monkeypatch.setattr(tables, "Console", terminal)
    print_summary(summarize([trace]), out)

    shown = r"[red]a[/red]\x1b[2J\n\u202e[/nonsense]"
    assert shown in plain
    assert shown in out.getvalue()
    assert "\x1b[2J" not in plain + out.getvalue()


def test_missing_ranks_and_dropped_events_are_said() -> None:
    text = printed(rank_trace(step(0, 5), step(5, 9), rank=1, world_size=4, dropped=3))

    assert "1 of 4 ranks (no trace of the others)" in text
    assert "dropped 3 events" in text
    assert "No communication was recorded." in text


def test_the_rank_that_sends_most_is_named() -> None:
    text = printed(
        rank_trace(comm("all_gather", "a", 0, 1, nbytes=1024), rank=0, world_size=2),
        rank_trace(comm("all_gather", "a", 0, 1, nbytes=3072), rank=1, world_size=2),
    )

    assert "sent 2.00 KiB per rank (rank 1: 3.00 KiB)" in text


def test_communication_of_no_unit_has_a_line() -> None:
    text = printed(rank_trace(event("all_reduce", 0, 5, category="comm", kind="async")))

    assert "(no unit)" in text
