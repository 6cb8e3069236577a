"""What the controller knows, shared between its parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pw.core.actor import Env
from pw.core.ids import scheduler_of
from pw.core.messages import ArrayPlaced, Release
from pw.core.sharding import ArraySpec, Binding, DeviceAddress
from pw.sched.control.clients import Array, Client, RunState


@dataclass(slots=True)
class Ledger:
    """Clients with all they own, their runs in flight, and the islands; plain state, which any part changes."""

    clients: dict[int, Client] = field(default_factory=dict)
    bindings: dict[int, Binding] = field(default_factory=dict)
    runs: dict[int, RunState] = field(default_factory=dict)
    islands: set[str] = field(default_factory=set)
    """Those that are ready."""
    limited: set[str] = field(default_factory=set)
    """Those that count their devices' memory."""
    schedulers: dict[str, None] = field(default_factory=dict)
    """Islands that have a scheduler, in the order of their forming."""

    def placed(self, array: int, spec: ArraySpec) -> ArrayPlaced:
        """What a scheduler needs to count the memory of an array that does not come from a run."""
        return ArrayPlaced(array, self.located(spec), spec.shard_bytes)

    def located(self, spec: ArraySpec) -> tuple[DeviceAddress, ...]:
        """The device of each shard of an array whose slice is bound."""
        return self.bindings[spec.placement.slice].located(spec.placement)


def drop(
    env: Env,
    ledger: Ledger,
    client: Client,
    arrays: Iterable[tuple[int, Array]],
    *,
    late: bool = False,
) -> None:
    """Have the hosts that hold these arrays forget them, after the client's earlier work.

    Where they were deleted before they had arrived (`late`), after that of it which uses them.
    """
    by_island: dict[str, tuple[list[int], list[tuple[str, ...]]]] = {}
    for number, array in arrays:
        if array.hosts and array.island in ledger.islands:
            numbers, hosts = by_island.setdefault(array.island, ([], []))
            numbers.append(number)
            hosts.append(array.hosts)
    for island, (numbers, hosts) in by_island.items():
        release = Release(client.number, tuple(numbers), tuple(hosts), late)
        env.send(scheduler_of(island), release)
