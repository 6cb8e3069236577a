"""The code in the documents runs, and prints what they say."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.project import blocks as pages
from tests.project.blocks import LANGUAGES, PYTHON, Command, Process, blocks, processes
from tests.project.generated import programs
from tests.project.test_documents import DOCUMENTS, named
from tests.stages import machines
from tests.stages.programs import ROOT, run_python, without_address
from tests.stages.samples import long

RUNS = [
    long(page, process) if page.parent.name == "notebooks" else (page, process)
    for page in DOCUMENTS
    for process in processes(page)
]
"""The notebooks show in one go what other pages show in parts, and `make docs` runs them."""
SHELL = ("console", "bash")


def label(value: Any) -> str:
    return named(value) if isinstance(value, Path) else ""


def test_each_block_has_a_language() -> None:
    wrong = [
        f"{named(page)}:{block.line}: {block.language!r}"
        for page in DOCUMENTS
        for block in blocks(page)
        if block.language not in LANGUAGES
    ]
    assert not wrong, "\n".join(wrong)


def test_what_does_not_run_says_why() -> None:
    for page in DOCUMENTS:
        for block in blocks(page):
            if "runs in" in block.marks:
                test = block.marks["runs in"].split()[0]
                assert page.name in (ROOT / test).read_text(), test
            assert len(block.marks.get("does not run", "a good reason").split()) > 2, named(page)


@pytest.mark.processes
@pytest.mark.parametrize(("page", "process"), RUNS, ids=label)
def test_the_python_of_a_page_runs(page: Path, process: Process, tmp_path: Path) -> None:
    script = tmp_path / page.name
    script.write_text(process.script)
    done = run_python(
        [str(script)], folder=tmp_path, environment=without_address() | process.variables
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout, process.output)


def check(printed: str, shown: list[str]) -> None:
    """Check that a program prints the lines that a page shows."""
    missing = pages.missing(printed, shown)
    assert missing is None, f"{missing!r} is not in\n{printed}"


def is_on_machines(page: Path) -> bool:
    return any(command.machine for command in pages.commands(page))


COMMANDS = [page for page in DOCUMENTS if pages.commands(page)]


@pytest.mark.processes
@pytest.mark.parametrize("page", [page for page in COMMANDS if not is_on_machines(page)], ids=named)
def test_a_reader_who_types_the_commands_of_a_page_gets_what_it_shows(
    page: Path, tmp_path: Path
) -> None:
    for name, text in pages.files(page).items():
        (tmp_path / name).write_text(text)
    for command in pages.commands(page):
        done = typed(command, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        check(done.stdout, command.output)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(310)
@pytest.mark.parametrize("page", [page for page in COMMANDS if is_on_machines(page)], ids=named)
def test_a_reader_with_several_machines_gets_what_a_page_shows(page: Path, tmp_path: Path) -> None:
    if machines.SSHD is None:
        pytest.skip("needs sshd: apt-get install openssh-server")
    said = machines.run_inside("tests.project.on_machines", str(page), folder=tmp_path, bound_s=300)
    assert said.endswith(f"all as on the page: {len(pages.commands(page))} commands\n")
    print(said)


def typed(command: Command, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a shell would: variables, then python or pw."""
    words = shlex.split(command.line)
    variables = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    program, *arguments = words
    start = {"python": [], "pw": ["-m", "pw.cli.main"]}[program]
    return run_python(
        [*start, *arguments], folder=folder, environment=without_address() | variables
    )


def commands() -> list[tuple[str, list[str]]]:
    """Each command of pw in the blocks of shells, and where it is."""
    found = []
    for page in DOCUMENTS:
        for block in blocks(page):
            if block.language not in SHELL or "does not run" in block.marks:
                continue
            if block.language == "console":
                lines = [line for _, line, _ in pages.typed(block)]
            else:
                lines = re.sub(r"\\\n\s*", "", block.code).splitlines()
            for line in lines:
                words = shlex.split(line.partition(" > ")[0], comments=True)
                while words and re.match(r"\w+=|export$", words[0]):
                    del words[0]
                if words and words[0].rpartition("/")[2] in programs():
                    found.append((f"{named(page)}:{block.line}", words))
    return found


@pytest.mark.parametrize(("place", "words"), commands(), ids=str)
def test_a_command_takes_what_a_page_gives_it(place: str, words: list[str]) -> None:
    name, *arguments = (word for word in words if word != "...")
    command = programs()[name]
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments.pop(0)]
    command.make_context(name, arguments)


def test_every_block_of_python_is_run_or_marked() -> None:
    count = sum(block.language in PYTHON for page in DOCUMENTS for block in blocks(page))
    assert count > 40
