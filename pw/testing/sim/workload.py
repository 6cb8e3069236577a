"""A simulated user, who acts as the seed says.

The user registers programs, compiles, uploads, runs, fetches, waits, checkpoints, deletes, and sometimes
leaves. No act
waits: each is an event, and the user checks the session's answers when they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pw.client.session.thread_messages import Ask, Await, Forget, Get, Put, Tell
from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ArrayDeleted, ArrayLost, CheckpointFailed, Error, HostLost
from pw.core.ids import CONTROLLER
from pw.core.sharding import ArraySpec, dtype_of
from pw.testing.sim.compiling import ask_compiler
from pw.testing.sim.cut import cut_function
from pw.testing.sim.drafts import random_draft
from pw.testing.sim.feeding import SimStream
from pw.testing.sim.handovers import GONE, MOVED, give
from pw.testing.sim.host import SUPERVISOR_STOPPED
from pw.testing.sim.ledger import GIVEN_BACK, NOT_KEPT, SUSPENDED
from pw.testing.sim.life import RUNS_AHEAD, Life
from pw.testing.sim.looping import is_burst, loop, run_ahead
from pw.testing.sim.names import share
from pw.testing.sim.oracle import INFRASTRUCTURE
from pw.testing.sim.programs import ProgramDraft, SimSlice, random_kinds, some_in_host_memory
from pw.testing.sim.quotas import counted_for_nothing
from pw.testing.sim.ragged import move_rows
from pw.testing.sim.rebalancing import rebalance
from pw.testing.sim.sick import test_devices
from pw.testing.sim.suspending import resume_late, suspend
from pw.testing.sim.timelines import record
from pw.testing.sim.views import overwriting, random_spoiling, random_view
from pw.testing.sim.world import Violation

SETTLED_S = 6.0
"""Seconds after the last answer in which hosts have dropped all deleted arrays."""


class SimClient(Life):
    """One user of a simulated cluster."""

    # --- acts ----------------------------------------------------------------------------------------

    def act(self, life: int) -> None:
        """Do one thing, and plan the next."""
        if life != self.lives or not self.node.alive or self.closing:
            return
        if self.session.closed is not None:
            self._cut_off(self.session.closed)
            return
        if self.node.paused:
            self.world.at(self.node.paused_until_s, self.act, life)
            return
        if self.looping and self.loops.random() < 0.9:
            self.world.after(0.01, self.act, life)
            return
        if self.world.profile.suspensions:
            resume_late(self)
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
        self.world.after(pause_s, self.act, life)

    def _do_something(self) -> None:
        moves = self.world.profile.slices_given_back
        if moves and len(self.slices) > 1 and self.random.random() < moves:
            self._give_back()
            return
        if (rate := self.world.profile.suspensions) and self.suspensions.random() < rate:
            suspend(self)
            return
        if (rate := self.world.profile.rebalances) and self.suspensions.random() < rate:
            rebalance(self)
            return
        if (rate := self.world.profile.device_tests) and self.device_tests.random() < rate:
            test_devices(self)
            return
        rate = self.world.profile.handovers
        if rate and self.random.random() < rate:
            tenant = self.world.tenant_of(self.name)
            importers = [
                one
                for one in self.cluster.users
                if one is not self and one.may_take and self.world.tenant_of(one.name) == tenant
            ]
            if importers:
                give(self, importers)
                return
        profile = self.world.profile
        if (
            profile.loops
            and self.loops_left
            and not self.looping
            and self.loops.random() < profile.loops
        ):
            loop(self, self.loops)
            return
        for rate, is_able, act in (
            (profile.cuts, len(self._joined()) > 1, self._run_cut),
            (profile.ragged, self.kinds, partial(move_rows, self)),
            (profile.timelines, True, partial(record, self)),
            (profile.views, self.kinds, self._view),
            (profile.names, self.kinds, partial(share, self)),
            (profile.streams, self.kinds, self._feed),
            (profile.checkpoints, self.kinds, self._checkpoint),
        ):
            if rate and is_able and self.random.random() < rate:
                act()
                return
        draw = self.random.random()
        if not self.kinds or len(self.programs) < 2 or draw < 0.04:
            self._register()
        elif draw < 0.10:
            self._put(self.random.choice(self.kinds))
        elif draw < 0.75:
            self._run()
        elif draw < 0.85:
            self.fetch()
        elif draw < 0.89:
            self._wait()
        elif draw < 0.91:
            self._checkpoint()
        elif draw < 0.92:
            ask_compiler(self)
        elif draw < 0.97:
            self._delete()
        elif draw < 0.98 and len(self.programs) > 2:
            number = self.random.choice(list(self.programs))
            del self.programs[number]
            self._post(Tell(msg.ReleaseProgram(number)))
        elif draw > 0.99:
            self._drain()
        elif self.world.profile.client_deaths:
            self.world.ledger.injected["session closed"] += 1
            self.leave()

    @property
    def may_take(self) -> bool:
        """Whether it is at work."""
        return (
            self.attached is not None
            and self.node.alive
            and not (self.closing or self.final or self.looking)
            and self.session.closed is None
        )

    @property
    def parts(self) -> list[SimSlice]:
        """Slices of the user, for programs."""
        return [SimSlice(bound.slice, len(bound.devices)) for bound in self.slices.values()]

    def _register(self) -> None:
        if not self.kinds:
            self.kinds = random_kinds(self.random, self.parts)
            if share := self.world.profile.host_memory:
                random = self.world.streams(f"memories/{self.name}")
                self.kinds = some_in_host_memory(random, self.kinds, share)
        number = self._id()
        name, profile = f"{self.name}/{number & 0xFFFF}", self.world.profile
        draft = random_draft(self.random, profile, self.parts, self.kinds, name)
        self._add_program(number, draft)

    def _add_program(self, number: int, draft: ProgramDraft) -> None:
        self.programs[number] = draft
        self._post(Tell(msg.RegisterProgram(number, Compact.of(draft.body), draft.artifacts)))

    def _joined(self) -> list[SimSlice]:
        """One of its slices on each island."""
        by_island = {bound.island: bound for bound in self.slices.values()}
        return [SimSlice(bound.slice, len(bound.devices)) for bound in by_island.values()]

    def _run_cut(self) -> None:
        """Run a function over several islands; the results are its next arguments."""
        numbers = [n for n, draft in self.programs.items() if draft.body.name.endswith("/cut")]
        if numbers and self.random.random() < 0.85:
            self._run(self.random.choice(numbers))
            return
        number = self._id()
        name = f"{self.name}/{number & 0xFFFF}/cut"
        self._add_program(number, cut_function(self.random, self._joined(), name))

    def _view(self) -> None:
        """Make views of some arrays; then perhaps delete a source. Or overwrite an array, which may be one."""
        draw = self.random.random()
        lie = [spec for spec in self.arrays.values() if spec.shape]  # predicates have no dimension
        if lie and draw < 0.25:
            spec = self.random.choice(lie)
            name = f"{self.name}/{self._id() & 0xFFFF}"
            broken = self.world.profile.broken_programs and draw < 0.1
            drafts = [overwriting(spec, name)]
            if broken:
                drafts = list(random_spoiling(self.random, spec, name))
            for draft in drafts:
                self._add_program(number := self._id(), draft)
                self._run(number)
            return
        numbers = [n for n, draft in self.programs.items() if not draft.blobs]
        if not numbers or self.random.random() < 0.4:
            view = random_view(self.random, self.kinds, lie)
            if view is None:
                return
            draft = view
            number = self._id()
            self._add_program(number, draft)
        else:
            number = self.random.choice(numbers)
        sources = self._run(number)
        if sources and self.random.random() < 0.4:
            self._delete(self.random.choice(sources))

    def _feed(self) -> None:
        """Take what has come of a stream; begin another one after its end."""
        if self.stream is None or self.stream.ended:
            if self.stream is not None:
                self.stream.close()
            self.stream = SimStream(self, self.random.choice(self.kinds))
        self.stream.step()

    def _value(self, spec: ArraySpec) -> np.ndarray[Any, Any]:
        data = self.random.randbytes(spec.size_bytes)
        return np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape)

    def _put(self, spec: ArraySpec) -> int:
        number, value = self._id(), self._value(spec)
        self.oracle.put(number, spec, value)
        self.arrays[number] = spec
        self._upload(Put(number, spec, value, self.random.random() < 0.2))
        return number

    def _run(self, number: int | None = None) -> list[int]:
        """Run a program; return the arrays that it read and that still exist."""
        if not self.may_run or not self.programs:
            return []
        if number is None:
            number = self.random.choice(list(self.programs))
        draft = self.programs[number]
        if is_burst(draft):
            run_ahead(self, self.random, number, draft)
            return []
        args = tuple(self.arguments(draft.body.inputs))
        self.launch(number, draft, args)
        return [arg for arg in args if isinstance(arg, int) and arg in self.arrays]

    @property
    def may_run(self) -> bool:
        """Whether it may launch another run."""
        return self.credits > 0 and self.runs_left > 0

    def arguments(self, specs: Sequence[ArraySpec]) -> list[int | bytes]:
        """Choose arguments of a run."""
        args: list[int | bytes] = []
        for spec in specs:
            held = [array for array, lies in self.arrays.items() if lies == spec]
            held = [array for array in held if array not in args]
            if held and self.random.random() < 0.9:
                args.append(self.random.choice(held[-4:]))
            elif spec.size_bytes < 2048 and self.random.random() < 0.5:
                args.append(self.random.randbytes(spec.size_bytes))
            else:
                args.append(self._put(spec))
        return args

    def launch(
        self,
        number: int,
        draft: ProgramDraft,
        args: tuple[int | bytes, ...],
        waited: Callable[[Any, BaseException | None], None] | None = None,
        wants_value: bool = False,
    ) -> tuple[int, ...]:
        """Run a program; returns its results. `waited` hears when the last one is ready, or gets its value."""
        results = tuple(self._id() for _ in draft.body.outputs)
        self.oracle.run(draft, args, results)
        for index in draft.body.donated:
            arg = args[index]
            if isinstance(arg, int):
                self.arrays.pop(arg, None)
        for array, output in zip(results, draft.body.outputs, strict=True):
            self.arrays[array] = output.spec
        self.credits -= 1
        self.runs_left -= 1
        self.world.checked["runs"] += 1
        then: Await | Get | None = None
        if waited is not None:
            array, spec = results[-1], self.arrays[results[-1]]
            what = "fetch" if wants_value else "wait"
            promise = self._promise(f"{what} {array:x} with its run", waited)
            then = Get(array, spec, promise) if wants_value else Await(((array, spec),), promise)
        self._call(self._id(), number, args, results, then)
        return results

    def fetch(self, array: int | None = None) -> None:
        """Fetch an array."""
        if array is None:
            if not self.arrays:
                return
            array = self.random.choice(list(self.arrays))

        def got(parts: list[Any] | None, error: BaseException | None) -> None:
            self.judge_value(array, parts, error)

        self._post(Get(array, self.arrays[array], self._promise(f"fetch {array:x}", got)))

    def judge_value(self, array: int, parts: list[Any] | None, error: BaseException | None) -> None:
        """Look at a value that was fetched, or at the error in its place."""
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
        wrong = self.oracle.check_error(array, error, held=held)
        return None if wrong is None or self._is_excused(array, error) else wrong

    def _is_excused(self, array: int, error: BaseException) -> bool:
        """Whether the end of another user's session, or of an island, explains an error."""
        words = str(error)
        if not self.cluster.given_up.isdisjoint(self.oracle.arrays[array].slices):
            # A controller that is started again is told nothing of slices that were refused.
            is_forgotten = self.world.ledger.injected["controller killed"] and "given back" in words
            return isinstance(error, (HostLost, ArrayLost)) or bool(is_forgotten)
        if MOVED in words:
            return self.world.ledger.any
        faults = self.world.ledger.injected
        if NOT_KEPT in words and faults[SUSPENDED] and (faults["silence"] or faults["pause"]):
            return True  # it was suspended while it stood still, before it had announced an upload
        made_of = self.oracle.arrays[array].made_of
        deals = self.cluster.deals
        is_off = any(deals[one].is_off for one in made_of if one in deals)
        return is_off and any(excuse in words for excuse in GONE)

    def _wait(self) -> None:
        if not self.arrays:
            return
        count = min(len(self.arrays), self.random.choice((1, 1, 3)))
        chosen = self.random.sample(list(self.arrays), count)
        named = tuple((array, self.arrays[array]) for array in chosen)

        def waited(result: Any, error: BaseException | None) -> None:
            self.judge_wait(chosen, error)

        self._post(Await(named, self._promise(f"wait {len(chosen)}", waited)))

    def judge_wait(self, chosen: Sequence[int], error: BaseException | None) -> None:
        """Look at the end of a wait for these arrays."""
        if error is not None:
            wrong = [self._check_error(array, error) for array in chosen]
            if all(wrong):
                raise Violation("oracle", f"{self.name}: {wrong[0]}")
        elif wrong := [text for array in chosen if (text := self.oracle.check_ready(array))]:
            raise Violation("oracle", f"{self.name}: {wrong[0]}")
        self.world.checked["oracle"] += 1

    def _checkpoint(self) -> None:
        if not self.arrays or not self.copies:
            return
        count = min(len(self.arrays), self.random.choice((1, 2, 4)))
        chosen = tuple(self.random.sample(list(self.arrays), count))

        def copied(result: Any, error: BaseException | None) -> None:
            if error is None or (type(error).__name__ in INFRASTRUCTURE and self.world.ledger.any):
                return  # a copy may fail where the array does not
            if (
                isinstance(error, CheckpointFailed)
                and self.world.ledger.injected[SUPERVISOR_STOPPED]
            ):
                return
            wrong = [self._check_error(array, error) for array in chosen]
            if all(wrong):
                raise Violation("oracle", f"{self.name}: {wrong[0]}")

        self.oracle.checkpoint(chosen)
        self.world.checked["checkpoints"] += 1
        promise = self._promise(f"checkpoint {len(chosen)}", copied)
        self._post(Ask(lambda number: msg.Checkpoint(number, chosen), promise, chosen))

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
        self._post(Ask(lambda number: msg.DrainHost(number, node), promise))

    def _delete(self, array: int | None = None) -> None:
        if array is None:
            if not self.arrays:
                return
            array = self.random.choice(list(self.arrays))
        del self.arrays[array]
        self._post(Forget((array,)))

    def _give_back(self) -> None:
        """Release a slice with all that is on it, and allocate another one."""
        number = self.random.choice(list(self.slices))
        if self.stream is not None and self.stream.slice == number:
            self.stream.close()
            self.stream = None
        for program in [n for n, draft in self.programs.items() if number in draft.body.slices()]:
            del self.programs[program]
            self._post(Tell(msg.ReleaseProgram(program)))
        lay = [array for array, spec in self.arrays.items() if spec.placement.slice == number]
        for array in lay:
            del self.arrays[array]
        self._post(Forget(tuple(lay)))
        self.kinds = [spec for spec in self.kinds if spec.placement.slice != number]
        self.given_back[number] = self.slices.pop(number)
        self.world.ledger.injected[GIVEN_BACK] += 1
        self._post(Tell(msg.ReleaseSlice(number)))
        self._allocate()

    def _finish(self) -> None:
        """Fetch everything once; when that has come, delete it and leave."""
        if not self.looking:
            self.looking = True
            if self.stream is not None:
                self.stream.close()
                self.stream = None
            for array in self.arrays:
                self.fetch(array)
            return
        if not self.open and not self.cleared:
            self.cleared = True
            for number in list(self.programs):
                self._post(Tell(msg.ReleaseProgram(number)))
            self._post(Forget(tuple(self.arrays)))
            self.arrays.clear()
            self.runs_left = 0
            self.world.after(SETTLED_S, self._check_out, self.lives)

    def _check_out(self, life: int) -> None:
        """Check that hosts hold nothing of this client, and that all credits are back; then leave."""
        if life != self.lives or not self.node.alive or self.closing:
            return
        world = self.world
        stopped = [node for node in (self.cluster.node, self.node) if node.paused]
        if stopped:  # a name may want again what this client alone has
            until_s = max(node.paused_until_s for node in stopped)
            world.at(until_s + SETTLED_S, self._check_out, life)
            return
        if (world.calm or not world.ledger.any) and self.session.closed is None:
            assert self.attached is not None
            controller = self.cluster.controller
            client = controller.sessions.get(self.attached.client)
            rebuilding = controller._rebuilder.replays.rebuilding
            is_away = client is None or client.recovering or client.number in rebuilding
            if client is None or is_away or len(client.stream) or client.offered:
                world.after(SETTLED_S, self._check_out, life)
                return
            world.checked["census"] += 1
            held = [
                f"{host.name} holds {what}"
                for host in self.cluster.members()
                if (what := host.held_by(self.attached.client))
            ]
            missing = min(self.attached.run_credits, RUNS_AHEAD) - self.credits
            settled_s = max(world.held_until_s, self.cluster.stopped_until_s()) + SETTLED_S
            if (held or missing) and world.now_s < settled_s:
                # A link that carries again delivers the delayed frames first, and the others of an
                # island wait for a host that is stopped: it is not lost before it hangs for 10 s.
                world.at(settled_s, self._check_out, life)
                return
            if client.usage.runs or counted_for_nothing(client):
                raise Violation(
                    "ledger", f"{self.name}, which has deleted all, is counted for more"
                )
            if held:
                raise Violation(
                    "census", f"of {self.name}, which has deleted all: {'; '.join(held)}"
                )
            if missing:
                raise Violation(
                    "credits", f"{self.name} misses {missing}, and all its runs are over"
                )
        for number in self.slices:
            self._post(Tell(msg.ReleaseSlice(number)))
        self.leave()
