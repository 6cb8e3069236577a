"""Names of nodes and actors, and numbers of clients and what they create.

A node is one process (a host, the controller, a client); an actor is one state machine in it.
Clients
name what they create: the controller gives each a number, and every id made by that client carries it
in its upper bits. So an ownership check is a shift and a comparison, and no call waits for a name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import NamedTuple

CONTROLLER = "controller"
"""Node name of the controller process."""

NAME_CHARACTERS = 256
"""Characters of the longest name of a node, and of anything that a user names."""

_SERIAL_BITS = 40
REPEATS = 1 << 39
"""First serial number of the controller; those below are the clients'."""
ADDRESSES = 4096
"""Number of addresses of each kind that are cached: a launch needs one for every host."""


class Address(NamedTuple):
    """Address of an actor on a node."""

    node: str
    actor: str


def client_id(client: int, serial: int) -> int:
    """The id that `client` gives to its `serial`-th array, program, run or slice."""
    return (client << _SERIAL_BITS) | serial


def client_of(identifier: int) -> int:
    """The number of the client that made `identifier`."""
    return identifier >> _SERIAL_BITS


def are_of(client: int, identifiers: Collection[int]) -> bool:
    """Whether a client has made all of these; at least one is given."""
    return min(identifiers) >> _SERIAL_BITS == client == max(identifiers) >> _SERIAL_BITS


def serial_of(identifier: int) -> int:
    """The serial number that the client gave to `identifier`."""
    return identifier & ((1 << _SERIAL_BITS) - 1)


def is_repeat(identifier: int) -> bool:
    """Whether the controller has given an id, for something that is made again."""
    return bool(identifier & REPEATS)


def run_name(run: int) -> str:
    """The name of a run for people: its client's number, a dot, its serial number."""
    return f"{client_of(run)}.{serial_of(run)}"


def arrays_in(args: Iterable[int | bytes]) -> list[int]:
    """The arrays among a run's arguments; the others are small values that travel with it."""
    return [arg for arg in args if isinstance(arg, int)]


RESOURCES = Address(CONTROLLER, "resources")
CONTROL = Address(CONTROLLER, "controller")


@lru_cache(maxsize=ADDRESSES)
def scheduler_of(island: str) -> Address:
    """The address of an island's gang scheduler."""
    return Address(CONTROLLER, f"scheduler/{island}")


@lru_cache(maxsize=ADDRESSES)
def executor_of(host: str) -> Address:
    """The address of a host's executor."""
    return Address(host, "executor")


@lru_cache(maxsize=ADDRESSES)
def coordinator_of(host: str) -> Address:
    """The address of a host's shard coordinator."""
    return Address(host, "coordinator")


@lru_cache(maxsize=ADDRESSES)
def store_of(host: str) -> Address:
    """The address of a host's object store."""
    return Address(host, "store")


def session_of(client_node: str) -> Address:
    """The address of a client's session."""
    return Address(client_node, "session")


SERVICES = Address(CONTROLLER, "services")
