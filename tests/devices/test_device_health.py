"""Sick devices: how a host finds them, what the controller says of them, and the bits that a test expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.client.looking.device_tests import DeviceTests
from pw.core import messages as msg
from pw.core.actors.actor import Actor
from pw.core.errors import AccessRefused, ArgumentError, ComputationFailed, HostLost
from pw.core.events import DeviceEvent, Event
from pw.core.ids import CONTROL, store_of
from pw.core.messages import DeviceOutcome, DeviceTest, SickState
from pw.core.rights import Rights, TenantRights
from pw.devices.host import device_health
from pw.devices.host.device_health import AGAIN_S, ANSWER_S, BUSY_S, DeviceHealth
from pw.devices.jax import device_tests, values
from pw.sched.control import device_health as control_health
from pw.testing import InProcessCluster
from tests.stages.actors import World
from tests.stages.daemons import until
from tests.stages.fake_devices import FakeBackend
from tests.stages.scripted import join
from tests.stages.stage import BOUND_S, mesh_on

STORE = store_of("h")
OK, FAILED, UNTESTED = DeviceOutcome.OK, DeviceOutcome.FAILED, DeviceOutcome.UNTESTED

# --- one host ----------------------------------------------------------------------------------------


class _Store(Actor):
    """A store with nothing but its devices."""

    def __init__(self, env: Any, backend: FakeBackend, every_s: float) -> None:
        super().__init__(env)
        self.health = DeviceHealth(env, backend, every_s)
        self.compose(self.health)


class Bench:
    """A host of two devices."""

    def __init__(self, every_s: float = 0.0) -> None:
        self.world = World()
        self.backend = FakeBackend(self.world, "h")
        store = self.world.add(STORE, lambda env: _Store(env, self.backend, every_s))
        self.health: DeviceHealth = store.health
        self.health.joins(2)

    def ask(self, number: int, *sick: msg.SickDevice) -> None:
        self.world.mailboxes["h"].append((CONTROL, STORE, msg.TestHost(number, sick)))
        self.world.settle()

    def suspect(self, *devices: int) -> None:
        self.backend.suspect(devices, "INTERNAL")
        self.world.settle()

    def answers(self) -> list[tuple[int, list[DeviceOutcome]]]:
        answers = self.world.to(CONTROL, msg.HostTested)
        return [(one.request, [test.outcome for test in one.devices]) for one in answers]

    def said(self) -> list[dict[int, SickState]]:
        said = self.world.to(CONTROL, msg.HostDevices)
        return [{sick.device: sick.state for sick in one.sick} for one in said]

    @property
    def tests(self) -> int:
        return self.world.counters["device_tests"]


def test_a_host_that_is_asked_tests_its_devices() -> None:
    bench = Bench()
    bench.backend.outcomes = {1: FAILED}
    bench.ask(7)
    assert bench.answers() == [(7, [OK, FAILED])]
    assert bench.said() == [{1: SickState.FAILED}]
    assert bench.world.counters["device_tests_failed"] == 1
    bench.backend.outcomes = {}
    bench.ask(8)
    assert bench.answers()[1:] == [(8, [OK, OK])]
    assert bench.said()[1:] == [{}], "it is well again"
    bench.ask(9)
    assert len(bench.said()) == 2, "nothing has changed"


def test_only_the_controller_may_ask() -> None:
    bench = Bench()
    bench.world.mailboxes["h"].append((store_of("other"), STORE, msg.TestHost(7)))
    bench.world.settle()
    assert not bench.tests
    assert bench.world.counters["messages_refused"] == 1


def test_a_device_that_an_error_names_is_suspect_until_its_test() -> None:
    bench = Bench()
    bench.backend.outcomes = {0: None, 1: FAILED}
    bench.suspect(0)
    suspect, failed = {0: SickState.SUSPECT}, {1: SickState.FAILED}
    assert bench.said() == [suspect, suspect | failed], "all devices of the host are tested"
    ((ordinal, done),) = bench.backend.held
    done(DeviceTest(ordinal, OK))
    bench.world.settle()
    assert bench.said()[2:] == [failed]


def test_errors_have_devices_tested_once_a_minute_at_most() -> None:
    bench = Bench()
    for _ in range(20):
        bench.suspect(0)
    assert bench.tests == 1
    assert bench.said()[-1] == {0: SickState.SUSPECT}
    bench.world.wait(AGAIN_S)
    assert bench.tests == 2
    assert bench.said()[-1] == {}
    bench.world.wait(10 * AGAIN_S)
    assert bench.tests == 2


def test_a_test_without_an_end_changes_nothing_and_is_repeated() -> None:
    bench = Bench()
    bench.backend.outcomes = {0: UNTESTED}
    bench.suspect(0)
    assert bench.said() == [{0: SickState.SUSPECT}]
    bench.backend.outcomes = {}
    bench.world.wait(AGAIN_S)
    assert bench.said()[1:] == [{}]


def test_who_asks_does_not_wait_for_a_device_that_hangs() -> None:
    bench = Bench()
    bench.backend.outcomes = {1: None}
    bench.ask(7)
    bench.ask(8)
    assert not bench.answers()
    bench.world.wait(ANSWER_S)
    assert bench.answers() == [(7, [OK, UNTESTED]), (8, [OK, UNTESTED])]
    ((ordinal, done),) = bench.backend.held
    done(DeviceTest(ordinal, FAILED, "late"))
    bench.world.settle()
    assert bench.said() == [{1: SickState.FAILED}]
    assert len(bench.answers()) == 2


def test_a_host_that_begins_again_hears_what_was_sick() -> None:
    bench = Bench()
    bench.backend.outcomes = {1: UNTESTED}
    sick = [msg.SickDevice(at, SickState.FAILED, "wrong bits") for at in (0, 1)]
    bench.ask(0, *sick)
    assert bench.answers() == [], "the controller wants no answer"
    assert bench.said() == [{1: SickState.FAILED}], "one is well, of the other nothing is new"
    bench.health.announce()
    assert bench.said()[1:] == [{1: SickState.FAILED}]


def test_an_idle_host_tests_its_devices_now_and_then() -> None:
    bench = Bench(every_s=3600.0)
    bench.world.wait(3600.0)
    assert bench.tests == 1
    bench.health.is_busy = lambda: True
    bench.world.wait(3600.0)
    bench.world.wait(BUSY_S)
    assert bench.tests == 1
    bench.health.is_busy = lambda: False
    bench.world.wait(BUSY_S)
    assert bench.tests == 2


# --- the controller ----------------------------------------------------------------------------------


def test_a_tenant_needs_the_right_to_have_devices_tested() -> None:
    world = World(1)
    named = {"red": Rights(may_drain=True), "blue": Rights()}
    world.controller(
        rights=TenantRights(named=named), island_status=lambda: world.resources.status({})
    )
    world.tenants = {"r": "red", "b": "blue"}
    world.host("h0", "i", 1, 2)
    world.settle()
    red, blue = join(world, "r"), join(world, "b")
    for client in (red, blue):
        client.tell(msg.TestDevices(5))
        world.settle()
    (answer,) = red.of(msg.DevicesTested)
    assert [(row.island, row.host, row.test.outcome) for row in answer.rows] == [
        ("i", "h0", OK),
        ("i", "h0", OK),
    ]
    (refused,) = blue.of(msg.RequestFailed)
    assert refused.error.kind == AccessRefused.__name__
    assert "may_drain" in refused.error.message


def test_a_host_with_a_failed_device_leaves_if_a_spare_can_take_its_place() -> None:
    for has_spare in (False, True):
        world = World(1)
        world.controller(island_status=lambda world=world: world.resources.status({}))  # type: ignore[misc]
        hosts = [world.host("h0", "i", 1, 2)]
        if has_spare:
            hosts.append(world.host("s0", "i", 0, 2, spare=True))
        world.settle()
        world.backends["h0"].outcomes = {1: FAILED}
        world.backends["h0"].suspect([1], "INTERNAL")
        world.settle()
        inventory = world.resources.inventory
        assert ("h0" in inventory.draining) is has_spare
        events = [event for _, event in world.logged]
        assert ("host is not replaced" in events) is not has_spare
        assert ("device is left out" in events) is not has_spare


# --- the bits ----------------------------------------------------------------------------------------


def on_paper(size: device_tests.TestSize) -> tuple[str, str, str]:
    """Digests of the test's results as numpy computes them; all integers are exact in float32."""
    one, other, words = device_tests.operands(size)
    result = one.astype(np.float32) @ other.astype(np.float32)
    for _ in range(size.products - 1):
        other = result - 8 * np.floor(result / 8) - 4
        result = one.astype(np.float32) @ other
    assert abs(result).max() < 1 << 24
    sums = words.sum(axis=0, dtype=np.uint32)
    digests = [device_tests.digest(one) for one in (result, sums, words)]
    return digests[0], digests[1], digests[2]


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(device_tests.HOST, id="host"),
        pytest.param(device_tests.ACCELERATOR, id="accelerator", marks=pytest.mark.long),
    ],
)
def test_the_bits_are_those_of_numpy(size: device_tests.TestSize) -> None:
    assert on_paper(size) == device_tests.DIGESTS[size]


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("INTERNAL: Failed to launch CUDA kernel", "INTERNAL"),
        ("DATA_LOSS: HBM is corrupt", "DATA_LOSS"),
        (
            "UNKNOWN: CUDA_ERROR_ECC_UNCORRECTABLE: uncorrectable ECC error encountered",
            "uncorrectable",
        ),
        ("INVALID_ARGUMENT: a shape", ""),
        ("RESOURCE_EXHAUSTED: Out of memory", ""),
        ("INTERNAL: CpuCallback error calling callback: ValueError", ""),
        ("INTERNAL: NCCL operation failed: remote process exited", ""),
    ],
)
def test_some_errors_make_devices_suspect(words: str, word: str) -> None:
    assert values.suspicion(jax.errors.JaxRuntimeError(words)) == word
    assert not values.suspicion(ValueError(words)), "it is an error of a client's function"


# --- a cluster in this process -----------------------------------------------------------------------


class Kept:
    """Keeps the events of devices."""

    endpoint = ""

    def __init__(self) -> None:
        self.events: list[DeviceEvent] = []

    def publish(self, event: Event) -> None:
        if isinstance(event, DeviceEvent):
            self.events.append(event)


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def cluster(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessCluster]:
    monkeypatch.setattr(device_health, "ANSWER_S", BOUND_S)  # a busy machine compiles slowly
    monkeypatch.setattr(control_health, "ANSWER_S", BOUND_S)
    with InProcessCluster(islands=2, devices_per_island=2, events=kept) as cluster:
        yield cluster


def outcomes(island: str | None = None) -> DeviceTests:
    """Test devices, however long it takes."""
    return pw.test_devices(island, timeout_s=BOUND_S)


@pytest.fixture
def flip(monkeypatch: pytest.MonkeyPatch) -> Callable[[jax.Device | None], None]:
    """Return a function that has one device compute a wrong bit in the last results of each test."""
    sick: list[jax.Device | None] = [None]
    bits_of = device_tests.bits_of

    def flipped(array: jax.Array) -> np.ndarray[Any, Any]:
        bits = bits_of(array)
        if array.devices() == {sick[0]} and array.dtype == jnp.uint32:
            bits = bits.copy()
            bits.flat[-1] ^= 1 << 17
        return bits

    monkeypatch.setattr(device_tests, "bits_of", flipped)
    return lambda device: sick.__setitem__(0, device)


def test_one_wrong_bit_fails_the_test_of_its_device(
    cluster: InProcessCluster, kept: Kept, flip: Callable[[jax.Device | None], None]
) -> None:
    tests = outcomes()
    assert [row.test.outcome for row in tests.rows] == [OK] * 4
    assert all(row.test.flop_per_s > 1e6 for row in tests.rows)
    assert all(
        min(row.test.read_bytes_per_s, row.test.copy_bytes_per_s) > 1e6 for row in tests.rows
    )
    assert tests.head == "4 of 4 devices are ok"

    flip(jax.devices()[3])
    tests = outcomes("island-1")
    (row,) = tests.failed
    assert (row.island, row.host, row.test.device) == ("island-1", "host-1", 1)
    assert row.test.words == "the result of the sum has wrong bits"
    assert len(tests.rows) == 2
    assert "1 failed" in str(tests)
    until(lambda: kept.events, "the event")
    assert [(e.what, e.host, e.device) for e in kept.events] == [("failed", "host-1", 1)]
    (sick,) = [host for host in pw.status().hosts if host.sick]
    assert (sick.name, sick.sick[0].device, sick.sick[0].state) == ("host-1", 1, SickState.FAILED)
    assert "1 failed, left out: the result of the sum has wrong bits" in str(pw.status())

    flip(None)
    assert not outcomes().failed
    until(lambda: len(kept.events) > 1, "another event")
    assert [event.what for event in kept.events] == ["failed", "passed"]
    assert not any(host.sick for host in pw.status().hosts)
    assert "sick devices" not in str(pw.status())


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("INTERNAL: uncorrectable ECC error encountered", FAILED),
        ("RESOURCE_EXHAUSTED: no room", UNTESTED),
        ("INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory", UNTESTED),
    ],
)
def test_a_device_that_raises_has_failed_unless_it_is_full(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch, words: str, outcome: DeviceOutcome
) -> None:
    def raises(array: jax.Array) -> np.ndarray[Any, Any]:
        raise jax.errors.JaxRuntimeError(words)

    monkeypatch.setattr(device_tests, "bits_of", raises)
    tests = outcomes("island-0")
    assert [row.test.outcome for row in tests.rows] == [outcome] * 2
    assert len(tests.failed) + len(tests.untested) == 2
    assert bool([host for host in pw.status().hosts if host.sick]) is (outcome is FAILED)


def test_there_must_be_such_an_island(cluster: InProcessCluster) -> None:
    with pytest.raises(ArgumentError, match="island-0, island-1"):
        outcomes("west")


def test_an_error_of_a_computation_has_its_device_tested(
    cluster: InProcessCluster,
    kept: Kept,
    flip: Callable[[jax.Device | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(*arrays: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    monkeypatch.setattr(device_health, "AGAIN_S", 0.0)  # the second error comes at once
    double = pw.jit(lambda x: 2 * x, mesh=mesh_on(0, 1))
    x = np.arange(4096, dtype=np.float32)
    double(x).block_until_ready()
    (executables,) = [
        host.backend.enqueuer.executables for host in cluster.hosts if host.name == "host-0"
    ]
    for key, executable in list(executables.items()):
        executables[key] = executable._replace(call=crash)
    with pytest.raises(ComputationFailed, match="injected"):
        double(x).block_until_ready()
    until(lambda: len(kept.events) == 2, "the outcome")
    assert [(e.what, e.host, e.device) for e in kept.events] == [
        ("suspect", "host-0", 0),
        ("passed", "host-0", 0),
    ]
    assert kept.events[0].reason == "an error of XLA names it (INTERNAL)", "nothing of the client"
    assert not outcomes("island-0").failed  # after the end of the test that runs
    flip(jax.devices()[0])
    with pytest.raises((ComputationFailed, HostLost)):  # its island may have left its epoch before
        double(x).block_until_ready()
    until(lambda: len(kept.events) == 4, "the outcome")
    assert [event.what for event in kept.events[2:]] == ["suspect", "failed"]
