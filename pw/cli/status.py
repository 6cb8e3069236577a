"""`pw status`: the tables of `pw.status()`, or the controller's answer as JSON."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import msgspec

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.client.show import tables
from pw.client.status import ClusterStatus
from pw.core.ids import run_name
from pw.core.messages import Status


def ask(address: str, timeout_s: float) -> tuple[Status, int]:
    """Return the answer of the controller at `address`, and the number of the client that has asked.

    Raises:
        ConnectionFailed: no controller answers there within `timeout_s`.
        VersionMismatch: the controller runs other versions.
    """
    with closing(Runtime(remote(address), 1.0, 0, connect_s=timeout_s)) as session:
        return session.ask.status(timeout_s), session.client


def document(address: str, told: Status, asker: int) -> dict[str, Any]:
    """Return the answer for JSON, without the client that has asked."""
    return {
        "address": address,
        "pw": told.pw_version,
        "jax": told.jax_version,
        "policy": told.policy,
        "islands": [
            _fields(island) | {"hosts": [_fields(host) for host in island.hosts]}
            for island in told.islands
        ],
        "waiting_hosts": [_fields(host) for host in told.waiting],
        "clients": [_fields(client) for client in told.clients if client.client != asker],
        "runs": [_fields(run) | {"run": run_name(run.run)} for run in told.runs],
    }


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


def show(address: str, told: Status, asker: int) -> None:
    """Print the answer as tables, without the client that has asked."""
    seen = ClusterStatus.of(told, address, asker)
    seen = replace(seen, clients=tuple(client for client in seen.clients if not client.is_me))
    tables.show(seen.head, seen.tables())
