"""`pw status`: the tables of `pw.status()`, or the controller's answer as JSON."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.client.show import tables
from pw.client.status import ClusterStatus
from pw.core.messages import HostInfo, IslandInfo, Status


def ask(address: str, timeout_s: float) -> Status:
    """Return the answer of the controller at `address`, without the client that has asked.

    Raises:
        ConnectionFailed: no controller answers there within `timeout_s`.
        VersionMismatch: the controller runs other versions.
    """
    with closing(Runtime(remote(address), 1.0, 0, connect_s=timeout_s)) as session:
        told = session.ask.status(timeout_s)
    others = tuple(client for client in told.clients if not client.is_me)
    return msgspec.structs.replace(told, clients=others)


def document(address: str, told: Status) -> dict[str, Any]:
    """Return the answer for JSON."""
    return {
        "address": address,
        "pw": told.pw_version,
        "jax": told.jax_version,
        "policy": told.policy,
        "islands": [island_fields(island) for island in told.islands],
        "waiting_hosts": [_host_fields(host) for host in told.other_hosts],
        "clients": [
            _fields(client, number="client", runs="runs_in_flight") for client in told.clients
        ],
        "runs": [_fields(run, function="program") for run in told.runs],
    }


def island_fields(island: IslandInfo) -> dict[str, Any]:
    """Return an island for JSON."""
    hosts = [_host_fields(host) | {"joined": host.state == "ready"} for host in island.hosts]
    return _fields(island, name="island", formed="epoch") | {"hosts": hosts}


def _host_fields(host: HostInfo) -> dict[str, Any]:
    return _fields(host, name="node", pid="process")


def _fields(info: msgspec.Struct, **renamed: str) -> dict[str, Any]:
    """Return the fields of a struct, some under the names that JSON documents have always used."""
    return {renamed.get(k, k): value for k, value in msgspec.structs.asdict(info).items()}


def show(address: str, told: Status) -> None:
    """Print the answer as tables."""
    seen = ClusterStatus.of(told, address)
    tables.show(seen.head, seen.tables())
