"""The blocks of code in documents, and how a test runs them.

The Python blocks of a document run in their order in one process, as a reader types them. A comment
before a block says otherwise:

    <!-- runs: PW_DEVICES=8 -->            a new process begins here, with these variables; before a
                                           console, its commands run in the folder of the page's files
    <!-- runs: until it shows this -->     its commands are typed again until they print what stands there
    <!-- file: script.py -->               a file that the reader saves, for commands below
    <!-- runs in tests/sched/test_x.py --> another test runs it
    <!-- does not run: REASON -->          nothing runs it
    <!-- first                             code that a reader does not see, such as smaller numbers
    batches = range(2)
    -->
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGES = {
    *("python", "{code-cell}", "console", "bash", "text", "yaml"),
    *("{toctree}", "{eval-rst}", "{names}"),
}
PYTHON = ("python", "{code-cell}")
_PART = re.compile(
    r"^<!-- (?P<mark>runs:|runs in|does not run:|file:|first)(?P<said>.*?)-->$"
    r"|^(?P<fence>```+)(?P<language>\S*)[^\n]*\n(?P<code>.*?)^(?P=fence)$",
    re.M | re.S,
)
UNTIL = "until it shows this"
_PROMPT = re.compile(r"^([a-z]*)\$ ", re.M)
_SHOWN = re.compile(r"^print\(.*\)(?:  #.*)?\n((?:# .*\n)+)", re.M)


@dataclass(frozen=True)
class Block:
    """A block of a document."""

    language: str
    code: str
    line: int
    """The line of the document at which its code begins, from 1."""
    marks: dict[str, str]
    """What the comments before it say, by their first words."""


@dataclass(frozen=True)
class Command:
    """A command that a reader types into a shell."""

    line: str
    output: list[str]
    """Lines that it prints, in this order; `...` ends a beginning."""
    machine: str = ""
    """The machine on which it is typed, where the prompt is `MACHINE$`."""
    is_repeated: bool = False
    """Whether it is typed again until it prints these lines."""


@dataclass
class Process:
    """Blocks that run one after the other."""

    variables: dict[str, str]
    lines: list[str] = field(default_factory=list)

    def add(self, code: str, line: int) -> None:
        """Add code, at the line that it has in the document."""
        self.lines += [""] * (line - 1 - len(self.lines))
        self.lines += code.splitlines()

    @property
    def script(self) -> str:
        """The program: its lines are those of the document."""
        return "\n".join(self.lines) + "\n"

    @property
    def output(self) -> list[str]:
        """Lines that it shows behind `print`, which it prints in this order; `...` ends a beginning."""
        shown = _SHOWN.findall(self.script)
        return [line.removeprefix("# ") for lines in shown for line in lines.splitlines()]


def blocks(path: Path) -> list[Block]:
    """Return the blocks of a document."""
    found: list[Block] = []
    text, marks = path.read_text(), {}
    for part in _PART.finditer(text):
        if part["mark"]:
            marks[part["mark"].rstrip(":")] = part["said"].strip("\n")
        else:
            line = text.count("\n", 0, part.start("code")) + 1
            code = re.sub(r"^---\n.*?^---\n|^[:%].*\n", _blank, part["code"], flags=re.M | re.S)
            found.append(Block(part["language"], code, line, marks))
            marks = {}
    return found


def _blank(options: re.Match[str]) -> str:
    """Options and magics of a cell of a notebook are no Python."""
    return "\n" * options[0].count("\n")


def processes(path: Path) -> list[Process]:
    """Return the processes in which the Python of a document runs."""
    found: list[Process] = []
    for block in blocks(path):
        if block.language not in PYTHON or {"runs in", "does not run", "file"} & block.marks.keys():
            continue
        if not found or "runs" in block.marks:
            words = block.marks.get("runs", "").split()
            found.append(Process(dict(word.split("=", 1) for word in words)))
        first = block.marks.get("first", "")
        if first:
            found[-1].add(first, block.line - 2 - first.count("\n"))
        found[-1].add(block.code, block.line)
    return found


def files(path: Path) -> dict[str, str]:
    """Return the files that a reader of a document saves, by name."""
    return {
        block.marks["file"].strip(): block.code for block in blocks(path) if "file" in block.marks
    }


def commands(path: Path) -> list[Command]:
    """Return the commands of a document that run, with what they print."""
    return [
        Command(line, output, machine, block.marks["runs"].strip() == UNTIL)
        for block in blocks(path)
        if block.language == "console" and "runs" in block.marks
        for machine, line, output in typed(block)
    ]


def typed(block: Block) -> Iterator[tuple[str, str, list[str]]]:
    """Yield the commands of a block of a console: the machine, the whole line, and the lines that it prints."""
    text = re.sub(r"\\\n\s*", "", block.code)
    _, *parts = _PROMPT.split(text)
    for machine, part in zip(parts[::2], parts[1::2], strict=True):
        line, *output = part.splitlines()
        yield machine, line, output


def missing(printed: str, shown: Sequence[str]) -> str | None:
    """Return the first of the lines that a program does not print in their order; None if it prints all."""
    lines = (line.rstrip() for line in printed.splitlines())
    for line in shown:
        start, dots, _ = line.partition("...")
        if not any(one.startswith(start) if dots else one == line for one in lines):
            return line
    return None
