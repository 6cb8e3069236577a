"""A training loop goes on, with the same values, whatever happens to the processes under it.

The loop computes with integers and a collective, donates its state, feeds batches from numpy, keeps steps in
flight, and has one line about failures: the checkpoint. What it should compute is computed by numpy.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.core.messages import Status
from tests.stages.daemons import Program, send, start_module, until
from tests.stages.machines import run_inside

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

ROWS, COLUMNS = 4, 1000
PRIME = 8191
IN_FLIGHT, BETWEEN_CHECKPOINTS = 4, 5
BOUND_S = 60.0
PACE_S = 0.05
"""Between steps, which would else take the processors from processes that start."""


def status() -> Status:
    return current.runtime().ask.status(20.0)


def members(island: str = "island-0") -> dict[str, int]:
    """Hosts of an island that is ready, and their runtimes' process ids."""
    for each in status().islands:
        if each.name == island and each.state == "ready":
            return {host.name: host.pid for host in each.hosts}
    return {}


def waiting() -> dict[str, str]:
    return {host.name: host.state for host in status().other_hosts}


class Training:
    """A training loop in a thread of its own, until it is told to stop."""

    def __init__(
        self, island: str = "island-0", devices: int = 2, seed: int = 0, via: str = ""
    ) -> None:
        self.seed = seed
        self.probes: list[int] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        device_set = pw.make_virtual_device_set()
        self._mesh = pw.Mesh(device_set.add_slice(devices, island=island).devices, ("x",))
        self._via = self._mesh
        if via:  # batches take a way through this island
            self._via = pw.Mesh(device_set.add_slice(devices, island=via).devices, ("x",))
        self._thread = threading.Thread(target=self._guarded, name="training", daemon=True)
        self._thread.start()
        self.go_on()

    def batch(self, step: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng((self.seed, step)).integers(
            0, PRIME, (ROWS, COLUMNS), np.int32
        )

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  (the test raises it)
            self.error = error

    def _run(self) -> None:
        rows = P("x")

        @pw.jit(
            mesh=self._mesh, in_shardings=(rows, rows), out_shardings=(rows, P()), donate_argnums=0
        )
        def step(state: Any, batch: Any) -> Any:
            total = state.sum() % PRIME
            state = (state * 3 + batch + total) % PRIME
            return state, state.sum() % PRIME

        relay = pw.jit(
            lambda batch: batch + 1, mesh=self._via, in_shardings=rows, out_shardings=rows
        )

        @pw.program
        def whole(state: Any, batch: Any) -> Any:
            return step(state, relay(batch))

        state: Any = np.zeros((ROWS, COLUMNS), np.int32)
        state = pw.put(state, sharding=pw.NamedSharding(self._mesh, rows))
        in_flight: deque[Any] = deque()
        at = 0
        while not self._stop.wait(PACE_S) or in_flight:
            if not self._stop.is_set():
                state, probe = whole(state, self.batch(at))
                in_flight.append(probe)
                if at % BETWEEN_CHECKPOINTS == 0:
                    pw.checkpoint(state)
                at += 1
            if len(in_flight) > IN_FLIGHT or self._stop.is_set():
                self.probes.append(int(np.asarray(in_flight.popleft())))

    def expected(self, steps: int) -> list[int]:
        state, probes = np.zeros((ROWS, COLUMNS), np.int64), []
        for at in range(steps):
            state = (state * 3 + self.batch(at) + 1 + state.sum() % PRIME) % PRIME
            probes.append(int(state.sum() % PRIME))
        return probes

    def go_on(self, steps: int = 8) -> None:
        """Wait until so many steps more have been made."""
        before = len(self.probes)
        until(
            lambda: self.error is not None or len(self.probes) >= before + steps,
            f"{steps} steps after step {before}: {self.error}",
            BOUND_S,
        )
        assert self.error is None, self.error

    def give_up(self) -> None:
        """End the loop, whatever it has computed."""
        self._stop.set()
        self._thread.join(BOUND_S)

    def stop(self) -> None:
        """End the loop, and compare all that it has computed."""
        self._stop.set()
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        assert self.probes == self.expected(len(self.probes))


def train_until_told(island: str, via: str) -> None:
    """The main program of a client of its own (see `Elsewhere`)."""
    training = Training(island, 1, via=via)
    end = threading.Event()
    signal.signal(signal.SIGUSR1, lambda *_: end.set())
    while not end.is_set():
        training.go_on(1)
        print(f"step {len(training.probes)}", flush=True)
    training.stop()
    print("all as expected", flush=True)


class Elsewhere:
    """A training loop in another process: a client that others can disturb, or not."""

    def __init__(self, folder: Path, address: str, island: str, via: str) -> None:
        body = f"from tests.cli.test_survival import train_until_told as t; t({island!r}, {via!r})"
        self.program = Program(folder, ["-c", body], PW_ADDRESS=address)
        self.go_on()

    def go_on(self, steps: int = 8) -> None:
        before = self.program.out.count("\n")
        try:
            until(
                lambda: (
                    self.program.process.poll() is not None
                    or self.program.out.count("\n") >= before + steps
                ),
                f"{steps} steps after {before}",
                BOUND_S,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.program.err}\n{pw.why()}\n{status()}") from None
        assert self.program.process.poll() is None, self.program.err

    def stop(self) -> None:
        self.program.process.send_signal(signal.SIGUSR1)
        assert self.program.end(BOUND_S) == 0, self.program.err
        assert self.program.out.endswith("all as expected\n")


class Grown:
    """A cluster, and workers that have come to it since it was started."""

    def __init__(self, cluster: pw.LocalCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.programs: list[Program] = []
        self.trainings: list[Training] = []

    def host(self, name: str) -> Any:
        return next(host for host in self.cluster.hosts if host.name == name)

    def training(self, island: str = "island-0", devices: int = 2) -> Training:
        """Train as this process."""
        self.trainings.append(Training(island, devices))
        return self.trainings[-1]

    def join(self, name: str, *options: object) -> Program:
        """Start another worker."""
        arguments = ["--controller", self.cluster.address, "--name", name, "--log-level", "error"]
        worker = start_module("pw.cli.worker", *arguments, *options, folder=self.folder)
        self.programs.append(worker)
        return worker

    def train(self, island: str, via: str) -> Elsewhere:
        """Train as another client."""
        training = Elsewhere(self.folder, self.cluster.address, island, via)
        self.programs.append(training.program)
        return training

    def stop(self, name: str, number: signal.Signals) -> list[int]:
        """Send a signal to a host's supervisor and to its runtime."""
        pids = [self.host(name).pid, self.host(name).runtime_pid()]
        for pid in pids:
            send(pid, number)
        return pids


@pytest.fixture
def grown(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Grown]:
    with pw.LocalCluster(**request.param) as cluster:
        grown = Grown(cluster, tmp_path)
        try:
            yield grown
        finally:
            for training in grown.trainings:
                training.give_up()
            for program in grown.programs:
                program.kill()


def of(**shape: Any) -> pytest.MarkDecorator:
    """The cluster that a test wants."""
    return pytest.mark.parametrize("grown", [shape], indirect=True, ids=[""])


@of(hosts_per_island=2, spare_hosts=1)
def test_hosts_of_a_gang_are_killed_stopped_replaced_and_drained(grown: Grown) -> None:
    training = grown.training()
    first = members()
    assert set(first) == {"island-0-host-0", "island-0-host-1"}
    assert waiting() == {"spare-0": "spare"}

    # The runtime crashes: its supervisor has another one.
    send(first["island-0-host-1"], signal.SIGKILL)
    training.go_on()

    # The runtime hangs: its supervisor kills it.
    (stuck,) = [pid for node, pid in members().items() if node == "island-0-host-0"]
    send(stuck, signal.SIGSTOP)
    until(lambda: stuck not in members().values() and members(), "another runtime", BOUND_S)
    training.go_on()

    # The whole machine hangs: a spare has its place when it wakes up.
    until(lambda: waiting() and members(), "a spare", BOUND_S)
    (spare,) = waiting()
    hanging = next(name for name in members() if name != spare)
    grown.stop(hanging, signal.SIGSTOP)
    until(lambda: spare in members(), "the spare has the place", BOUND_S)
    training.go_on()
    grown.stop(hanging, signal.SIGCONT)
    until(lambda: waiting() == {hanging: "spare"}, "it waits as a spare", BOUND_S)
    training.go_on()

    # The whole machine is gone: the one that hung takes its place.
    grown.host(spare).kill()
    until(lambda: hanging in members(), "the other one has the place", BOUND_S)
    training.go_on()

    # A host is drained, and the new one takes over.
    grown.join("new", "--spare")
    until(lambda: "new" in waiting(), "a new spare", BOUND_S)
    drained = start_module(
        "pw.cli.main", "drain", hanging, "--address", grown.cluster.address, folder=grown.folder
    )
    assert drained.end(BOUND_S) == 0, drained.err
    assert drained.out == f"{hanging} is drained, and its worker ends\n"
    assert "new" in members()
    assert hanging not in waiting()
    until(lambda: grown.host(hanging).exit_code() is not None, "the worker ends", BOUND_S)
    assert grown.host(hanging).exit_code() == 0
    training.go_on()
    training.stop()


@of()
def test_a_checkpoint_is_answered_when_the_supervisor_has_it(grown: Grown) -> None:
    """Also when it is stopped meanwhile, and however many come one after the other."""
    (host,) = grown.cluster.hosts
    step = pw.jit(lambda x: x + 1, donate_argnums=0)
    state = step(np.zeros(COLUMNS, np.int32))
    pw.checkpoint(state).result(BOUND_S)
    send(host.pid, signal.SIGSTOP)
    try:
        state = step(state)
        saving = pw.checkpoint(state)
        other = step(np.full(COLUMNS, 5, np.int32))
        np.testing.assert_array_equal(other, np.full(COLUMNS, 6)), "nothing else waits for it"
        assert not saving.done()
    finally:
        send(host.pid, signal.SIGCONT)
    saving.result(BOUND_S)
    for _ in range(20):
        state = step(state)
        pw.checkpoint(state).result(BOUND_S)
    runtime = host.runtime_pid()
    assert runtime is not None
    send(runtime, signal.SIGKILL)
    np.testing.assert_array_equal(state, np.full(COLUMNS, 22))


@pytest.mark.long
@of(islands=2)
def test_islands_come_and_go_while_others_work(grown: Grown) -> None:
    training = grown.training("island-0", 1)
    worker = grown.join("far", "--island", "west")
    until(lambda: members("west"), "a new island", BOUND_S)
    other = grown.train("island-1", via="west")

    # Without a spare an island waits, and the first host that comes takes the place.
    grown.host("island-1-host-0").kill()
    until(lambda: not members("island-1"), "the loss", BOUND_S)
    training.go_on()
    grown.join("replacement", "--island", "island-1")
    other.go_on()
    other.stop()

    # An island is left by all its hosts.
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end(BOUND_S) == 0
    until(lambda: not members("west"), "the island is gone", BOUND_S)
    training.go_on()
    training.stop()


@of(hosts_per_island=2)
def test_a_client_that_is_killed_leaves_nothing_and_disturbs_nobody(
    grown: Grown, tmp_path: Path
) -> None:
    training = grown.training()
    body = """
import signal, numpy as np, pw
from jax.sharding import PartitionSpec as P
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(2).devices, ("x",))
rows = pw.NamedSharding(mesh, P("x"))
kept = pw.put(np.ones(1 << 20, np.int8), sharding=rows)
pw.block_until_ready(kept)
large = [pw.put(np.ones(1 << 25, np.int8), sharding=rows) for _ in range(4)]
print("uploading", flush=True)
signal.pause()
"""
    client = Program(tmp_path, ["-c", body], PW_ADDRESS=grown.cluster.address)
    grown.programs.append(client)
    client.until_says("uploading")
    assert len(status().clients) == 2
    client.process.kill()
    client.end()
    until(lambda: len(status().clients) == 1, "the client is given up", BOUND_S)
    until(lambda: large_left() == 0, "its arrays and uploads are gone", BOUND_S)
    training.go_on()
    training.stop()
    client.until_alone()


def large_left() -> int:
    """Bytes of arrays on hosts, in units of more than the training loop has, and uploads on their way."""
    return sum(
        counters["live_bytes"] // (1 << 19) + counters["uploads_arriving"]
        for node, counters in pw.stats().items()
        if "host" in node
    )


@pytest.mark.long
def test_the_example_reaches_the_same_losses(tmp_path: Path) -> None:
    """A pipeline over two islands, with a spare; see the example for what is killed when."""
    example = start_module(
        "examples.train_through_failures",
        *("--steps", 20, "--kills", 1, "--seed", 1),
        folder=tmp_path,
    )
    try:
        assert example.end() == 0, example.out + example.err
        assert ": recovered in" in example.out
        assert "the same, bit for bit" in example.out
        example.until_alone()
    finally:
        example.kill()


@pytest.mark.long
def test_packets_that_get_lost_between_hosts_cost_time_only(tmp_path: Path) -> None:
    """One way between two hosts, and from a host to the controller, in network namespaces."""
    said = run_inside("tests.cli.partition", folder=tmp_path)
    assert said.endswith("all as expected\n")
