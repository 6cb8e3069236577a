"""A name is the thing, not a participle or a pronoun: such names in `pw` are bounded, and become fewer."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.stages.programs import ROOT

MOST = 8
"""Times that `pw` binds one of WORDS as a name."""
CLASSES = 16
"""Names that classes in several files of `pw` have."""
ASKING = 10
"""Files of `pw` that ask for a kind of computation, or for a kind of something else in the same words."""
ASKS = re.compile(r"is_view|is_merge|is_python|is_compiled|kind is ")
WORDS = {"made", "found", "known", "given", "whole", "taken", "others", "told", "said"}


def names_in(tree: ast.AST) -> Iterator[str]:
    """Names that are assigned, are parameters or attributes, or are defined, without leading underscores."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()) | ast.arg(name):
                yield name.lstrip("_")
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name.lstrip("_")
            case ast.MatchAs(_, str(name)) | ast.MatchStar(str(name)):
                yield name.lstrip("_")


def test_participles_and_pronouns_as_names_become_fewer() -> None:
    counts: Counter[str] = Counter()
    for path in (ROOT / "pw").rglob("*.py"):
        names = names_in(ast.parse(path.read_text()))
        counts[str(path.relative_to(ROOT))] = sum(name in WORDS for name in names)
    worst = "\n".join(f"{count} in {path}" for path, count in counts.most_common(20))
    assert counts.total() <= MOST, f"{counts.total()}, not {MOST}; the most are\n{worst}"


def test_a_class_has_a_name_of_its_own() -> None:
    files: defaultdict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "pw").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                files[node.name].add(str(path.relative_to(ROOT)))
    several = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    assert len(several) <= CLASSES, several


def test_few_files_ask_for_a_kind_of_computation() -> None:
    asking = [path for path in (ROOT / "pw").rglob("*.py") if ASKS.search(path.read_text())]
    assert len(asking) <= ASKING, sorted(str(path.relative_to(ROOT)) for path in asking)
