"""Runs each script in plain JAX, and on one and two islands, and compares what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.stages.inherited import ROOT
from tests.stages.programs import without_address

SCRIPTS = sorted(Path(__file__).parent.glob("[a-z]*.py"))
DEVICES = 4
LIMIT_S = 600.0
PLAIN = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}"}


def printed(script: Path, variables: dict[str, str]) -> list[Any]:
    """Run a script, and return the JSON that it prints.

    Raises:
        subprocess.SubprocessError: it failed, or has not ended in time.
    """
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=without_address() | variables,
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    return [json.loads(line) for line in ran.stdout.splitlines()]


def main() -> int:
    """Compare all scripts; the exit code is 1 if one differs."""
    failed = 0
    for script in SCRIPTS:
        expected = printed(script, PLAIN)
        for islands in (1, 2):
            over = {"JAX_PLATFORMS": "pw", "PW_DEVICES": str(DEVICES), "PW_ISLANDS": str(islands)}
            made = printed(script, over)
            is_same = len(made) == len(expected) and all(
                np.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
                for ours, theirs in zip(made, expected, strict=True)
            )
            failed += not is_same
            said = "as in plain JAX" if is_same else f"{made}, and in plain JAX {expected}"
            print(f"{script.relative_to(ROOT)}, islands: {islands}: {said}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
