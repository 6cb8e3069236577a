"""One folder uses private names of JAX, those of `jax._src` and all of jaxlib."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stages.programs import ROOT

FOLDER = ROOT / "pw/core/jax_private"
PRIVATE = re.compile(r"jax(\.\w+)*\._[a-z]\w*(\.\w+)*|jaxlib(\.\w+)+")
"""A name of JAX with a part that begins with one underscore, or any of jaxlib."""


def private_names(source: str) -> Iterator[str]:
    """Yield the private names of JAX that a file imports, names in full, or gives to `import_module`."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        yield from filter(PRIVATE.fullmatch, names)


def test_no_other_folder_uses_private_names_of_jax() -> None:
    files = [path for path in (ROOT / "pw").rglob("*.py") if FOLDER not in path.parents]
    found = [f"{file}: {name}" for file in files for name in private_names(file.read_text())]
    assert not found, f"move them to {FOLDER}:\n" + "\n".join(found)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_each_name_says_what_would_replace_it(file: Path) -> None:
    tree = ast.parse(file.read_text())
    of_all = "Public:" in (ast.get_docstring(tree) or "")
    assert of_all or not list(_without_public_way(tree.body))


def _without_public_way(body: list[ast.stmt]) -> Iterator[str]:
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef):
            name, words = node.name, ast.get_docstring(node) or ""
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name, words = ast.unparse(target), ast.unparse(after) if after else ""
        else:
            continue
        if not name.startswith("_") and "Public:" not in words:
            yield name


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "import jaxlib.mlir",
        "from jaxlib import xla_client",
        "jax._src.config.value",
        "import_module('jaxlib._jax')",
    ],
)
def test_a_private_name_is_found(line: str) -> None:
    assert list(private_names(line))
