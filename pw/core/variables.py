"""The environment variables of pw, and a warning of one that is misspelt."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable

VARIABLES = (
    "PW_ADDRESS",
    "PW_ADVICE",
    "PW_BULK",
    "PW_CREDENTIALS",
    "PW_DAEMON",
    "PW_DASHBOARD_TOKEN",
    "PW_DEVICES",
    "PW_EDGES",
    "PW_EMBEDDED_DEVICES",
    "PW_EMBEDDED_TOPOLOGY",
    "PW_EMBEDDED_DEVICE_MEMORY",
    "PW_EMBEDDED_SPILL",
    "PW_EMBEDDED_SPILL_FILES",
    "PW_INSECURE",
    "PW_ISLANDS",
    "PW_KEEP_BYTES",
    "PW_LOG_FORMAT",
    "PW_OUTPUT_TO_CLIENTS_ONLY",
    "PW_PROGRESS",
    "PW_PYTHON_CONFINE",
    "PW_PYTHON_MEMORY",
    "PW_RECOVERY_TIMEOUT",
    "PW_REVOKED",
    "PW_SLICES",
    "PW_WORKER_OUTPUT",
)
"""Names of all variables that any process of pw reads or sets."""


def warn_of_misspelt(names: Iterable[str]) -> None:
    """Warn of each name that begins with PW_, is none of pw's and is nearly one of them."""
    for name in names:
        if name.startswith("PW_") and name not in VARIABLES:
            for near in difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8):
                words = f"pw reads no environment variable {name}; did you mean {near}?"
                warnings.warn(words, stacklevel=2)
