"""Says which clients wait, for which others, since when, and when they go on (`pw why --queue`).

Launches come from the schedulers of islands, each in the order of its policy. `pw.sched.island.forecast` says
how the time that is left is estimated. What waits at the controller follows: devices and programs beyond a
tenant's bound, devices that no island has, islands that are away, versions of names, and calls. For these
no time can be told.

An asker sees its tenant's waits as they are. Clients of other tenants have no number and no name, their
launches only a place; what else they wait for is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.ids import client_of, run_name, scheduler_of
from pw.core.messages.owners import Sees
from pw.core.rights import Resource, in_words
from pw.sched.control.client_order import ClientOrder
from pw.sched.control.clients import Client
from pw.sched.control.explain.inquiries import Inquiries, Inquiry
from pw.sched.control.lookups import Lookups
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.slices import SliceRequests
from pw.sched.control.usage import RoomQueue
from pw.sched.control.versions import VersionState

ANOTHER = "another tenant"
"""Name of all clients of other tenants."""


@dataclass(eq=False)
class WaitReports(ControlPart):
    """Answers `GetQueue`."""

    inquiries: Inquiries
    policy: str
    slices: SliceRequests
    registry: ProgramRegistry
    runs: RunsInFlight
    stream: ClientOrder
    lookups: Lookups
    island_status: Callable[[], tuple[msg.IslandInfo, ...]]

    @handles_client(msg.GetQueue)
    def _get(self, client: Client, message: msg.GetQueue) -> None:
        self.inquiries.answer(client, message, self._inquire(client, message))

    def _inquire(self, asker: Client, message: msg.GetQueue) -> Inquiry:
        schedulers = map(scheduler_of, sorted(self._islands.schedulers))
        answers = yield msg.IslandWaits, dict.fromkeys(schedulers, msg.ListWaits)
        reports = sorted(answers.values(), key=lambda report: report.island)
        sees = self.sessions.sight(asker.number)
        launches = [
            self._launch(wait, report.island) for report in reports for wait in report.waits
        ]
        here = [*self._for_room(), *self._of_clients(), *self._for_names()]
        seen = [wait for wait in here if sees(wait.client)]
        return msg.Queue(
            message.request,
            self.policy,
            tuple(masked(wait, sees) for wait in (*launches, *seen)),
            len(here) - len(seen),
            sum(report.clients_left_out for report in reports),
        )

    # --- on islands -------------------------------------------------------------------------------

    def _launch(self, wait: msg.LaunchWait, island: str) -> msg.ClientWait:
        run = self.runs.in_flight.get(wait.run)
        name = run_name(wait.run if run is None else run.record.order)
        what = f"{'devices for ' if wait.is_launched else ''}run {name} of {wait.program!r}"
        if wait.reasons:
            what += f": {' and '.join(wait.reasons)}"
        return self._wait(
            client_of(wait.run),
            "launch",
            what,
            where=island,
            run=name,
            in_front=wait.in_front,
            unit=wait.unit,
            waited_s=wait.waited_s,
            left_s=wait.left_s,
            more=wait.more,
        )

    # --- at the controller ------------------------------------------------------------------------

    def _for_room(self) -> Iterator[msg.ClientWait]:
        """Yield what waits until its tenant may have more."""
        for queue, resource in (
            (self.slices.queue, Resource.DEVICES),
            (self.registry.queue, Resource.PROGRAMS),
        ):
            for tenant in [tenant for tenant, _ in queue.tenants]:
                yield from self._of_tenant(queue, tenant, resource)

    def _of_tenant(
        self, queue: RoomQueue, tenant: str, resource: Resource
    ) -> Iterator[msg.ClientWait]:
        usage = self.sessions.usage
        bound = usage.rights.of(tenant).bound(resource) or 0
        clients = (one for one in self.sessions.clients if one.tenant == tenant)
        held = [(one.number, one.usage.amount(resource)) for one in clients]
        holders = [(number, amount) for number, amount in held if amount]
        for request in queue.of_tenant(tenant).values():
            what = (
                f"{in_words(resource, request.amount)}; tenant {tenant!r} may have {bound} and has "
                f"{usage.amount(tenant, resource)}"
            )
            yield self._wait(
                request.client,
                resource.value,
                what,
                in_front=holders,
                unit=resource.value,
                waited_s=self._env.now_s() - request.since_s,
            )

    def _of_clients(self) -> Iterator[msg.ClientWait]:
        """Yield what each client waits for with its slices and its calls."""
        islands = self.island_status()
        away = [one.name for one in islands if one.state != "ready"]
        for client in self.sessions.clients:
            slices = client.slices
            unbound = slices.unbound.keys() - self.slices.queue.keys
            unplaced = slices.owned - self._islands.bindings.keys() - unbound
            unplaced -= self.slices.queue.keys
            waiting = partial(self._wait, client.number)
            if awaited := self.slices.awaited_hosts(client, islands):
                what = f"{' and '.join(awaited)}, which its slices name, to come back"
                yield waiting("island", what, waited_s=self._since(client, unbound | unplaced))
            elif unplaced:
                count = self.slices.unplaced(client)
                what = f"{in_words(Resource.DEVICES, count)} that no island has yet"
                yield waiting("devices", what, waited_s=self._since(client, unplaced))
            if unbound and not awaited:
                calls = len(client.stream)
                what = f"the island of {_counted(len(unbound), 'slice')}, which is away"
                what += f"; {_counted(calls, 'call')} of it wait" if calls else ""
                where = ", ".join(away)
                yield waiting("island", what, where=where, waited_s=self._since(client, unbound))
            backlog = client.stream.backlog
            if backlog and (not client.recovering or client.away is not None):
                obstacle = self.stream.reason(client, backlog[0])
                if obstacle:
                    what = f"{obstacle}; {_counted(len(backlog), 'call')} held"
                    yield waiting("calls", what)

    def _since(self, client: Client, slices: Iterable[int]) -> float | None:
        """Return for how long a client has waited for these slices, in seconds."""
        since_s = client.slices.waits_since_s
        times_s = [since_s[number] for number in slices if number in since_s]
        return self._env.now_s() - min(times_s) if times_s else None

    def _for_names(self) -> Iterator[msg.ClientWait]:
        """Yield the lookups that wait for versions of names."""
        for waiting in self.lookups.waiting.values():
            for one in waiting.values():
                message = one.message
                shared = self.lookups.names.directory.find(one.client, message.name)
                versions = () if shared is None else shared.versions.values()
                arriving = [v for v in versions if v.state is VersionState.ARRIVING and v.maker]
                number = message.version
                which = f"version {number} of" if number else "a version of"
                newer = f" after {message.after}" if message.after and not number else ""
                yield self._wait(
                    one.client.number,
                    "name",
                    f"{which} {message.name!r}{newer}",
                    in_front=[(version.maker, 1) for version in arriving],
                    unit="versions",
                    waited_s=self._env.now_s() - one.since_s,
                )

    # --- rows -------------------------------------------------------------------------------------

    def _wait(
        self,
        client: int,
        kind: str,
        what: str,
        *,
        where: str = "",
        run: str = "",
        in_front: Iterable[tuple[int, int]] = (),
        unit: str = "",
        waited_s: float | None = None,
        left_s: float | None = None,
        more: int = 0,
    ) -> msg.ClientWait:
        owner = self.sessions.get(client)
        front = tuple(msg.InFront(number, self._name(number), count) for number, count in in_front)
        return msg.ClientWait(
            client,
            self._name(client),
            "" if owner is None else owner.tenant,
            kind,
            where,
            what,
            run,
            front,
            unit,
            waited_s,
            left_s,
            more,
        )

    def _name(self, number: int) -> str:
        client = self.sessions.get(number)
        return "(has left)" if client is None else client.name


def masked(wait: msg.ClientWait, sees: Sees) -> msg.ClientWait:
    """Return a wait without what the asker may not see of clients of other tenants."""
    if not sees(wait.client):
        what = f"a run on {wait.where}"
        wait = replace(wait, client=0, name=ANOTHER, tenant="", what=what, run="", more=0)
    hidden = sum(one.amount for one in wait.in_front if not sees(one.client))
    if all(sees(one.client) for one in wait.in_front):
        return wait
    shown = [one for one in wait.in_front if sees(one.client)]
    return replace(wait, in_front=(*shown, msg.InFront(0, ANOTHER, hidden)))


def _counted(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
