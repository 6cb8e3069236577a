"""The name under which a process's sessions are shown: its script, and its process id."""

from __future__ import annotations

import os
import sys

CHARACTERS = 80
"""The longest name of a script that is shown whole."""


def process_name() -> str:
    """Return a name like `train.py, pid 4711`."""
    return f"{script_name()}, pid {os.getpid()}"


def script_name() -> str:
    """Return what this process runs: a script, a module, a notebook, `python -c`, or `python`."""
    main, program = sys.modules.get("__main__"), sys.argv[0] if sys.argv else ""
    if "kernel_launcher" in os.path.basename(program):
        # The first is set by Jupyter's server, the second by Visual Studio Code.
        name = os.environ.get("JPY_SESSION_NAME") or getattr(main, "__vsc_ipynb_file__", "")
        name = os.path.basename(str(name)) or "notebook"
    elif (spec := getattr(main, "__spec__", None)) is not None:
        name = spec.name.removesuffix(".__main__")
    elif program in ("-c", "-", ""):
        name = "python -c" if program == "-c" else "python"
    else:
        name = os.path.basename(program)
    return "".join(one if one.isprintable() else "?" for one in name)[:CHARACTERS]
