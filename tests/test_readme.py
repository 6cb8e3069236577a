"""What the README shows works."""

from __future__ import annotations

import re

import pytest

from tests.scripts import ROOT, finish, start_client

BLOCKS = [
    block
    for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if "import" in block and "..." not in block
]


def test_there_are_whole_programs() -> None:
    assert len([block for block in BLOCKS if "print(" in block]) >= 2


@pytest.mark.processes
@pytest.mark.parametrize("block", BLOCKS)
def test_a_program_of_the_readme_runs(block: str) -> None:
    output = finish(start_client("", block)).strip()
    expected = re.findall(r"^print\(.*\n# (.*)$", block, re.MULTILINE)
    assert output
    assert not expected or output == expected[-1]
