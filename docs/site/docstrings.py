"""Docstrings as the reference shows them: text with code in single backticks, which Sphinx reads as roles."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_CODE = re.compile(r"(`+[^`]*`+)")
_BLOCK = re.compile(r"^(\S.*\n\n)((?: {4}.*\n|\n)+)", re.M)
"""An indented block of code, behind a line that is not indented."""


def _escape(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Escape what is text in a docstring and markup in reStructuredText."""
    parts = _CODE.split("\n".join(lines))
    for at in range(0, len(parts), 2):  # between code
        after_code = at > 0 and re.match(r"\w", parts[at])
        parts[at] = ("\\ " if after_code else "") + parts[at].replace("*", "\\*")
    text = _BLOCK.sub(_block, "".join(parts))
    lines[:] = text.split("\n")


def _block(match: re.Match[str]) -> str:
    code = match[2].replace("\\*", "*")
    return f"{match[1]}::\n\n{code}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to the events of Sphinx, before docstrings are read as Google's."""
    app.connect("autodoc-process-docstring", _escape, priority=1)
    return {"parallel_read_safe": True}
