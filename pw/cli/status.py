"""What `pw status` shows, as data and as tables."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from pw.client.runtime import Runtime
from pw.client.threads import remote
from pw.core.ids import run_name

WIDTH_WITHOUT_TERMINAL = 160


def describe(address: str, timeout_s: float) -> dict[str, Any]:
    """The cluster at `address`, as a JSON document of islands, clients (not counting this one) and runs.

    Raises:
        ConnectionFailed: nobody answers there within `timeout_s`.
        VersionMismatch: the controller runs other versions.
    """
    session = Runtime(remote(address), 1.0, 0, connect_s=timeout_s)
    try:
        status = session.status(timeout_s)
    finally:
        session.close()
    return {
        "address": address,
        "pw": status.pw_version,
        "jax": status.jax_version,
        "policy": status.policy,
        "islands": [
            _fields(island) | {"hosts": [_fields(host) for host in island.hosts]}
            for island in status.islands
        ],
        "waiting_hosts": [_fields(host) for host in status.waiting],
        "clients": [
            _fields(client) for client in status.clients if client.client != session.client
        ],
        "runs": [_fields(run) | {"run": run_name(run.run)} for run in status.runs],
    }


def _fields(struct: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(struct)


def show(described: dict[str, Any]) -> None:
    """Print the document of `describe` as tables."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    console.print(
        f"controller {described['address']}, pw {described['pw']} with jax {described['jax']}, "
        f"policy {described['policy']}"
    )
    islands, hosts, clients = described["islands"], [], described["clients"]
    rows = []
    for island in islands:
        here = island["hosts"]
        hosts += [(island["island"], host) for host in here]
        rows.append(
            (
                island["island"],
                island["state"],
                island["epoch"],
                island["platform"],
                f"{len(here)}/{island['expected_hosts']}",
                sum(host["devices"] for host in here),
                island["slices"],
                island["queued"],
                island["launched"],
            )
        )
    names = "island state epoch platform hosts devices slices queued launched"
    _table(console, "Islands", names, rows)
    _table(
        console,
        "Hosts",
        "island host pid devices endpoint joined",
        [
            (
                island,
                host["node"],
                host["process"],
                host["devices"],
                host["endpoint"],
                "yes" if host["joined"] else "no",
            )
            for island, host in hosts
        ],
    )
    if described["waiting_hosts"]:
        _table(
            console,
            "Hosts without a place",
            "host state island pid devices endpoint",
            [
                (
                    host["node"],
                    host["state"],
                    host["island"] or "any",
                    host["process"],
                    host["devices"],
                    host["endpoint"],
                )
                for host in described["waiting_hosts"]
            ],
        )
    _table(
        console,
        "Clients",
        "client name arrays programs slices runs",
        [
            (
                client["client"],
                client["name"],
                client["arrays"],
                client["programs"],
                client["slices"],
                client["runs_in_flight"],
            )
            for client in clients
        ],
    )
    _table(
        console,
        "Runs",
        "run program islands segments seconds",
        [
            (
                run["run"],
                run["program"],
                ", ".join(run["islands"]),
                run["segments_left"],
                f"{run['age_s']:.1f}",
            )
            for run in described["runs"]
        ],
    )


def _table(console: Console, title: str, columns: str, rows: list[tuple[Any, ...]]) -> None:
    if not rows:
        console.print(f"no {title.lower()}")
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, name in enumerate(columns.split()):
        number = all(isinstance(row[index], int) for row in rows)
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console.print(table)
