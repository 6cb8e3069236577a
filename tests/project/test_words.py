"""One word for each thing: the last column of the glossary is searched for in the whole project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


BANNED = {word: instead for instead, words in rows() for word in words}


def files() -> Iterator[Path]:
    for folder in SEARCHED:
        for kind in ("*.py", "*.md"):
            yield from (path for path in (ROOT / folder).rglob(kind) if path not in EXEMPT)
    yield ROOT / "README.md"


def test_the_glossary_bans_words() -> None:
    assert len(BANNED) >= 10


@pytest.mark.parametrize("word", BANNED)
def test_a_word_that_the_glossary_replaces_is_not_used(word: str) -> None:
    pattern = re.compile(rf"\b{re.escape(word)}(s|es)?\b", re.I)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"use {BANNED[word]!r} instead of {word!r}:\n" + "\n".join(found[:50])
