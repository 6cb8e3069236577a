"""Runs programs one after the other, each in a process that has imported JAX, and nothing of `pw`.

    python -m tests.stages.first_import CODE ...

Each is a fork of this process, and imports what it needs of `pw`, as a user's script would. Ends
with 1 at the first that fails.
"""

from __future__ import annotations

import os
import sys

import jax.numpy  # noqa: F401 - what takes long to import, and is not tested
import optax  # noqa: F401


def main(programs: list[str]) -> int:
    """Run the programs; each goes back from here in its own process, and ends as an interpreter does."""
    assert "pw" not in sys.modules
    for program in programs:
        child = os.fork()
        if not child:
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
            return 0
        if os.waitpid(child, 0)[1]:
            print(f"it fails:\n{program}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
