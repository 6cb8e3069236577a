"""The launch leases of a client: it launches on hosts itself where it is alone.

The scheduler of an island lends hosts (`Lent`). From then on a call of a lent program sends its launch over the
lines to these hosts, in the thread that calls, and the session tells the controller a little later, of several
runs at once (`JournalingEnv.launched`). Small uploads go over the lines, too, before launches that read them.
A run whose arguments may not be on the hosts yet, or of another program, goes to the controller alone, which
ends the lease. So does all that must have its place among the launches: checkpoints, arrays for other
sessions, slices that are given back.
The scheduler may end a lease at any time: hosts then ignore launches of the client, and the controller has
them launched, because it has been told of them.

Threads call `launch`, `ordinary` and `posting`, one at a time, with the session's lock. A launch may be
interrupted at any step, and is whole or not at all: its run is noted before the first host hears of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from pw.client.session.hosts import Hosts
from pw.client.session.journaling import KEEP_LEASES, JournalingEnv
from pw.client.session.lines import Lines, SmallValue
from pw.client.session.thread_messages import LOCKED_S, Allocate, Ask, Await, Forget, Get, Put, Tell
from pw.core import messages as msg
from pw.core.actors.actor import Part, handles
from pw.core.ids import Address, arrays_in, executor_of
from pw.core.sharding import ArraySpec, Box

_NO_QUESTION: tuple[int, int, tuple[int, ...]] = (0, 0, ())
"""The question of a launch that asks for nothing (`LeasedLaunch`)."""

RECENT = 64
"""Newest runs without a lease that are remembered: their arrays are on the hosts when a lease begins."""


class Lock(Protocol):
    """What the session asks of the lock of its threads."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, and return whether it was free in time (seconds)."""

    def release(self) -> None:
        """Let go of it."""


@dataclass(slots=True, eq=False)
class _Lease:
    number: int
    epoch: int
    index: int
    """Index of the next launch."""
    until: int
    """Index of the first launch that the lease does not cover."""
    on_hosts: set[int]
    """Arrays that earlier launches have read or made, so they are on the hosts."""
    room_bytes: int
    """Bytes that all launches of the lease may take on each device."""
    is_small: bool
    """True if one host is lent."""
    used_bytes: int = 0
    """Bytes that the launches so far take on each device."""
    reported_bytes: int = 0
    """Value of `used_bytes` when the controller was last told of launches because memory is short."""

    @property
    def is_short(self) -> bool:
        """Whether so much was used since then that the controller should be told again."""
        return 2 * (self.used_bytes - self.reported_bytes) > self.room_bytes - self.reported_bytes


class _LaunchForm(NamedTuple):
    """A launch as some hosts get it."""

    steps: tuple[msg.LaunchStep, ...]
    executors: list[Address]
    is_asked: bool = False
    """True if these hosts are asked for a result."""


class _ResultQuestion(NamedTuple):
    """How launches of a program ask for a result."""

    note: type[Await | Get]
    spec: ArraySpec
    hosts: frozenset[str]
    """The hosts that are asked; none if launches cannot ask."""
    positions: tuple[int, ...]
    boxes: tuple[Box, ...]
    forms: Sequence[_LaunchForm]


@dataclass(slots=True)
class _Template:
    """What does not change from one launch of a program to the next."""

    lease: _Lease
    install: int
    forms: Sequence[_LaunchForm]
    hosts: frozenset[str]
    room_bytes: int
    """Bytes on each device that a run takes of the lease's memory."""
    asking: _ResultQuestion | None = None
    """How launches ask for the result that was asked for last."""


@dataclass(eq=False, repr=False)
class Leases(Part):
    """The leases of one session."""

    _env: JournalingEnv
    _hosts: Hosts
    _lines: Lines
    lock: Lock | None = None
    """Lock of the session's threads; None where one thread does all."""
    programs: dict[int, _Template] = field(default_factory=dict)
    """Common parts of the launches of each lent program."""
    is_short: bool = False
    """True if memory is short, and the lease may get more when the controller hears of the launches."""
    announced: int = 0
    """The newest array that was announced to the controller in a note."""
    losses: int = 0
    """Number of times that hosts may have lost what was sent to them."""
    _leases: dict[int, _Lease] = field(default_factory=dict)
    _recent: deque[msg.Run] = field(default_factory=lambda: deque(maxlen=RECENT))
    _arrived: set[int] = field(default_factory=set)
    """Uploads whose values are on their hosts."""
    _sent: set[int] = field(default_factory=set)
    """Uploads that were sent over lines. A launch behind one finds it on that host; another host, whose line is
    lost, might take the launch from the scheduler, and not have the value."""
    _last_run: int = 0
    _donated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Positions of donated arguments, of programs that have some."""
    _kept_out: set[int] = field(default_factory=set)
    """Arrays that other sessions may not have taken yet, or that do not exist."""

    # --- calls ---------------------------------------------------------------------------------------

    def launch(
        self,
        run: int,
        program: int,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        wanted: Await | Get | None,
    ) -> bool:
        """Launch a run, and ask for a result if one is `wanted`; False if nothing was done."""
        template, wires = self.programs.get(program), self._lines.wires
        if template is None or wires is None:
            return False
        lease = template.lease
        index, on_hosts = lease.index, lease.on_hosts
        used_bytes = lease.used_bytes + template.room_bytes
        if index >= lease.until or used_bytes > lease.room_bytes:
            return False
        for arg in args:
            if type(arg) is int and arg not in on_hosts:
                return False
        forms, question, unasked = template.forms, _NO_QUESTION, wanted
        if wanted is not None:
            if isinstance(wanted, Get):
                array, spec = wanted.array, wanted.spec
            else:
                ((array, spec),) = wanted.arrays
            asking = template.asking
            if asking is None or asking.spec is not spec or asking.note is not type(wanted):
                asking = template.asking = self._question(template, type(wanted), spec)
            if asking.hosts:
                request = self._lines.begin(wanted, asking.hosts, asking.boxes)
                question = request, array, asking.positions
                forms, unasked = asking.forms, None
        lease.index, lease.used_bytes = index + 1, used_bytes
        self._env.launched(msg.Run(run, program, args, results, lease.number, index))
        for steps, executors, is_asked in forms:
            launch = msg.LeasedLaunch(
                lease.epoch,
                lease.number,
                index,
                run,
                program,
                template.install,
                steps,
                args,
                results,
                *(question if is_asked else _NO_QUESTION),
            )
            wires.tell(executors, launch)
        if unasked is not None:
            self._lines.ask_somehow(unasked)
        on_hosts.update(results)
        if program in self._donated:
            on_hosts.difference_update(self._donate(program, args))
        if template.room_bytes and lease.is_short:
            lease.reported_bytes, self.is_short = used_bytes, True
        return True

    def _question(
        self, template: _Template, note: type[Await | Get], spec: ArraySpec
    ) -> _ResultQuestion:
        """Return how launches of a program ask for such a result."""
        hosts, small = self._lines.holders(spec), None
        if note is Get:
            small = self._lines.small_value(spec)
            hosts = hosts.intersection(() if small is None else (small.host,))
        if not hosts <= template.hosts:
            hosts = frozenset()
        _, positions, boxes = small or SmallValue("", (), ())
        forms = []
        for steps, executors, _ in template.forms:
            for is_asked in (True, False):
                some = [one for one in executors if (one.node in hosts) == is_asked]
                if some:
                    forms.append(_LaunchForm(steps, some, is_asked))
        return _ResultQuestion(note, spec, hosts, positions, boxes, forms)

    def _donate(self, program: int, args: Sequence[int | bytes]) -> list[int]:
        """Forget the uploads that are donated to a run, and return its donated arrays."""
        donated = arrays_in(args[at] for at in self._donated.get(program, ()))
        self._arrived.difference_update(donated)
        self._sent.difference_update(donated)
        return donated

    def unknown(self, program: int, args: Sequence[int | bytes]) -> list[int]:
        """Return the arguments that may not be on the hosts yet; none if the run cannot be launched anyway."""
        template = self.programs.get(program)
        if template is None:
            return []
        lease = template.lease
        if lease.index >= lease.until or lease.used_bytes + template.room_bytes > lease.room_bytes:
            return []
        on_hosts = lease.on_hosts
        return [arg for arg in arrays_in(args) if arg not in on_hosts and arg not in self._kept_out]

    def ordinary(self, run: msg.Run) -> None:
        """A run goes to the controller alone."""
        self.stop()
        self._donate(run.program, run.args)
        self._recent.append(run)
        self._last_run = run.run

    def posting(self, note: object) -> None:
        """A note goes to the session: it may end leases, or say what programs and arrays are."""
        if isinstance(note, Put):
            self.announced = self.announced if note.bound else note.array
        elif isinstance(note, Tell):
            message = note.message
            if isinstance(message, msg.RegisterProgram):
                if donated := message.body.held.donated:
                    self._donated[message.program] = donated
            elif isinstance(message, msg.ReleaseProgram):
                self._donated.pop(message.program, None)
            elif isinstance(message, msg.CreateArray):
                self.announced = message.array
            elif isinstance(message, msg.Offer):
                self._kept_out.update(message.arrays)
            if not isinstance(message, KEEP_LEASES):
                self.stop()
        elif isinstance(note, Forget):
            self.forget(note.arrays)
        elif isinstance(note, (Ask, Allocate)):
            self.stop()

    def forget(self, arrays: Sequence[int]) -> None:
        """Launches may not read these arrays: the client has deleted them."""
        self._kept_out.difference_update(arrays)
        self._arrived.difference_update(arrays)
        self._sent.difference_update(arrays)
        for lease in list(self._leases.values()):
            lease.on_hosts.difference_update(arrays)

    def stop(self) -> None:
        """Launch nothing more under the leases that there are, or that are on their way; from any thread."""
        self._last_run = 0
        if self._leases:
            self._leases, self.programs = {}, {}

    def lost(self) -> None:
        """Hosts may not have what was sent to them; from any thread."""
        self.losses += 1
        self._arrived, self._sent = set(), set()
        self.stop()

    def sent(self, array: int) -> None:
        """An upload goes over lines now; from any thread with the lock."""
        self._sent.add(array)
        for lease in list(self._leases.values()):
            if lease.is_small:
                lease.on_hosts.add(array)

    def arrived(self, array: int, losses: int) -> None:
        """The value of an upload is on its hosts, unless there were more `losses` since.

        From any thread with the lock.
        """
        if losses == self.losses and array not in self._kept_out:
            self._arrived.add(array)
            for lease in list(self._leases.values()):
                lease.on_hosts.add(array)

    def over(self, lease: int) -> None:
        """A host takes no more launches of a lease; from any thread."""
        if lease in self._leases:
            self.stop()

    # --- the scheduler -------------------------------------------------------------------------------

    @handles(msg.Lent)
    def _on_lent(self, sender: Address, message: msg.Lent) -> None:
        if not self._lines.open.issuperset(message.hosts):
            self._lines.meet(message.hosts)  # for the next lease
            return
        if self.lock is not None and not self.lock.acquire(timeout=LOCKED_S):
            return  # the lease ends with the next run
        try:
            if message.last_run == self._last_run:
                self._begin(message)
        finally:
            if self.lock is not None:
                self.lock.release()

    def _begin(self, message: msg.Lent) -> None:
        on_hosts = {array for run in self._recent for array in (*arrays_in(run.args), *run.results)}
        on_hosts |= self._arrived
        if len(message.hosts) == 1:
            on_hosts |= self._sent
        lease = _Lease(
            message.lease,
            message.epoch,
            message.first,
            message.until,
            on_hosts.difference(self._kept_out, message.shared),
            message.room_bytes,
            len(message.hosts) == 1,
        )
        self._leases[message.lease] = lease
        for program in message.programs:
            alike: dict[tuple[msg.LaunchStep, ...], list[Address]] = {}
            hosts = set()
            for host, steps in zip(message.hosts, program.steps, strict=True):
                alike.setdefault(steps, []).append(executor_of(host))
                hosts.add(host)
            self.programs[program.program] = _Template(
                lease,
                program.install,
                [_LaunchForm(*each) for each in alike.items()],
                frozenset(hosts),
                program.room_bytes,
            )

    @handles(msg.RunFailed)
    def _on_run_failed(self, sender: Address, message: msg.RunFailed) -> None:
        self._kept_out.update(message.results)
        self._arrived.difference_update(message.results)
        self._sent.difference_update(message.results)
        for lease in list(self._leases.values()):
            lease.on_hosts.difference_update(message.results)

    @handles(msg.LeaseWindow)
    def _on_window(self, sender: Address, message: msg.LeaseWindow) -> None:
        lease = self._leases.get(message.lease)
        if lease is not None:
            lease.until, lease.room_bytes = message.until, message.room_bytes

    @handles(msg.SliceLost, msg.SliceBound)
    def _on_slice(self, sender: Address, message: msg.SliceLost | msg.SliceBound) -> None:
        """A slice may have other devices now."""
        self.lost()
