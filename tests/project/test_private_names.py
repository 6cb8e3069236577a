"""Tests use what `pw` shows: how many times they use a private name of it is bounded, and falls."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.stages.programs import ROOT

MOST = 200
"""Uses of private names of `pw` in tests."""
OF_OTHERS = {"_exit", "_replace"}
"""Names of the standard library that `pw` has, too."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("_") and name not in OF_OTHERS


def trees(folder: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(folder.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def defined(node: ast.AST) -> str:
    """Return the name that a node of the syntax tree defines, or nothing."""
    match node:
        case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
            return name
    return ""


def used(node: ast.AST) -> list[str]:
    """Return private names of others that a node of the syntax tree uses."""
    match node:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return []
        case ast.Attribute(attr=name) if is_private(name):
            return [name]
        case ast.ImportFrom(module=str(module), names=names) if module.startswith("pw."):
            return [one.name for one in names if is_private(one.name)]
        case ast.Call(func=ast.Attribute(attr="setattr"), args=[_, ast.Constant(str(name)), *_]):
            return [name] if is_private(name) else []
    return []


def test_private_names_of_pw_become_fewer() -> None:
    ours = {
        name
        for _, tree in trees(ROOT / "pw")
        for node in ast.walk(tree)
        if is_private(name := defined(node))
    }
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {name}"  # type: ignore[attr-defined]
        for path, tree in trees(ROOT / "tests")
        for node in ast.walk(tree)
        for name in used(node)
        if name in ours
    ]
    assert len(found) <= MOST, f"{len(found)} of {MOST}:\n" + "\n".join(found)
