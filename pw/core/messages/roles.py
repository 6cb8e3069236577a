"""What a process is in its cluster: the controller, a worker, or a client, as its name says.

Where links have certificates, the transport has checked that the certificate says the same.
"""

from __future__ import annotations

from enum import StrEnum

from pw.core.ids import CONTROLLER

CLIENT_PREFIX = "client-"
"""Node names of clients begin with it."""


class Role(StrEnum):
    """Role of a process in its cluster."""

    CONTROLLER = "controller"
    WORKER = "worker"
    CLIENT = "client"


def role_of(node: str) -> Role:
    """The role of the node with a name: clients are called `client-...`, and workers otherwise."""
    if node == CONTROLLER:
        return Role.CONTROLLER
    return Role.CLIENT if node.startswith(CLIENT_PREFIX) else Role.WORKER
