"""Which words no error may have that a user reads, and which strings of the source become errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = re.compile(
    r"\b(epochs?|incarnations?|segments?|slots?|lineage|landings?|mailbox|actors?|tickets?|artifacts?|"
    r"opcodes?|edges?|credits?|frames?|nodes?|coroutines?|bulk plane|bulk thread|an op|the ops?|handshake)\b"
    r"|(?<!\()\brun \d|''|\"\"",
    re.IGNORECASE,
)
"""What the runtime is made of, a number without a name, and names that are empty."""

OUR_FAULT = frozenset({"InternalError", "ProtocolError"})
"""They are faults of pw, and said to be: what they say is for those who mend it."""

NOT_READ_BY_USERS = frozenset(
    {"log", "_warn_once", "warning", "info", "debug", "error", "exception", "Violation", "Option"}
) | {"Argument", "count", "MalformedFrame", "ZmtpError", "getLogger", "once", "Lifecycle"}
"""Calls whose words go to logs and operators, or nowhere."""

WORDS = 3
"""Shorter strings are no sentences."""


def insides(text: str) -> list[str]:
    """The words in a message that a user should not have to read."""
    return [match[0] for match in FORBIDDEN.finditer(text)]


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that may become part of an error, and their lines."""
    yield from _Sentences().of(ast.parse(path.read_text()))


class _Sentences(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def of(self, tree: ast.AST) -> list[tuple[int, str]]:
        self.visit(tree)
        return self.found

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # else it is a docstring
            self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        """What must not be; `-O` leaves it out."""

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name not in NOT_READ_BY_USERS | OUR_FAULT:
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
        self._found(node.lineno, "".join(map(str, parts)))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._found(node.lineno, node.value)

    def _found(self, line: int, text: str) -> None:
        if len(text.split()) >= WORDS:
            self.found.append((line, text))
