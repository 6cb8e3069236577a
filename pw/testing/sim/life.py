"""A simulated client's sessions: the production `ClientSession`, born, attached, cut off, closed or killed.

A user may come back after a session has ended, under another name, as a new process would. Slices
are allocated here as well, because a session without one can do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pw.client.session.session import ClientSession
from pw.client.session.thread_messages import (
    Allocate,
    Await,
    Close,
    Get,
    Open,
    Put,
    Tell,
    TellLaunched,
)
from pw.core.errors import Disconnected, Error, InsufficientDevices, QuotaExceeded
from pw.core.ids import CONTROLLER, client_id
from pw.core.messages import AllocateSlice, Attached, ReleaseSlice, Run, SliceBound
from pw.core.sharding import ArraySpec
from pw.core.waits import RECONNECT_S
from pw.testing.sim.bulk import SimBulk
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.lines import SimWires
from pw.testing.sim.memory_bounds import random_bound
from pw.testing.sim.network import LINES
from pw.testing.sim.node import SimNode
from pw.testing.sim.oracle import Oracle
from pw.testing.sim.programs import ProgramDraft
from pw.testing.sim.shapes import random_shape
from pw.testing.sim.world import Violation

RUNS_AHEAD = 12
"""Number of runs that a user has in flight, at most; less than the controller would allow, so that it
matters."""
LIVES = 3
TOLD_S = 4e-3
"""Seconds for which the session may not have told of launches."""
EVERYTHING = 1 << 30
"""Bytes of inputs that no user here exhausts."""


@dataclass(slots=True, eq=False)
class Promise:
    """A future for the session (see `pw.client.session.thread_messages.Settle`)."""

    _then: Callable[[Any, BaseException | None], None]

    def set_result(self, result: Any) -> None:
        """Settle with a result."""
        self._then(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        """Settle with an error."""
        self._then(None, exception)


class Life:
    """The sessions of one user: how they begin and end; `act` does the work in between."""

    def __init__(self, cluster: SimCluster, number: int, runs: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.number = number
        self.runs_left = runs
        self.lives = 0
        self.random = self.world.streams(f"client/{number}")
        self.loops = self.world.streams(f"loops/{number}")
        self.suspensions = self.world.streams(f"suspensions/{number}")
        self.device_tests = self.world.streams(f"device tests of users/{number}")
        self._tells = self.world.streams(f"tells/{number}")
        self.looping = 0
        """Number of calls that are left of a loop (`pw.testing.sim.looping`)."""
        self.loops_left = 5
        self.drained = False
        self.finished = False
        """True if the user's work is done, and the session is closed or dead."""
        self.final = False
        """True if the user checks all arrays once more, and then leaves."""
        self.is_beside = cluster.world.profile.embedded and number == 0
        """True if the session is on the controller's node, and both end together."""
        self.fetched = 0
        self.failed = 0
        self.live()

    # --- a life --------------------------------------------------------------------------------------

    def live(self) -> None:
        """Begin a session."""
        self.lives += 1
        self.name = f"client-{self.number}.{self.lives}"
        if self.is_beside:
            self.name, node = CONTROLLER, self.cluster.node
        else:
            node = SimNode(self.world, self.name, 1, "")
            node.network.introduce(CONTROLLER, CONTROLLER)
        self.node = node
        self.bulk = SimBulk(node, self.cluster.planes)
        self.session = node.add("session", lambda env: ClientSession(env, self.bulk, self._credits))
        name = f"client-{self.number}.{self.lives}{LINES}"
        self.wires = SimWires(self.world, name, self.session.lines)
        self._is_telling = False
        for act in self.cluster.on_start["client"]:
            act(self)
        self.attached: Attached | None = None
        self.open: dict[int, str] = {}
        """Requests without an answer, by number."""
        self.slices: dict[int, SliceBound] = {}
        self.given_back: dict[int, SliceBound] = {}
        """Slices that the user had, by number."""
        self.likes: dict[int, int] = {}
        """Slices of this user on the devices of other users' slices, by those; 0 while it asks for one."""
        self.refused = 0
        self.kinds: list[ArraySpec] = []
        self.programs: dict[int, ProgramDraft] = {}
        self.arrays: dict[int, ArraySpec] = {}
        self.stream: Any = None
        """Stream that feeds the user (`pw.testing.sim.feeding`)."""
        self.credits = 0
        self.serial = 0
        self.looking = False
        self.cleared = False
        self.closing = False
        self.share, self.priority = self._claim()
        keep_bytes = self.random.choice((0, 1 << 12, 1 << 18, EVERYTHING, EVERYTHING))
        keeps = keep_bytes == EVERYTHING
        self.copies = not keeps or self.random.random() < 0.3
        self.oracle = Oracle(self.name, keeps, self.world.ledger, self._nodes_of)
        promise = self._promise("attach", self._on_attached)
        self.recovery_s: float | None = None
        """How long the user waits for lost islands, in seconds; None for as long as the cluster says."""
        if self.world.profile.island_losses:
            waits = self.world.streams(f"{self.name}/recovery")
            self.recovery_s = waits.choice((None, 0.0, 2.0, 10.0, math.inf))
        self.node.post(
            "session",
            Open(
                self.name,
                self.share,
                self.priority,
                keep_bytes,
                promise,
                RECONNECT_S,
                recovery_s=self.recovery_s,
            ),
        )

    def _claim(self) -> tuple[float, int]:
        """Return the weight and the priority of the user."""
        return self.random.choice((1.0, 1.0, 2.0)), self.random.randrange(3)

    def _nodes_of(self, number: int) -> tuple[str, ...]:
        """Return the nodes that matter to a slice, of this user or of one whose arrays it may have taken."""
        exporters = {deal.exporter.name: deal.exporter for deal in self.cluster.deals.values()}
        nodes = [self.name, CONTROLLER, *exporters]
        for user in (self, *exporters.values()):
            bound = user.slices.get(number) or user.given_back.get(number)
            if bound is not None:
                nodes += self.cluster.hosts_of(bound.island)
        return tuple(nodes)

    def _promise(self, what: str, then: Callable[[Any, BaseException | None], None]) -> Promise:
        life = self.lives
        self.serial += 1
        ticket = self.serial

        def settled(result: Any, error: BaseException | None) -> None:
            if self.lives == life and self.node.alive and self.open.pop(ticket, ""):
                then(result, error)

        self.open[ticket] = what
        return Promise(settled)

    def _id(self) -> int:
        assert self.attached is not None
        self.serial += 1
        return client_id(self.attached.client, self.serial)

    def _post(self, note: object) -> None:
        """Give the session a note, as a thread would; a question goes over the lines, if it may."""
        session = self.session
        session.leases.posting(note)
        if isinstance(note, (Await, Get)) and session.closed is None and session.lines.ask(note):
            return
        self.node.post("session", note)

    def _upload(self, note: Put) -> None:
        """Upload a value as a thread would."""
        if self.session.closed is None and self._tells.random() < 0.8:
            self.session.put(note, self._post)
            self.world.checked["uploads over lines"] += bool(note.bound)
            return
        self._post(note)
        if self._tells.random() < 0.5:  # as for a large value, before a run that reads it
            losses, array = self.session.leases.losses, note.array

            def there(result: Any, error: BaseException | None) -> None:
                if error is None and array in self.arrays:
                    self.session.leases.arrived(array, losses)

            promise = self._promise(f"upload {array:x}", there)
            self._post(Await(((array, note.spec),), promise))

    def _call(
        self,
        run: int,
        program: int,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        wanted: Await | Get | None = None,
    ) -> None:
        """Launch a run under a lease, or have the session tell of it, as a thread would."""
        session = self.session
        if session.leases.launch(run, program, args, results, wanted):
            self.world.checked["launches over lines"] += 1
            if not self._is_telling:
                self._is_telling = True
                delay_s = self._tells.uniform(0.0, TOLD_S)
                self.world.after(delay_s, self._tell_launched, self.node)
            return
        message = Run(run, program, args, results)
        session.leases.ordinary(message)
        self._post(Tell(message))
        if wanted is not None:
            self._post(wanted)

    def _tell_launched(self, node: SimNode) -> None:
        if node is self.node and node.alive:
            self._is_telling = False
            node.post("session", TellLaunched())

    def _credits(self, count: int) -> None:
        if count < 1 << 20:
            self.credits += count

    def die(self) -> None:
        """The process is killed."""
        if self.node.alive:
            if self.is_beside:
                self._end_controller()
            else:
                self.node.die(seen=True)
            self.wires.node.die(seen=True)
            self._again()

    def _end_controller(self) -> None:
        """End the controller with this session; the next one is there for the next life."""
        self.world.ledger.note("controller killed", *[host.name for host in self.cluster.hosts])
        self.cluster.kill_controller()
        self.cluster.restart_controller()

    def leave(self) -> None:
        """Close the session, whatever is open."""
        if self.closing or not self.node.alive:
            return
        self.closing = True
        self.open.clear()
        self.lives += 1  # ignore further answers to this life
        self._post(Close(Disconnected("the user has left"), Promise(lambda result, error: None)))
        self.world.after(0.01, self._close, self.node)

    def _close(self, node: SimNode) -> None:
        if node.paused:
            self.world.at(node.paused_until_s, self._close, node)
        elif node.alive:
            if self.is_beside:
                self._end_controller()
            else:
                node.close()
            self.wires.node.close()
            self._again()

    def _again(self) -> None:
        """End this life; begin another if runs are left."""
        self.open.clear()
        if self.lives < 2 * LIVES and self.runs_left > 0 and not self.final:
            self.world.after(self.random.uniform(0.01, 2.0), self.live)
        else:
            self.finished = True

    # --- the beginning of a life ---------------------------------------------------------------------

    def _on_attached(self, answer: Attached | None, error: BaseException | None) -> None:
        if answer is None:
            self._cut_off(error)
            return
        self.attached = answer
        self.credits += min(answer.run_credits, RUNS_AHEAD)
        profile = self.world.profile
        for _ in range(5 if profile.moves or profile.cuts else self.random.choice((1, 2, 2, 3))):
            self._allocate()
        self.world.after(0.001, self.act, self.lives)

    def _place(self) -> tuple[str, int]:
        """Return the island and the size of its next slice."""
        island = self.random.choice(list(self.cluster.islands))
        members = self.cluster.islands[island]
        most = len(members) * members[0].devices
        return island, self.random.choice([n for n in (1, 2, 4, 8, most) if n <= most])

    def _names(self, island: str) -> tuple[str, ...]:
        """Return the hosts that its next slice names, none as a rule."""
        named = self.world.profile.named_hosts
        if not named or self.random.random() >= named:
            return ()
        hosts = [host.name for host in self.cluster.islands[island]]
        return tuple(self.random.sample(hosts, self.random.randint(1, len(hosts))))

    def _allocate(self) -> None:
        island, size = self._place()
        names = self._names(island)
        size = len(names) or size
        request = AllocateSlice(self._id(), size, None, island, None, hosts=names)
        if self.world.profile.shapes and not names:
            request = self._shaped(request)
        if share := self.world.profile.slice_memory:
            random = self.world.streams(f"slice memory/{self.number}")
            request = random_bound(random, request, share)

        def bound(answer: SliceBound | None, error: BaseException | None) -> None:
            if answer is not None:
                self.slices[answer.slice] = answer
            elif isinstance(error, (InsufficientDevices, QuotaExceeded)):
                self.refused += 1
                if not self.final:
                    self.world.after(self.random.uniform(0.05, 0.5), self._retry, self.lives)
            else:
                self._cut_off(error)

        self._post(Allocate(request, self._promise("allocate", bound)))
        if self.world.profile.quotas:
            patience_s = self.random.uniform(0.5, 4.0)
            self.world.after(patience_s, self._wait_no_more, self.lives, self.serial, request.slice)

    def _shaped(self, request: AllocateSlice) -> AllocateSlice:
        """Return a request with a shape, on any island or for no other slice."""
        random = self.world.streams(f"shapes/{self.number}")
        if random.random() >= self.world.profile.shapes:
            return request
        return replace(
            request,
            island=random.choice((None, request.island)),
            topology=random.choice((None, *[random_shape(random, request.devices)] * 3)),
            exclusive=random.random() < 0.3,
        )

    def _wait_no_more(self, life: int, ticket: int, slice_: int) -> None:
        """Ask for another slice: other clients of the tenant may keep what this one needs for long."""
        if life != self.lives or not self.node.alive or self.session.closed is not None:
            return
        if self.open.pop(ticket, ""):
            self.world.checked["waits for devices given up"] += 1
            self._post(Tell(ReleaseSlice(slice_)))
            if not self.final:
                self.world.after(self.random.uniform(0.05, 0.5), self._retry, self.lives)

    def _retry(self, life: int) -> None:
        if life == self.lives and self.node.alive and self.session.closed is None:
            self._allocate()

    def _cut_off(self, error: BaseException | None) -> None:
        """Check that a fault excuses the end of the session."""
        if not isinstance(error, Error):
            raise Violation("errors are typed", f"{self.name}: {error!r}")
        world = self.world
        if isinstance(error, QuotaExceeded) and world.profile.quotas:
            # Its tenant has enough clients.
            world.checked["clients refused"] += 1
            self.closing = True
            world.after(0.0, self._close, self.node)
            return
        controller = world.nodes.get(CONTROLLER)
        is_unanswered = world.ledger.injected["controller killed"] or (
            controller and controller.paused
        )
        is_alone = self.attached is None and is_unanswered
        if not is_alone and not world.ledger.touched((self.name, CONTROLLER)):
            raise Violation("sessions last", f"{self.name} was cut off: {error}")
        if not self.closing:
            self.closing = True
            self.world.after(0.0, self._close, self.node)

    def act(self, life: int) -> None:
        """Do one thing in this life, and plan the next."""
        raise Violation("users act", f"{self.name} does not know how, in life {life}")
