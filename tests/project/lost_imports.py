"""Finds modules that use a submodule which only another module's import loads.

`import jax` and then `jax.extend.core` works while some other module imports `jax.extend`, and fails alone.
What packages load by themselves is asked in interpreters of their own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import all_suffixes
from itertools import accumulate
from pathlib import Path

from tests.stages.programs import ROOT

_ASK = """
import importlib, sys
for name in sys.argv[1:]:
    package, _, own = name.rpartition(".")
    if not hasattr(importlib.import_module(package), own):
        print(name)
"""


@dataclass(frozen=True)
class Use:
    """A module that a file uses as an attribute of its package, and does not import."""

    file: str
    line: int
    module: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} uses {self.module} and does not import it"


def lost(files: Iterable[Path]) -> list[Use]:
    """Return the uses of modules that neither their file nor their package imports."""
    found = [use for file in files for use in _uses(ast.parse(file.read_text()), str(file))]
    uses = [use for use in found if _is_module(use.module)]
    missing = _not_loaded({use.module for use in uses})
    return [use for use in uses if use.module in missing]


def _uses(tree: ast.Module, file: str) -> Iterator[Use]:
    """Return each dotted name that begins with an imported name, and is not imported itself."""
    imported: set[str] = set()
    wholes: dict[str, str] = {}  # of the names that imports give
    chains: list[ast.Attribute] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported |= _prefixes(alias.name)
                first = alias.name.partition(".")[0]
                wholes[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= _prefixes(node.module)
            for alias in node.names:
                whole = wholes[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                imported.add(whole)
        elif isinstance(node, ast.Attribute):
            chains.append(node)
    for chain in chains:
        first, *names = _names(chain)
        if first in wholes and (module := ".".join([wholes[first], *names])) not in imported:
            yield Use(file, chain.lineno, module)


def _prefixes(module: str) -> set[str]:
    return set(accumulate(module.split("."), "{}.{}".format))


def _names(node: ast.expr) -> list[str]:
    """Return the names of `a.b.c`; if it begins with something else, the first is empty."""
    if isinstance(node, ast.Attribute):
        return [*_names(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _is_module(name: str) -> bool:
    """Return whether the folder of its package has such a module."""
    package, _, own = name.rpartition(".")
    for entry in (str(ROOT), *sys.path):
        folder = Path(entry, *package.split("."))
        if folder.is_dir():
            files = [own + suffix for suffix in all_suffixes()]
            return any((folder / file).is_file() for file in [f"{own}/__init__.py", *files])
    return False


def _not_loaded(modules: set[str]) -> set[str]:
    """Return the modules that importing their packages does not load."""
    roots = {module.partition(".")[0] for module in modules}
    asked = [
        subprocess.Popen(
            # Packages before what is in them, which loads more.
            [sys.executable, "-c", _ASK, *sorted(m for m in modules if m.startswith(f"{root}."))],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for root in sorted(roots)
    ]
    answers = [process.communicate()[0] for process in asked]
    assert [process.returncode for process in asked] == [0] * len(asked)
    return set("\n".join(answers).split())
