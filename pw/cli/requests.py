"""What `pw` asks the controller, in a session of its own: status, names, why, cancel and more."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
import typer

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.client.connection.waiting import time_left
from pw.client.display import tables
from pw.client.looking.device_tests import TESTED_S, DeviceTests
from pw.client.looking.memory import ClusterMemory
from pw.client.looking.names import ClusterNames
from pw.client.looking.plan import Plan
from pw.client.looking.queue import ClusterQueue
from pw.client.looking.status import ClusterStatus
from pw.client.rebalancing import PlannedMoves, moved
from pw.core.errors import Error
from pw.core.ids import client_id
from pw.core.messages import HostInfo, IslandInfo, PlanMoves, Status, slow_hosts
from pw.operating.timeline import tracing

CONNECT_S = 3.0
AWAITED_S = 1.0
"""Seconds to wait in silence for a drain to end."""


def connected(address: str, timeout_s: float) -> closing[Runtime]:
    """Return a session for a `with` block.

    Raises:
        ConnectionFailed: no controller answers at `address` within `timeout_s`.
        VersionMismatch: the controller runs other versions.
    """
    return closing(Runtime(remote(address), 1.0, 0, connect_s=timeout_s))


class Answer(NamedTuple):
    """An answer of the controller, as a document and as text."""

    document: dict[str, Any]
    """The values of its JSON document."""
    shown: tables.Shown | str
    """The tables or the lines for people."""

    def show(self, *, as_json: bool) -> None:
        """Print it to standard output."""
        if not as_json and isinstance(self.shown, tables.Shown):
            tables.show(self.shown)
        else:
            typer.echo(json.dumps(self.document, indent=2) if as_json else self.shown)


def status(address: str, timeout_s: float, *, by_tenant: bool = False) -> Answer:
    """Return the state of a cluster, without the client that has asked.

    Args:
        address: the controller's.
        timeout_s: how long to wait for its answer.
        by_tenant: True to show what tenants have, may have and have used.
    """
    with connected(address, timeout_s) as session:
        state = session.ask.status(timeout_s)
    clients = tuple(client for client in state.clients if not client.is_me)
    state = msgspec.structs.replace(state, clients=clients)
    document, shown = status_document(address, state), ClusterStatus.of(state, address)
    return Answer(document, shown.by_tenant if by_tenant else shown)


def status_document(address: str, state: Status) -> dict[str, Any]:
    """Return the state of a cluster for JSON."""
    return {
        "address": address,
        "pw": state.pw_version,
        "jax": state.jax_version,
        "policy": state.policy,
        "islands": [_island(island) for island in state.islands],
        "waiting_hosts": [_host(host) for host in state.other_hosts],
        "clients": [
            _fields(client, number="client", runs="runs_in_flight") for client in state.clients
        ],
        "runs": [_fields(run, function="program") for run in state.runs],
        "hidden_clients": state.hidden_clients,
        "hidden_runs": state.hidden_runs,
        "awaited_islands": state.awaited_islands,
        "slow": [_plain(one) | {"words": one.words} for one in slow_hosts(state.islands)],
        "tenants": [_fields(tenant, name="tenant") for tenant in state.tenants],
    }


def _island(island: IslandInfo) -> dict[str, Any]:
    hosts = [_host(host) | {"joined": host.state == "ready"} for host in island.hosts]
    return _fields(island, name="island", formed="epoch") | {"hosts": hosts}


def _host(host: HostInfo) -> dict[str, Any]:
    sick = [msgspec.structs.asdict(one) for one in host.sick]
    return _fields(host, name="node", pid="process") | {"sick": sick}


def test_devices(address: str, island: str) -> DeviceTests:
    """Return the tests of the devices of an island, of all if it is empty.

    Raises:
        AccessRefused: the caller may not have devices tested.
        ArgumentError: there is no such island.
        ConnectionFailed: no controller answers.
    """
    with connected(address, CONNECT_S) as session:
        return DeviceTests.of(session.ask.test_devices(island, TESTED_S))


def _fields(info: msgspec.Struct, **renamed: str) -> dict[str, Any]:
    """Return the fields of a struct, some under the names that JSON documents have always used."""
    named = {renamed.get(k, k): value for k, value in msgspec.structs.asdict(info).items()}
    return {k: _plain(v) if isinstance(v, msgspec.Struct) else v for k, v in named.items()}


def memory(address: str, timeout_s: float) -> Answer:
    """Return the memory of all devices of a cluster; in JSON, all sizes are in bytes."""
    with connected(address, timeout_s) as session:
        reply = session.ask.memory(timeout_s)
    return Answer({"address": address} | _document(reply), ClusterMemory.of(reply))


def names(address: str, timeout_s: float) -> Answer:
    """Return what is published; in JSON, sizes are in bytes, and a `keep_s` of null is for good."""
    with connected(address, timeout_s) as session:
        shown = ClusterNames.of(session.ask.names(timeout_s))
    rows = [
        msgspec.structs.asdict(one) | {"keep_s": None if one.keep_s == math.inf else one.keep_s}
        for one in shown.names
    ]
    return Answer({"address": address, "names": rows}, shown)


def plan(address: str, name: str, timeout_s: float) -> Answer:
    """Return the plan of a program; in JSON, sizes are in bytes and estimates in seconds.

    Raises:
        ArgumentError: there is no program or run of that name.
    """
    with connected(address, timeout_s) as session:
        reply = session.ask.plan(name, 0, timeout_s)
    return Answer(_document(reply), Plan.of(reply))


def explanation(address: str, timeout_s: float) -> Answer:
    """Return what holds up the cluster.

    In JSON, `verdict` is the first line of `text`, and numbers of runs carry their client's.
    """
    with connected(address, timeout_s) as session:
        reply = session.ask.explain(timeout_s)
    islands = [_island(island) for island in reply.islands]
    verdict = {"verdict": reply.text.splitlines()[0]}
    return Answer(verdict | _document(reply) | {"islands": islands}, reply.text)


def queue(address: str, timeout_s: float) -> Answer:
    """Return which clients wait, and for which; in JSON, what is not known is null."""
    with connected(address, timeout_s) as session:
        reply = session.ask.queue(timeout_s)
    return Answer({"address": address} | _document(reply), ClusterQueue.of(reply))


def _document(reply: msgspec.Struct) -> dict[str, Any]:
    """Return the fields of an answer by name, but for the number of its request."""
    fields: dict[str, Any] = _plain(reply)
    del fields["request"]
    return fields


def _plain(value: Any) -> Any:
    """Structs as objects with named fields."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(field) for name, field in msgspec.structs.asdict(value).items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def trace(address: str, path: str, seconds: float, timeout_s: float) -> Iterator[str]:
    """Record a timeline for some seconds; yield lines that say what is in the file.

    Raises:
        ArgumentError: the file cannot be written.
        ConnectionFailed: no controller answers at `address` within `timeout_s`.
    """
    with connected(address, timeout_s) as session, tracing.trace(path, runtime=session) as timeline:
        time.sleep(seconds)
    yield f"{path}: {timeline.summary}"
    yield from timeline.notes


def parse(what: str) -> tuple[int, int]:
    """Return the numbers of a client and of its run, 0 for all. Raises Error if `what` names neither."""
    client, dot, run = what.partition(".")
    if not client.isdecimal() or (dot and not run.isdecimal()):
        raise Error(f"{what!r} is neither a run (client.number) nor a client; see pw status")
    return int(client), client_id(int(client), int(run)) if dot else 0


def cancel(address: str, what: list[str], timeout_s: float) -> None:
    """Cancel runs, and wait until the controller has.

    Raises:
        Error: there is no such client, or no such run in flight.
    """
    chosen = [parse(one) for one in what]
    with connected(address, timeout_s) as session:
        for client, run in chosen:
            session.ask.cancel_runs(client, run).result(timeout_s)


def suspend(
    address: str,
    client: int | None,
    tenant: str,
    island: str,
    timeout_s: float,
    *,
    to_files: bool = False,
) -> list[str]:
    """Suspend clients; returns when they have left their devices, with a line about each.

    Raises:
        Error: it is not clear which clients, there are none such, the caller may not suspend them, or it took
            longer than `timeout_s`.
    """
    meant = _meant(client, tenant, island)
    with connected(address, CONNECT_S) as session:
        try:
            session.ask.suspend(*meant, to_files=to_files).result(timeout_s)
        except TimeoutError:
            raise Error(
                f"not all of its work has ended after {timeout_s:g} s; the suspension goes on, see pw status "
                "and pw why"
            ) from None
        return _lines(session, client, tenant)


def _lines(session: Runtime, client: int | None, tenant: str) -> list[str]:
    """Return a line about each client that is suspended, or waits for devices since."""
    return [
        f"client {one.number} ({one.name}): {one.suspended}"
        for one in session.ask.status().clients
        if one.suspended and client in (None, one.number) and tenant in ("", one.tenant)
    ]


def resume(
    address: str, client: int | None, tenant: str, island: str, timeout_s: float
) -> list[str]:
    """Have suspended clients go on; return a line about each that waits for devices.

    Raises:
        Error: it is not clear which clients, there are none such, or the caller may not resume them.
    """
    meant = _meant(client, tenant, island)
    with connected(address, timeout_s) as session:
        session.ask.resume(*meant).result(timeout_s)
        return _lines(session, client, tenant)


def migrate(address: str, client: int, island: str, timeout_s: float) -> None:
    """Move a client to an island; returns when it has left its devices.

    Raises:
        Error: there is no such client or island, the caller may not move it, or it took longer than
            `timeout_s`.
    """
    with connected(address, CONNECT_S) as session:
        try:
            session.ask.migrate(client, 0, island).result(timeout_s)
        except TimeoutError:
            raise Error(
                f"not all of its work has ended after {timeout_s:g} s; it moves when that has, see pw why"
            ) from None


def rebalance(
    address: str,
    wanted: PlanMoves,
    dry_run: bool,
    timeout_s: float,
    show: Callable[[PlannedMoves], None],
) -> None:
    """Show the slices that move, and move them one after the other, unless this is a dry run.

    Raises:
        Error: no moves make room, or a move took longer than `timeout_s`.
    """
    with connected(address, CONNECT_S) as session:
        moves = PlannedMoves(session.ask.plan_moves(wanted).moves)
        show(moves)
        try:
            if not dry_run:
                moved(session.ask, moves, timeout_s)
        except TimeoutError:
            raise Error(
                f"a move has not left its devices after {timeout_s:g} s; it goes on, see pw status and pw why, "
                "and later moves were not begun"
            ) from None


def _meant(client: int | None, tenant: str, island: str) -> tuple[int, str, str]:
    if sum((client is not None, bool(tenant), bool(island))) != 1:
        raise Error(
            "name a client (its number, see pw status), a --tenant or an --island, and only one"
        )
    if client is not None and client < 1:
        raise Error(f"there is no client {client}; see pw status")
    return client or 0, tenant, island


def say_if_absent(session: Runtime, host: str) -> None:
    """Write a line to standard error if a host, which is to be drained, is not in the cluster."""
    state = session.ask.status()
    hosts = (*state.other_hosts, *(one for island in state.islands for one in island.hosts))
    if all(one.name != host for one in hosts):
        typer.echo(
            f"pw: no host {host} is here; the controller waits, as hosts may still come back after its start "
            "or after a loss",
            err=True,
        )


def drain(address: str, host: str, timeout_s: float) -> None:
    """Drain `host`; returns when the host holds nothing any more.

    Raises:
        Error: there is no such host, no other host can take its place, or it took longer than `timeout_s`.
    """
    with connected(address, CONNECT_S) as session:
        left_s, drained = time_left(timeout_s), session.ask.drain(host)
        if not drained.settles(min(AWAITED_S, timeout_s)):
            say_if_absent(session, host)
        try:
            drained.result(left_s())
        except TimeoutError:
            raise Error(
                f"host {host} is not empty after {timeout_s:g} s; the drain goes on, see pw status"
            ) from None
