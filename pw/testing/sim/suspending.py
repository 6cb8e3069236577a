"""Users that suspend each other, and the promises of a suspension.

| monitor | promise |
|---|---|
| suspended | nothing of a suspended client is launched; soon its hosts have none of its arrays on devices |
| suspended | a client stays suspended when its controller is started again |
| copies in files | a host has no copies in memory that were to go to files, if it could write them |
| run once | a computation is not launched again because its client was suspended |

With the profile's `suspensions`, a user has another one, or itself, suspended. After a while the suspended user
asks to go on, also if it is not suspended yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pw.client.session.thread_messages import Ask
from pw.core import messages as msg
from pw.core.ids import Address, client_of
from pw.testing.sim.ledger import SUSPENDED
from pw.testing.sim.world import Violation

LATE_S = 10.0
"""Seconds after which a user that is still suspended asks to go on."""
SETTLED_S = 4.0
"""Seconds after which hosts have dropped what a suspended client had on devices."""

CALLED_OFF = 0.3
"""Share of the moves whose user asks to go on at once."""

TO_FILES = 0.6
"""Share of the suspensions whose copies are to lie in files, in profiles with files."""


def suspend(user: Any) -> None:
    """Have a user of the same tenant leave its devices."""
    random, world = user.suspensions, user.world
    tenant = world.tenant_of(user.name)
    targets = [
        one for one in user.cluster.users if one.may_take and world.tenant_of(one.name) == tenant
    ]
    if not targets:
        return
    target = random.choice(targets)
    number = target.attached.client
    # Slices with a shape move by plan: one for which an island has no room would wait, however long.
    if random.random() < 0.3 and user.cluster.schedulers and not world.profile.shapes:
        _migrate(user, target)
        return
    promise = user._promise(f"suspend client {number}", lambda result, error: None)
    to_files = bool(world.profile.spill_files) and random.random() < TO_FILES
    order = partial(msg.SuspendClients, client=number, to_files=to_files)
    user._post(Ask(order, promise, ()))
    world.checked["suspensions"] += 1
    world.ledger.injected[SUSPENDED] += 1
    pause_s = random.choice((0.0, 1e-3, 0.05, 0.5, 2.0, 6.0))
    world.after(pause_s, resume, target, target.lives)


def _migrate(user: Any, target: Any) -> None:
    """Have a user, or one slice of it, move to an island."""
    random, number = user.suspensions, target.attached.client
    island = random.choice(sorted(user.cluster.schedulers))
    chosen = random.choice((0, *target.slices))
    promise = user._promise(f"migrate client {number}", lambda result, error: None)
    user._post(Ask(lambda request: msg.MigrateClient(request, island, number, chosen), promise, ()))
    user.world.checked["migrations"] += 1
    user.world.ledger.injected[SUSPENDED] += 1
    if random.random() < CALLED_OFF:
        pause_s = random.choice((0.0, 1e-3, 3e-3))
        user.world.after(pause_s, resume, target, target.lives)


def resume(user: Any, life: int) -> None:
    """Have a user ask to go on, when its process can."""
    if user.lives != life or not user.node.alive or user.session.closed is not None:
        return
    world = user.world
    if user.node.paused:
        world.at(user.node.paused_until_s, resume, user, life)
        return
    promise = user._promise("resume", lambda result, error: None)
    user._post(Ask(msg.ResumeClients, promise, ()))


def resume_late(user: Any) -> None:
    """Ask to go on if the user was suspended long ago, by what came late."""
    if user.attached is None or not user.cluster.node.alive:
        return
    client = user.cluster.controller.sessions.get(user.attached.client)
    suspension = None if client is None else client.suspension
    if suspension is not None and suspension.since_s < user.cluster.node.now_s() - LATE_S:
        resume(user, user.lives)


class SuspensionMonitor:
    """Watches the suspended clients of each controller."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        if not (world.profile.suspensions or world.profile.rebalances):
            return
        self._runs: dict[tuple[int, int], int] = {}
        """Run in which each segment of a user's call was launched."""
        world.watch_sent(msg.Launch, self._launching)
        world.watch_sent(msg.SliceLost, self._left)
        world.watch_sent(msg.Replicate, self._copying)
        self._to_files: set[tuple[str, int]] = set()
        """Hosts and arrays of copies that are to lie in files."""
        world.watch_handled(msg.Attach, self._attaching)

    def _client(self, number: int) -> Any:
        node = self._cluster.node
        return self._cluster.controller.sessions.get(number) if node.alive else None

    def _launching(self, sender: Address, to: Address, message: msg.Launch) -> None:
        client = self._client(client_of(message.run))
        if client is None or message.segment == msg.CANCELLED:
            return
        self._world.checked["suspended"] += 1
        if client.is_suspended:
            words = f"run {message.run:x} of {client.name} is launched on {to.node}"
            raise Violation("suspended", words)
        run = self._cluster.controller.runs.in_flight.get(message.run)
        if run is None or self._world.ledger.any or run.record.program.body.makes_views:
            return
        key = (run.record.order, message.segment)
        first = self._runs.setdefault(key, message.run)
        # What lies on a slice that was given back is not copied: it is made again for queued runs.
        given_back = {number for user in self._cluster.users for number in user.given_back}
        if first != message.run and given_back.isdisjoint(run.record.program.slices):
            words = f"segment {message.segment} of run {run.record.order:x} of {client.name} twice"
            raise Violation("run once", words)

    def _attaching(self, sender: Address, to: Address, message: msg.Attach) -> Callable[[], None]:
        """A client that was suspended stays so when its controller is started again."""

        def check() -> None:
            client = self._client(message.resume)
            self._runs.clear()  # what an earlier controller had in flight is run again
            users = [one for one in self._cluster.users if one.node.name == sender.node]
            if client is None or not users or not users[0].session.hosts.suspended_by:
                return
            self._world.checked["still suspended"] += 1
            if not client.is_suspended:
                words = f"{client.name} is not suspended any more after a restart of its controller"
                raise Violation("suspended", words)

        return check

    def _left(self, sender: Address, to: Address, message: msg.SliceLost) -> None:
        client = self._client(client_of(message.slice))
        if client is not None and client.suspension is not None and client.suspension.is_complete:
            self._world.checked["withdrawn"] += len(client.suspension.withdrawn)
            self._look_for_files(client, client.suspension)
            self._world.after(SETTLED_S, self._check, client, client.suspension)

    def _copying(self, sender: Address, to: Address, message: msg.Replicate) -> None:
        for copy in message.copies:  # the last order for an array counts
            change = self._to_files.add if copy.to_files else self._to_files.discard
            change((to.node, copy.array))

    def _look_for_files(self, client: Any, suspension: Any) -> None:
        """Copies are in files before a client leaves its devices."""
        for host in self._cluster.members():
            arrays = {array for name, array in self._to_files if name == host.name}
            if host.node is None or not host.has_files or host.files.failed:
                continue
            for one in host.store.replicas.memory.all():
                if one.array not in arrays or one.array not in suspension.copied:
                    continue
                self._world.checked["copies in files"] += 1
                if not one.in_file and one.data.nbytes:
                    words = f"{host.name} has a copy of {one.array:x} of {client.name} in memory"
                    raise Violation("copies in files", words)
        self._to_files = {key for key in self._to_files if client_of(key[1]) != client.number}

    def _check(self, client: Any, suspension: Any) -> None:
        """Hosts have nothing on devices of a client that is still suspended."""
        if client.suspension is not suspension or self._client(client.number) is not client:
            return
        stopped_s = max(self._world.held_until_s, self._cluster.stopped_until_s())
        if self._world.now_s < stopped_s + SETTLED_S:
            self._world.at(stopped_s + SETTLED_S, self._check, client, suspension)
            return
        self._world.checked["off the devices"] += 1
        for host in self._cluster.members():
            held = host.held_by(client.number)  # one with an error has no bytes
            arrays = [one for one in held if not _has_failed(client, one)]
            if arrays:
                words = f"{host.name} has arrays of {client.name}, which is suspended: {arrays[:5]}"
                raise Violation("suspended", words)


def _has_failed(client: Any, number: int) -> bool:
    array = client.arrays.get(number)
    return array is not None and array.error is not None
