"""Fill the template and write the page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trine.tools.errors import TraceFileError
from trine.tools.reports.html.model import Page
from trine.tools.reports.html.page import build_page
from trine.tools.text import printable
from trine.tools.tracing.reader import RankTrace
from trine.tools.tracing.write import written_beside

__all__ = ["render", "write_report"]


def write_report(traces: Sequence[RankTrace], out: Path, title: str) -> None:
    """Write one self-contained HTML page about a run.

    Args:
        traces: of the ranks of one run, at least one, as `read_traces` returns them.
        out: replaced if it exists, once the new file is complete.
        title: of the page.

    Raises:
        TraceFileError: if it cannot be written.
    """
    page = render(build_page(traces, title))
    try:
        with written_beside(out) as file:
            file.write(page.encode("utf-8"))
    except OSError as error:
        raise TraceFileError(
            f"The report cannot be written to {printable(str(out))}: {error.strerror or error}."
        ) from error


def render(page: Page) -> str:
    """The page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style, script = _text("page.css"), _text("page.js")
    return environment.from_string(_text("page.html.jinja")).render(
        page=page,
        style=Markup(style),
        script=Markup(script),
        # The only style and the only script that the page's policy allows.
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode("utf-8")).digest()).decode("ascii")
