"""Tests use what `pw` shows: how many times they use a private name of it is bounded, and falls."""

from __future__ import annotations

import re

from tests.stages.programs import ROOT

MOST = 20
"""Uses of private names of `pw` in tests."""
OF_OTHERS = {"_exit", "_replace", "_current_frames", "_run_exitfuncs"}
OF_OTHERS |= {"_condition", "_src", "_to_xla_hlo_sharding", "_device_assignment"}
"""Names of the standard library and of JAX that `pw` uses, too."""
NAME = r"_[A-Za-z]\w*[A-Za-z0-9]\b"
USES = re.compile(rf'(?<!\bself)(?<!\bcls)\.({NAME})|setattr\([^,"]+, "({NAME})"')
IMPORTS = re.compile(r"^ *from pw\S* import (\([^)]*\)|.*)$", re.MULTILINE)


def test_private_names_of_pw_become_fewer() -> None:
    source = "\n".join(path.read_text() for path in (ROOT / "pw").rglob("*.py"))
    ours = set(re.findall(rf"\b{NAME}", source)) - OF_OTHERS
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text()
        names = [used or patched for used, patched in USES.findall(text)]
        names += [name for line in IMPORTS.findall(text) for name in re.findall(rf"\b{NAME}", line)]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in names if name in ours]
    assert len(found) <= MOST, f"{len(found)}, not {MOST}:\n" + "\n".join(found)
