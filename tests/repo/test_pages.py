"""Pages can be read where they lie, on a Git host, which knows Markdown and not Sphinx."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, files

PAGES = [str(path) for path in files() if path.suffix == ".md" and "changelog.d" not in path.parts]
# These are read in the built site only: lists of pages, and what is generated from the code.
FOR_SPHINX = [page for page in PAGES if Path(page).name == "index.md" or "reference" in page]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^]]*)\]\(([^)\s]+)\)")
# The three directives that look like code where they are not understood.
CODE = ("```{testcode}", "```{testoutput}", "```{doctest}")


def prose(page: str) -> str:
    """A page without its code."""
    return FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that Git hosts and Sphinx make of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(str(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_have_a_text_and_lead_somewhere(page: str) -> None:
    wrong = []
    for text, target in LINK.findall(prose(page)):
        if target.startswith("https://"):
            found = True
        else:
            name, _, anchor = target.partition("#")
            file = (ROOT / page).parent / name if name else ROOT / page
            found = file.exists() and (not anchor or anchor in anchors(file))
        if not text or not found:
            wrong.append(f"[{text}]({target})")

    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in FOR_SPHINX])
def test_nothing_on_a_page_needs_sphinx_to_be_understood(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^```\{.*$", text, re.MULTILINE)

    assert [fence for fence in fences if fence not in CODE] == []
    assert re.findall(r"^(?:%.*|:[\w-]+:.*|\([\w-]+\)=)$", text, re.MULTILINE) == []


def test_there_are_pages_to_look_at() -> None:
    assert {"README.md", "docs/tutorials/shard-your-first-model.md"} <= set(PAGES)


@pytest.mark.parametrize("page", ["architecture.md", "layers.svg"])
def test_the_architecture_names_every_module_of_the_engine(page: str) -> None:
    engine = ROOT / "packages/distributed/src/trine/distributed/_fsdp"
    modules = {path.stem for path in engine.glob("*.py")} - {"__init__"}
    text = (ROOT / "docs/explanation" / page).read_text(encoding="utf-8")

    named = set(re.findall(r"`(\w+)`" if page.endswith(".md") else r">(\w+)<", text))

    assert modules - named == set()


def test_the_architecture_names_every_module_of_the_wrapper() -> None:
    wrapper = ROOT / "packages/distributed/src/trine/distributed/_wrapper"
    modules = {path.stem for path in wrapper.glob("*.py")} - {"__init__"}
    text = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    section = text.partition("\n## The wrapper")[2].partition("\n## ")[0]

    named = set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))

    assert named == modules
