"""The report: needs nothing else, can be used with a keyboard, and its lengths are true."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.tools.events import US, event, rank_trace, step, write_rank_file
from trine.core.tracing import TraceEvent
from trine.tools.cli import main
from trine.tools.reports.html.page import build_page
from trine.tools.reports.html.write import render
from trine.tools.tracing import End, RankTrace

HOSTILE = "</script><img src=x onerror=alert(1)>\u202eabc\x1b[31m"
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Element:
    def __init__(self, tag: str, attributes: dict[str, str], parent: Element | None) -> None:
        self.tag = tag
        self.attributes = attributes
        self.parent = parent
        self.children: list[Element] = []
        self.own_text = ""

    def __iter__(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            yield from child

    @property
    def text(self) -> str:
        return self.own_text + "".join(child.text for child in self.children)

    def find(self, tag: str, **attributes: str) -> list[Element]:
        return [
            one
            for one in self
            if one.tag == tag
            and all(
                value in one.attributes.get(name.strip("_"), "").split()
                for name, value in attributes.items()
            )
        ]


class Tree(HTMLParser):
    """The page as a browser sees it, as far as tests ask."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = self.current = Element("", {}, None)
        self.feed(page)
        self.close()
        assert self.current is self.root, f"<{self.current.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {name: value or "" for name, value in attrs}, self.current)
        self.current.children.append(made)
        if tag not in VOID:
            self.current = made

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.current.tag == tag, f"</{tag}> closes <{self.current.tag}>"
        assert self.current.parent is not None
        self.current = self.current.parent

    def handle_data(self, data: str) -> None:
        self.current.own_text += data


def report(*traces: RankTrace, title: str = "run") -> str:
    return render(build_page(traces, title))


def tree(*traces: RankTrace) -> Element:
    return Tree(report(*traces)).root


def rank(
    number: int,
    world_size: int,
    late_us: int = 0,
    steps: int = 6,
    unit: str = "blocks.0",
    more: int = 0,
) -> RankTrace:
    """A rank that loads, computes, waits for a gather, and updates: 1 ms a step in all.

    The gather ends 700 us after the step's start, 100 us after the last rank came at 600 us.
    """
    made: list[TraceEvent] = []
    for at in range(steps):
        t = at * 1_000
        key = {"group": "world", "seq": at + 1, "op": "all_gather"}
        came = t + 400 + late_us
        made += [
            event("load batch", t, t + 100, category="io", step=at),
            event("forward", t + 100, came, category="compute", step=at, unit=unit),
            event("start all_gather", came, kind="instant", category="comm", step=at, args=key),
            event(
                "all_gather",
                came,
                t + 700,
                kind="async",
                category="comm",
                unit=unit,
                step=at,
                nbytes=64,
                args=key,
            ),
            event("wait all_gather", came, t + 700, category="comm", unit=unit, step=at, args=key),
            event("optimizer", t + 700, t + 1_000, category="compute", step=at),
            event(
                "memory.sharded",
                t + 10,
                kind="counter",
                category="mem",
                unit=unit,
                value=2**20,
                step=at,
            ),
            event(
                "memory.activations",
                t + 300,
                kind="counter",
                category="mem",
                unit=unit,
                value=2**21 + at,
                step=at,
            ),
            event(
                "memory.activations",
                t + 800,
                kind="counter",
                category="mem",
                unit=unit,
                value=0,
                step=at,
            ),
            *(
                event("op", t + 100 + place, t + 101 + place, category="compute", step=at)
                for place in range(min(more, 290))
            ),
            step(t, t + 1_000, at),
        ]
    return rank_trace(*made, rank=number, world_size=world_size)


def two_ranks() -> tuple[RankTrace, RankTrace]:
    return rank(0, 2), rank(1, 2, late_us=200)


def widths(mark: Element) -> dict[str, float]:
    return {one.attributes["class"]: float(one.attributes["width"]) for one in mark.find("rect")}


def test_the_page_refers_to_nothing_outside_of_it() -> None:
    page = report(*two_ranks())

    root = Tree(page).root
    links = [one.attributes["href"] for one in root if "href" in one.attributes]
    assert links
    assert all(link.startswith("#") for link in links)
    assert not [
        one for one in root if "src" in one.attributes or one.tag in ("link", "img", "iframe")
    ]
    assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", page))
    assert "@import" not in page
    assert "://" not in page


def test_links_lead_to_sections() -> None:
    root = tree(*two_ranks())

    targets = {one.attributes["id"] for one in root if "id" in one.attributes}
    assert {link.attributes["href"][1:] for link in root.find("a")} <= targets


def test_the_policy_allows_our_style_and_our_script_and_nothing_else() -> None:
    root = tree(*two_ranks())

    (policy,) = [
        one.attributes["content"] for one in root.find("meta") if "http-equiv" in one.attributes
    ]
    (style,), (script,) = root.find("style"), root.find("script")
    hashes = {
        name: b64encode(sha256(one.text.encode()).digest()).decode()
        for name, one in (("style", style), ("script", script))
    }
    assert policy == (
        f"default-src 'none'; style-src 'sha256-{hashes['style']}'; "
        f"script-src 'sha256-{hashes['script']}'"
    )
    assert not [
        one for one in root for name in one.attributes if name == "style" or name.startswith("on")
    ]


def test_everything_that_takes_the_focus_has_a_name() -> None:
    root = tree(*two_ranks())

    focusable = [
        one for one in root if one.tag in ("a", "button", "summary") or "tabindex" in one.attributes
    ]
    assert len(focusable) > 20
    assert [
        one.tag for one in focusable if not (one.attributes.get("aria-label") or one.text).strip()
    ] == []


def test_every_picture_has_one_place_to_enter_it_and_a_name() -> None:
    root = tree(*two_ranks())

    charts = root.find("svg", class_="chart")
    assert len(charts) == 4  # ranks, steps, a timeline since all steps are alike, memory
    for chart in charts:
        assert chart.attributes["aria-label"]
        assert len([one for one in chart if one.attributes.get("tabindex") == "0"]) == 1


def test_every_picture_has_a_table_beside_it() -> None:
    root = tree(*two_ranks())

    for section in root.find("section"):
        if section.find("svg", class_="chart"):
            assert len(section.find("table")) >= len(section.find("figure"))


def test_bars_are_as_long_as_the_parts_of_the_breakdown() -> None:
    # Rank 0 comes at 400 us, rank 1 at 600; both go on at 700. So of the 300 us for which rank 0
    # is blocked 200 are rank 1's doing, and 100 exposed communication.
    root = tree(*two_ranks())

    rank_0, rank_1 = root.find("svg", class_="chart")[0].find("g", class_="mark")
    per_us = 830 / 1_000  # the longest bar takes 830 of 1000
    assert widths(rank_0) == {
        "compute": round(300 * per_us, 1),
        "exposed": round(100 * per_us, 1),
        "wait": round(200 * per_us, 1),
        "data": round(100 * per_us, 1),
        "optimizer": round(300 * per_us, 1),
    }
    assert widths(rank_1) == {
        "compute": round(500 * per_us, 1),
        "exposed": round(100 * per_us, 1),
        "data": round(100 * per_us, 1),
        "optimizer": round(300 * per_us, 1),
    }
    assert rank_0.attributes["aria-label"] == (
        "rank 0, 1.00 ms: compute 300 us, exposed communication 100 us, "
        "waiting for other ranks 200 us, loading data 100 us, optimizer 300 us"
    )


def test_columns_are_as_high_as_steps_are_long() -> None:
    slow = [step(0, 1_000, 0), step(1_000, 5_000, 1), step(5_000, 6_000, 2)]

    root = tree(rank_trace(*slow))

    columns = root.find("svg", class_="chart")[1].find("g", class_="mark")
    heights = [
        sum(float(one.attributes["height"]) for one in column.find("rect")) for column in columns
    ]
    assert heights == [55.0, 220.0, 55.0]
    assert "the slowest of 3" in root.text


def test_a_timeline_shows_spans_where_they_were() -> None:
    root = tree(*two_ranks())

    timeline = root.find("svg", class_="timeline")[0]
    labels = [item.text for item in root.find("ol", class_="labels")[0].children]
    drawn = [
        (labels[label], start, length, float(one.attributes["x"]), float(one.attributes["width"]))
        for one in timeline.find("rect", class_="mark")
        for label, start, length in [map(int, one.attributes["data-e"].split())]
    ]
    assert [one[:3] for one in drawn if one[0] == "forward blocks.0"] == [
        ("forward blocks.0", 100 * US, 300 * US),
        ("forward blocks.0", 100 * US, 500 * US),
    ]
    for _, start, length, x, width in drawn:
        assert x == pytest.approx(150 + 850 * start / (1_000 * US), abs=0.06)
        assert width == pytest.approx(850 * length / (1_000 * US), abs=0.06)


def test_tables_hold_the_exact_numbers_to_sort_by() -> None:
    root = tree(*two_ranks())

    (units,) = [
        one
        for one in root.find("table")
        if one.find("caption")[0].text == "Communication of each unit"
    ]
    cells = units.find("tbody")[0].children[0].children
    assert [cell.text for cell in cells[:3]] == ["blocks.0", "all_gather", "1"]
    assert [cell.attributes["data-key"] for cell in cells[5:7]] == ["100000", "100000"]


def test_memory_is_the_sum_of_what_units_have_at_the_moment() -> None:
    def held(kind: str, unit: str, at: int, mib: float) -> TraceEvent:
        return event(
            f"memory.{kind}", at, kind="counter", category="mem", unit=unit, value=mib * 2**20
        )

    trace = rank_trace(
        held("sharded", "a", 0, 1),
        held("sharded", "b", 1, 2),
        held("activations", "a", 2, 8),
        held("activations", "b", 3, 4),
        held("activations", "a", 4, 0),
        step(0, 10),
    )

    root = tree(trace)

    assert "The peak is 15.0 MiB, in step 0: 12.0 MiB activations, 3.00 MiB parameter" in root.text
    says = [
        one.attributes["aria-label"]
        for one in root.find("svg", class_="chart")[-1].find("g", class_="mark")
    ]
    assert says == [
        "at 0 ns, 1.00 MiB: parameter shards 1.00 MiB",
        "at 1.00 us, 3.00 MiB: parameter shards 3.00 MiB",
        "at 2.00 us, 11.0 MiB: parameter shards 3.00 MiB, activations 8.00 MiB",
        "at 3.00 us, 15.0 MiB: parameter shards 3.00 MiB, activations 12.0 MiB",
        "at 4.00 us, 7.00 MiB: parameter shards 3.00 MiB, activations 4.00 MiB",
    ]


def test_the_straggler_is_named_at_the_top() -> None:
    ranks = [rank(number, 4, late_us=200 if number == 2 else 0) for number in range(4)]

    root = tree(*ranks)

    verdicts = [one.text for one in root.find("p", class_="verdict")]
    assert verdicts[0] == (
        "A step takes 1.00 ms (median of 6 steps on 4 ranks): "
        "35% compute, 30% optimizer, 15% waiting for other ranks, 10% exposed communication."
    )
    assert verdicts[1].startswith("Rank 2 (host-a) makes everybody wait 200 us a step")
    assert verdicts[2] == (
        "Most exposed communication: blocks.0, 100 us a step (100% of all that is exposed)."
    )


def test_hostile_names_are_labels_and_nothing_else() -> None:
    trace = rank(0, 1, unit=HOSTILE)
    trace.header.environment[HOSTILE] = HOSTILE

    page = report(trace, title=HOSTILE)

    root = Tree(page).root
    assert len(root.find("script")) == 1
    assert root.find("img") == []
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert root.find("h1")[0].text == "</script><img src=x onerror=alert(1)>\\u202eabc\\x1b[31m"
    assert "\\u202eabc\\x1b[31m" in root.find("ol", class_="labels")[0].text


@pytest.mark.parametrize(
    "traces",
    [
        [rank_trace()],
        [rank_trace(event("x", 0, 5))],
        [rank_trace(event("x", 3), rank=3, world_size=5)],
        [rank_trace(step(0, 10), rank=0, world_size=2), rank_trace(rank=1, world_size=2)],
        [rank_trace(step(0, 0))],
        [rank_trace(event("memory.sharded", 1, kind="counter", value=float("nan")))],
        [rank_trace(step(0, 10), step(10, 20), dropped=7)],
    ],
)
def test_what_is_missing_is_said_and_breaks_nothing(traces: list[RankTrace]) -> None:
    root = tree(*traces)

    assert len(root.find("section")) == 5
    assert "No memory was recorded." in root.text
    assert ("7 events did not fit" in root.text) == (traces[0].dropped == 7)
    if len(traces) < traces[0].header.world_size:
        assert "No trace of ranks 0-2, 4 was read." in root.text


def test_times_that_no_clock_shows_give_a_page_all_the_same() -> None:
    latest = 2**63 - 1
    made = [
        step(0, 5),
        event("forward", 0, category="compute"),
        event("memory.sharded", 1, kind="counter", category="mem", value=1e308),
    ]
    for one in made:
        one.end_ns = latest
    made[-1].start_ns = latest
    rank_0 = rank_trace(*made, rank=0, world_size=2, perf_counter_ns=latest)
    rank_1 = rank_trace(*made, rank=1, world_size=2, clock="clock of host-b", unix_ns=latest)

    assert len(tree(rank_0, rank_1).find("section")) == 5


def test_a_recording_that_was_cut_off_is_told_from_one_that_was_closed() -> None:
    killed, closed = two_ranks()
    closed = replace(closed, end=End(len(closed.events), 0, "closed"))

    root = tree(killed, closed)

    (notes,) = root.find("ul", class_="notes")
    assert notes.text.strip() == "The recording of rank 0 was cut off; its end is missing."


def test_eight_ranks_and_fifty_steps_stay_under_300_kb() -> None:
    ranks = [
        rank(number, 8, late_us=number, steps=50, unit=f"transformer.layers.{number}", more=200)
        for number in range(8)
    ]

    page = report(*ranks)

    assert 50_000 < len(page.encode()) < 300_000
    assert "events left out" in page


def test_many_ranks_and_steps_and_units_are_left_out_in_words() -> None:
    ranks = [
        rank(number, 100, steps=1 if number else 300, unit=f"layers.{number}")
        for number in range(100)
    ]

    page = report(*ranks)

    root = Tree(page).root
    assert len(page.encode()) < 1_000_000
    assert "Of 100 ranks, the 64 with the longest steps are shown." in root.text
    assert "Of 100 ranks, 16 are drawn" in root.text
    assert "The slowest of every 3 steps" in root.text


def test_text_can_be_read_on_its_ground_in_light_and_in_dark() -> None:
    style = Tree(report(rank(0, 1))).root.find("style")[0].text
    themes = [
        dict(re.findall(r"--(\w+): (#\w{6})", block))
        for block in re.findall(r":root \{.*?\}", style, re.S)
    ]
    fills = re.findall(r"fill: (#\w{6})", style)

    assert len(themes) == 2
    for theme in themes:
        for text in ("text", "faint", "link"):
            for ground in ("page", "raised"):
                assert contrast(theme[text], theme[ground]) >= 4.5
        assert contrast(theme["focus"], theme["page"]) >= 3
    assert len(fills) > 8
    assert min(contrast("#111111", fill) for fill in fills if fill != "#111111") >= 4.5


def contrast(one: str, other: str) -> float:
    """As WCAG 2.2 defines it."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    darker, lighter = sorted([luminance(one), luminance(other)])
    return (lighter + 0.05) / (darker + 0.05)


def trine(*args: str | Path) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="trine")


def test_the_command_writes_the_page_and_says_how_large_it_is(tmp_path: Path) -> None:
    write_rank_file(tmp_path / "my run", *rank(0, 1).events)

    result = trine("trace", "report", tmp_path / "my run", "--out", tmp_path / "report.html")

    assert result.exit_code == 0
    assert re.fullmatch(r".*report\.html: \d+ KB\n", result.output)
    root = Tree((tmp_path / "report.html").read_text(encoding="utf-8")).root
    assert root.find("title")[0].text == "my run"


def test_the_page_does_not_take_the_place_of_a_trace(tmp_path: Path) -> None:
    trace = write_rank_file(tmp_path, step(0, 1))
    before = trace.read_bytes()

    result = trine("trace", "report", tmp_path, "--out", trace)

    assert result.exit_code == 1
    assert "The report would take the place of a trace" in result.stderr
    assert trace.read_bytes() == before


def test_a_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    write_rank_file(tmp_path, step(0, 1))

    result = trine("trace", "report", tmp_path, "--out", tmp_path / "none" / "report.html")

    assert result.exit_code == 2
    assert "its folder does not exist. Make it first." in result.stderr
