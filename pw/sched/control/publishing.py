"""Publishes what happens in the cluster (`pw.core.events`); this part exists only where events are on.

Theory of operation. Sessions, runs and uploads publish their own events where they happen. This part
adds what no single place knows: hosts come and go with the resource manager's directory, a client recovers
from one turn of the controller to another, and hosts report transfers and counters once a
period. What is published is never read back: nothing here changes how work goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.actors.ticker import Ticker
from pw.core.events import CountersEvent, EpochEvent, HostEvent, RecoveryEvent, Sink, TransferEvent
from pw.core.ids import CONTROLLER, Address, client_of, coordinator_of, run_name
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_host

PERIOD_S = 1.0
"""Seconds between two reports of counters by processes, and of transfers by hosts."""


@dataclass(slots=True)
class _Recovery:
    """A client that waits until something is rebuilt."""

    name: str
    arrays: int
    began_s: float


@dataclass(eq=False)
class Publishing(ControlPart):
    """Publishes events of the whole cluster."""

    events: Sink
    counters: Callable[[], dict[str, int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._hosts: dict[str, msg.Peer] = {}
        self._draining: frozenset[str] = frozenset()
        self._recoveries: dict[int, _Recovery] = {}
        self._ticker = Ticker(self._env, PERIOD_S, self._count)
        self._ticker.start()

    # --- islands and hosts ------------------------------------------------------------------------

    @handles(msg.IslandFormed)
    def _island_formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self.events.publish(EpochEvent("ready", message.island, message.epoch, message.hosts))
        for host in message.hosts:
            self._env.send(coordinator_of(host), msg.Observe(PERIOD_S))

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        reason = message.error.message
        self.events.publish(EpochEvent("lost", message.island, message.epoch, (), reason))

    @handles(msg.Directory)
    def _hosts_are(self, sender: Address, message: msg.Directory) -> None:
        former, self._hosts = self._hosts, {peer.node: peer for peer in message.peers}
        for host in former.keys() - self._hosts.keys():
            self.events.publish(HostEvent("gone", host))
        for host, peer in self._hosts.items():
            before = former.get(host)
            if before is None:
                self.events.publish(HostEvent("registered", host))
            if (before is not None and before.member) != peer.member:
                self.events.publish(HostEvent("ready" if peer.member else "waiting", host))

    @handles(msg.Draining)
    def _hosts_drain(self, sender: Address, message: msg.Draining) -> None:
        for host in message.nodes:
            if host not in self._draining:
                self.events.publish(HostEvent("draining", host))
        self._draining = frozenset(message.nodes)

    # --- clients ----------------------------------------------------------------------------------

    def turn_ended(self) -> None:
        """Publish which clients have begun to recover in this turn, and which have recovered."""
        now_s = self._env.now_s()
        for client in self.sessions.clients:
            if client.is_holder:
                continue
            recovery = self._recoveries.get(client.number)
            if client.rebuilds and recovery is None:
                begun = _Recovery(client.name, len(client.arrays.lost), now_s)
                self._recoveries[client.number] = begun
                self._tell("began", client.number, begun)
            elif recovery is not None and not client.rebuilds:
                del self._recoveries[client.number]
                self._tell("ended", client.number, recovery, now_s - recovery.began_s)

    def client_left(self, client: Client) -> None:
        """The recovery of a client that leaves ends with it."""
        recovery = self._recoveries.pop(client.number, None)
        if recovery is not None:
            passed_s = self._env.now_s() - recovery.began_s
            self._tell("ended", client.number, recovery, passed_s)

    def _tell(self, what: str, client: int, recovery: _Recovery, seconds: float = 0.0) -> None:
        self.events.publish(RecoveryEvent(what, client, recovery.name, recovery.arrays, seconds))

    # --- reports ----------------------------------------------------------------------------------

    @handles_host(msg.Observed)
    def _observed(self, host: str, message: msg.Observed) -> None:
        for one in message.transfers:
            if self.sessions.is_known(client_of(one.run)):
                what = "failed" if one.failed else "edge"
                self.events.publish(
                    TransferEvent(
                        what,
                        run_name(one.run),
                        one.edge,
                        one.sources,
                        (host,),
                        one.size_bytes,
                        one.seconds,
                    )
                )
        counters = message.counters
        if message.skipped:
            counters = counters | {"transfers_skipped": message.skipped}
        self.events.publish(CountersEvent("totals", host, counters))

    def _count(self) -> bool:
        self.events.publish(CountersEvent("totals", CONTROLLER, self.counters()))
        return True
