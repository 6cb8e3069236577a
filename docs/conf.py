"""The site of the documentation, for Sphinx: `make docs` builds it from the files of this folder."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from docs.site.sources import source_of  # noqa: E402 - after the path is set

project = "pw"
author = "the authors of pw"
copyright = "the authors of pw, Apache-2.0"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "docs.site.docstrings",
    "docs.site.reference",
    "docs.site.sources",
]
exclude_patterns = ["_build"]

# Markdown, with the anchors of GitHub.
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "source"]

# Notebooks are text; each build runs them.
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# Docstrings: in single backticks a name of the reference, or else code.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Cause", "What to do"]
linkcode_resolve = source_of

html_theme = "sphinx_book_theme"
html_title = "pw"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
html_theme_options = {
    "use_download_button": False,
    "show_toc_level": 2,
    "home_page_in_toc": False,
    "navbar_persistent": [],  # the search field is in the sidebar
}
