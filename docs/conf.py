"""The documentation site: Sphinx over the Markdown of this repository as it is.

The pages stay readable where no site is built. `make docs` builds it, and `make check`
with every warning as an error.
"""

import re
import tomllib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

REPOSITORY = Path(__file__).resolve().parent.parent

project = "paramserver"
author = "The paramserver authors"
project_copyright = f"{author}, Apache-2.0"
release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
    "version"
]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
# The sources are the repository, so that links between pages are the same everywhere.
include_patterns = [
    "*.md",
    "deploy/**.md",
    "docs/**.md",
    "examples/*.md",
    "tests/bench/RESULTS.md",
]
exclude_patterns = ["**/.*", ".*"]
root_doc = "docs/index"

myst_heading_anchors = 4
# Docstrings write `name` for what is code.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_inherit_docstrings = False
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"paramserver {release}"
html_copy_source = False
html_show_sourcelink = False
html_extra_path = ["site"]

FOREIGN = re.compile(
    r"<(?:script|img|iframe|source|image|use)\b[^>]*\b(?:src|href)=[\"'](?:https?:)?//|"
    r"<link\b[^>]*\bhref=[\"'](?:https?:)?//|"
    r"\burl\([\"']?(?:https?:)?//"
)
"""What a browser would ask another host for while it shows a page."""


def refuse_foreign_hosts(app: Sphinx, error: Exception | None) -> None:
    """Fails a build whose pages would ask another host for anything."""
    if error is not None:
        return
    for page in sorted(Path(app.outdir).rglob("*")):
        if page.suffix in {".html", ".css", ".svg"}:
            found = FOREIGN.search(page.read_text())
            if found:
                raise SphinxError(f"{page.name} asks another host: {found.group()}")


def setup(app: Sphinx) -> None:
    """Hooks into the build."""
    app.connect("build-finished", refuse_foreign_hosts)
