"""Checks what the controller publishes: each beginning has one end, and nothing comes after it."""

from __future__ import annotations

from collections.abc import Callable

from pw.core.events import (
    ClientEvent,
    CountersEvent,
    DeviceEvent,
    EpochEvent,
    Event,
    HostEvent,
    RecoveryEvent,
    RunEvent,
    TransferEvent,
)
from pw.core.ids import CONTROLLER
from pw.testing.sim.world import Violation, World


class EventLog:
    """A sink that follows islands, hosts, clients, runs and recoveries of one controller."""

    endpoint = ""

    def __init__(self, world: World, in_flight: Callable[[], set[str]]) -> None:
        self._world = world
        self._in_flight = in_flight
        self._ready: dict[str, int] = {}
        """Islands that are ready, and the last epoch of each island."""
        self._hosts: set[str] = set()
        self._sick: set[tuple[str, int]] = set()
        """Devices that are suspect or have failed."""
        self._clients: set[int] = set()
        self._runs: dict[str, int] = {}
        """Attempts that have begun, and their clients."""
        self._recovering: set[int] = set()
        self._epochs: dict[str, int] = {}
        self._takes: dict[type[Event], Callable[..., str]] = {
            EpochEvent: self._island,
            HostEvent: self._host,
            DeviceEvent: self._device,
            ClientEvent: self._client,
            RunEvent: self._run,
            RecoveryEvent: self._recovery,
            TransferEvent: self._transfer,
            CountersEvent: self._counters,
        }

    def publish(self, event: Event) -> None:
        """Check an event against those before it."""
        self._world.checked["events"] += 1
        wrong = self._takes[type(event)](event)
        if wrong:
            raise Violation("events", f"{event.topic} {event.what}: {wrong} ({event})")

    def check_end(self, clients: set[int]) -> None:
        """Raise Violation if a client that has left is still there, or something of it."""
        left = self._clients - clients
        if left or self._runs or self._recovering - clients:
            raise Violation(
                "events",
                f"no end was published of clients {left}, runs {self._runs}, recoveries {self._recovering}",
            )

    def _island(self, event: EpochEvent) -> str:
        if event.what == "ready":
            if event.island in self._ready:
                return "it was ready before"
            if event.epoch <= self._epochs.get(event.island, 0):
                return "its epoch is not a new one"
            self._ready[event.island] = self._epochs[event.island] = event.epoch
            return "" if event.hosts else "it has no hosts"
        epoch = self._ready.pop(event.island, 0)
        return "" if epoch == event.epoch and event.reason else "another epoch was ready"

    def _host(self, event: HostEvent) -> str:
        if event.what == "registered":
            is_new = event.host not in self._hosts
            self._hosts.add(event.host)
            return "" if is_new else "it was here before"
        if event.what == "draining":
            return ""
        is_known = event.host in self._hosts
        if event.what == "gone":
            self._hosts.discard(event.host)
        return "" if is_known else "it was not here"

    def _device(self, event: DeviceEvent) -> str:
        device = (event.host, event.device)
        if event.what != "passed":
            self._sick.add(device)
            return "" if event.reason else "there is no reason"
        was_sick = device in self._sick
        self._sick.discard(device)
        return "" if was_sick else "it was well before"

    def _client(self, event: ClientEvent) -> str:
        if event.what == "attached":
            is_new = event.client not in self._clients
            self._clients.add(event.client)
            return "" if is_new else "it was attached before"
        is_known = event.client in self._clients
        self._clients.discard(event.client)
        self._runs = {run: client for run, client in self._runs.items() if client != event.client}
        if event.client in self._recovering:
            return "its recovery has not ended"
        return "" if is_known else "it was not attached"

    def _run(self, event: RunEvent) -> str:
        if event.client not in self._clients:
            return "its client is not attached"
        if event.what == "began":
            is_new = event.attempt not in self._runs
            self._runs[event.attempt] = event.client
            return "" if is_new else "it had begun"
        if event.what == "refused":
            return "" if event.error else "there is no reason"
        if (event.what == "ended") is bool(event.error):
            return "its error does not fit"
        return "" if self._runs.pop(event.attempt, 0) == event.client else "it had not begun"

    def _recovery(self, event: RecoveryEvent) -> str:
        if event.client not in self._clients:
            return "its client is not attached"
        is_open = event.client in self._recovering
        if event.what == "began":
            self._recovering.add(event.client)
            return "it had begun" if is_open else ""
        self._recovering.discard(event.client)
        return "" if is_open else "it had not begun"

    def _counters(self, event: CountersEvent) -> str:
        """Once a second, compare the runs that have no end with those that the controller has in flight."""
        if event.process != CONTROLLER or (runs := self._in_flight()) == self._runs.keys():
            return ""
        return f"in flight are {sorted(runs)}, published are {sorted(self._runs)}"

    def _transfer(self, event: TransferEvent) -> str:
        if event.bytes < 0 or (event.seconds is not None and event.seconds < 0):
            return "it is less than nothing"
        return "" if event.destinations and event.sources else "it has no ends"
