"""Settings of the site. Nothing in it is fetched from a network: not to build it, and not to read it."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx.application import Sphinx

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402 (it lies beside this file)

import eata  # noqa: E402

generate.write(HERE / "generated")

project = "eata"
version = release = eata.__version__
project_copyright = "the eata contributors, MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
suppress_warnings = ["misc.highlighting_failure"]  # an example may leave something out by ...
exclude_patterns = ["_build", "generated/parts"]
html_theme = "furo"
html_title = "eata"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
smartquotes_action = "D"  # dashes only
html_show_sphinx = False
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
default_role = "code"
maximum_signature_line_length = 90
napoleon_use_ivar = True
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"


def mathml(block: bool) -> tuple[Any, None]:
    """A renderer of equations as MathML, which every browser of today shows by itself."""

    def visit(writer: Any, node: nodes.math | nodes.math_block) -> None:
        writer.body.append(latex2mathml.tex2mathml(node.astext(), as_block=block))
        raise nodes.SkipNode

    return visit, None


def result_links(_app: Sphinx, page: str, source: list[str]) -> None:
    """A link into ``results/``, right in the repository, leads to the page that is made from there, if there is one."""

    def link(found: re.Match[str]) -> str:
        text, name = found.groups()
        there = (HERE / "generated" / f"result-{name}.md").exists()
        return f"[{text}](/generated/result-{name}.md)" if there else text

    source[0] = re.sub(r"\[([^\]]*)\]\((?:\.\./)+results/([\w-]+)[^)]*\)", link, source[0])


def tables(_app: Sphinx, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Markdown tables in docstrings, which are readable in an editor, become what Sphinx takes."""
    found: list[str] = []
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            found.append(line)
        elif not set(line) <= set("|-: "):
            if not lines[number - 1].startswith("|"):
                found += [".. list-table::", "   :header-rows: 1", ""]
            cells = line.strip("|").split(" | ")
            found += [f"   {'*' if place == 0 else ' '} - {cell.strip()}" for place, cell in enumerate(cells)]
    lines[:] = found


def no_types(_app: Sphinx, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """What stands before a colon in an attribute's comment is no type, as napoleon would have it."""
    if what == "attribute":
        lines[:] = [line.replace(": ", "; ") for line in lines]


def setup(app: Sphinx) -> None:
    """What the settings above can't say."""
    app.add_html_math_renderer("mathml", mathml(block=False), mathml(block=True))
    app.connect("source-read", result_links)
    app.connect("autodoc-process-docstring", no_types, priority=400)  # before napoleon's
    app.connect("autodoc-process-docstring", tables)
