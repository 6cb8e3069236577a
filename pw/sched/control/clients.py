"""All that the controller knows of one client.

Everything that a client owns hangs on its `Client`, so that the controller forgets all of it at
once. Each part of the controller changes only what it owns here.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, ref

from pw.core import messages as msg
from pw.core.ids import REPEATS, Address, arrays_in, client_id, client_of
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec
from pw.core.tenants import OPERATOR, may_touch
from pw.sched.control.array_states import Array, Arrays
from pw.sched.control.lineage import Lineage
from pw.sched.control.programs import RegisteredProgram

Ordered = (
    msg.Run
    | msg.Delete
    | msg.CreateArray
    | msg.Offer
    | msg.ReleaseProgram
    | msg.ReleaseSlice
    | msg.Checkpoint
    | msg.SaveArrays
    | msg.Inquire
)
"""Messages that the controller handles in the client's order."""


class ClientSlices:
    """The slices of one client. Only `pw.sched.control.slices` changes them."""

    def __init__(self) -> None:
        self.owned: set[int] = set()
        self.borrowed: set[int] = set()
        """Given back by the client, and bound again while something is rebuilt."""
        self.requests: dict[int, msg.AllocateSlice] = {}
        """How slices were asked for; a slice that was given back stays while kept runs used it."""
        self.unbound: dict[int, int] = {}
        """Slices whose island was lost and is expected back, and the number of that loss."""
        self.times_bound: dict[int, int] = {}
        self.hosts: dict[int, set[str]] = {}
        """The hosts that each slice is or was bound to: they may have its arrays."""

    def __contains__(self, number: int) -> bool:
        """Whether the slice is to be bound for the client."""
        return number in self.owned or number in self.borrowed

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
    """The number of the loss of its slices."""
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)
    """All that it has told of, also those that it has released."""


@dataclass(slots=True, eq=False)
class Client:
    """A client and all it owns."""

    address: Address
    number: int
    name: str
    share: float = 1.0
    priority: int = 0
    tenant: str = OPERATOR
    """Clients of one tenant may see and cancel each other's runs (`pw.core.tenants`)."""
    slices: ClientSlices = field(default_factory=ClientSlices)
    arrays: Arrays = field(default_factory=Arrays)
    lineage: Lineage = field(default_factory=Lineage)
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)
    retired: dict[int, RegisteredProgram] = field(default_factory=dict)
    """Released programs that are installed again, for a replay."""
    views: OrderedDict[Program, RegisteredProgram] = field(default_factory=OrderedDict)
    """Programs that make what it hands to other clients, the one used longest ago first."""
    wanted: dict[int, int] = field(default_factory=dict)
    """What other clients want of what it handed to them, and the names under which they await it."""
    brought: dict[int, int] = field(default_factory=dict)
    """What it has taken, does not hold, and asked for again to repeat runs; and the names under which."""
    asking: set[int] = field(default_factory=set)
    """What it has taken and no run of the other client makes yet: its own runs with these wait."""
    offered: Counter[int] = field(default_factory=Counter)
    """Its arrays that stay until another client has taken them (`pw.sched.control.shares`)."""
    backlog: deque[Ordered] = field(default_factory=deque)
    """Messages that wait for what the first of them needs (`pw.sched.control.client_order`)."""
    last_run: int = 0
    """The newest run that it sent."""
    early_losses: dict[int, str] = field(default_factory=dict)
    """Results of runs that it has launched and not told of yet, and a host that has not got them."""
    resuming: Resumption | None = None
    patient_until_s: float = -math.inf
    """Until then recovery waits for hosts that may have replicas."""
    credits_used: int = 0
    """Its runs in flight that use a credit."""
    repeats: int = 0
    """How many numbers `new_id` has given."""
    _specs: WeakKeyDictionary[ArraySpec, ref[ArraySpec]] = field(default_factory=WeakKeyDictionary)

    @property
    def recovering(self) -> bool:
        """Whether the client's stream waits until something is rebuilt."""
        return bool(self.slices.unbound or self.arrays.lost or self.wanted or self.resuming)

    def one_spec(self, spec: ArraySpec) -> ArraySpec:
        """Return the one object for all specs that equal `spec`.

        A spec names all its devices, and each run compares the spec of each argument.
        """
        known = self._specs.setdefault(spec, ref(spec))()
        return spec if known is None else known

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
        args = message.args
        donated = [args[index] for index in program.body.donated if 0 <= index < len(args)]
        return tuple(arrays_in(donated))

    def delete(self, arrays: tuple[int, ...]) -> list[tuple[int, Array]]:
        """Forget arrays; return those that hosts may drop now."""
        self.lineage.release(arrays)
        taken = [(number, self.arrays.take(number)) for number in arrays]
        return [(n, array) for n, array in taken if array is not None and not array.awaited]
