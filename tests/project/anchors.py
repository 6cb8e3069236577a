"""Links of documents to lines of code: [`Class.method`](../pw/file.py#L12).

python -m tests.project.anchors     writes the lines where the definitions are now, and the parts of
                                    documents that are made from code (`generated.py`)
"""

from __future__ import annotations

import ast
import os
import re
from functools import cache
from pathlib import Path

from tests.project.generated import generated

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)#L(\d+)\)")


def corrected(page: Path) -> str:
    """The text of a page with its parts made from code, whose links lead to the lines of their definitions.

    Raises:
        LookupError: a file or a definition does not exist.
    """

    def link(match: re.Match[str]) -> str:
        name, path, _ = match.groups()
        return f"[`{name}`]({path}#L{_line_of(page.parent / path, name)})"

    return _LINK.sub(link, generated(page.read_text()))


def _line_of(file: Path, name: str) -> int:
    """The line of a definition; of the first one if there are several."""
    lines = _definitions(os.path.normpath(file))
    if name not in lines:
        raise LookupError(f"{file} does not define {name}")
    return lines[name]


@cache
def _definitions(file: str) -> dict[str, int]:
    lines: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines.setdefault(prefix + child.name, child.lineno)
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(Path(file).read_text()), "")
    return lines


if __name__ == "__main__":
    for page in sorted(ROOT.glob("docs/**/*.md")):
        text = corrected(page)
        if text != page.read_text():
            page.write_text(text)
            print(f"corrected {page.relative_to(ROOT)}")
