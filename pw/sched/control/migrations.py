"""Moves clients to other islands, and prepares that while they compute.

To move is to be suspended and to go on at once, elsewhere (`suspensions`). Before launches are held, the new
place is prepared:

- The resource manager says which devices the slices would have there. They ask for the same ones later.
- The hosts of these devices compile the client's programs (`CompileAhead`).
- Arrays that exist are copied to host memory, and offered to these hosts. A suspension does not copy again
  what has replicas, and hosts restore what they have.

Nothing depends on a preparation. If it takes too long, or the devices are others in the end, work is done as
for any suspended client. Copies are replicas; those that no checkpoint asked for are dropped when the client
has its arrays again, and when it does not move after all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import ArgumentError, Error, ErrorReport, HostLost, InsufficientDevices
from pw.core.ids import Address, arrays_in, client_of, scheduler_of, store_of
from pw.core.rights import Resource, in_words
from pw.core.sharding import ArraySpec, Box, DeviceAddress
from pw.sched.cluster.moves import Destination
from pw.sched.control.array_states import ArrayState
from pw.sched.control.checkpoints.in_memory import Checkpoints, box_holders
from pw.sched.control.checkpoints.replicas import ReplicaTable
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client, handles_host
from pw.sched.control.suspension_requests import SuspensionRequests
from pw.sched.control.suspensions import Suspensions

STALLED_S = 5.0
"""Seconds without word of a copy after which a client moves, and a little more if many bytes are missing."""
LEAST_BYTES_PER_S = 100 << 20
"""Bytes of copies for which a client waits a second more, at most, without word of one."""
COMPILED_WITHIN_S = 600.0
"""Seconds after which a client moves, whatever is still being compiled for it."""
LOOK_S = 0.5
"""Seconds between two looks whether a preparation takes too long, or copies are not needed any more."""
AHEAD = 256
"""Number of computations of a client that are compiled ahead, the newest ones: hosts keep no more."""

Destinations = Callable[[Collection[int], str, tuple[DeviceAddress, ...]], tuple[Destination, ...]]
"""Function that returns the devices that slices would have on an island; those of one slice may be named."""

Awaited = dict[int, set[tuple[str, Box]]]
"""Hosts and the boxes that they have still to keep, or to refuse, by array."""


@dataclass(slots=True, eq=False)
class Migration:
    """A client that computes on while its new place is prepared."""

    client: Client
    asked: tuple[Address, int]
    """Asker, and the number of its request."""
    by: str
    """Words for the asker."""
    slices: frozenset[int]
    """Numbers of the slices that move."""
    target: str
    """Name of the island to which they move."""
    named: tuple[DeviceAddress, ...]
    """Devices that the only slice is to have there, in order, as the asker says; empty for any."""
    devices: dict[int, tuple[DeviceAddress, ...]]
    """Devices that slices would have there, in order, by slice; of those that have room."""
    began_s: float
    """Time at which it was asked for, in seconds."""
    heard_s: float
    """Time at which a host told of a copy last, in seconds."""
    compiling: set[int] = field(default_factory=set)
    """Numbers of the compilations ahead that have not ended."""
    copying: set[int] = field(default_factory=set)
    """Numbers of arrays whose copies have not come to all hosts that are to have them."""
    offered: set[int] = field(default_factory=set)
    """Numbers of arrays that were offered to the hosts of their new devices."""
    patience_s: float = STALLED_S
    """Seconds for which it waits for word of a copy."""


@dataclass(eq=False)
class Migrations(ControlPart):
    """Clients that are about to move, and copies that were made for moves."""

    suspensions: Suspensions
    requests: SuspensionRequests
    replicas: ReplicaTable
    checkpoints: Checkpoints
    island_status: Callable[[], tuple[msg.IslandInfo, ...]]
    destinations: Destinations
    under_way: dict[int, Migration] = field(default_factory=dict, init=False)
    """Moves that are being prepared, by client."""
    copies: dict[int, Awaited] = field(default_factory=dict, init=False)
    """Arrays that were copied for a move, by client: replicas to drop when they are not needed any more."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.suspensions.stays = self._stays
        self._requests = 0
        self._looks = Ticker(self._env, LOOK_S, self._look)

    # --- asked for --------------------------------------------------------------------------------

    @handles_client(msg.MigrateClient)
    def _migrate_asked(self, asker: Client, message: msg.MigrateClient) -> None:
        meant = msg.SuspendClients(message.request, message.client)
        clients = self.requests.meant(asker, meant, "migrate")
        if clients is None:
            return
        (client,) = clients
        bindings, target = self._islands.bindings, message.island
        own = client.slices.all
        chosen = {message.slice} & own if message.slice else own
        slices = frozenset(
            number
            for number in chosen
            if number in bindings
            and (bindings[number].island != target or bool(message.slice and message.devices))
        )
        unbound = client.slices.unbound.keys() if client.left_for else ()
        waiting = frozenset(chosen.intersection(unbound))
        asked = (asker.address, message.request)
        error = self._why_not(client, slices | waiting, target) or self._why_not_now(client)
        now_s, named = self._env.now_s(), message.devices if message.slice else ()
        places = () if error else self.destinations(slices, target, named)
        devices = {place.slice: place.devices for place in places}
        if error is None and (full := slices - devices.keys()):
            error = self._no_room(client, full, target)
        if error is None and waiting:
            self._redirect(client, waiting, target)
        if error is not None or not slices:
            self._answer(asked, error)
            return
        migration = Migration(
            *(client, asked, self.requests.who(asker), slices, target, named, devices),
            *(now_s, now_s),
        )
        self.under_way[client.number] = migration
        if client.resuming is None:
            self._compile(migration, places)
            self._copy(migration)
            self._looks.start()
        self._env.log(
            "info",
            "client is about to move",
            client=client.number,
            island=target,
            compilations=len(migration.compiling),
            arrays=len(migration.copying),
        )

    def _answer(self, asked: tuple[Address, int], error: Error | None) -> None:
        asker, request = asked
        report = None if error is None else ErrorReport.of(error)
        self._env.send(asker, msg.Answered(request, report))

    def _why_not(self, client: Client, slices: Iterable[int], target: str) -> Error | None:
        """Return why slices cannot move to an island."""
        islands = {island.name: island for island in self.island_status()}
        if target not in islands:
            return ArgumentError(f"there is no island {target!r}; see pw status")
        island = islands[target]
        for number in slices:
            devices = client.slices.requests[number].devices
            if devices > island.devices:
                return InsufficientDevices(
                    f"a slice of client {client.number} has {devices} devices, and island {target!r} has "
                    f"{island.devices}"
                )
        return None

    def _no_room(self, client: Client, slices: Collection[int], target: str) -> Error | None:
        """Return why slices would wait on an island; None if it has not all its hosts yet."""
        islands = {island.name: island for island in self.island_status()}
        if islands[target].state != "ready":
            return None
        count = sum(client.slices.requests[number].devices for number in slices)
        return InsufficientDevices(
            f"client {client.number} stays where it is: island {target!r} has no room now for "
            f"{in_words(Resource.DEVICES, count)} of it, because other slices have devices or memory there; "
            "pw rebalance --island makes room, and pw status shows who is there"
        )

    def _redirect(self, client: Client, slices: Collection[int], target: str) -> None:
        """Have slices that wait for devices since their client has left others wait on an island."""
        error = ErrorReport.of(HostLost(f"{client.left_for}, and is to go on on island {target!r}"))
        self.suspensions.slices.set_down(client, slices, error)
        self.suspensions.slices.take_up(client, slices, target, {})

    def _why_not_now(self, client: Client) -> Error | None:
        """Return why a client cannot move now."""
        number = client.number
        if client.suspension is not None:
            return ArgumentError(
                f"client {number} is suspended; resume it first (pw resume {number})"
            )
        if number in self.under_way:
            target = self.under_way[number].target
            return ArgumentError(f"client {number} is about to move to island {target!r} already")
        return None

    def _stays(self, client: Client) -> None:
        """A client is to go on that is about to move."""
        migration = self.under_way.pop(client.number, None)
        if migration is not None:
            error = Error(f"client {client.number} was resumed before it moved")
            self._answer(migration.asked, error)

    def in_words(self, client: Client) -> str:
        """Return who moves or has suspended a client, or what it waits for since; empty for others."""
        migration = self.under_way.get(client.number)
        if migration is None:
            return self.suspensions.in_words(client)
        return f"about to move to island {migration.target}, by {migration.by}"

    def client_left(self, client: Client) -> None:
        """A client that leaves does not move; its replicas go with it."""
        self.copies.pop(client.number, None)
        migration = self.under_way.pop(client.number, None)
        if migration is not None:
            self._answer(migration.asked, Error(f"client {client.number} has left"))

    # --- programs ---------------------------------------------------------------------------------

    def _compile(self, migration: Migration, places: Iterable[Destination]) -> None:
        """Have the hosts of the new devices compile the client's programs."""
        there = {place.slice: place for place in places}
        wanted: dict[tuple[bytes, tuple[DeviceAddress, ...]], tuple[bytes, int]] = {}
        for program in migration.client.programs.values():
            if program.error is not None:
                continue
            blobs = {artifact.digest: artifact.blob for artifact in program.artifacts}
            for computation in program.body.computations:
                place = there.get(computation.placement.slice)
                blob = blobs.get(computation.artifact)
                if place is None or blob is None or computation.traits.runs_on_host:
                    continue
                devices = tuple([place.devices[at] for at in computation.placement.devices])
                wanted[computation.artifact, devices] = blob, place.epoch
        for (_, devices), (blob, epoch) in list(wanted.items())[-AHEAD:]:
            for host in dict.fromkeys(device.host for device in devices):
                self._requests += 1
                migration.compiling.add(self._requests)
                order = msg.CompileAhead(
                    migration.client.number, self._requests, blob, devices, migration.target, epoch
                )
                self._env.send(store_of(host), order)

    @handles_host(msg.CompiledAhead)
    def _compiled(self, host: str, message: msg.CompiledAhead) -> None:
        for migration in self.under_way.values():
            migration.compiling.discard(message.request)

    # --- arrays -----------------------------------------------------------------------------------

    def _copy(self, migration: Migration) -> None:
        """Have arrays copied to host memory while the client computes on."""
        client = migration.client
        copies = self.copies.setdefault(client.number, {})
        by_island: dict[str, list[tuple[str, msg.ArrayCopy]]] = {}
        amounts: dict[int, int] = {}
        for number, spec in self.travellers(migration):
            devices = self._islands.located(spec)
            island = self._islands.bindings[spec.placement.slice].island
            holders = box_holders(spec, devices)
            for host, positions in holders.items():
                copy = msg.ArrayCopy(number, spec, devices, positions)
                by_island.setdefault(island, []).append((host, copy))
            copies[number] = {
                (host, spec.box(at)) for host, positions in holders.items() for at in positions
            }
            migration.copying.add(number)
            amounts[number] = spec.size_bytes
        migration.patience_s += sum(amounts.values()) / LEAST_BYTES_PER_S
        self.sessions.usage.keep(client.number, Resource.HOST_MEMORY, amounts)
        for island, orders in by_island.items():
            order = msg.CopyArrays(client.number, tuple(orders), first=True)
            self._env.send(scheduler_of(island), order)
        if not copies:
            del self.copies[client.number]

    def travellers(self, migration: Migration) -> Iterable[tuple[int, ArraySpec]]:
        """Yield the arrays that exist on the slices that move, and that no call is about to take over."""
        client = migration.client
        to_come = {array for run in self.suspensions.runs_of(client) for array in run.results}
        for message in client.stream:
            if isinstance(message, msg.Run):
                to_come.update(arrays_in(client.donated_to(message)))
        for number, array in client.arrays.held.items():
            spec = array.spec
            if (
                array.state is ArrayState.PRESENT
                and number not in to_come
                and spec.placement.slice in migration.slices
                and self._islands.is_bound(spec)
                and number in client.lineage.origins
                and not self.replicas.are_complete(number, spec)
            ):
                yield number, spec

    @handles_host(msg.Holdings)
    def _holds(self, host: str, message: msg.Holdings) -> None:
        """A host has copies of arrays that travel, or has none."""
        for holding in message.holdings if self.copies else ():
            array, number = holding.array, client_of(holding.array)
            awaited = self.copies.get(number, {}).get(array)
            if not awaited:
                continue
            if holding.boxes:
                awaited -= {(host, box) for box in holding.boxes}
            else:
                awaited -= {one for one in awaited if one[0] == host}
            migration = self.under_way.get(number)
            if migration is not None and array in migration.copying:
                migration.heard_s = self._env.now_s()
                if not awaited:
                    self._copied(migration, array, awaited)

    def _copied(self, migration: Migration, array: int, awaited: set[tuple[str, Box]]) -> None:
        """Offer an array that is in host memory to the hosts of its new devices; once, then it has come."""
        origin = migration.client.lineage.origins.get(array)
        offers: dict[tuple[str, str], list[Box]] = {}
        if origin is not None and self.replicas.are_complete(array, origin.spec):
            placement = origin.spec.placement
            there = migration.devices.get(placement.slice, ())
            for box, positions in origin.spec.distinct_boxes() if there else ():
                holders = self.replicas.holders(array, box)
                keepers = {there[placement.devices[at]].host for at in positions}
                for keeper in sorted(keepers.difference(holders)) if holders else ():
                    offers.setdefault((holders[0], keeper), []).append(box)
        if not offers or array in migration.offered:
            migration.copying.discard(array)
            return
        migration.offered.add(array)
        assert origin is not None, "its boxes were offered"
        for (holder, keeper), boxes in offers.items():
            awaited.update((keeper, box) for box in boxes)
            self.replicas.offer(array, origin.spec, tuple(boxes), holder, keeper)

    # --- and away ---------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Do not wait for copies of arrays that are gone, and drop copies; the end of the turn goes on."""
        for migration in self.under_way.values():
            migration.copying = {
                number for number in migration.copying if number in migration.client.arrays
            }
        for number in list(self.copies):
            self.clear(number)
        return bool(self.under_way or self.copies)

    def go_on(self) -> None:
        """Have clients leave whose place is prepared, at the end of a turn."""
        for number, migration in list(self.under_way.items()):
            if migration.client.suspension is not None:
                error = self._why_not_now(migration.client)
                del self.under_way[number]
                self._answer(migration.asked, error)
            elif self.is_prepared(migration):
                del self.under_way[number]
                self._leave(migration)

    def is_prepared(self, migration: Migration) -> bool:
        """Return whether a client moves now, with what is there."""
        now_s = self._env.now_s()
        if migration.compiling and now_s < migration.began_s + COMPILED_WITHIN_S:
            return False
        return not migration.copying or now_s >= migration.heard_s + migration.patience_s

    def _leave(self, migration: Migration) -> None:
        """Have a client leave its devices, and go on at its new place."""
        client, target = migration.client, migration.target
        slices = migration.slices & client.slices.all
        error = self._why_not(client, slices, target)
        if error is not None or not slices:
            self._answer(migration.asked, error)
            return
        self.suspensions.suspend(client, migration.by, migration.asked)
        suspension = client.suspension
        assert suspension is not None, "it was not suspended before"
        suspension.slices, suspension.target = slices, target
        suspension.devices = migration.devices
        if migration.named:
            suspension.devices = dict.fromkeys(slices, migration.named)
        suspension.goes_on = True

    # --- copies that are left ---------------------------------------------------------------------

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        """Wait for no host: those of the island do not answer any more."""
        for migration in self.under_way.values():
            migration.copying.clear()
            if migration.target == message.island:
                migration.compiling.clear()
        for copies in self.copies.values():
            for awaited in copies.values():
                awaited.clear()

    def clear(self, number: int) -> None:
        """Drop the copies of a client that has its arrays, unless a checkpoint has asked for them, too."""
        client, copies = self.sessions.get(number), self.copies[number]
        if client is None:
            del self.copies[number]
            return
        if (
            number in self.under_way
            or client.suspension is not None
            or client.recovering
            or self.checkpoints.count(client)
            or any(array.restored for _, array in client.arrays.arriving())
        ):
            return
        origins = client.lineage.origins
        # A host that has not answered yet would be taken for one that has a replica.
        gone = [array for array, hosts in copies.items() if not hosts or array not in origins]
        for array in gone:
            del copies[array]
        self.replicas.drop(
            array for array in gone if array not in origins or not origins[array].replicated
        )
        if not copies:
            del self.copies[number]
