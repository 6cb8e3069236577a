"""The controller: admits clients and turns their runs into gangs on islands.

It is composed of parts, each with its own messages: clients (`sessions`, `stream`), slices
(`slices`), programs (`registry`), runs (`runs`, `run_ends`), arrays (`uploads`, `checkpoints`),
what was lost with a host (`recovery`) and why work does not go on (`explain`). A part knows only
the parts that are made before it.

The controller submits a run to all its islands at once. It waits for the first compilation of a
program, and not for data; only a checkpoint waits for the uploads of its arrays. It holds no buffers and
opens no bulk channel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from msgspec.structs import asdict

from pw.core import messages as msg
from pw.core.accounts import AccountSink, Spent
from pw.core.actors.actor import Actor, Env, handles
from pw.core.events import Sink
from pw.core.ids import CONTROLLER, RESOURCES, Address, scheduler_of
from pw.core.rights import DEVICE_MEMORY, NO_BOUNDS, NewRights, TenantRights
from pw.core.tenants import NO_SECRET, OPERATOR, Claims, may_touch
from pw.core.tickets import Tickets
from pw.core.timeline import Recordings
from pw.core.waits import RECOVERY_S
from pw.sched.control.accounts import Accounts, Take
from pw.sched.control.checkpoints.disk_table import LOOKS, DiskTable
from pw.sched.control.checkpoints.in_memory import Checkpoints
from pw.sched.control.checkpoints.on_disk import Saves
from pw.sched.control.checkpoints.replicas import ReplicaTable
from pw.sched.control.client_order import ClientOrder, Handlers
from pw.sched.control.clients import Client, Resumption
from pw.sched.control.confirmations import Confirmations
from pw.sched.control.device_health import SickDevices
from pw.sched.control.explain.inquiries import Inquiries
from pw.sched.control.explain.memory import MemoryReports
from pw.sched.control.explain.plans import Plans
from pw.sched.control.explain.why import Explainer
from pw.sched.control.handovers import HandoverTable
from pw.sched.control.islands import Islands
from pw.sched.control.leaving_hosts import LeavingHosts
from pw.sched.control.lookups import Lookups
from pw.sched.control.migrations import Destinations, Migrations
from pw.sched.control.names import NameTable
from pw.sched.control.preemption import Preemption
from pw.sched.control.publishing import Publishing
from pw.sched.control.rebalancing import Planner, Rebalancing
from pw.sched.control.recovery.losses import Losses
from pw.sched.control.recovery.rebuild import Rebuilder
from pw.sched.control.recovery.replay import Replays
from pw.sched.control.recovery.resume import Resumptions
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.run_ends import RunEnds
from pw.sched.control.runs import CREDITS_AT_ONCE, RunsInFlight
from pw.sched.control.sessions import Sessions
from pw.sched.control.slices import SliceRequests
from pw.sched.control.suspension_requests import SuspensionRequests
from pw.sched.control.suspensions import Suspensions
from pw.sched.control.uploads import UploadTable
from pw.sched.control.usage import Usage
from pw.sched.control.waits import WaitReports
from pw.sched.control.watches import IslandWatches


class Controller(Actor):
    """Admits clients and turns their runs into gangs on islands."""

    def __init__(
        self,
        env: Env,
        tickets: Tickets,
        versions: tuple[str, str],
        policy: str,
        spawn_scheduler: Callable[[str], None],
        island_status: Callable[[], tuple[msg.IslandInfo, ...]],
        counters: Callable[[], dict[str, int]],
        recovery_s: float = RECOVERY_S,
        heard_s: Callable[[str], float | None] = lambda node: None,
        first_client: int = 1,
        waiting_hosts: Callable[[], tuple[msg.HostInfo, ...]] = tuple,
        credits_at_once: int = CREDITS_AT_ONCE,
        events: Sink | None = None,
        only_transfers: bool = False,
        claims: Claims = NO_SECRET,
        rights: TenantRights = NO_BOUNDS,
        uses: Callable[[], Mapping[int, msg.ClientUse]] = dict,
        lines: Callable[[], tuple[msg.LogLine, ...]] = tuple,
        awaited_islands: Callable[[], int] = int,
        tenants_memory: Callable[[], Iterable[tuple[str, int]]] = tuple,
        take_spent: Take = lambda client: (),
        account_sink: AccountSink | None = None,
        preempt_s: float = math.inf,
        plan_moves: Planner = lambda wanted, sizes: (),
        destinations: Destinations = lambda slices, island, devices: (),
    ) -> None:
        super().__init__(env)
        self._versions = versions
        self._policy = policy
        self._spawn_scheduler = spawn_scheduler
        self._island_status = island_status
        self._waiting_hosts = waiting_hosts
        self._awaited_islands = awaited_islands
        self._counters = counters
        self._uses = uses
        self._lines = lines
        self._tenants_memory = tenants_memory
        self.usage = Usage(rights)
        self._islands = Islands(env, counts_tenants=rights.have_file)
        sessions = self.sessions = Sessions(
            env, self._islands, tickets, first_client, events, claims, self.usage, heard_s
        )
        self.accounts = Accounts(sessions, take_spent, account_sink)
        slices = self.slices = SliceRequests(sessions, recovery_s, self._lends)
        registry = self.registry = ProgramRegistry(sessions, only_transfers)
        runs = self.runs = RunsInFlight(sessions, credits_at_once)
        replicas = self.replicas = ReplicaTable(sessions, recovery_s)
        checkpoints = self.checkpoints = Checkpoints(sessions, replicas)
        disk = self.disk = DiskTable(sessions, account_sink, first_client * LOOKS)
        saves = self.saves = Saves(sessions, disk)
        handovers = self.handovers = HandoverTable(sessions, registry, runs)
        stream = self.stream = ClientOrder(sessions, checkpoints, saves, handovers)
        losses = Losses(sessions, runs)
        replays = Replays(sessions, registry, runs, handovers)
        rebuilder = self._rebuilder = Rebuilder(
            sessions, slices, registry, replicas, replays, handovers
        )
        resumptions = Resumptions(sessions, slices, replicas, rebuilder, handovers)
        inquiries = Inquiries(sessions)
        sick = self.sick = SickDevices(sessions, inquiries, island_status, waiting_hosts)
        explainer = Explainer(
            *(sessions, inquiries, slices, runs, stream, checkpoints, saves),
            lambda: sick.in_islands(island_status()),
            heard_s,
        )
        measured = MemoryReports(sessions, inquiries, island_status)
        plans = Plans(sessions, runs)
        ends = RunEnds(sessions, runs, losses, rebuilder, stream, explainer)
        uploads = self._uploads = UploadTable(sessions, replicas, losses, replays, ends)
        confirmations = Confirmations(sessions)
        names = self.names = NameTable(
            sessions, slices, replicas, handovers, uploads, confirmations, self._release
        )
        lookups = self.lookups = Lookups(sessions, names)
        waits = WaitReports(
            *(sessions, inquiries, policy, slices, registry, runs, stream, lookups, island_status)
        )
        in_order: Handlers = {
            msg.Run: runs.start,
            msg.CreateArray: uploads.create,
            msg.Offer: handovers.offer,
            msg.Checkpoint: checkpoints.begin,
            msg.SaveArrays: saves.begin,
            msg.Publish: names.publish,
            msg.Lookup: lookups.look_up,
            msg.Unpublish: names.unpublish,
            msg.ReleaseProgram: registry.release,
            msg.ReleaseSlice: slices.release,
        }
        resuming: Handlers = {
            msg.Run: resumptions.ran,
            msg.CreateArray: resumptions.announced,
            msg.Offer: handovers.offered_before,
            msg.Publish: names.published_before,
        }
        stream.set_handlers(in_order, resuming)
        suspensions = self.suspensions = Suspensions(
            sessions, stream, slices, runs, replicas, losses, rebuilder
        )
        requests = SuspensionRequests(sessions, suspensions)
        migrations = self.migrations = Migrations(
            sessions, suspensions, requests, replicas, checkpoints, island_status, destinations
        )
        leaving = self._leaving_hosts = LeavingHosts(sessions, suspensions)
        preemption = Preemption(sessions, slices, suspensions, island_status, preempt_s)
        rebalancing = Rebalancing(sessions, requests, plan_moves)
        watches = self.watches = IslandWatches(sessions, recovery_s)
        self.recordings = Recordings(env, lambda sender: sessions.at(sender.node) is not None)
        self.compose(
            *(slices, registry, runs, losses, replicas, checkpoints, rebuilder, disk, saves),
            *(sessions, resumptions, inquiries, explainer, measured, plans),
            *(ends, uploads, stream, handovers, watches, self.recordings),
            *(confirmations, names, lookups, waits, self.accounts, suspensions),
            *(requests, migrations, preemption, leaving, rebalancing, sick),
            order={
                # Losses marks what is lost before the rebuilder brings it back.
                msg.EpochEnded: (
                    *(SliceRequests, ProgramRegistry, Losses),
                    *(Checkpoints, Rebuilder, Saves, Confirmations),
                )
            },
        )
        self._publishing: Publishing | None = None
        if events is not None:
            self._publishing = Publishing(sessions, events, counters)
            self.compose(self._publishing)

    # --- clients come and go ----------------------------------------------------------------------

    @handles(msg.Attach)
    def _attach(self, sender: Address, message: msg.Attach) -> None:
        if (former := self.sessions.at(sender.node)) is not None:
            self._remove(former, "attached again")
        client = self.sessions.attach(sender, message, self.replicas.unclaimed)
        if client is not None:
            self.accounts.attached(client)
        if client is not None and message.resume:
            client.resuming = Resumption(self.slices.new_loss())
            if message.suspended_by:
                self.suspensions.suspended_before(client, message.suspended_by)

    @handles(NewRights)
    def _rights_changed(self, sender: Address, news: NewRights) -> None:
        """What tenants have stays theirs, also if it is more than they may have now."""
        self.usage.rights = news.rights
        self.sessions.rights_changed()
        for tenant in dict.fromkeys(client.tenant for client in self.sessions.clients):
            self.slices.rights_changed(tenant)
            self.registry.try_again(tenant)

    def _lends(self, owner: Client, reader: Client) -> bool:
        """Whether a name's holder has offered a version to a client, which takes it on the same devices."""
        versions = (one for shared, one in self.names.offered.values() if shared.holder is owner)
        return any(reader.number in version.readers.values() for version in versions)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        client = self.sessions.at(message.node)
        if client is not None:
            self._remove(client, message.reason)
        else:
            self._uploads.host_lost(message.node)
            self.replicas.host_lost(message.node)
            self.checkpoints.host_lost(message.node)
            self.saves.host_lost(message.node)
            self.disk.host_lost(message.node)

    def _remove(self, client: Client, reason: str) -> None:
        """Release all that a client owned, on every host."""
        self.env.log(
            "info",
            "client left",
            client=client.number,
            name=client.name,
            reason=reason,
            arrays=len(client.arrays),
            runs=client.usage.runs,
        )
        self._release(client, reason)
        self.recordings.forget_node(client.address.node)
        self.watches.client_left(client)
        self.names.client_left(client)
        self.lookups.client_left(client)

    def _release(self, client: Client, reason: str) -> None:
        """Release what a client, or the holder of a name, owned."""
        self.accounts.client_left(client)
        self.migrations.client_left(client)
        self.suspensions.client_left(client)
        self.checkpoints.client_left(client)
        self.replicas.client_left(client)
        self.saves.client_left(client)
        self.handovers.client_left(client)
        self.runs.client_left(client)
        if self._publishing is not None:
            self._publishing.client_left(client)
        self.sessions.leave(client, reason)
        self.slices.client_left(client)
        self.registry.client_left(client)

    def turn_ended(self) -> None:
        """Go on with the streams of clients, forget what nothing needs, and give credits back."""
        self._uploads.settle_taken()
        self._go_on()
        while (
            (asked := self.handovers.clients_with_news())
            or any(client.lineage.has_unneeded for client in self.sessions.calling)
            or (
                self.sessions.is_busy
                and any(client.lineage.has_unneeded for client in self.sessions.busy())
            )
            or self.names.go_on()
            or self.lookups.go_on()
        ):
            for client in asked:
                self._rebuilder.proceed(client)
            self._uploads.settle_taken()
            self._go_on()
        if self.migrations.under_way:
            self.migrations.go_on()
        if self.suspensions.leaving:
            self.suspensions.go_on()
        self._leaving_hosts.go_on()
        self.stream.answer_inquiries()
        if self._publishing is not None:
            self.runs.publish()
            self._publishing.turn_ended()
        self.runs.send_credits()

    def _go_on(self) -> None:
        for client in tuple(self.sessions.calling):
            if client.has_work:
                self._go_on_with(client)
        if not self.sessions.is_busy:
            return
        for holder in self.sessions.busy():
            if self.sessions.get(holder.number) is None:  # its name has ended in this turn
                continue
            self._go_on_with(holder)
            if not holder.has_work:
                self.sessions.rest(holder.number)

    def _go_on_with(self, client: Client) -> None:
        self.stream.go_on(client)
        while client.lineage.has_unneeded:
            self._forget(client)
            self.stream.go_on(client)  # this may end a checkpoint that the stream waits for
        if client.slices.borrowed and not client.recovering:
            self.slices.return_borrowed(client)

    def _forget(self, client: Client) -> None:
        """Have the client and the hosts forget what nothing of the client can need any more."""
        unneeded = client.lineage.drain()
        if unneeded.runs:
            self.sessions.tell(client, msg.ForgetRuns(tuple(unneeded.runs)))
        if unneeded.inputs:
            self.handovers.forgotten(unneeded.inputs)
            self.sessions.tell(client, msg.ForgetInputs(tuple(unneeded.inputs)))
        for number in unneeded.slices:
            self.slices.forget_request(client, number)
        self.checkpoints.forget(client, unneeded.arrays)
        self.replicas.drop(unneeded.arrays)

    # --- islands and hosts ------------------------------------------------------------------------

    @handles(msg.IslandFormed)
    def _island_formed(self, sender: Address, message: msg.IslandFormed) -> None:
        if self._islands.formed(message):
            self._spawn_scheduler(message.island)
            self.sessions.scheduler_added(message.island)
        self.env.send(scheduler_of(message.island), message)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        """Tell the scheduler first; the parts then hold the clients that need the island."""
        self._islands.left(message.island)
        self.env.send(scheduler_of(message.island), message)

    @handles(msg.DrainHost)
    def _drain_host(self, sender: Address, message: msg.DrainHost) -> None:
        client = self.sessions.of(sender)
        if client is None:
            return
        if not self.usage.rights.of(client.tenant).may_drain:
            refused = self.sessions.objection(client, f"drain host {message.node}", "")
            self.env.send(sender, msg.Answered(message.request, refused))
            return
        who = {"tenant": client.tenant, "name": client.name, "node": sender.node}
        self.env.audit("drain", **who, host=message.node)
        self.env.send(RESOURCES, msg.DrainHost(message.request, message.node, sender.node))

    # --- reports ----------------------------------------------------------------------------------

    @handles(msg.GetStatus)
    def _status(self, sender: Address, message: msg.GetStatus) -> None:
        asker = self.sessions.of(sender)
        if asker is None:
            return
        uses, nothing = self._uses(), msg.ClientUse()
        islands = self._island_status()
        sees = self.sessions.sight(asker.number)
        clients = [client for client in self.sessions.clients if not client.is_holder]
        seen = [client for client in clients if sees(client.number)]
        self.env.send(
            sender,
            msg.Status(
                message.request,
                *self._versions,
                self._policy,
                self._leaving_hosts.in_islands(self.sick.in_islands(islands)),
                self.sick.of(self._waiting_hosts()),
                tuple(
                    msg.ClientInfo(
                        client.number,
                        client.name,
                        *self.sessions.weight_of(client),
                        len(client.arrays),
                        len(client.programs),
                        len(client.slices.owned),
                        client.usage.runs,
                        client.address == sender,
                        self.slices.awaited_hosts(client, islands),
                        client.tenant,
                        self.usage.rights.of(client.tenant).share,
                        uses.get(client.number, nothing),
                        self.sessions.silent_s(client),
                        self.migrations.in_words(client),
                    )
                    for client in seen
                ),
                tuple(run for run in self.runs.status() if sees(run.client)),
                "" if self.sessions.events is None else self.sessions.events.endpoint,
                len(clients) - len(seen),
                sum(one.usage.runs for one in self.sessions.clients if not sees(one.number)),
                self._awaited_islands(),
                tuple(self._tenants(asker.tenant)),
            ),
        )

    def _tenants(self, asker: str) -> Iterator[msg.TenantInfo]:
        """Yield the tenants that a client of a tenant may see."""
        rights, sums = self.usage.rights, self.accounts.sums()
        most_bytes: dict[str, int] = {}
        for tenant, size_bytes in self._tenants_memory():
            most_bytes[tenant] = max(size_bytes, most_bytes.get(tenant, 0))
        here = {client.tenant for client in self.sessions.clients}
        for tenant in sorted(here | rights.named.keys() | sums.keys()):
            if may_touch(asker, tenant):
                own, amounts = rights.of(tenant), self.usage.amounts(tenant)
                if most_bytes.get(tenant):
                    amounts[DEVICE_MEMORY] = most_bytes[tenant]
                spent = asdict(sums.get(tenant, Spent()))
                yield msg.TenantInfo(tenant, own.share, amounts, own.bounds(), spent)

    @handles(msg.GetStats)
    def _stats(self, sender: Address, message: msg.GetStats) -> None:
        if self.sessions.of(sender) is None:
            return
        counters = self._counters()
        counters["live_arrays"] = sum(len(client.arrays) for client in self.sessions.clients)
        counters["programs"] = sum(len(client.programs) for client in self.sessions.clients)
        counters["runs_in_flight"] = len(self.runs.in_flight)
        counters["offers"] = len(self.handovers)
        lines = self._lines() if self.env.tenant_of(sender.node) == OPERATOR else ()
        self.env.send(sender, msg.Stats(message.request, CONTROLLER, counters, lines))
