"""Pages of the site that show source files: links of documents and of the reference lead there.

A document links to `../pw/file.py#L12`, as on GitHub. Here the file gets a page with numbered lines. Only
files that some page links to have one.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx

from docs.site.links import DOCS, with_titles

ROOT = Path(__file__).resolve().parents[2]
SCHEME = "source:"
"""Stands before the path of a file, from the root of the repository, until pages are written."""
_LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(#[^)\s]+)?(?=\))")


def source_of(domain: str, info: dict[str, str]) -> str | None:
    """Return the link to the source of an object of the reference."""
    if domain != "py" or not info["module"]:
        return None
    found: Any = importlib.import_module(info["module"])
    try:
        for name in info["fullname"].split("."):
            found = getattr(found, name)
        found = inspect.unwrap(found.fget if isinstance(found, property) else found)
        path = inspect.getsourcefile(found)
        line = inspect.getsourcelines(found)[1]
    except (AttributeError, TypeError, OSError):
        return None  # a constant
    if path is None or ROOT / "pw" not in Path(path).parents:
        return None
    return f"{SCHEME}{Path(path).relative_to(ROOT)}#L{line}"


def _mark_links(app: Sphinx, document: str, text: list[str]) -> None:
    """Mark the links to files outside of the folder of documents."""
    folder = Path(app.env.doc2path(document)).parent

    def marked(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        if DOCS in path.parents or not path.is_file():
            return match[0]
        return f"{SCHEME}{path.relative_to(ROOT)}{match[2] or ''}"

    text[0] = _LINK.sub(marked, with_titles(text[0], folder))


def _lead_links(app: Sphinx, tree: nodes.document, document: str) -> None:
    """Lead marked links to the pages of their files."""
    linked: set[str] = app.builder.__dict__.setdefault("pw_sources", set())
    for link in tree.findall(nodes.reference):
        target: str = link.get("refuri", "")
        if target.startswith(SCHEME):
            path, _, line = target.removeprefix(SCHEME).partition("#")
            linked.add(path)
            page = app.builder.get_relative_uri(document, f"source/{path}")
            link["refuri"] = f"{page}#{line}" if line else page


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Make the pages of the files that are linked."""
    form = HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True, wrapcode=True)
    for path in sorted(app.builder.__dict__.get("pw_sources", ())):
        try:
            lexer = get_lexer_for_filename(path)
        except ClassNotFound:
            lexer = TextLexer()
        code = highlight((ROOT / path).read_text(), lexer, form)
        # The anchors of Pygments are L-12, those of GitHub L12.
        code = re.sub(r'(id="|name="|href="#)L-(\d+)"', r'\1L\2"', code)
        body = f"<h1>{path}</h1>\n{code}"
        yield f"source/{path}", {"title": path, "body": body}, "page.html"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the events of Sphinx."""
    app.connect("source-read", _mark_links)
    app.connect("doctree-resolved", _lead_links)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
