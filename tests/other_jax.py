"""All tests with another release of JAX: `python -m tests.other_jax 0.10.1`, a part of `make long`.

The release has a lock file and an environment of its own. `make test JAX=0.10.1` runs a sample of the tests
there: the files of `other_jax.txt`, whose code depends most on what a release of JAX changes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

from tests.stages.inherited import ROOT
from tests.stages.samples import MORE_EXAMPLES

CORES = os.cpu_count() or 1


def releases() -> Iterator[str]:
    """Yield the releases that have a lock file of their own."""
    for lock in sorted(ROOT.glob("requirements-jax-*.lock")):
        yield lock.stem.removeprefix("requirements-jax-")


def main(release: str) -> None:
    """Make the environment of a release, and become a run of all tests there."""
    environment = ROOT / f".venv-jax-{release}"
    subprocess.run(
        ["make", f"{environment.name}/.installed", f"JAX={release}"], cwd=ROOT, check=True
    )
    python = environment / "bin" / "python"
    variables = {name: text for name, text in os.environ.items() if name != MORE_EXAMPLES}
    tests = ["-m", "pytest", "-q", "-n", str(CORES), "--dist", "loadfile"]
    tests += ["--max-worker-restart=0", "--durations=15"]
    os.chdir(ROOT)
    os.execve(python, [str(python), *tests], variables)


if __name__ == "__main__":
    main(sys.argv[1])
