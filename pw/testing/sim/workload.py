"""A simulated client: the production session, and a user who does whatever the seed says.

The user allocates slices, registers programs, uploads, runs, fetches, waits, deletes, and sometimes goes
away, politely or not. Nothing here waits: each act is an event, and what the session answers is looked
at when it comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pw.client.notes import Allocate, Ask, Await, Close, Forget, Get, Open, Put, Tell
from pw.client.session import ClientSession
from pw.core.errors import ArrayDeleted, Disconnected, Error, InsufficientDevices
from pw.core.ids import CONTROLLER, client_id
from pw.core.messages import (
    AllocateSlice,
    Attached,
    Checkpoint,
    DrainHost,
    RegisterProgram,
    ReleaseProgram,
    ReleaseSlice,
    Run,
    SliceBound,
)
from pw.core.sharding import ArraySpec, dtype_of
from pw.testing.sim.bulk import SimBulk
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import CLIENT_SILENCE_S
from pw.testing.sim.node import SimNode
from pw.testing.sim.oracle import INFRASTRUCTURE, Oracle
from pw.testing.sim.programs import Draft, Slice, random_kinds, random_program
from pw.testing.sim.world import Violation

RUNS_AHEAD = 12
"""Runs that a user has in flight at most; less than the controller would allow, so that it matters."""
LIVES = 3
EVERYTHING = 1 << 30
SETTLED_S = 2.0
"""When everything has been answered, what has been deleted is gone after this time."""


class Promise:
    """What the session settles (see `pw.client.notes.Settle`)."""

    __slots__ = ("_settled", "_then")

    def __init__(self, then: Callable[[Any, BaseException | None], None]) -> None:
        self._then = then
        self._settled = False

    def set_result(self, result: Any) -> None:
        """It worked."""
        self._settled = True
        self._then(result, None)

    def set_exception(self, exception: BaseException | None) -> None:
        """It did not."""
        self._settled = True
        self._then(None, exception)

    def done(self) -> bool:
        """Whether it is settled."""
        return self._settled


class SimClient:
    """One user, who may come back under another name after a session has ended."""

    def __init__(self, cluster: SimCluster, number: int, runs: int) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.number = number
        self.runs_left = runs
        self.lives = 0
        self.random = self.world.streams(f"client/{number}")
        self.drained = False
        self.finished = False
        """Everything this user wanted has been done, and the session is closed or dead."""
        self.final = False
        """Look at all arrays once more, then go."""
        self.fetched = 0
        self.failed = 0
        self.live()

    # --- a life --------------------------------------------------------------------------------------

    def live(self) -> None:
        """Begin a session."""
        self.lives += 1
        self.name = f"client-{self.number}.{self.lives}"
        node = SimNode(self.world, self.name, 1, "", 1.0, lambda peer: CLIENT_SILENCE_S)
        node.network.introduce(CONTROLLER, CONTROLLER)
        self.node = node
        self.bulk = SimBulk(node, self.cluster.planes)
        self.session = node.add("session", lambda env: ClientSession(env, self.bulk, self._credits))
        self.attached: Attached | None = None
        self.open: dict[int, str] = {}
        """What has been asked and not been answered."""
        self.slices: dict[int, SliceBound] = {}
        self.refused = 0
        self.kinds: list[ArraySpec] = []
        self.programs: dict[int, Draft] = {}
        self.arrays: dict[int, ArraySpec] = {}
        self.given: list[int] = []
        """Donated arrays whose handles still exist."""
        self.credits = 0
        self.serial = 0
        self.looking = False
        self.cleared = False
        self.closing = False
        share, priority = self.random.choice((1.0, 1.0, 2.0)), self.random.randrange(3)
        keep_bytes = self.random.choice((0, 1 << 12, 1 << 18, EVERYTHING, EVERYTHING))
        keeps = keep_bytes == EVERYTHING
        # A copy is where lineage ends: if all hosts with copies die, there is nothing to go back to.
        self.copies = not keeps or self.random.random() < 0.3
        keeps = keeps and not self.copies
        self.oracle = Oracle(self.name, keeps, self.world.ledger, self._nodes_of)
        promise = self._promise("attach", self._on_attached)
        self.node.post("session", Open(self.name, share, priority, keep_bytes, promise))

    def _nodes_of(self, number: int) -> tuple[str, ...]:
        bound = self.slices.get(number)
        hosts = () if bound is None else self.cluster.hosts_of(bound.island)
        return (self.name, CONTROLLER, *hosts)

    def _promise(self, what: str, then: Callable[[Any, BaseException | None], None]) -> Promise:
        life = self.lives
        self.serial += 1
        ticket = self.serial

        def settled(result: Any, error: BaseException | None) -> None:
            if self.lives == life and self.node.alive:
                del self.open[ticket]
                then(result, error)

        self.open[ticket] = what
        return Promise(settled)

    def _id(self) -> int:
        assert self.attached is not None
        self.serial += 1
        return client_id(self.attached.client, self.serial)

    def _post(self, note: object) -> None:
        self.node.post("session", note)

    def _credits(self, count: int) -> None:
        if count < 1 << 20:
            self.credits += count

    def die(self) -> None:
        """The process is killed."""
        if self.node.alive:
            self.node.die()
            self.node.network.vanish(seen=True)
            self._again()

    def leave(self) -> None:
        """Close the session, whatever is open."""
        if self.closing or not self.node.alive:
            return
        self.closing = True
        self.open.clear()
        self.lives += 1  # answers to this life do not matter any more
        self._post(Close(Disconnected("the user has left"), Promise(lambda result, error: None)))
        self.world.after(0.01, self._close, self.node)

    def _close(self, node: SimNode) -> None:
        if node.paused:
            self.world.at(node.paused_until_s, self._close, node)
        elif node.alive:
            node.network.close()
            node.die()
            self._again()

    def _again(self) -> None:
        """This life is over; there may be another."""
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
        for _ in range(self.random.choice((1, 2, 2, 3))):
            self._allocate()
        self.world.after(0.001, self._act, self.lives)

    def _allocate(self) -> None:
        island = self.random.choice(list(self.cluster.islands))
        members = self.cluster.islands[island]
        most = len(members) * members[0].devices
        size = self.random.choice([n for n in (1, 2, 4, 8, most) if n <= most])
        request = AllocateSlice(self._id(), size, None, island, None)

        def bound(answer: SliceBound | None, error: BaseException | None) -> None:
            if answer is not None:
                self.slices[answer.slice] = answer
            elif isinstance(error, InsufficientDevices):
                self.refused += 1
                self.world.after(self.random.uniform(0.05, 0.5), self._retry, self.lives)
            else:
                self._cut_off(error)

        self._post(Allocate(request, self._promise("allocate", bound)))

    def _retry(self, life: int) -> None:
        if life == self.lives and self.node.alive and self.session.closed is None:
            self._allocate()

    def _cut_off(self, error: BaseException | None) -> None:
        """The session has ended without being asked."""
        if not isinstance(error, Error):
            raise Violation("errors are typed", f"{self.name}: {error!r}")
        if not self.world.ledger.touched((self.name, CONTROLLER)):
            raise Violation("sessions last", f"{self.name} was cut off: {error}")
        if not self.closing:
            self.closing = True
            self.world.after(0.0, self._close, self.node)

    # --- acts ----------------------------------------------------------------------------------------

    def _act(self, life: int) -> None:
        """Do one thing, and plan the next."""
        if life != self.lives or not self.node.alive or self.closing:
            return
        if self.session.closed is not None:
            self._cut_off(self.session.closed)
            return
        if self.node.paused:
            self.world.at(self.node.paused_until_s, self._act, life)
            return
        if self.slices:
            if self.final or (self.runs_left <= 0 and len(self.slices) > 0):
                self._finish()
            else:
                self._do_something()
        elif self.final and not self.open:
            self.leave()
            return
        pause_s = self.random.choice((0.0, 1e-4, 1e-3, 0.01))
        if self.random.random() < 0.15:
            runs = max(1, self.world.profile.runs // self.world.profile.clients)
            pause_s = self.random.expovariate(1.0) * self.world.profile.span_s / runs
        self.world.after(pause_s, self._act, life)

    def _do_something(self) -> None:
        draw = self.random.random()
        if not self.kinds or len(self.programs) < 2 or draw < 0.04:
            self._register()
        elif draw < 0.10:
            self._put(self.random.choice(self.kinds))
        elif draw < 0.75:
            self._run()
        elif draw < 0.85:
            self._get()
        elif draw < 0.89:
            self._wait()
        elif draw < 0.91:
            self._checkpoint()
        elif draw < 0.97:
            self._delete()
        elif draw < 0.98 and len(self.programs) > 2:
            number = self.random.choice(list(self.programs))
            del self.programs[number]
            self._post(Tell(ReleaseProgram(number)))
        elif draw > 0.99:
            self._drain()
        elif self.world.profile.client_deaths:
            self.world.ledger.injected["session closed"] += 1
            self.leave()

    def _register(self) -> None:
        slices = [Slice(bound.slice, len(bound.devices)) for bound in self.slices.values()]
        if not self.kinds:
            self.kinds = random_kinds(self.random, slices)
        number = self._id()
        broken = self.world.profile.broken_programs and self.random.random() < 0.05
        draft = random_program(
            self.random, slices, self.kinds, f"{self.name}/{number & 0xFFFF}", broken=broken
        )
        self.programs[number] = draft
        self._post(Tell(RegisterProgram(number, draft.body, draft.artifacts)))

    def _value(self, spec: ArraySpec) -> np.ndarray[Any, Any]:
        data = self.random.randbytes(spec.size_bytes)
        return np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape)

    def _put(self, spec: ArraySpec) -> int:
        number, value = self._id(), self._value(spec)
        self.oracle.put(number, spec, value)
        self.arrays[number] = spec
        self._post(Put(number, spec, value, self.random.random() < 0.2))
        return number

    def _run(self) -> None:
        if self.credits < 1 or self.runs_left < 1 or not self.programs:
            return
        number = self.random.choice(list(self.programs))
        draft = self.programs[number]
        args: list[int | bytes] = []
        for spec in draft.body.inputs:
            held = [array for array, lies in self.arrays.items() if lies == spec]
            held = [array for array in held if array not in args]
            if held and self.random.random() < 0.9:
                args.append(self.random.choice(held[-4:]))
            elif spec.size_bytes < 2048 and self.random.random() < 0.5:
                args.append(self.random.randbytes(spec.size_bytes))
            else:
                args.append(self._put(spec))
        given = tuple(args)
        results = tuple(self._id() for _ in draft.body.outputs)
        self.oracle.run(draft, given, results)
        for index in draft.body.donated:
            arg = given[index]
            if isinstance(arg, int) and self.arrays.pop(arg, None) is not None:
                self.given.append(arg)
        for array, output in zip(results, draft.body.outputs, strict=True):
            self.arrays[array] = output.spec
        self.credits -= 1
        self.runs_left -= 1
        self.world.checked["runs"] += 1
        self._post(Tell(Run(self._id(), number, given, results)))

    def _get(self, array: int | None = None) -> None:
        if array is None:
            if not self.arrays:
                return
            array = self.random.choice(list(self.arrays))

        def got(parts: list[Any] | None, error: BaseException | None) -> None:
            self._judge(array, parts, error)

        self._post(Get(array, self.arrays[array], self._promise(f"fetch {array:x}", got)))

    def _judge(self, array: int, parts: list[Any] | None, error: BaseException | None) -> None:
        if error is not None:
            self.failed += 1
            wrong = self._check_error(array, error)
        else:
            assert parts is not None
            self.fetched += 1
            wrong = self.oracle.check_value(array, parts)
        self.world.checked["oracle"] += 1
        if wrong is not None:
            raise Violation("oracle", f"{self.name}: {wrong}")

    def _check_error(self, array: int, error: BaseException) -> str | None:
        held = array in self.arrays
        if not held and isinstance(error, ArrayDeleted):
            return None  # deleted or donated after it was asked for
        if self.session.closed is not None and self.world.ledger.touched((self.name, CONTROLLER)):
            return None  # the session has ended, with all that was open
        return self.oracle.check_error(array, error, held=held)

    def _wait(self) -> None:
        if not self.arrays:
            return
        count = min(len(self.arrays), self.random.choice((1, 1, 3)))
        chosen = self.random.sample(list(self.arrays), count)
        named = tuple((array, self.arrays[array]) for array in chosen)

        def waited(result: Any, error: BaseException | None) -> None:
            if error is not None:
                wrong = [self._check_error(array, error) for array in chosen]
                if all(wrong):
                    raise Violation("oracle", f"{self.name}: {wrong[0]}")
            self.world.checked["oracle"] += 1

        self._post(Await(named, self._promise(f"wait {len(chosen)}", waited)))

    def _checkpoint(self) -> None:
        if not self.arrays or not self.copies:
            return
        count = min(len(self.arrays), self.random.choice((1, 2, 4)))
        chosen = tuple(self.random.sample(list(self.arrays), count))

        def copied(result: Any, error: BaseException | None) -> None:
            if error is None or (type(error).__name__ in INFRASTRUCTURE and self.world.ledger.any):
                return  # a copy may fail where the array does not
            wrong = [self._check_error(array, error) for array in chosen]
            if all(wrong):
                raise Violation("oracle", f"{self.name}: {wrong[0]}")

        self.world.checked["checkpoints"] += 1
        promise = self._promise(f"checkpoint {len(chosen)}", copied)
        self._post(Ask(lambda number: Checkpoint(number, chosen), promise, chosen))

    def _drain(self) -> None:
        """Have a host emptied and sent away."""
        if self.drained or self.random.random() >= self.world.profile.drains:
            return
        self.drained = True
        node = self.random.choice([host.name for host in self.cluster.hosts])

        def answered(result: Any, error: BaseException | None) -> None:
            if error is not None and not isinstance(error, Error):
                raise Violation("errors are typed", f"{self.name}: {error!r}")

        self.world.ledger.note("drain", node)
        promise = self._promise(f"drain {node}", answered)
        self._post(Ask(lambda number: DrainHost(number, node), promise))

    def _delete(self) -> None:
        if not self.arrays:
            return
        array = self.random.choice(list(self.arrays))
        del self.arrays[array]
        self._post(Forget((array, *self.given)))
        self.given.clear()

    def _finish(self) -> None:
        """Fetch everything once; when that has come, delete it and leave."""
        if not self.looking:
            self.looking = True
            for array in self.arrays:
                self._get(array)
            return
        if not self.open and not self.cleared:
            self.cleared = True
            for number in list(self.programs):
                self._post(Tell(ReleaseProgram(number)))
            self._post(Forget((*self.arrays, *self.given)))
            self.arrays.clear()
            self.runs_left = 0
            self.world.after(SETTLED_S, self._check_out, self.lives)

    def _check_out(self, life: int) -> None:
        """Nothing of this client should be anywhere, and all credits be back: it can go."""
        if life != self.lives or not self.node.alive or self.closing:
            return
        world = self.world
        if (world.calm or not world.ledger.any) and self.session.closed is None:
            world.checked["census"] += 1
            assert self.attached is not None
            held = [
                f"{host.name} holds {what}"
                for host in self.cluster.hosts
                if (what := host.held_by(self.attached.client))
            ]
            if held:
                raise Violation(
                    "census", f"of {self.name}, which has deleted all: {'; '.join(held)}"
                )
            missing = min(self.attached.run_credits, RUNS_AHEAD) - self.credits
            if missing:
                raise Violation(
                    "credits", f"{self.name} misses {missing}, and all its runs are over"
                )
        for number in self.slices:
            self._post(Tell(ReleaseSlice(number)))
        self.leave()
