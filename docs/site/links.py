"""Links between documents: on the site they show the title of a page where a document shows its file's name."""

from __future__ import annotations

import os
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1]
_NAMED = re.compile(r"\[[\w./-]+\.md\](?=\(([^)\s:#]+\.md)(?:#[^)\s]+)?\))")


def with_titles(text: str, folder: Path) -> str:
    """Return a document of a folder whose links to other documents have no text: MyST puts the title there."""

    def titled(match: re.Match[str]) -> str:
        path = Path(os.path.normpath(folder / match[1]))
        return "[]" if DOCS in path.parents and path.is_file() else match[0]

    return _NAMED.sub(titled, text)
