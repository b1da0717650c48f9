"""A real browser, headless and kept off the network; where there is none, tests are skipped."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.browser.example_run import example_run
from trine.tools.tracing import RankTrace

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, Route, sync_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass
class Visit:
    """A page, and what happened on it that should not have."""

    page: Page
    requests: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


Open = Callable[..., Visit]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    # An empty TRINE_CHROMIUM means the one that `playwright install chromium` fetched.
    program = os.environ.get(
        "TRINE_CHROMIUM", next(filter(None, map(shutil.which, PROGRAMS)), None)
    )
    if program is None:
        pytest.skip("no Chromium: put one on PATH, or name it in TRINE_CHROMIUM")
    with sync_playwright() as running:
        launched = running.chromium.launch(executable_path=program or None)
        yield launched
        launched.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Opens an address; whatever is asked of other machines is refused, and remembered."""
    contexts = []

    def go(address: str, *, scheme: str = "light", width: int = 1280, height: int = 900) -> Visit:
        context = browser.new_context(
            color_scheme=scheme,  # type: ignore[arg-type]  # "light" or "dark"
            viewport={"width": width, "height": height},
        )
        contexts.append(context)
        made = Visit(context.new_page())

        def decide(route: Route) -> None:
            made.requests.append(route.request.url)
            if route.request.url.startswith(("file:", "http://127.0.0.1:", "blob:", "data:")):
                route.continue_()
            else:
                made.refused.append(route.request.url)
                route.abort()

        context.route("**/*", decide)
        made.page.on("console", lambda message: made.complaints.append(message.text))
        made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
        made.page.goto(address)
        return made

    yield go
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def runs() -> Callable[[int], list[RankTrace]]:
    """The traces of the example run on so many ranks, made once."""
    made: dict[int, list[RankTrace]] = {}

    def of(ranks: int) -> list[RankTrace]:
        return made.setdefault(ranks, made.get(ranks) or example_run(ranks))

    return of


@pytest.fixture(scope="session")
def report_file(
    runs: Callable[[int], list[RankTrace]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """The report of the example run on so many ranks."""
    from trine.tools.reports.html import write_report

    folder = tmp_path_factory.mktemp("reports")

    def of(ranks: int) -> Path:
        out = folder / f"{ranks}.html"
        if not out.exists():
            write_report(runs(ranks), out, f"Example run on {ranks} rank{'s' if ranks > 1 else ''}")
        return out

    return of
