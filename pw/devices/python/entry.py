"""Begins a Python process: confines it while it has one thread, and then has it serve its host."""

from __future__ import annotations

import sys

from pw.devices.python.confining import confine


def main() -> None:
    """Confine this process, say on the host's standard error what was not possible, and serve the host."""
    if missing := confine():
        print(f"pw: a Python process of clients runs without {missing}", file=sys.stderr)
    from pw.devices.python.child import main as serve  # numpy has threads

    serve()


if __name__ == "__main__":
    main()
