"""The programs in the README and the guide work."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

import pytest

from tests.scripts import ROOT, finish, start_client

TEXT = "".join((ROOT / name).read_text() for name in ("README.md", "docs/guide.md"))
SHOWN = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BLOCKS = [block for block in SHOWN if "import" in block and "..." not in block]


def test_there_are_whole_programs() -> None:
    assert len([block for block in BLOCKS if "print(" in block]) >= 2


def test_what_its_programs_import_is_installed_the_way_it_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r'pip install -e "\.\[(\w+)\]"', TEXT)
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    installed = {re.split(r"\W", requirement)[0] for requirement in wanted}
    imported = set()
    for node in ast.walk(ast.parse("\n".join(SHOWN))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert "optax" in imported
    assert imported - set(sys.stdlib_module_names) - {"pw"} <= installed


@pytest.mark.processes
@pytest.mark.parametrize("block", BLOCKS)
def test_a_program_runs(block: str) -> None:
    output = finish(start_client("", block)).strip()
    expected = re.findall(r"^print\(.*\n# (.*)$", block, re.MULTILINE)
    assert output
    assert not expected or output == expected[-1]
