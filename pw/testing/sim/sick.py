"""Devices that fall ill, and what hosts and the controller say of them.

| monitor | promise |
|---|---|
| sick | a device that is said to have failed is sick, and one that passes a test is well |
| left out | no computation runs on a device that its island goes on without |
| sick in the end | the controller says of each host what the last test there has shown; no device is suspect |

A sick device has wrong bits in tests, and some of its computations fail with an error that names it. Errors
also name devices that are well. Users have all devices tested now and then, and some sick devices are
replaced. A slice that has a device that failed gets another one, or is refused. What computations return is
never wrong here: nothing could find out which results were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

from pw.client.session.thread_messages import Ask
from pw.core import messages as msg
from pw.core.errors import Error
from pw.core.ids import Address, client_of
from pw.testing.sim.world import Violation, World

ERRS = 0.2
"""Share of the computations on a sick device that fail."""
UNTESTED = 0.1
"""Share of tests that come to no end, while faults happen."""
ROUND_S = 60.0
"""Seconds in which a test of a host ends, and its answer arrives."""
WORD = "INTERNAL"

Device = tuple[str, int]
"""Name of a host, and ordinal of a device there."""


class Sickness:
    """The sick devices of a world. Nothing falls ill but in profiles with `sick`."""

    def __init__(self, world: World, hosts: Callable[[], list[Any]]) -> None:
        self._world = world
        self._hosts = hosts
        self._random = world.streams("sick")
        self._since_s: dict[Device, float] = {}
        """Time at which each sick device fell ill, in seconds of the world."""
        self.was_sick: set[Device] = set()
        self.left_out: dict[tuple[str, int], set[int]] = {}
        """Devices that an island goes on without, by host and epoch."""

    # --- illness ------------------------------------------------------------------------------------

    def fall_ill(self, random: Random) -> None:
        """A device falls ill, is replaced, or is accused without being sick."""
        hosts = [host for host in self._hosts() if host.node is not None]
        if not hosts:
            return
        host = random.choice(hosts)
        device = (host.name, random.randrange(host.devices))
        draw = random.random()
        if draw < 0.3 and self._since_s:
            device = random.choice(sorted(self._since_s))
            del self._since_s[device]
            self._note("device replaced", device)
        elif draw < 0.8:
            self._since_s.setdefault(device, self._world.now_s)
            self.was_sick.add(device)
            self._note("device falls ill", device)
        if draw > 0.5 and host.node is not None and not host.node.paused:
            self._note("device accused", device)
            self._accuse(host.backend, device)

    def _note(self, what: str, device: Device) -> None:
        self._world.ledger.injected[what] += 1
        self._world.trace.add((self._world.now_s, "FAULT", None, f"{what}: {device}"))

    def _accuse(self, backend: Any, device: Device) -> None:
        if backend.host == device[0]:
            backend.answer(lambda: backend.suspect([device[1]], WORD))

    def sick_on(self, layout: Any) -> Iterator[Device]:
        """Yield the sick devices that a computation runs on."""
        for place in layout.outputs:
            for host, shards in place.by_host.items():
                for ordinal, _ in shards:
                    if (host, ordinal) in self._since_s:
                        yield host, ordinal

    def errs(self, layout: Any, backends: list[Any]) -> bool:
        """Whether a computation fails because of a sick device; if so, that one is named."""
        if not self._since_s or self._world.calm:
            return False
        device = next(self.sick_on(layout), None)
        if device is None or self._random.random() >= ERRS:
            return False
        for backend in backends:
            self._accuse(backend, device)
        return True

    def is_well(self, device: Device, since_s: float) -> bool:
        """Whether a device has not been sick all the time since a moment."""
        return self._since_s.get(device, self._world.now_s) > since_s

    def check_left_out(self, layout: Any, epoch: int) -> None:
        """Raise Violation if a computation of an epoch runs on a device that is left out."""
        if not self.left_out:
            return
        for place in layout.outputs:
            for host, shards in place.by_host.items():
                left_out = self.left_out.get((host, epoch), ())
                self._world.checked["left out"] += bool(left_out)
                for ordinal, _ in shards:
                    if ordinal in left_out:
                        words = (
                            f"a computation runs on device {ordinal} of {host}, which is left out"
                        )
                        raise Violation("left out", words)

    # --- tests --------------------------------------------------------------------------------------

    def outcome(self, host: str, ordinal: int, random: Random) -> msg.DeviceTest:
        """Return the outcome of a test that ends now."""
        self._world.checked["device tests"] += 1
        if not self._world.calm and random.random() < UNTESTED:
            return msg.DeviceTest(ordinal, msg.DeviceOutcome.UNTESTED, "injected")
        if (host, ordinal) in self._since_s:
            return msg.DeviceTest(ordinal, msg.DeviceOutcome.FAILED, "wrong bits")
        return msg.DeviceTest(ordinal, msg.DeviceOutcome.OK)


def test_devices(user: Any) -> None:
    """Have a user ask for the test of all devices, and check the answer."""
    world, sickness, asked_s = user.world, user.cluster.sickness, user.world.now_s

    def answered(result: Any, error: BaseException | None) -> None:
        if error is not None:
            if not isinstance(error, Error):
                raise Violation("errors are typed", f"{user.name}: {error!r}")
            return
        for row in result.rows:
            device = (row.host, row.test.device)
            world.checked["sick"] += 1
            if row.test.outcome is msg.DeviceOutcome.FAILED and device not in sickness.was_sick:
                raise Violation("sick", f"{device} is well, and has failed")
            if row.test.outcome is msg.DeviceOutcome.OK and not sickness.is_well(
                device, asked_s - ROUND_S
            ):
                raise Violation("sick", f"{device} has passed, and is sick")

    promise = user._promise("the test of devices", answered)
    user._post(Ask(lambda request: msg.TestDevices(request), promise))


class SickMonitor:
    """Compares what hosts and the controller say with what tests have shown."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._shown: dict[tuple[str, int], dict[int, msg.DeviceOutcome]] = {}
        """DeviceOutcome of the last test of each device that had an end, by host and incarnation; UNTESTED if
        none had."""
        self._had_failed: set[Device] = set()
        """Devices whose last test that had an end failed, in any incarnation."""
        if not world.profile.sick:
            return
        cluster.on_start["host"].append(self._watch_tests)
        world.watch_sent(msg.HostDevices, self._says)
        self._failed: dict[str, set[int]] = {}
        """Devices that have failed, by host, as the resource manager knows it."""
        self._resources: Any = None
        self._bound: set[int] = set()
        """Slices that had devices once."""
        world.watch_handled(msg.DevicesFailed, self._failing)
        world.watch_sent(msg.IslandFormed, self._formed)
        world.watch_sent(msg.SliceBound, self._has_devices)
        world.watch_sent(msg.SliceRefused, self._refused)

    def _watch_tests(self, host: Any) -> None:
        shown = self._shown[host.name, host.incarnation] = {}
        test = host.backend.test

        def ended(done: Callable[[msg.DeviceTest], None], outcome: msg.DeviceTest) -> None:
            device = (host.name, outcome.device)
            if outcome.outcome is msg.DeviceOutcome.UNTESTED:
                shown.setdefault(outcome.device, outcome.outcome)
            else:
                shown[outcome.device] = outcome.outcome
                self._had_failed.discard(device)
            if outcome.outcome is msg.DeviceOutcome.FAILED:
                self._had_failed.add(device)
            done(outcome)

        host.backend.test = lambda ordinal, done: test(ordinal, partial(ended, done))

    def _says(self, sender: Address, to: Address, message: msg.HostDevices) -> None:
        for one in message.sick:
            self._world.checked["sick"] += 1
            device = (sender.node, one.device)
            is_wrong = device not in self._cluster.sickness.was_sick
            if one.state is msg.SickState.FAILED and is_wrong:
                raise Violation("sick", f"{device} is well, and its host says that it has failed")

    # --- devices that are left out ------------------------------------------------------------------

    def _failing(
        self, sender: Address, to: Address, message: msg.DevicesFailed
    ) -> Callable[[], None]:
        """A host with a failed device leaves for a spare, or its island goes on without the device."""
        self._world.ledger.note("device left out", message.node)
        self._look()
        inventory, node = self._cluster.resources.inventory, message.node
        failed = self._failed[node] = {one.device for one in message.devices}

        def after() -> None:
            island = inventory.island_of(node)
            if node in inventory.draining:
                self._world.ledger.note("drain", node)
            elif (
                island is not None and island.state == "ready" and not self._is_run_on(island, node)
            ):
                self._cluster.sickness.left_out[node, island.epoch] = failed

        return after

    def _is_run_on(self, island: Any, node: str) -> bool:
        """Whether a launch of a client that has left is in flight on a host: it may still begin."""
        scheduler = self._cluster.schedulers[island.name]
        return any(
            node in task.hosts and client_of(task.here.run) not in scheduler.queues.clients
            for task in scheduler.in_flight.launches.values()
        )

    def _formed(self, sender: Address, to: Address, message: msg.IslandFormed) -> None:
        self._look()
        for host in message.hosts:
            failed = self._failed.get(host, set())
            self._cluster.sickness.left_out[host, message.epoch] = failed

    def _look(self) -> None:
        """Another resource manager knows of no device that has failed."""
        if self._resources is not self._cluster.resources:
            self._resources = self._cluster.resources
            self._failed = {}

    def _has_devices(self, sender: Address, to: Address, message: msg.SliceBound) -> None:
        self._bound.add(message.slice)

    def _refused(self, sender: Address, to: Address, message: msg.SliceRefused) -> None:
        if message.slice in self._bound:
            self._world.ledger.injected["slice without a device"] += 1
            self._cluster.given_up.add(message.slice)

    def check_end(self) -> None:
        """Raise Violation if the controller does not say what the last tests have shown."""
        if not self._world.profile.sick:
            return
        hosts = [host.name for host in self._cluster.members()]
        infos = [one for island in self._cluster.status() for one in island.hosts]
        infos = list(self._cluster.controller.sick.of(tuple(infos)))
        incarnations = {host.name: host.incarnation for host in self._cluster.hosts}
        for info in (info for info in infos if info.name in hosts):
            self._world.checked["sick in the end"] += 1
            shown = self._shown[info.name, incarnations[info.name]]
            failed = {at for at, outcome in shown.items() if outcome is msg.DeviceOutcome.FAILED}
            untested = {
                at for at, outcome in shown.items() if outcome is msg.DeviceOutcome.UNTESTED
            }
            says = {one.device: one.state for one in info.sick}
            # An earlier incarnation knew it, and may have been lost before a new controller heard of it.
            failed |= {at for at in untested & set(says) if (info.name, at) in self._had_failed}
            if says != dict.fromkeys(failed, msg.SickState.FAILED):
                words = f"of {info.name} the controller says {says}, and {failed} have failed"
                raise Violation("sick in the end", words)
