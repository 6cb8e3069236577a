"""Which devices of an island a slice may have: fits a request, chooses positions, and words a refusal.

Pure functions of an island and a request. A request may name hosts: then it gets as many devices of
each of them. It may want hosts that run clients' Python functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pw.core.errors import Error, InsufficientDevices, PythonRefused
from pw.core.messages import AllocateSlice
from pw.sched.cluster.inventory import Inventory, Island, Position, counted


def fits(island: Island, request: AllocateSlice) -> bool:
    """Whether an island has the devices that a slice needs, or will have them when its hosts are back."""
    if request.island is not None and request.island != island.name:
        return False
    kinds = (island.platform.lower(), island.kind.lower())
    # Hosts tell the kind when they join.
    is_known = bool(island.kind) or island.state == "ready"
    if request.kind is not None and is_known and request.kind.lower() not in kinds:
        return False
    ranks = _ranks(island, request)
    if request.hosts:
        return len(ranks) == len(request.hosts) and _on_each(request) <= island.local_devices
    if request.topology is not None:
        extent = math.prod(request.topology)
        if extent != request.devices or any(size < 1 for size in request.topology):
            return False
        if not _blocks(island, request.topology, ranks):
            return False
    return request.devices <= len(ranks) * island.local_devices


def choose(island: Island, request: AllocateSlice) -> tuple[Position, ...]:
    """Return the least loaded devices; with a topology, the least loaded block of that form."""
    ranks = _ranks(island, request)
    if request.hosts:
        return tuple(
            position
            for rank in ranks
            for position in _least_loaded(island, [rank], _on_each(request))
        )
    if request.topology is None or len(request.topology) < 2:
        return _least_loaded(island, ranks, request.devices)
    blocks = _blocks(island, request.topology, ranks)
    return min(blocks, key=lambda block: sum(island.load[position] for position in block))


def suits(island: Island, request: AllocateSlice, positions: Sequence[Position]) -> bool:
    """Whether these positions, which a slice had, are still right for it."""
    ranks = _ranks(island, request)
    if request.hosts:
        return [rank for rank, _ in positions] == [
            rank for rank in ranks for _ in range(_on_each(request))
        ]
    return all(rank in ranks and at < island.local_devices for rank, at in positions)


def refusal(inventory: Inventory, request: AllocateSlice) -> Error:
    """Return why no island can have a slice, with what there is."""
    islands = inventory.islands.values()
    seated = {host.node: host for island in islands for host in island.hosts.values()}
    for node in request.hosts:
        if node not in seated:
            waiting = {host.name: host.state for host in inventory.waiting_hosts()}
            what = f"is {waiting[node]}" if node in waiting else "is not connected"
            return InsufficientDevices(
                f"host {node!r} has no place in an island: it {what} (see pw status). Hosts of islands "
                f"are: {', '.join(sorted(seated)) or 'none yet'}{_to_come(inventory)}"
            )
    if request.python and request.python_hosts:
        named_hosts = set(request.hosts) - set(request.python_hosts)
        if named_hosts or not seated.keys() & set(request.python_hosts):
            return PythonRefused(
                f"Python functions of your tenant run on {', '.join(request.python_hosts)} only (python in "
                f"pw-controller --tenants); hosts of islands are: {', '.join(sorted(seated)) or 'none yet'}"
            )
    if request.python:
        named = [seated[node] for node in request.hosts] or list(seated.values())
        willing = sorted(n for n, host in seated.items() if host.registration.python)
        refusing = [host.node for host in named if not host.registration.python]
        if refusing and (request.hosts or not willing):
            there = f". Hosts that do are: {', '.join(willing)}" if willing else ""
            return PythonRefused(
                f"host {refusing[0]!r} runs no Python functions of clients: its owner can start it with "
                f"pw-worker --allow-python, or LocalCluster(allow_python=True){there}"
            )
    there = "; ".join(island.describe() for island in islands) or "no islands yet"
    if request.python and request.topology == (request.devices, 1):
        willing = sorted(n for n, host in seated.items() if host.registration.python)
        return InsufficientDevices(
            f"no island has {counted(request.devices, 'host')} that run Python functions of clients. Islands "
            f"are: {there}. Hosts that run Python functions are: {', '.join(willing) or 'none yet'}; ask for "
            "as many of one island with hosts="
        )
    asked = counted(request.devices, "device")
    if request.like:
        asked += ", those of another session's slice"
    for name in ("kind", "island", "topology"):
        value = getattr(request, name)
        if value is not None:
            asked += f" with {name}={value!r}"
    if request.hosts:
        asked += f" on {', '.join(request.hosts)}{' together' * (len(request.hosts) > 1)}"
    if request.python:
        asked += ", on hosts that run Python functions"
    besides = f" besides the {counted(len(request.apart), 'island')} of the other slices"
    return InsufficientDevices(
        f"no island{besides * bool(request.apart)} has {asked} for one slice. There are: {there}"
        f"{_to_come(inventory)}"
    )


def _to_come(inventory: Inventory) -> str:
    """Return which islands and hosts a cluster that starts still waits for, and what to do."""
    if not inventory.awaited_islands:
        return ""
    waiting = [f"{host.name} ({host.state})" for host in inventory.waiting_hosts()]
    besides = f" Hosts without an island: {', '.join(waiting)}." if waiting else ""
    return (
        f".{besides} The cluster still waits for {counted(inventory.awaited_islands, 'island')}: start the "
        "missing workers (pw-worker), or see in their logs why they have not come; pw status shows the hosts "
        "that are here"
    )


def _ranks(island: Island, request: AllocateSlice) -> Sequence[int]:
    """Return the ranks of the hosts that a slice may be on, those of named hosts in that order."""
    if not request.hosts and not request.python:
        return range(island.expected_hosts)
    nodes = request.hosts or island.ranks
    return [
        island.ranks.index(node)
        for node in nodes
        if node in island.ranks
        and (not request.python or _runs_python(island, node, request.python_hosts))
    ]


def _runs_python(island: Island, node: str, only: Sequence[str]) -> bool:
    """Return whether a host runs Python functions; a host that is away may say so when it is back."""
    if only and node not in only:
        return False
    host = island.hosts.get(node)
    return host is None or host.registration.python


def _on_each(request: AllocateSlice) -> int:
    return request.devices // len(request.hosts)


def _least_loaded(island: Island, ranks: Sequence[int], count: int) -> tuple[Position, ...]:
    positions = [(rank, ordinal) for rank in ranks for ordinal in range(island.local_devices)]
    chosen = sorted(positions, key=lambda position: (island.load[position], position))
    return tuple(sorted(chosen[:count]))


def _blocks(
    island: Island, topology: tuple[int, ...], ranks: Sequence[int]
) -> list[tuple[Position, ...]]:
    """Return all blocks of a form whose hosts have these ranks."""
    rows, columns = (topology[0], math.prod(topology[1:])) if len(topology) > 1 else (1, 1)
    return [
        tuple((row + r, column + c) for r in range(rows) for c in range(columns))
        for row in range(island.expected_hosts - rows + 1)
        if all(row + r in ranks for r in range(rows))
        for column in range(island.local_devices - columns + 1)
    ]
