"""One word for each thing: the last column of the glossary is searched for in the whole project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.stages.programs import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"
EXEMPT = {GLOSSARY, ROOT / "docs/internals/performance-log.md", Path(__file__)}
SEARCHED = ("pw", "tests", "bench", "examples", "docs")


def rows() -> Iterator[tuple[str, list[str]]]:
    """Each word of the glossary, and the words that are not used in its place."""
    for line in GLOSSARY.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[0] != "word":
            yield cells[0], [word.strip() for word in cells[2].split(",") if word.strip(" -")]


BANNED = {word.lower(): instead for instead, words in rows() for word in words}


def files() -> Iterator[Path]:
    for folder in SEARCHED:
        for kind in ("*.py", "*.md"):
            yield from (path for path in (ROOT / folder).rglob(kind) if path not in EXEMPT)
    yield ROOT / "README.md"


def test_the_glossary_bans_words() -> None:
    assert len(BANNED) >= 10


def test_words_that_the_glossary_replaces_are_not_used() -> None:
    words = "|".join(map(re.escape, BANNED))
    pattern = re.compile(rf"\b({words})(s|es)?\b", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[1]!r}, use {BANNED[match[1].lower()]!r}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert not found, "\n".join(found[:50])
