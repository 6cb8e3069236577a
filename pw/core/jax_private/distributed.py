"""The group of an island's hosts in XLA's runtime; imports jax and jaxlib only when it is used.

Public: `jax.distributed.initialize`, which runs the service in rank 0 and cannot be undone.
"""

from __future__ import annotations

import importlib
from typing import Any

TESTED_JAXLIB = "0.10."
"""What the versions begin with whose services and clients were tested."""


def private_runtime() -> Any:
    """jaxlib's private module with the coordination service, its client, and Gloo's collectives.

    Raises:
        RuntimeError: these entry points were not tested with the installed jaxlib.
    """
    version = importlib.import_module("jaxlib").__version__
    if not version.startswith(TESTED_JAXLIB):
        raise RuntimeError(
            f"islands of several hosts use private entry points of jaxlib {TESTED_JAXLIB}x, but "
            f"jaxlib {version} is installed; install jax and jaxlib {TESTED_JAXLIB}x, or use "
            "islands of one host"
        )
    return importlib.import_module("jaxlib._jax")


def enter(client: Any, rank: int, hosts: int, address: str) -> None:
    """Let JAX open its devices as a member of a group, with a client of the service at `address`."""
    state = _state()
    state.client = client
    state.process_id = rank
    state.num_processes = hosts
    state.coordinator_address = address


def client() -> Any:
    """JAX's client of the service; None in no group."""
    return _state().client


def _state() -> Any:
    return importlib.import_module("jax._src.distributed").global_state
