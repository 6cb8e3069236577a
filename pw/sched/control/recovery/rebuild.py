"""Brings back what clients had on hosts that were lost.

Theory of operation. A client with something lost, or with a slice that is not bound, is
*recovering*. What needs a slice that is away waits. Of the rest, lost arrays are restored from
replicas where there are any, and the others are made again by running what made them (`plan` works
out what, `replay` does it). Then the client's stream goes on; the client has noticed nothing but the delay.

What cannot be brought back fails, with the reason. So does what needs a slice that is given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import ErrorReport, InsufficientDevices, IslandLost
from pw.core.ids import Address
from pw.sched.control.checkpoints.replicas import ReplicaTable
from pw.sched.control.clients import Client
from pw.sched.control.handovers import HandoverTable
from pw.sched.control.programs import said_of
from pw.sched.control.recovery.losses import Proceed
from pw.sched.control.recovery.plan import RecoveryPlan, named, plan_recovery
from pw.sched.control.recovery.replay import Replays
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.sessions import ControlPart
from pw.sched.control.slices import GiveUp, SliceRequests

LOOK_S = 0.5
"""Seconds between two looks for hosts that have what clients miss."""
NAMED = 32
"""Number of arrays that the error of a lost island names, of those that are left and of those that are lost."""


@dataclass(eq=False)
class Rebuilder(ControlPart):
    """Brings lost slices and arrays back."""

    slices: SliceRequests
    registry: ProgramRegistry
    replicas: ReplicaTable
    replays: Replays
    handovers: HandoverTable

    def __post_init__(self) -> None:
        super().__post_init__()
        self._looks = Ticker(self._env, LOOK_S, self._look)

    # --- when it can go on ------------------------------------------------------------------------

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        for client in list(self.sessions.clients):
            self.proceed(client)

    @handles(msg.SliceBound)
    def _slice_bound(self, sender: Address, message: msg.SliceBound) -> None:
        client = self.sessions.owner(message.slice)
        if client is not None and message.slice in client.slices:
            self.proceed(client)

    @handles(msg.ProgramInstalled)
    def _installed(self, sender: Address, message: msg.ProgramInstalled) -> None:
        client = self.sessions.owner(message.program)
        if client is not None and client.recovering:
            self.proceed(client)

    @handles(Proceed)
    def _proceed(self, sender: Address, timer: Proceed) -> None:
        client = self.sessions.get(timer.client)
        if client is not None:
            self.proceed(client)

    def _look(self) -> bool:
        """Hosts may have come that have what clients miss."""
        for client in list(self.sessions.clients):
            if client.arrays.lost or client.wanted:
                self.proceed(client)
        return False

    def proceed(self, client: Client) -> None:
        """Rebuild what was lost and needs no slice that is away, once the programs are compiled."""
        if client.resuming is not None or client.is_held:
            return
        is_whole = not client.slices.unbound
        if is_whole:
            self.handovers.prepare(client)
        if client.arrays.lost or (client.wanted and is_whole):
            plan = self._plan(client)
            if self._waits_for_replicas(client, plan):
                self._looks.start()
                return
            if self._waits_for_slices(client, plan) or self._waits_for_programs(client, plan):
                return
            for number, error in plan.lost.items():
                self._fail(client, (number,), error)
                self.handovers.failed(client, number, error)
            self.replays.carry_out(client, plan)
        if is_whole:
            self.replicas.top_up(client)

    def _plan(self, client: Client) -> RecoveryPlan:
        def bound(number: int) -> bool:
            return number in self._islands.bindings or client.slices.may_borrow(number)

        replicas, away = self.replicas.of(client), client.slices.unbound.keys()
        client.brought = {
            number: name
            for number, name in client.brought.items()
            if (array := client.arrays.find(name)) is not None and array.awaited
        }
        return plan_recovery(
            client.lineage,
            client.arrays,
            replicas,
            bound,
            self._env.now_s(),
            () if away else client.wanted,
            self.handovers.can_bring,
            self.handovers.is_asked,
            client.brought,
            away,
        )

    def _waits_for_replicas(self, client: Client, plan: RecoveryPlan) -> bool:
        """Return whether to wait for hosts that may have replicas of arrays that are lost without them."""
        origins = client.lineage.origins
        lasting = any(array in origins and origins[array].lasting for array in plan.lost)
        return bool(plan.lost) and (
            self._env.now_s() < client.patient_until_s or (lasting and self.replicas.may_come_back)
        )

    def _waits_for_slices(self, client: Client, plan: RecoveryPlan) -> bool:
        """Borrow the slices that the plan needs; return whether there are any."""
        needed = {
            client.lineage.origins[array].spec.placement.slice
            for array in (*plan.restores, *plan.uploads)
        }
        needed.update(*(record.program.slices for record in plan.runs))
        missing = needed - self._islands.bindings.keys()
        if missing:
            self.slices.borrow(client, missing)
        return bool(missing)

    def _waits_for_programs(self, client: Client, plan: RecoveryPlan) -> bool:
        """Have the hosts compile what the plan runs; return whether they have to."""
        compiling = [self.registry.reinstall(client, record.program) for record in plan.runs]
        return any(compiling)

    # --- what cannot be brought back --------------------------------------------------------------

    def _fail(self, client: Client, arrays: Iterable[int], error: ErrorReport) -> None:
        if failed := client.arrays.fail(arrays, error):
            self.sessions.tell(client, msg.RunFailed(0, failed, error))

    @handles(GiveUp)
    def _give_up(self, sender: Address, timer: GiveUp) -> None:
        client = self.sessions.get(timer.client)
        if client is None:
            return
        gone = {n for n, loss in client.slices.unbound.items() if loss == timer.loss}
        if not gone:
            return
        self._env.log("warning", "island given up", island=timer.island, client=client.number)
        left, lost = self._left_and_lost(client, gone)
        for names, slices in _by_hosts(client, gone).items():
            where = f" on {' and '.join(names)}, which the slice names," if names else ""
            words = (
                f"{timer.error.message}; there were no devices to go on with{where} for "
                f"{timer.waited_s:g} s. Start its hosts again (see pw.status()), or "
                "ask for other devices with pw.make_virtual_device_set() and compute there"
            )
            error = msgspec.structs.replace(
                timer.error, kind=IslandLost.__name__, message=words, left=left, lost=lost
            )
            self._abandon(client, slices, error)

    @handles(msg.SliceRefused)
    def _slice_refused(self, sender: Address, message: msg.SliceRefused) -> None:
        client = self.sessions.owner(message.slice)
        if client is None or message.slice not in client.slices.unbound:
            return
        error = message.error
        if error.kind == InsufficientDevices.__name__:
            left, lost = self._left_and_lost(client, {message.slice})
            error = msgspec.structs.replace(error, kind=IslandLost.__name__, left=left, lost=lost)
        self.slices.keep_refusal(client, message.slice, error)
        self._abandon(client, {message.slice}, error)

    def _left_and_lost(
        self, client: Client, gone: set[int]
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the client's arrays on other slices than these, and of those on these."""
        left: list[str] = []
        lost: list[str] = []
        for number, array in client.arrays.held.items():
            slice = array.spec.placement.slice
            name = named(array.spec, client.lineage.origins.get(number)).removeprefix("the array ")
            if array.error is None and len(names := lost if slice in gone else left) < NAMED:
                names.append(name)
        return tuple(left), tuple(lost)

    def _abandon(self, client: Client, gone: set[int], error: ErrorReport) -> None:
        """Fail what lay on slices that will not be bound, and what needs it."""
        self.slices.give_up(client, gone)
        self.registry.fail(client, gone, error)
        by_name: dict[str, list[int]] = {}
        for number, array in client.arrays.lost.items():
            if array.spec.placement.slice in gone:
                name = named(array.spec, client.lineage.origins.get(number))
                by_name.setdefault(name, []).append(number)
        for name, numbers in by_name.items():
            self._fail(client, numbers, said_of(f"{name} is lost", error))
        self.proceed(client)


def _by_hosts(client: Client, slices: Iterable[int]) -> dict[tuple[str, ...], set[int]]:
    """Return slices by the hosts that they name."""
    by_hosts: dict[tuple[str, ...], set[int]] = {}
    for number in slices:
        by_hosts.setdefault(client.slices.requests[number].hosts, set()).add(number)
    return by_hosts
