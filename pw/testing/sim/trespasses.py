"""Clients of one tenant that ask for what clients of another have, and the promise that they get none.

With the profile's `trespasses`, users are of two tenants. A trespasser cancels, deletes, fetches and
gives back what another tenant's client has, drains hosts, and asks what it may not see. A stranger of
its tenant claims the number of such a client, if possible before that client itself comes back to
the next controller. No answer may have anything (`tenants`), and no client of the other tenant may
notice (`oracle`, `sessions last`, `credits`).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import TYPE_CHECKING, Any

from pw.core import messages as msg
from pw.core.actors.actor import Actor
from pw.core.ids import CONTROL, CONTROLLER, Address, run_name, store_of
from pw.core.messages.roles import CLIENT_PREFIX
from pw.testing.sim.forgeries import Forgeries
from pw.testing.sim.node import SimNode
from pw.testing.sim.rogues import Rogues
from pw.testing.sim.world import Violation, World, tenant_of_user

if TYPE_CHECKING:
    from pw.testing.sim.cluster import SimCluster
    from pw.testing.sim.workload import SimClient

TIMELINE = 1 << 20
"""Number of a trespasser's timeline."""
REQUESTS = 1 << 50
"""First number of a trespasser's requests; sessions have none that are so large."""


class Stranger(Actor):
    """The session of a process that claims another client's number."""

    def receive(self, sender: Address, message: object) -> None:
        """Ignore the message: `Trespasses` judges messages when they are sent."""


class Trespasses:
    """Sends what trespassers ask for, and judges the answers."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world: World = cluster.world
        self._numbers: dict[int, str] = {}
        """Tenants of all numbers of clients."""
        self._asked = 0
        self._asked_for: set[int] = set()
        """Slices that trespassers have asked for, on devices of others."""
        self._rogues = Rogues(cluster)
        Forgeries(cluster)
        world = self._world
        world.watch_sent(msg.Attached, self._attached)
        for kind in (
            msg.Answered,
            msg.Fetched,
            msg.Ready,
            msg.Status,
            msg.Explanation,
            msg.Memory,
            msg.Queue,
            msg.ProgramPlan,
            msg.DevicesTested,
            msg.Records,
        ):
            world.watch_sent(kind, self._answered)
        world.watch_sent(msg.SliceBound, self._bound)

    # --- what trespassers do ----------------------------------------------------------------------

    def trespass(self, random: Random, clients: list[SimClient]) -> None:
        """Have one client ask for everything that a client of another tenant has.

        It is attached to the present controller: a request that arrives before `Attach` ends a
        session, and a session sends none (regression trespasses 9600146).
        """
        at_work = [
            client for client in clients if client.node.alive and client.attached is not None
        ]
        trespassers = [
            client for client in at_work if not client.node.paused and client.session.link.is_open
        ]
        if not trespassers:
            return
        trespasser = random.choice(trespassers)
        tenant = tenant_of_user(trespasser.name)
        victims = [client for client in at_work if tenant_of_user(client.name) != tenant]
        if not victims:
            return
        victim = random.choice(victims)
        self._world.ledger.injected["trespass"] += 1
        self._pose_as(random, trespasser, victim)
        self._rogues.forge(random, victim)
        node = trespasser.node
        for to, message in (*self._requests(random, victim), *self._slices(trespasser, victim)):
            node.network.send(to, Address(node.name, "session"), message)
        node.request_turn()

    def _request(self) -> int:
        self._asked += 1
        return REQUESTS + self._asked

    def _requests(self, random: Random, victim: SimClient) -> list[tuple[Address, object]]:
        assert victim.attached is not None
        number, request = victim.attached.client, self._request
        arrays = tuple(victim.arrays)[:4]
        hosts = [host.name for host in self._cluster.hosts if host.node is not None]
        asked: list[Any] = [
            msg.CancelRuns(request(), number),
            msg.Cancel(arrays),
            msg.GetStatus(request()),
            msg.Explain(request()),
            msg.GetMemory(request()),
            msg.GetQueue(request()),
            msg.TestDevices(request()),
            msg.GetPlan(request(), run_name(victim.serial)),
            msg.ReadRecords(TIMELINE, request()),
        ]
        if hosts:
            asked.append(msg.DrainHost(request(), random.choice(hosts)))
        if arrays:
            asked += [
                msg.Delete(arrays),
                msg.Checkpoint(request(), arrays),
                msg.Inquire(request(), arrays),
            ]
        asked += [msg.ReleaseProgram(program) for program in list(victim.programs)[:2]]
        asked += [msg.ReleaseSlice(slice_) for slice_ in victim.slices]
        for draft in list(victim.programs.values())[:2]:
            asked.append(msg.GetPlan(request(), draft.body.name))
        messages: list[tuple[Address, object]] = [(CONTROL, message) for message in asked]
        messages += [(store_of(host), msg.ReadRecords(TIMELINE, request())) for host in hosts]
        for array in arrays:
            bound = victim.slices.get(victim.arrays[array].placement.slice)
            for host in dict.fromkeys(at.host for at in bound.devices) if bound else ():
                store = store_of(host)
                spec, devices = victim.arrays[array], bound.devices if bound else ()
                messages.append((store, msg.Wait(request(), (array,))))
                messages.append((store, msg.Fetch(request(), array, spec, devices, (0,), None)))
        return messages

    def _pose_as(self, random: Random, trespasser: SimClient, victim: SimClient) -> None:
        """A stranger of the trespasser's tenant claims the victim's number."""
        assert trespasser.attached is not None
        assert victim.attached is not None
        name = f"client-{trespasser.number}.stranger-{self._request() - REQUESTS}"
        node = SimNode(self._world, name, 1, "")
        node.network.introduce(CONTROLLER, CONTROLLER)
        session = node.add("session", Stranger)
        claim = random.choice((b"", trespasser.attached.claim))
        session.env.send(CONTROL, msg.Attach(name, 1.0, 0, victim.attached.client, claim))
        self._world.after(random.choice((0.1, 5.0)), self._gone, node)

    def _gone(self, node: SimNode) -> None:
        if node.alive:
            node.close()

    # --- what they may not get --------------------------------------------------------------------

    def _attached(self, sender: Address, to: Address, message: msg.Attached) -> None:
        """A number is always of one tenant."""
        tenant = tenant_of_user(to.node)
        if self._numbers.setdefault(message.client, tenant) != tenant:
            words = (
                f"{to.node} of tenant {tenant} got the number {message.client} of another tenant"
            )
            raise Violation("tenants", words)

    def _slices(
        self, trespasser: SimClient, victim: SimClient
    ) -> Iterator[tuple[Address, msg.AllocateSlice]]:
        """Ask for devices that the victim has."""
        for model in list(victim.slices)[:1]:
            number = trespasser._id()
            self._asked_for.add(number)
            yield CONTROL, msg.AllocateSlice(number, 1, None, None, None, like=model)

    def _bound(self, sender: Address, to: Address, message: msg.SliceBound) -> None:
        if to == CONTROL or message.slice not in self._asked_for:
            return
        client = self._cluster.controller.sessions.owner(message.slice)
        assert client is not None, "a slice is bound for a client"
        if client.slices.requests[message.slice].like:
            words = f"{to.node} got a slice on the devices of a client of another tenant"
            raise Violation("tenants", words)

    def _answered(self, sender: Address, to: Address, message: Any) -> None:
        """A trespasser gets errors, or reports that have nothing of the other tenant."""
        request = message.question if isinstance(message, msg.Records) else message.request
        if request <= REQUESTS:
            return
        self._world.checked["tenants"] += 1
        tenant = tenant_of_user(to.node)
        seen: set[int] = set()
        if isinstance(message, msg.Status):
            seen = {client.number for client in message.clients}
        elif isinstance(message, msg.Explanation):
            seen = {client.client for client in message.clients}
        elif isinstance(message, msg.Memory):
            owners = (owner for device in message.devices for owner in device.owners)
            seen = {owner.client for owner in owners if owner.client}
        elif isinstance(message, msg.Queue):
            self._world.checked["waits shown"] += len(message.waits)
            fronts = {one.client for wait in message.waits for one in wait.in_front}
            named = {wait.client for wait in message.waits} | fronts
            runs = {int(wait.run.partition(".")[0]) for wait in message.waits if wait.run}
            seen = (named - {0}) | runs
        elif isinstance(message, msg.ProgramPlan):
            seen = {int(message.program.partition(".")[0])}
        elif isinstance(message, msg.Records):
            self._world.checked["names in records"] += len(message.names)
            users = [_user_in(name) for _, name in message.names]
            if any(user and tenant_of_user(user) != tenant for user in users):
                words = f"{to.node} of tenant {tenant} read names of programs of {users}"
                raise Violation("tenants", words)
        elif not _is_refusal(message):
            words = f"{to.node} of tenant {tenant} was not refused: {type(message).__name__}"
            raise Violation("tenants", words)
        strangers = {number for number in seen if self._numbers.get(number, tenant) != tenant}
        if strangers:
            words = f"{to.node} of tenant {tenant} saw {type(message).__name__} of {strangers}"
            raise Violation("tenants", words)


def _user_in(name: str) -> str:
    """The user whose program or computation a record names; empty for other names."""
    words = [word for word in name.split() if word.startswith(CLIENT_PREFIX)]
    return words[0].partition("/")[0] if words else ""


def _is_refusal(message: Any) -> bool:
    """Whether an answer has an error and nothing else."""
    return isinstance(message, msg.Answered) and message.error is not None
