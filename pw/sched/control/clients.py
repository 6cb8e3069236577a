"""All that the controller knows of one client.

Everything that a client owns hangs on its `Client`, so that the controller forgets all of it at
once. Each part of the controller changes only what it owns here.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import REPEATS, Address, client_id, client_of
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, DeviceAddress
from pw.core.tenants import OPERATOR, may_touch
from pw.sched.control.array_states import ArrayEntry, ArrayTable
from pw.sched.control.lineage import Lineage
from pw.sched.control.programs import RegisteredProgram
from pw.sched.control.set_aside import Away, Stream
from pw.sched.control.suspension_states import Suspension
from pw.sched.control.usage import ClientUsage


class ClientSlices:
    """The slices of one client. Only `pw.sched.control.slices` changes them."""

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self.borrowed: set[int] = set()
        """Slices that the client has given back, and that are bound again while an array is rebuilt."""
        self.requests: dict[int, msg.AllocateSlice] = {}
        """Requests for slices, by number; the request of a slice that was given back stays while kept runs used
        it."""
        self.unbound: dict[int, int] = {}
        """Slices whose island was lost and is expected back, with the number of that loss."""
        self.refused: dict[int, ErrorReport] = {}
        """Errors of slices that have lost their devices and cannot have others, by number."""
        self.down: dict[int, tuple[DeviceAddress, ...] | None] = {}
        """Slices that are asked for when the client is resumed, with the devices that they had last, if known;
        None for a slice that has never had any."""
        self.waits_since_s: dict[int, float] = {}
        """Times since which slices wait for devices, in seconds, by number; bound ones have none."""
        self.unproven: set[int] = set()
        """Slices on the devices of another slice whose tenant is not known yet: its client may come back."""
        self.times_bound: dict[int, int] = {}
        self.hosts: dict[int, set[str]] = {}
        """Names of the hosts to which each slice is or was bound: they may have its arrays."""

    def __contains__(self, number: int) -> bool:
        """Return whether the client wants the slice bound."""
        return number in self.owned or number in self.borrowed

    @property
    def all(self) -> set[int]:
        """Numbers of the slices that the client wants bound."""
        return self.owned | self.borrowed

    def devices(self, number: int) -> int | None:
        """Return how many devices a slice has or will have; None if that is not known."""
        request = self.requests.get(number)
        return None if request is None else request.devices

    def are_on(self, host: str) -> bool:
        """Return whether a slice is or was bound to a host."""
        return any(host in hosts for hosts in self.hosts.values())

    def may_borrow(self, number: int) -> bool:
        """Return whether a slice that was given back can be bound again."""
        return number in self.requests and number not in self


@dataclass(slots=True)
class Resumption:
    """A client of an earlier controller tells what that controller knew."""

    loss: int
    """Number of the last loss of the client's slices."""
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)
    """Programs that the client has registered, also those that it has released, by number."""


@dataclass(slots=True, eq=False)
class Client:
    """A client and all it owns."""

    address: Address
    number: int
    name: str
    share: float = 1.0
    """Share that the client asked for; its rights may allow less (`Sessions.weight_of`)."""
    priority: int = 0
    """Priority that the client asked for; its rights may allow less."""
    tenant: str = OPERATOR
    """Name of the client's tenant; clients of one tenant may see and cancel each other's runs
    (`pw.core.tenants`)."""
    line: str = ""
    """Node of the client's lines to hosts; empty if it has none."""
    usage: ClientUsage = field(default_factory=lambda: ClientUsage(OPERATOR))
    """What the client has, as the ledger counts it."""
    recovery_s: float | None = None
    """How long the client waits for a lost island, in seconds; None for as long as the cluster says."""
    slices: ClientSlices = field(default_factory=ClientSlices)
    arrays: ArrayTable = field(default_factory=ArrayTable)
    lineage: Lineage = field(default_factory=Lineage)
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)
    retired: dict[int, RegisteredProgram] = field(default_factory=dict)
    """Released programs that are installed again for a replay, by number."""
    views: OrderedDict[Program, RegisteredProgram] = field(default_factory=OrderedDict)
    """Programs that make what the client hands to other clients, the one used longest ago first."""
    wanted: dict[int, int] = field(default_factory=dict)
    """Arrays that other clients want again from this client, with the names under which they await them."""
    brought: dict[int, int] = field(default_factory=dict)
    """Imported arrays that the client does not hold and has asked for again to repeat runs, with the names
    there."""
    asking: set[int] = field(default_factory=set)
    """Imported arrays that no run of the exporter makes yet: the client's runs that read them wait."""
    offered: Counter[int] = field(default_factory=Counter)
    """Arrays that stay until another client has taken them, counted (`pw.sched.control.handovers`)."""
    stream: Stream = field(default_factory=Stream)
    """Messages that wait."""
    last_run: int = 0
    """Number of the newest run that the client sent."""
    early_losses: dict[int, str] = field(default_factory=dict)
    """Results of runs that the client has launched and not told of yet, with a host that has not got them."""
    resuming: Resumption | None = None
    suspension: Suspension | None = None
    left_for: str = ""
    """Words for who has suspended it, from when it is resumed until it has devices."""
    patient_until_s: float = -math.inf
    """Time until which recovery waits for hosts that may have replicas, in seconds."""
    repeats: int = 0
    """Number of ids that `new_id` has returned."""
    _specs: WeakKeyDictionary[ArraySpec, ref[ArraySpec]] = field(default_factory=WeakKeyDictionary)

    @property
    def is_holder(self) -> bool:
        """Whether no process calls from the address: the client holds what is published under a name."""
        return self.usage.is_holder

    @property
    def away(self) -> Away | None:
        """What the client is without while it waits for islands; None if it does not, or if all of it waits."""
        if not self.slices.unbound or self.resuming is not None:
            return None
        return Away(
            self.slices.unbound.keys(), self.arrays, self.lineage, self.programs, self.last_run
        )

    @property
    def recovering(self) -> bool:
        """Whether something of the client is to be rebuilt."""
        return bool(self.slices.unbound or self.arrays.lost or self.wanted or self.resuming)

    @property
    def is_held(self) -> bool:
        """Whether its messages wait, because it leaves its devices or is suspended."""
        return self.suspension is not None and self.suspension.stops_stream

    @property
    def is_suspended(self) -> bool:
        """Whether it has left its devices."""
        return self.suspension is not None and self.suspension.is_complete

    @property
    def rebuilds(self) -> bool:
        """Whether something of the client is being rebuilt, which it is not while the client is suspended."""
        return self.recovering and self.suspension is None

    @property
    def has_work(self) -> bool:
        """Whether the end of a turn may have something to do for the client."""
        stream = self.stream
        return bool(
            stream.backlog
            or stream.aside.messages
            or self.lineage.has_unneeded
            or self.slices.borrowed
        )

    def has_come(self, run: int) -> bool:
        """Whether a run has come before; one that later ones have passed has not."""
        return run <= self.last_run and run not in self.stream.aside.overtaken

    def is_new(self, run: int) -> bool:
        """Whether a run has not come before, which is noted."""
        if self.has_come(run):
            return False
        self.last_run = max(run, self.last_run)
        self.stream.aside.overtaken.discard(run)
        return True

    def one_spec(self, spec: ArraySpec) -> ArraySpec:
        """Return the one object for all specs that equal `spec`.

        A spec names all its devices, and each run compares the spec of each argument.
        """
        original = self._specs.setdefault(spec, ref(spec))()
        return spec if original is None else original

    def owns(self, identifier: int) -> bool:
        """Return whether the client has given this id."""
        return client_of(identifier) == self.number

    def may_touch(self, other: Client | None) -> bool:
        """Return whether it may see and change what `other` has; of no client, only an operator."""
        return may_touch(self.tenant, "" if other is None else other.tenant)

    def new_id(self) -> int:
        """Return a number for an array or a run that the client itself never gives."""
        self.repeats += 1
        return client_id(self.number, REPEATS + self.repeats)

    def donated_to(self, message: msg.Run) -> tuple[int, ...]:
        """Return the arrays that a run takes from the client, also if the run is refused."""
        program = self.programs.get(message.program)
        if program is None or not program.body.donated:
            return ()
        return program.donated(message.args)

    def delete(self, arrays: tuple[int, ...]) -> list[tuple[int, ArrayEntry]]:
        """Forget arrays; return those that hosts may drop now."""
        for number in arrays:
            if (array := self.arrays.get(number)) is not None and array.error is not None:
                self.lineage.has_failed(number, array.error)
        self.lineage.release(arrays)
        entries = [(number, self.arrays.take(number)) for number in arrays]
        return [(n, array) for n, array in entries if array is not None and not array.awaited]
