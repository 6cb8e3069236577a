"""Tests the devices of the cluster for a client, and keeps which are sick.

Hosts test their devices and say which are suspect or have failed (`pw.devices.host.device_health`). What a
host says replaces what it said before. It is kept here while the host begins again as another incarnation,
which knows nothing of it: as soon as its island is formed, that one is tested. The resource manager
hears which devices have failed: it has a spare replace their host, or leaves them out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import ArgumentError, ErrorReport
from pw.core.events import DeviceEvent
from pw.core.ids import RESOURCES, Address, store_of
from pw.sched.control.clients import Client
from pw.sched.control.explain.inquiries import Inquiries, Inquiry
from pw.sched.control.sessions import ControlPart, handles_client, handles_host

ANSWER_S = 9.0
"""Seconds that hosts have to answer; they do so within `pw.devices.host.device_health.ANSWER_S`."""

HOSTS_KEPT = 1024
"""Number of hosts with sick devices that are kept; one more drops the oldest, which may be gone for good."""


@dataclass(eq=False)
class SickDevices(ControlPart):
    """The sick devices of all hosts."""

    inquiries: Inquiries
    island_status: Callable[[], tuple[msg.IslandInfo, ...]]
    waiting_hosts: Callable[[], tuple[msg.HostInfo, ...]]
    _states: dict[str, tuple[msg.SickDevice, ...]] = field(default_factory=dict, init=False)
    """Devices that are suspect or have failed, by host."""

    def of(self, hosts: tuple[msg.HostInfo, ...]) -> tuple[msg.HostInfo, ...]:
        """Return hosts with their sick devices."""
        return tuple(
            msgspec.structs.replace(host, sick=self._states[host.name])
            if host.name in self._states
            else host
            for host in hosts
        )

    def in_islands(self, islands: tuple[msg.IslandInfo, ...]) -> tuple[msg.IslandInfo, ...]:
        """Return islands whose hosts have their sick devices."""
        if not self._states:
            return islands
        return tuple(msgspec.structs.replace(one, hosts=self.of(one.hosts)) for one in islands)

    # --- tests --------------------------------------------------------------------------------------

    @handles_client(msg.TestDevices)
    def _test(self, client: Client, message: msg.TestDevices) -> None:
        refusal = self._refusal(client, message)
        if refusal is not None:
            self.sessions.tell(client, msg.RequestFailed(message.request, refusal))
            return
        self.inquiries.answer(client, message, self._inquire(message), ANSWER_S)

    def _refusal(self, client: Client, message: msg.TestDevices) -> ErrorReport | None:
        if not self.sessions.usage.rights.of(client.tenant).may_drain:
            return self.sessions.objection(client, "test devices", "tenants with `may_drain`")
        names = sorted(island.name for island in self.island_status())
        if message.island and message.island not in names:
            words = f"there is no island {message.island!r}; there are {', '.join(names)}"
            return ErrorReport.of(ArgumentError(words))
        return None

    def _inquire(self, message: msg.TestDevices) -> Inquiry:
        islands = [one for one in self.island_status() if message.island in ("", one.name)]
        ready = [one for one in islands if one.state == "ready"]
        hosts = [(island.name, host) for island in ready for host in island.hosts]
        answers = yield msg.HostTested, {store_of(host.name): msg.TestHost for _, host in hosts}
        rows = []
        for island, host in hosts:
            answer = answers.get(store_of(host.name))
            tests = () if answer is None else answer.devices
            missing = set(range(host.devices)) - {test.device for test in tests}
            words = "the host does not answer" if answer is None else "it is not open"
            late = (msg.DeviceTest(at, msg.DeviceOutcome.UNTESTED, words) for at in sorted(missing))
            rows += [msg.TestRow(island, host.name, test) for test in (*tests, *late)]
        waiting = [] if message.island else list(self.waiting_hosts())
        waiting += [host for one in islands if one not in ready for host in one.hosts]
        skipped = tuple(sorted({host.name for host in waiting}))
        return msg.DevicesTested(message.request, tuple(rows), skipped)

    # --- what hosts say -----------------------------------------------------------------------------

    @handles_host(msg.HostDevices)
    def _host_says(self, host: str, message: msg.HostDevices) -> None:
        former = {one.device: one for one in self._states.pop(host, ())}
        if message.sick:
            self._states[host] = message.sick
        if len(self._states) > HOSTS_KEPT:
            oldest = next(iter(self._states))
            del self._states[oldest]
            self._env.send(RESOURCES, msg.DevicesFailed(oldest, ()))
        now = {one.device: one for one in message.sick}
        for device, one in now.items():
            if device not in former or former[device].state is not one.state:
                self._publish(one.state, host, device, one.words)
        for device in former.keys() - now.keys():
            self._publish("passed", host, device, former[device].words)
        failed = _failed(message.sick)
        if failed or _failed(former.values()):
            self._env.send(RESOURCES, msg.DevicesFailed(host, failed))

    def _publish(self, what: str, host: str, device: int, words: str) -> None:
        level = "info" if what == "passed" else "warning"
        self._env.log(level, f"device {what}", host=host, device=device, reason=words)
        if self.sessions.events is not None:
            self.sessions.events.publish(DeviceEvent(str(what), host, device, words))

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        """Have hosts tested that had a sick device in an earlier epoch."""
        for host in message.hosts:
            if host in self._states:
                self._env.send(store_of(host), msg.TestHost(0, self._states[host]))


def _failed(sick: Iterable[msg.SickDevice]) -> tuple[msg.SickDevice, ...]:
    return tuple(one for one in sick if one.state is msg.SickState.FAILED)
