"""The summary as people see it, on a terminal and elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from tests.tools.events import comm, event, rank_trace, step
from tests.tools.jobs import begin, done, through, wait
from trine.core.tracing import TraceEvent
from trine.tools.reports import print_summary, summarize, tables
from trine.tools.tracing import RankTrace
from trine.tools.tracing.schema import End


def two_ranks() -> list[RankTrace]:
    def events(late_us: int) -> list[TraceEvent]:
        return [
            *done(1, 100 + late_us, 300, unit="(root)", nbytes=65_536),
            begin(2, 400, unit="blocks.0"),
            wait(2, 1_350, 1_400, unit="blocks.0"),
            through(2, 400, 1_400, unit="blocks.0", nbytes=131_072),
            begin(3, 5_000, unit="blocks.0", op="reduce_scatter"),
            wait(3, 6_750, 7_000, unit="blocks.0", op="reduce_scatter"),
            through(3, 5_000, 7_000, unit="blocks.0", op="reduce_scatter", nbytes=131_072),
            event("forward", 0, 9_500, category="compute"),
            step(0, 10_000),
        ]

    return [
        closed(rank_trace(*events(0), rank=0, world_size=2)),
        closed(rank_trace(*events(100), rank=1, world_size=2)),
    ]


def closed(trace: RankTrace) -> RankTrace:
    """The recording with an end."""
    return replace(trace, end=End(len(trace.events), trace.dropped, "closed"))


def printed(*traces: RankTrace) -> str:
    out = io.StringIO()
    print_summary(summarize(map(closed, traces)), out)
    return out.getvalue()


def test_a_recording_without_events_asks_whether_its_steps_were_reached() -> None:
    assert printed(rank_trace()).startswith(
        "1 rank, no events: did the run reach the steps that were to be recorded?\n"
    )


PLAIN = """\
2 ranks, 1 step
step time 10.0 ms median, 10.0 ms mean, 10.0 ms p95, 10.0 ms first
slowest rank 0: 10.0 ms mean
4% of the step is exposed communication, most of it reduce_scatter of blocks.0.
sent 320 KiB per rank

                                                            makes
                                                           others
rank     step  compute  exposed     wait   other   hidden    wait
-----------------------------------------------------------------
0     10.0 ms  9.00 ms   400 us   100 us  500 us  2.70 ms    0 ns
1     10.0 ms  9.10 ms   400 us     0 ns  500 us  2.70 ms  100 us
mean  10.0 ms  9.05 ms   400 us  50.0 us  500 us  2.70 ms
                 90.5%     4.0%     0.5%    5.0%

communication by unit: per step, mean over ranks

                    all-                   reduce-
                  gather                   scatter                      of
unit      calls     time      sent  calls     time     sent  exposed  step     wait
-----------------------------------------------------------------------------------
(root)        1   100 us  64.0 KiB                            100 us  1.0%  50.0 us
blocks.0      1  1.00 ms   128 KiB      1  2.00 ms  128 KiB   300 us  3.0%     0 ns
total         2  1.10 ms   192 KiB      1  2.00 ms  128 KiB   400 us  4.0%  50.0 us
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
