"""The programs in the README, the guide, and several other pages work."""

from __future__ import annotations

import ast
import re
import sys
import tomllib

import pytest

from tests.stages.programs import ROOT, run_python, without_address
from tests.stages.scripts import finish, start_client

PAGES = ("README.md", "docs/guide.md", "docs/control-flow.md")
TEXT = "".join((ROOT / name).read_text() for name in PAGES)
SHOWN = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BLOCKS = [block for block in SHOWN if "import" in block and "..." not in block]
PAGE = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("jax", "islands"))
PLAIN = [
    block
    for block in [*BLOCKS, *re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)]
    if not re.search(r"^(import|from) .*\bpw\b", block, re.M)
]
"""Those of plain JAX, which need only environment variables."""


def test_there_are_whole_programs() -> None:
    assert len([block for block in BLOCKS if "print(" in block]) >= 2


def test_the_first_program_is_plain_jax() -> None:
    assert BLOCKS[0] in PLAIN
    assert "`JAX_PLATFORMS=pw PW_DEVICES=8 python" in TEXT


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


def check(block: str, output: str) -> None:
    expected = re.findall(r"^print\(.*\n# (.*)$", block, re.MULTILINE)
    assert output
    assert not expected or output.strip() == expected[-1]


@pytest.mark.processes
@pytest.mark.parametrize("block", [block for block in BLOCKS if block not in PLAIN])
def test_a_program_runs(block: str) -> None:
    check(block, finish(start_client("", block)))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["ragged", "moe"])
def test_a_page_runs(name: str) -> None:
    page = (ROOT / f"docs/{name}.md").read_text()
    whole = "".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    done = finish(start_client("", whole))
    assert done.splitlines() == re.findall(r"^print\(.*\n# (.*)$", whole, re.MULTILINE)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("block", "islands"),
    [
        (BLOCKS[0], "1"),
        (BLOCKS[0], "2"),
        *((block, "2" if "island" in block else "1") for block in PLAIN if block != BLOCKS[0]),
    ],
)
def test_a_program_of_plain_jax_runs(block: str, islands: str) -> None:
    variables = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "8", "PW_ISLANDS": islands}
    done = run_python(["-c", block], environment=without_address() | variables)
    assert done.returncode == 0, done.stderr
    check(block, done.stdout)
