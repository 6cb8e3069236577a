"""Clients as processes of their own, for tests in which several clients share a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PRELUDE = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import pw
"""


def start_client(address: str, body: str, **variables: str) -> subprocess.Popen[str]:
    """Run `body` (after the usual imports) in a process connected to `address`."""
    environment = os.environ | {"PW_ADDRESS": address, "PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(client: subprocess.Popen[str], timeout_s: float = 90.0) -> str:
    """What the client printed. Fails with its errors if it did not end well, or in time."""
    try:
        output, errors = client.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        client.kill()
        output, errors = client.communicate()
        raise AssertionError(f"the client hung\n{output}\n{errors}") from None
    assert client.returncode == 0, f"exit code {client.returncode}\n{output}\n{errors}"
    return output
