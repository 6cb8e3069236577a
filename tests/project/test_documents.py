"""The documents: links lead somewhere, files that they name exist, tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer.main

import pw
from docs.site.links import with_titles
from docs.site.pictures import DRAWINGS
from pw.cli.main import app
from pw.core.actors.lifecycle import Lifecycle
from pw.devices.host import edge_states
from pw.sched.cluster import slice_states
from pw.sched.control import array_states, run_states
from pw.sched.island import launch_states
from tests.project.anchors import corrected
from tests.stages.programs import ROOT

DOCUMENTS = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
PLACED = re.compile(r"^\.\. (?:auto|py:)\w+:: pw\.(\w+)(?![\w.])", re.M)
"""Names that the pages of docs/api place (`docs.site.reference` shows all others)."""
LIFECYCLES: list[Lifecycle] = [
    array_states.ARRAY,
    run_states.RUN,
    launch_states.LAUNCH,
    edge_states.SENDER,
    edge_states.RECEIVER,
    slice_states.SLICE,
]
COMMANDS: Any = typer.main.get_command(app)
TABLES = {lifecycle.name: lifecycle for lifecycle in LIFECYCLES}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = document.parent / name if name else document
        assert path.exists(), target
        if path.suffix == ".py":
            continue  # the lines are checked below
        assert not anchor or anchor in anchors(path), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_links_to_code_lead_to_its_definitions(document: Path) -> None:
    assert document.read_text() == corrected(document), "run python -m tests.project.anchors"


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_files_that_are_named_exist(document: Path) -> None:
    if document.name == "performance-log.md":
        return
    for path in re.findall(r"`((?:pw|docs|tests|bench|examples)/[\w/.-]+)`", document.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=named)
def test_commands_that_are_named_exist(document: Path) -> None:
    parts = re.findall(r"^```.*?\n(.*?)^```|`([^`]+)`", document.read_text(), re.M | re.S)
    code = "\n".join(block or " ".join(words.split()) for block, words in parts)
    called = re.findall(r"^(?:\$ )?(?:\w+=\S+ )*pw ([a-z0-9][a-z0-9-]*)(?: ([a-z-]+))?", code, re.M)
    for name, first in called:
        command = COMMANDS.commands.get(name)
        assert command is not None, f"pw {name}"
        group = getattr(command, "commands", {})
        assert not (group and first) or first in group, f"pw {name} {first}"


@pytest.mark.parametrize("mark", TABLES)
def test_a_lifecycle_is_shown_as_it_is(mark: str) -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert f"<!-- table: {mark} -->\n\n{TABLES[mark]}\n" in text, str(TABLES[mark])


def test_what_happens_when_a_host_dies_during_an_upload_is_two_links_from_the_readme() -> None:
    assert "docs/reliability.md" in (ROOT / "README.md").read_text()
    link = "internals/recovery.md#a-host-dies-in-the-middle-of-an-upload"
    assert link in (ROOT / "docs/reliability.md").read_text()


def test_links_show_titles_on_the_site() -> None:
    inside, outside = (
        "[tracing.md](tracing.md#how-exact-it-is)",
        "[bench/README.md](../bench/README.md)",
    )
    text = f"({inside}), {outside}, [Guide](guide.md), [api/index.md](api/index.md)"
    shown = with_titles(text, ROOT / "docs")
    assert (
        shown == f"([](tracing.md#how-exact-it-is)), {outside}, [Guide](guide.md), [](api/index.md)"
    )


def test_every_page_is_in_the_contents_of_the_site() -> None:
    docs, listed = ROOT / "docs", set()
    for page in docs.rglob("*.md"):
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.M | re.S):
            names = [line for line in block.splitlines() if not line.startswith(":")]
            listed |= {(page.parent / f"{name}.md").relative_to(docs) for name in names}
    pages = {page.relative_to(docs) for page in docs.rglob("*.md") if "_build" not in page.parts}
    assert listed == pages - {Path("index.md")}


def test_drawings_are_those_of_their_script() -> None:
    for name, draw in DRAWINGS.items():
        drawn = (ROOT / "docs" / "pictures" / f"{name}.svg").read_text()
        assert drawn == draw().svg(), "run python -m docs.site.pictures"


def test_the_reference_names_what_there_is() -> None:
    placed = [
        name
        for page in (ROOT / "docs/api").glob("*.md")
        for name in PLACED.findall(page.read_text())
    ]
    assert len(placed) == len(set(placed))
    assert set(placed) <= set(pw.__all__)
    assert all(getattr(pw, name).__doc__ for name in pw.__all__)
