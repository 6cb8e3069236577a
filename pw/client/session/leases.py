"""The launch leases of a client: it launches on hosts itself where it is alone.

The scheduler of an island lends hosts (`Lent`). From then on the session sends the runs of the lent programs to
these hosts, and tells the controller a little later, several runs at once (`JournalingEnv`). A run whose
arguments may not be on the hosts yet, or of another program, goes to the controller alone, which ends
the lease. So does all that must have its place among the launches: checkpoints, arrays for
other sessions, slices that are given back.
The scheduler may end a lease at any time: hosts then ignore launches of the client, and the controller has
them launched, because it has been told of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from pw.client.session.hosts import Hosts
from pw.client.session.requests import Requests
from pw.client.session.thread_messages import Await
from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import Address, arrays_in, executor_of
from pw.core.sharding import ArraySpec

RECENT = 64
"""So many runs without a lease are remembered: their arrays are on the hosts when a lease begins."""


@dataclass(slots=True, eq=False)
class _Lease:
    number: int
    epoch: int
    index: int
    """Of the next launch."""
    until: int
    known: set[int]
    """Arrays that launches before have read or made, so they are on the hosts."""


@dataclass(slots=True)
class _Template:
    """What does not change from one launch of a program to the next."""

    lease: _Lease
    install: int
    sends: list[tuple[tuple[msg.Step, ...], list[Address]]]
    """The hosts that do the same, and what they do."""
    holders: tuple[ArraySpec | None, frozenset[str]] = (None, frozenset())
    """The spec of the result that was waited for last, and the hosts that have it, if all know the client."""


@dataclass(eq=False, repr=False)
class Leases(Part):
    """The leases of one session."""

    _env: Env
    _hosts: Hosts
    _requests: Requests
    _programs: dict[int, _Template] = field(default_factory=dict)
    _leases: dict[int, _Lease] = field(default_factory=dict)
    _recent: deque[msg.Run] = field(default_factory=lambda: deque(maxlen=RECENT))
    _last_run: int = 0
    _kept_out: set[int] = field(default_factory=set)
    """Arrays that other sessions may not have taken yet, or that do not exist."""

    def launch(
        self, run: msg.Run, donated: tuple[int, ...], wanted: Await | None
    ) -> tuple[msg.Run, Await | None]:
        """Launch a run if that is possible, and wait for a result if that is `wanted`.

        `donated` are the arrays that the run takes. Returns what to tell the controller, and the wait if it
        has not begun.
        """
        template = self._programs.get(run.program)
        if template is None:
            return self._ordinary(run), wanted
        lease = template.lease
        index = lease.index
        arrays = arrays_in(run.args)
        if index >= lease.until or not lease.known.issuperset(arrays):
            return self._ordinary(run), wanted
        lease.index = index + 1
        requests: dict[str, int] = {}
        awaited = 0
        if wanted is not None:
            requests, awaited = self._asked(template, wanted), wanted.arrays[0][0]
        for steps, executors in template.sends:
            launch = msg.LeasedLaunch(
                lease.epoch,
                lease.number,
                index,
                run.run,
                run.program,
                template.install,
                steps,
                run.args,
                run.results,
            )
            for executor in executors:
                self._hosts.identify(executor.node)
                if (request := requests.get(executor.node)) is not None:
                    asking = msgspec.structs.replace(launch, request=request, awaited=awaited)
                    self._env.send(executor, asking)
                else:
                    self._env.send(executor, launch)
        lease.known.update(run.results)
        lease.known.difference_update(donated)
        self._env.count("leased_launches")
        noted = msgspec.structs.replace(run, lease=lease.number, index=index)
        return noted, None if requests else wanted

    def _asked(self, template: _Template, wanted: Await) -> dict[str, int]:
        """Begin to wait; returns the number of the request to each host that the launch asks."""
        spec = wanted.arrays[0][1]
        if template.holders[0] is not spec:
            hosts = self._hosts.that_know_me(spec)
            launched = {executor.node for _, executors in template.sends for executor in executors}
            template.holders = (spec, hosts if hosts <= launched else frozenset())
        hosts = template.holders[1]
        return self._requests.wait_with_launch(wanted, hosts) if hosts else {}

    def _ordinary(self, run: msg.Run) -> msg.Run:
        self.stop()
        self._recent.append(run)
        self._last_run = run.run
        return run

    def forget(self, arrays: tuple[int, ...]) -> None:
        """The client has deleted arrays."""
        self._kept_out.difference_update(arrays)
        for lease in self._leases.values():
            lease.known.difference_update(arrays)

    def offered(self, arrays: tuple[int, ...]) -> None:
        """Other sessions are to get these arrays: their controller orders what takes them."""
        self._kept_out.update(arrays)

    def stop(self) -> None:
        """Launch nothing more under the leases that there are, or that are on their way."""
        self._last_run = 0
        if self._leases:
            self._leases.clear()
            self._programs.clear()

    @handles(msg.Lent)
    def _on_lent(self, sender: Address, message: msg.Lent) -> None:
        if message.last_run != self._last_run:
            return
        known = {array for run in self._recent for array in (*arrays_in(run.args), *run.results)}
        lease = _Lease(
            message.lease,
            message.epoch,
            message.first,
            message.until,
            known - self._kept_out,
        )
        self._leases[message.lease] = lease
        for program in message.programs:
            alike: dict[tuple[msg.Step, ...], list[Address]] = {}
            for host, steps in zip(message.hosts, program.steps, strict=True):
                alike.setdefault(steps, []).append(executor_of(host))
            template = _Template(lease, program.install, list(alike.items()))
            self._programs[program.program] = template

    @handles(msg.RunFailed)
    def _on_run_failed(self, sender: Address, message: msg.RunFailed) -> None:
        self._kept_out.update(message.results)
        for lease in self._leases.values():
            lease.known.difference_update(message.results)

    @handles(msg.LeaseWindow)
    def _on_window(self, sender: Address, message: msg.LeaseWindow) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None:
            lease.until = message.until

    @handles(msg.SliceLost)
    def _on_slice_lost(self, sender: Address, message: msg.SliceLost) -> None:
        self.stop()

    @handles(msg.SliceBound)
    def _on_slice_bound(self, sender: Address, message: msg.SliceBound) -> None:
        """A slice may have other devices now."""
        self.stop()
