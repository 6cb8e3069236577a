"""The README begins with what pw is, and the pages say how to install what their programs import."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

from tests.project.blocks import PYTHON, blocks
from tests.stages.programs import ROOT

README = ROOT / "README.md"
TEXT = README.read_text()


def test_the_first_program_is_plain_jax() -> None:
    first = next(block for block in blocks(README) if block.language in PYTHON)
    assert not re.search(r"^(import|from) .*\bpw\b", first.code, re.M)
    behind = TEXT.splitlines()[first.line :]
    assert any(first.marks["runs"].strip() in line for line in behind)


def test_what_programs_import_is_installed_the_way_the_guide_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    guide = ROOT / "docs/guide.md"
    (extra,) = re.findall(r'pip install -e "\.\[(\w+)\]"', guide.read_text())
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    installed = {re.split(r"\W", requirement)[0] for requirement in wanted}
    shown = [block.code for page in (README, guide) for block in blocks(page)]
    imported = set()
    for code in shown:
        for line in re.findall(r"^(?:import|from) .*", code, re.M):
            (node,) = ast.parse(line).body
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(str(node.module).partition(".")[0])
    assert "optax" in imported
    assert imported - set(sys.stdlib_module_names) - {"pw"} <= installed
