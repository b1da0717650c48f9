"""How the documentation is built: strictly, and without a network."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

from click.testing import CliRunner
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from trine.tools.cli import main as trine

HERE = Path(__file__).parent

project = "Trine"
author = "The Trine developers"
copyright = "The Trine developers"
release = importlib.metadata.version("trine-core")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
nitpicky = True
# Docstrings set code in single backticks, as Markdown does.
default_role = "literal"

html_theme = "furo"
html_title = "Trine"
html_copy_source = False
html_show_sourcelink = False

myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 88

# Links to Python and torch resolve against the inventories checked in beside this file, so
# that a build needs no network. A name that is missing there fails the build: add it to
# write_inventories.py and run that.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(HERE / "inventories" / "python.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable", str(HERE / "inventories" / "torch.inv")),
}
intersphinx_disabled_reftypes = ["std:doc"]

# Type variables have no page to link to.
nitpick_ignore_regex = [("py:(class|obj)", r"(trine\.[a-z_.]+\.)?([A-Z]|Ts)")]

# Blocks of one page share a namespace; pages do not.
doctest_global_setup = f"import sys; PYTHON = {sys.executable!r}; DOCS = {str(HERE)!r}"


def _show_factory_defaults(
    app: Sphinx,
    what: str,
    name: str,
    obj: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str, str | None] | None:
    """Write the default of a dataclass field with a factory so that Sphinx can parse it."""
    if signature is None or "<factory>" not in signature:
        return None
    return signature.replace("<factory>", "..."), returns


class CommandHelp(SphinxDirective):
    """`{command-help} trace merge`: what `trine trace merge --help` prints."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Ask the command itself, so that the page cannot be out of date."""
        runner = CliRunner(env={"COLUMNS": "80"})
        arguments = [*self.arguments[0].split(), "--help"]
        asked = runner.invoke(trine, arguments, prog_name="trine", terminal_width=78)
        if asked.exit_code != 0:
            raise self.error(f"trine {' '.join(arguments)}: {asked.output}")
        return [nodes.literal_block(asked.output, asked.output, language="text")]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-signature", _show_factory_defaults)
