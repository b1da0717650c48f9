"""The report as people meet it: looked at, walked through by keyboard, in light and in dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.conftest import Open
from tests.browser.example_run import SLOW_RANK, SLOW_UNIT

ReportFile = Callable[[int], Path]

OVERLAPPING_TEXTS = """
() => [...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const texts = [...chart.querySelectorAll("text")]
    .map((item) => [item.textContent, item.getBoundingClientRect()]);
  return texts.flatMap(([text, box], place) => texts.slice(place + 1)
    .filter(([, other]) => box.left < other.right - 1 && other.left < box.right - 1
      && box.top < other.bottom - 3 && other.top < box.bottom - 3)
    .map(([other]) => text + " | " + other));
})
"""
SPILLING_TEXTS = """
() => [...document.querySelectorAll("svg.chart")].flatMap((chart) => {
  const around = chart.getBoundingClientRect();
  return [...chart.querySelectorAll("text")].filter((item) => {
    const box = item.getBoundingClientRect();
    return box.left < around.left - 1 || box.right > around.right + 1;
  }).map((item) => item.textContent);
})
"""
# The text on a mark must lie within it, whatever font there is.
TEXTS_WIDER_THAN_THEIR_MARK = """
() => [...document.querySelectorAll("svg.chart text.on")].filter((item) => {
  const box = item.getBoundingClientRect();
  const mark = item.previousElementSibling.getBoundingClientRect();
  return box.right > mark.right + 1;
}).map((item) => item.textContent)
"""

FIGURE_WITH_FOCUS = """
() => document.activeElement.closest(".mark")
  && [...document.querySelectorAll("figure")].indexOf(document.activeElement.closest("figure"))
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("ranks", [1, 8])
def test_the_page_asks_for_nothing_and_complains_of_nothing(
    visit: Open, report_file: ReportFile, ranks: int, scheme: str
) -> None:
    address = report_file(ranks).as_uri()

    made = visit(address, scheme=scheme)

    assert made.requests == [address]
    assert made.complaints == []
    lightness = made.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert lightness == {"light": "rgb(255, 255, 255)", "dark": "rgb(23, 23, 27)"}[scheme]


@pytest.mark.parametrize("ranks", [1, 8])
def test_texts_in_pictures_lie_apart_and_within(
    visit: Open, report_file: ReportFile, ranks: int
) -> None:
    page = visit(report_file(ranks).as_uri()).page

    assert page.evaluate(OVERLAPPING_TEXTS) == []
    assert page.evaluate(SPILLING_TEXTS) == []
    assert page.evaluate(TEXTS_WIDER_THAN_THEIR_MARK) == []


@pytest.mark.parametrize("width", [400, 1280, 2000])
def test_the_page_itself_never_scrolls_sideways(
    visit: Open, report_file: ReportFile, width: int
) -> None:
    page = visit(report_file(8).as_uri(), width=width).page

    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) == 0


def test_the_top_names_what_is_wrong_with_the_run(visit: Open, report_file: ReportFile) -> None:
    page = visit(report_file(8).as_uri()).page

    verdict = " ".join(page.locator(".verdict").all_inner_texts())
    assert f"Rank {SLOW_RANK} (host-a) makes everybody wait" in verdict
    assert f"Most exposed communication: {SLOW_UNIT}," in verdict


def test_the_tab_key_comes_to_every_picture_and_arrow_keys_to_every_value(
    visit: Open, report_file: ReportFile
) -> None:
    page = visit(report_file(8).as_uri()).page
    figures = page.locator("figure").count()

    said: dict[int, list[str]] = {}
    for _ in range(200):
        page.keyboard.press("Tab")
        place = page.evaluate(FIGURE_WITH_FOCUS)
        if place is None or place in said:
            continue
        output = page.locator("figure").nth(place).locator("output")
        said[place] = [output.inner_text()]
        for key in ("ArrowRight", "ArrowDown", "End", "Home"):
            page.keyboard.press(key)
            name = page.evaluate("document.activeElement.getAttribute('aria-label')")
            assert output.inner_text() == name
            said[place].append(name)
        if len(said) == figures:
            break

    assert sorted(said) == list(range(figures))
    for first, *others, home in said.values():
        assert home == first
        assert len({first, *others}) >= 3


def test_every_bar_and_moment_can_be_come_to(visit: Open, report_file: ReportFile) -> None:
    page = visit(report_file(8).as_uri()).page

    for place in (0, 1):
        figure = page.locator("figure").nth(place)
        marks = figure.locator(".mark")
        marks.first.focus()
        names = [page.evaluate("document.activeElement.getAttribute('aria-label')")]
        for _ in range(marks.count() - 1):
            page.keyboard.press("ArrowDown")
            names.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
        assert names == marks.evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")


def test_the_timeline_says_what_an_event_is_and_where(visit: Open, report_file: ReportFile) -> None:
    page = visit(report_file(8).as_uri()).page
    timeline = page.locator("figure", has=page.locator(".timeline")).first

    timeline.locator(".mark").first.focus()
    page.keyboard.press("ArrowDown")  # from the step into its middle, the backward
    page.keyboard.press("ArrowLeft")

    assert timeline.locator("output").inner_text().startswith("forward: ")


def test_what_has_the_focus_can_be_seen(visit: Open, report_file: ReportFile) -> None:
    page = visit(report_file(1).as_uri(), scheme="dark").page

    page.locator(".timeline .mark").first.focus()
    page.keyboard.press("ArrowDown")

    style = page.evaluate(
        "(style => [style.stroke, style.strokeWidth])(getComputedStyle(document.activeElement))"
    )
    assert style == ["rgb(255, 213, 74)", "3px"]


def test_a_timeline_is_enlarged_by_keyboard_and_made_small_again(
    visit: Open, report_file: ReportFile
) -> None:
    page = visit(report_file(8).as_uri()).page
    timeline = page.locator(".timeline").first
    mark = timeline.locator("rect.mark").nth(1)

    def width_of_mark() -> float:
        box = mark.bounding_box()
        assert box is not None
        return box["width"]

    before = width_of_mark()
    page.get_by_role("button", name="Enlarge").first.press("Enter")
    enlarged = width_of_mark()
    page.get_by_role("button", name="Show more time").first.press("Enter")

    assert enlarged == pytest.approx(2 * before, rel=0.05)  # the edge is not enlarged
    assert width_of_mark() == pytest.approx(before, rel=0.01)


def test_a_table_is_sorted_by_keyboard_by_the_numbers_behind_its_texts(
    visit: Open, report_file: ReportFile
) -> None:
    page = visit(report_file(8).as_uri()).page
    table = page.locator(
        "table", has=page.locator("caption", has_text="Communication of each unit")
    )
    title = table.get_by_role("button", name="exposed")
    cells = "all => all.map(row => Number(row.cells[5].dataset.key))"

    title.press("Enter")
    falling = table.locator("tbody tr").evaluate_all(cells)
    order = title.locator("..").get_attribute("aria-sort")
    title.press("Enter")
    rising = table.locator("tbody tr").evaluate_all(cells)

    assert order == "descending"
    assert falling == sorted(falling, reverse=True)
    assert rising == sorted(falling)
    assert len(set(falling)) > 5
