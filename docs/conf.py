"""Sphinx settings: these pages and the reference from docstrings, as a site.

Comes in: ``sphinx-build -W -b html docs build/docs``. Goes out: a folder of HTML.
Always holds: pages read the same in a repository's browser, so what only Sphinx knows is here.
"""

from __future__ import annotations

import re
from typing import Any

import qcompile

project = "qcompile"
release = qcompile.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["README.md"]  # part of index.rst
html_theme = "furo"
html_show_copyright = False
html_title = f"qcompile {release}"
myst_heading_anchors = 3
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_use_unqualified_type_names = True
highlight_language = "none"
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./[^)]*\)")


def _inside(app: object, page: str, source: list[str]) -> None:
    """Links to files of the repository, which the site does not have, become their text."""
    source[0] = _OUTSIDE.sub(r"\1", source[0])


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _inside)
