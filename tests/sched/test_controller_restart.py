"""The controller is started again: hosts and clients find the new one, and nothing is lost.

In the world of `tests.stages.actors` at any moment of a random workload, with the session that users have;
and with processes of their own.
"""

from __future__ import annotations

import gc
import random
import re
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import numpy as np
import pytest

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.connection import current, threads
from pw.client.connection.runtime import Runtime
from pw.client.functions.jit import jit
from pw.client.functions.transfer import put
from pw.client.session.journaling import JournalingEnv
from pw.client.session.session import ClientSession
from pw.client.session.thread_messages import (
    Allocate,
    Ask,
    Close,
    Forget,
    Get,
    Open,
    Put,
    Tell,
    resolve,
)
from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ArgumentError, ArrayLost, CompileError, ConnectionFailed, Disconnected
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, Address, client_id, session_of
from pw.core.programs.program import Program
from pw.core.sharding import ArraySpec, box_slices
from pw.sched.control.sessions import CLIENT_NUMBERS, ClientNumbers
from pw.transport.links import codec
from tests.stages.actors import World
from tests.stages.daemons import Program as Script
from tests.stages.fake_devices import FakeBulk
from tests.stages.local_runtime import QuietThread
from tests.stages.samples import long, some
from tests.stages.scripted import LARGE, SMALL, chain, copy, digest, split
from tests.stages.supervised import SupervisedHost

CREDITS = 512


class User:
    """A session as users have it, and what they know of their arrays."""

    recovery_s: float | None = None
    """How long it waits for lost islands, in seconds."""

    def __init__(self, world: World, name: str, keep_bytes: int = 1 << 30) -> None:
        self.world, self.me = world, session_of(name)
        self.serial = 0
        self.credits = 0
        self.runs = 0
        self.specs: dict[int, ArraySpec] = {}
        self.outputs: dict[int, ArraySpec] = {}
        bulk = FakeBulk(world, name)
        self.session: ClientSession = world.add(
            self.me, lambda env: ClientSession(env, bulk, self._grant)
        )
        attached: Future[Any] = Future()
        self.note(Open(name, 1.0, 0, keep_bytes, attached, 60.0, recovery_s=self.recovery_s))
        world.settle()
        self.number = attached.result(0).client

    def _grant(self, count: int) -> None:
        self.credits += count

    def note(self, note: Any) -> None:
        self.world.post(self.me, self.me, note)

    def id(self) -> int:
        self.serial += 1
        return client_id(self.number, self.serial)

    def slice(self, devices: int, island: str | None) -> Future[Any]:
        bound: Future[Any] = Future()
        self.note(Allocate(msg.AllocateSlice(self.id(), devices, None, island, None), bound))
        return bound

    def program(self, body: Program, blob: bytes = b"1") -> int:
        number = self.id()
        (output,) = body.outputs
        self.outputs[number] = output.spec
        self.note(
            Tell(msg.RegisterProgram(number, Compact.of(body), (msg.Artifact(digest(blob), blob),)))
        )
        return number

    def release(self, program: int) -> None:
        self.note(Tell(msg.ReleaseProgram(program)))

    def run(self, program: int, arg: int | bytes) -> int:
        made = self.id()
        self.specs[made] = self.outputs[program]
        self.runs += 1
        self.note(Tell(msg.Run(self.id(), program, (arg,), (made,))))
        return made

    def put(self, value: np.ndarray[Any, Any], spec: ArraySpec) -> int:
        array = self.id()
        self.specs[array] = spec
        self.note(Put(array, spec, value, False))
        return array

    def delete(self, *arrays: int) -> None:
        self.note(Forget(arrays))

    def get(self, array: int) -> Future[Any]:
        future: Future[Any] = Future()
        self.note(Get(array, self.specs[array], future))
        return future

    def ask(self, what: Any, *arrays: int) -> Future[Any]:
        future: Future[Any] = Future()
        self.note(Ask(what, future, arrays))
        return future

    def checkpoint(self, *arrays: int) -> Future[Any]:
        return self.ask(lambda request: msg.Checkpoint(request, arrays), *arrays)

    def whole(self, array: int, future: Future[Any]) -> np.ndarray[Any, Any]:
        spec = self.specs[array]
        value = np.full(spec.shape, -1)
        for box, part in future.result(0):
            value[box_slices(box)] = part
        return value

    def value(self, array: int) -> np.ndarray[Any, Any]:
        future = self.get(array)
        for _ in range(100):
            self.world.wait(0.5)
            if future.done():
                break
        assert future.done(), "a fetch hangs"
        return self.whole(array, future)


class Cluster:
    """Island a of two hosts, island b of one, and a user with a slice on each."""

    def __init__(self, seed: int, elements: int = SMALL, spares: int = 0) -> None:
        self.world = World(seed)
        self.starts = 0
        self.start()
        self.hosts = {
            name: SupervisedHost(self.world, name, name[0], hosts)
            for name, hosts in (("a0", 2), ("a1", 2), ("b0", 1))
        }
        for index in range(spares):
            self.hosts[f"s{index}"] = SupervisedHost(self.world, f"s{index}", "", spare=True)
        self.world.settle()
        self.user = User(self.world, "c")
        a, b = self.user.slice(2, "a"), self.user.slice(1, None)
        self.world.settle()
        self.a, self.b = (
            split(bound.result(0).slice, n, elements) for bound, n in ((a, 2), (b, 1))
        )
        self.island_b = b.result(0).island
        self.x = np.arange(elements)

    def start(self) -> None:
        """Start a controller."""
        self.starts += 1
        self.world.controller(first_client=1000 * self.starts)

    def lose(self) -> None:
        """SIGKILL to the controller."""
        self.world.kill(CONTROLLER)

    def time(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            self.world.wait(0.5)

    def idle(self) -> None:
        """Nothing is left anywhere once the user has let go of everything."""
        self.time(100)
        self.world.wait(700)
        for host in self.hosts.values():
            if not host.finished:
                left = host.current.census()
                left.pop("edges_parked")
                assert not any(left.values()), f"{host.name}: {left}"
        client = self.world.client(self.user.number)
        assert not client.arrays
        assert not client.lineage.origins
        journal = self.user.session.link.journal
        assert not journal.runs
        assert not journal.inputs
        assert not journal.held
        self.world.sent.clear()  # the record of all messages
        gc.collect()  # former controllers
        assert not journal.artifacts


def work(cluster: Cluster, seed: int, steps: int, happens: dict[int, Any]) -> dict[int, Any]:
    """A random workload with something happening in between; the arrays that it leaves, with their values."""
    user, world, dice = cluster.user, cluster.world, random.Random(seed)
    programs = {
        "there": (cluster.a, cluster.b, user.program(chain([cluster.a, cluster.b])), 2),
        "back": (cluster.b, cluster.a, user.program(chain([cluster.b, cluster.a])), 2),
        "step": (cluster.a, cluster.a, user.program(chain([cluster.a], donated=(0,))), 1),
        "one": (cluster.b, cluster.b, user.program(chain([cluster.b], donated=(0,))), 1),
    }
    arrays: dict[int, Any] = {}
    reads: list[tuple[int, Any, Any]] = []
    asked: list[Any] = []
    for index in range(steps):
        if index in happens:
            happens[index]()
        world.steps(dice.randrange(12))
        what = dice.random()
        if what < 0.15 or not arrays:
            value = cluster.x + dice.randrange(1000)
            arrays[user.put(value, dice.choice((cluster.a, cluster.b)))] = value
        elif what < 0.7:
            array = dice.choice(list(arrays))
            fitting = [entry for entry in programs.values() if entry[0] == user.specs[array]]
            _, _, program, more = dice.choice(fitting)
            value = arrays[array]
            if more == 1:
                del arrays[array]
            arrays[user.run(program, array)] = value + more
        elif what < 0.8:
            array = dice.choice(list(arrays))
            reads.append((array, arrays[array], user.get(array)))
        elif what < 0.9:
            asked.append(user.checkpoint(*dice.sample(list(arrays), min(2, len(arrays)))))
        elif len(arrays) > 2:
            array = dice.choice(list(arrays))
            del arrays[array]
            user.delete(array)
    for _, _, number, _ in programs.values():
        user.release(number)
    cluster.time(20)
    for array, value, future in reads:
        assert future.done(), "a read hangs"
        if future.exception(0) is None:
            np.testing.assert_array_equal(user.whole(array, future), value)
        else:  # it was asked for once more when the user had donated or deleted it
            assert type(future.exception(0)).__name__ in ("ArrayDeleted", "HostLost"), future
            assert array not in arrays
    for future in asked:
        assert future.done(), "a checkpoint hangs"
    return arrays


def look(cluster: Cluster, arrays: dict[int, Any]) -> None:
    """Everything is there, once, and goes again."""
    user = cluster.user
    for array, value in arrays.items():
        np.testing.assert_array_equal(user.value(array), value)
    assert user.session.closed is None
    assert user.credits == user.runs
    user.delete(*arrays)
    cluster.idle()


def restart(cluster: Cluster, seed: int) -> Any:
    dice = random.Random(f"restart {seed}")

    def happen() -> None:
        cluster.lose()
        cluster.world.steps(dice.randrange(40))
        if dice.random() < 0.5:
            cluster.world.wait(dice.choice((0.5, 1.0, 5.0)))
        cluster.start()
        cluster.world.steps(dice.randrange(40))
        if dice.random() < 0.5:
            cluster.world.wait(0.5)

    return happen


@pytest.mark.parametrize("seed", some(range(40), 6))
def test_a_controller_is_started_again_at_any_moment(seed: int) -> None:
    cluster = Cluster(seed, elements=LARGE if seed % 4 == 0 else SMALL)
    again = restart(cluster, seed)
    look(cluster, work(cluster, seed, 40, {seed % 40: again}))


@pytest.mark.parametrize("seed", some(range(18), 6))
def test_a_controller_is_started_again_and_again(seed: int) -> None:
    cluster = Cluster(seed)
    again = restart(cluster, seed)
    look(cluster, work(cluster, seed, 40, {10: again, 11 + seed % 9: again, 30: again}))


@pytest.mark.parametrize("seed", some(range(40), 6))
def test_a_host_crashes_while_there_is_no_controller(seed: int) -> None:
    cluster = Cluster(seed, spares=seed % 2)
    dice = random.Random(f"crash {seed}")
    again = restart(cluster, seed)
    crash = lambda: cluster.hosts[dice.choice(("a0", "a1", "b0"))].crash()  # noqa: E731

    def both() -> None:
        if dice.random() < 0.5:
            crash()
        again()
        if dice.random() < 0.7:
            cluster.world.steps(dice.randrange(60))
            crash()

    look(cluster, work(cluster, seed, 40, {seed % 40: both}))


def test_the_spare_that_took_a_rank_keeps_it() -> None:
    cluster = Cluster(0, spares=1)
    user, world = cluster.user, cluster.world
    program = user.program(chain([cluster.a]))
    array = user.run(program, cluster.x.tobytes())
    world.settle()
    cluster.hosts["a1"].die()
    world.settle()
    np.testing.assert_array_equal(user.value(array), cluster.x + 1)
    cluster.lose()
    world.settle()
    cluster.start()
    np.testing.assert_array_equal(user.value(array), cluster.x + 1)
    (island,) = [one for one in world.resources.inventory.islands.values() if one.name == "a"]
    assert (island.state, island.ranks, island.epoch) == ("ready", ["a0", "s0"], 3)


def test_a_spare_that_comes_first_does_not_make_an_island() -> None:
    cluster = Cluster(0)
    world = cluster.world
    cluster.hosts["s"] = SupervisedHost(world, "s", "a", 0, spare=True)
    world.settle()
    cluster.lose()
    world.settle()
    cluster.start()
    world.post(Address("s", "executor"), RESOURCES, msg.RegisterHost("a", 0, 1, "cpu", "", 1, True))
    world.settle()
    assert not world.resources.inventory.islands
    assert "s" in world.resources.inventory.spares
    cluster.time(3)
    assert sorted(world.resources.inventory.islands["a"].ranks) == ["a0", "a1"]
    assert world.resources.inventory.islands["a"].state == "ready"


def test_what_is_ready_can_be_read_without_a_controller() -> None:
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    array = user.run(user.program(chain([cluster.a, cluster.b])), cluster.x.tobytes())
    world.settle()
    cluster.lose()
    np.testing.assert_array_equal(user.value(array), cluster.x + 2)
    cluster.start()
    np.testing.assert_array_equal(user.value(array), cluster.x + 2)


def test_nothing_that_was_ready_is_run_again() -> None:
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    step = user.program(chain([cluster.a], donated=(0,)))
    array = user.put(cluster.x, cluster.a)
    for _ in range(5):
        array = user.run(step, array)
    world.settle()
    cluster.lose()
    world.settle()
    cluster.start()
    np.testing.assert_array_equal(user.value(array), cluster.x + 5)
    assert not world.counters["runs_repeated"]


@pytest.mark.parametrize("when", ["unconfirmed", "in between"])
def test_a_slice_that_was_given_back_is_forgotten_under_another_controller(when: str) -> None:
    cluster = Cluster(2)
    user, world = cluster.user, cluster.world
    given, kept = cluster.a.placement.slice, cluster.b.placement.slice
    hosts = user.session.hosts
    if when == "in between":
        cluster.lose()
        world.settle()
    user.note(Tell(msg.ReleaseSlice(given)))
    world.drain("c")
    if when == "unconfirmed":
        cluster.lose()
    assert given in hosts.former | hosts.slices.keys(), "no controller has heard of it"
    cluster.start()
    cluster.time(20)
    assert hosts.slices.keys() == hosts.bounds.keys() == {kept}
    assert not hosts.former
    assert world.client(user.number).slices.owned == {kept}


@pytest.mark.parametrize("restarts", [False, True])
def test_what_was_made_on_a_slice_that_was_given_back_is_made_again_or_says_why_not(
    restarts: bool,
) -> None:
    cluster = Cluster(3)
    user, world = cluster.user, cluster.world
    number = cluster.a.placement.slice
    moved = user.program(copy(cluster.a, cluster.b))
    x = user.put(cluster.x, cluster.a)
    y = user.run(moved, x)
    user.delete(x)
    user.note(Tell(msg.ReleaseSlice(number)))
    user.release(moved)
    world.settle()
    if restarts:
        cluster.lose()
    for host in cluster.hosts.values():
        if host.name.startswith(cluster.island_b):
            host.crash()
    world.settle()
    if restarts:
        cluster.start()
        cluster.time(20)
        with pytest.raises(ArrayLost, match="were given back"):
            user.value(y)
    else:
        np.testing.assert_array_equal(user.value(y), cluster.x)
        assert world.counters["inputs_sent_again"] == 1
    hosts, journal = user.session.hosts, user.session.link.journal
    kept = {cluster.b.placement.slice}
    assert hosts.slices.keys() == hosts.bounds.keys() == journal.bound.keys() == kept
    assert world.client(user.number).slices.owned == kept
    user.delete(y)
    cluster.idle()
    assert world.client(user.number).slices.requests.keys() == kept


class Thread(QuietThread):
    """A runtime's session in the world of actors, which comes to rest after every note."""

    address = "tcp://controller"

    def __init__(self, world: World, runtime: Runtime) -> None:
        self._world, self._me = world, session_of("r")
        bulk = FakeBulk(world, "r")
        self.session: ClientSession = world.add(
            self._me, lambda env: ClientSession(env, bulk, runtime.grant, runtime.session_ended)
        )
        self.closes = 0

    def post(self, note: object) -> None:
        self._world.post(self._me, self._me, note)
        self._world.settle()

    def close(self) -> None:
        self.closes += 1


class Answering(QuietThread):
    """A session that is attached, and no more."""

    address = "tcp://controller"

    def __init__(self, runtime: Runtime) -> None:
        pass

    def post(self, note: object) -> None:
        if isinstance(note, Open):
            resolve(note.attached, msg.Attached(2, b"", CREDITS, ()))
        elif isinstance(note, Close):
            resolve(note.closed, ())


def test_a_session_that_has_ended_says_why_until_there_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(0)
    begun: list[str] = []

    def remote(address: str, **how: Any) -> Any:
        begun.append(address)
        return Answering

    monkeypatch.setattr(threads, "remote", remote)
    monkeypatch.delenv("PW_ADDRESS", raising=False)
    ended = Runtime(lambda runtime: Thread(cluster.world, runtime), 1.0, 0)
    before = current.use(ended)
    try:
        mesh = default_mesh()
        type_ = ArrayType.of(jax.core.ShapedArray((), np.float32), OwnSharding.replicated(mesh))
        array, other_array = (Array(ended, client_id(ended.client, n), type_) for n in (98, 99))
        waiting = array.start_fetch()
        assert current.connect() is ended
        cluster.lose()
        cluster.world.settle()
        cluster.world.wait(59)
        assert ended.alive
        cluster.world.wait(2)
        assert not ended.alive
        assert isinstance(waiting.exception(0), ConnectionFailed)
        double = jit(lambda x: x * 2, mesh=mesh)
        for use in (
            current.runtime,
            ended.ask.status,
            ended.check_alive,
            array.block_until_ready,
            lambda: np.asarray(array),
            lambda: double(array),
            lambda: double(1.0),
            lambda: put(1.0),
            lambda: put(1.0, mesh.devices.item()),
        ):
            with pytest.raises(ConnectionFailed, match=r"back within 60 s\..*pw\.connect\(\)"):
                use()
        other_array.delete()
        ended.release_program(1)
        ended.tick()
        thread: Any = ended.thread
        assert thread.closes == 0
        monkeypatch.setenv("PW_ADDRESS", "tcp://other")
        other = current.connect()
        assert thread.closes == 1
        assert begun == ["tcp://controller"]
        assert other.alive
        assert other is current.runtime()
        current.leave("tcp://other", before)
        assert other.alive
        with pytest.raises(ConnectionFailed, match="60 s"):
            put(array)
        current.leave("tcp://controller", before)  # as a local cluster does that ends
        assert current.is_current(before)
        with pytest.raises(Disconnected, match=r"pw\.disconnect"):
            other.check_alive()
        assert thread.closes == 1
    finally:
        current.use(before)


def test_a_program_that_was_released_can_be_made_again_under_another_controller() -> None:
    cluster = Cluster(1)
    runtime = Runtime(lambda runtime: Thread(cluster.world, runtime), 1.0, 0)
    spec = split(runtime.allocate_slice(2, island="a").slice, 2)
    other = split(spec.placement.slice, 1)

    def make(*specs: ArraySpec) -> int:
        body = chain(list(specs), b"7")
        return runtime.register_program(body, {digest(b"7"): b"7"})

    def works(program: int, spec: ArraySpec) -> None:
        (y,) = runtime.run(program, [cluster.x.tobytes()], 1)
        fetched = runtime.fetch(y, spec)
        cluster.time(20)
        np.testing.assert_array_equal(fetched.result(0), cluster.x + 7)
        runtime.delete([y])

    def release(program: int) -> None:
        runtime.release_program(program)
        runtime.tick()

    first, second = make(spec), make(other)
    works(first, spec)
    release(first)
    third = make(spec)  # the second one has had it sent
    works(third, spec)
    release(second)
    release(third)
    cluster.lose()
    cluster.start()
    cluster.time(20)
    again = make(spec)
    works(again, spec)
    assert runtime.programs.artifacts == {digest(b"7"): 1}
    registered = cluster.world.to(CONTROL, msg.RegisterProgram)
    assert [len(message.artifacts) for message in registered] == [1, 0, 0, 1]
    release(again)
    assert not runtime.programs.artifacts
    assert not len(runtime.programs)
    thread = runtime.thread
    assert isinstance(thread, Thread)
    del registered
    cluster.idle()
    assert not thread.session.link.journal.artifacts
    assert not cluster.world.control.registry.artifacts


def test_an_artifact_is_sent_anew_if_a_program_dies_while_another_one_is_registered() -> None:
    """The garbage collector may release one at any moment, in the same thread."""
    cluster = Cluster(1)
    runtime = Runtime(lambda runtime: Thread(cluster.world, runtime), 1.0, 0)
    spec = split(runtime.allocate_slice(2, island="a").slice, 2)
    blobs = {digest(b"7"): b"7"}
    first = runtime.register_program(chain([spec], b"7"), blobs)

    class Dying(dict[bytes, bytes]):
        def items(self) -> Any:
            yield from super().items()
            cluster.world.sent.clear()  # the record of all messages
            runtime.release_program(first)

    second = runtime.register_program(chain([spec], b"7"), Dying(blobs))
    runtime.tick()
    (y,) = runtime.run(second, [cluster.x.tobytes()], 1)
    fetched = runtime.fetch(y, spec)
    cluster.time(20)
    np.testing.assert_array_equal(fetched.result(0), cluster.x + 7)


def test_a_program_that_no_message_can_hold_is_refused_in_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1)
    runtime = Runtime(lambda runtime: Thread(cluster.world, runtime), 1.0, 0)
    thread: Any = runtime.thread
    spec = split(runtime.allocate_slice(2, island="a").slice, 2)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 20_000)
    large = bytes(20_000)
    words = r"takes 20\d+ bytes .* holds 20000; .* 'stage 0', takes 20000 bytes; .* pw\.put\(x\)"
    with pytest.raises(ArgumentError, match=re.compile(words)):
        runtime.register_program(chain([spec], large), {digest(large): large})
    halves = {digest(blob): blob for blob in (bytes(9_000), b"7" * 9_000)}
    with pytest.raises(ArgumentError, match="cannot be sent"):  # a host gets both in one message
        runtime.register_program(chain([spec], b"7" * 9_000), halves)
    assert not runtime.programs.artifacts
    assert not len(runtime.programs)
    assert not cluster.world.to(CONTROL, msg.RegisterProgram)
    thread.has_frames = False  # in a cluster inside this process there are none
    runtime.release_program(runtime.register_program(chain([spec], large), {digest(large): large}))
    thread.has_frames = True
    program = runtime.register_program(chain([spec], b"7"), {digest(b"7"): b"7"})
    (y,) = runtime.run(program, [cluster.x.tobytes()], 1)
    fetched = runtime.fetch(y, spec)
    cluster.time(20)
    np.testing.assert_array_equal(fetched.result(0), cluster.x + 7)


def test_questions_that_were_answered_are_not_kept() -> None:
    cluster = Cluster(1)
    runtime = Runtime(lambda runtime: Thread(cluster.world, runtime), 1.0, 0)
    for _ in range(100):
        runtime.ask.status()
        runtime.ask.explain()
        runtime.stats()
    thread: Any = runtime.thread
    assert len(thread.session.link.journal.requests) < 100


def test_a_program_of_too_many_arrays_is_refused_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1)
    runtime = Runtime(lambda runtime: Thread(cluster.world, runtime), 1.0, 0)
    spec = split(runtime.allocate_slice(2, island="a").slice, 2)
    monkeypatch.setattr(codec, "MAX_OBJECTS", 100)
    with pytest.raises(ArgumentError, match="takes 1 arrays and makes 1, with 3 calls: stack"):
        runtime.register_program(chain([spec] * 3, b"7"), {digest(b"7"): b"7"})
    assert not cluster.world.to(CONTROL, msg.RegisterProgram)


def test_what_could_not_be_sent_is_not_told_to_the_next_controller() -> None:
    def send(to: Address, message: object) -> None:
        raise codec.MessageTooLarge("no frame holds it")

    nothing = dict.fromkeys(
        (
            *("address", "now_s", "call_later", "introduce", "forget", "log", "count"),
            *("recorder", "tenant_of", "islands_of", "audit"),
        )
    )
    link = JournalingEnv(cast(Any, SimpleNamespace(send=send, **nothing)))
    link.keeps = True
    with pytest.raises(codec.MessageTooLarge):
        link.send(CONTROL, msg.CreateArray(1, split(1, 2)))
    assert 1 not in link.journal
    assert len(list(link.journal.retold())) == 1, "nothing but that there is nothing"


def test_what_comes_to_the_next_controller_too_early_does_no_harm() -> None:
    """It was said before the session had heard that the last one was lost."""
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    array = user.put(cluster.x, cluster.a)
    world.settle()
    cluster.lose()
    cluster.start()
    world.stale.discard((user.me.node, CONTROLLER))
    world.post(user.me, CONTROL, msg.Checkpoint(99, (array,)))
    np.testing.assert_array_equal(user.value(array), cluster.x)
    assert user.session.closed is None


@pytest.mark.parametrize("deleted", [False, True])
def test_a_run_that_no_controller_heard_of_fails_as_what_it_reads(deleted: bool) -> None:
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    bad = user.program(chain([cluster.a], b"nocompile"), b"nocompile")
    good = user.program(chain([cluster.a]))
    array = user.run(bad, cluster.x.tobytes())
    world.settle()
    cluster.lose()
    made = user.run(good, array)  # sent to the controller that is lost
    if deleted:
        user.delete(array)
    world.settle()
    cluster.start()
    cluster.time(20)
    error = user.get(made)
    cluster.time(2)
    assert isinstance(error.exception(0), CompileError)
    user.delete(made) if deleted else user.delete(array, made)
    user.release(bad), user.release(good)
    cluster.idle()


@pytest.mark.parametrize("seed", some(range(20), 8))
def test_a_host_and_its_controller_lose_sight_of_each_other(seed: int) -> None:
    cluster = Cluster(seed)
    user, world = cluster.user, cluster.world

    def blip() -> None:
        host = ("a0", "a1", "b0")[seed % 3]
        for one, other in ((host, CONTROLLER), (CONTROLLER, host)):
            link = world.links[other, one]
            link.clear()
            for actor in world.actors[one]:
                me = Address(one, actor)
                link.append((me, me, msg.PeerLost(other, "silent")))

    look(cluster, work(cluster, seed, 30, {seed: blip}))
    assert user.session.closed is None


def test_a_controller_that_does_not_come_back_is_given_up() -> None:
    cluster = Cluster(0)
    cluster.lose()
    cluster.world.settle()
    asked = cluster.user.ask(msg.GetStatus)
    bound = cluster.user.slice(1, "a")
    cluster.world.wait(59)
    assert not asked.done()
    cluster.world.wait(2)
    for future in (asked, bound):
        error = future.exception(0)
        assert isinstance(error, ConnectionFailed)
        assert "has not come back within 60 s" in str(error)
    for host in cluster.hosts.values():
        assert host.incarnations == 2, "its supervisor goes on looking, or ends"


@pytest.mark.parametrize(
    ("reason", "words"), [("silent", "silent"), ("closed", "the controller was paused")]
)
def test_a_client_that_its_own_controller_gave_up_is_not_taken_back(
    reason: str, words: str
) -> None:
    """It is told why: a controller that was stopped for a while hears that its clients have hung up."""
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    for one, other in ((user.me.node, CONTROLLER), (CONTROLLER, user.me.node)):
        for actor in world.actors[one]:
            world.post(Address(one, actor), Address(one, actor), msg.PeerLost(other, reason))
    cluster.time(2)
    assert isinstance(user.session.closed, Disconnected)
    assert "given up" in str(user.session.closed)
    assert words in str(user.session.closed)
    assert not world.control.sessions.clients


def test_copies_of_clients_that_do_not_come_back_are_dropped() -> None:
    cluster = Cluster(0)
    user, world = cluster.user, cluster.world
    array = user.put(cluster.x, cluster.a)
    user.checkpoint(array)
    world.settle()
    world.kill(user.me.node)
    cluster.lose()
    world.settle()
    cluster.start()
    world.wait(1)
    world.wait(1)
    held = [host.current.census()["replica_bytes"] for host in cluster.hosts.values()]
    assert any(held)
    world.wait(100)
    held = [host.current.census()["replica_bytes"] for host in cluster.hosts.values()]
    assert not any(held)
    assert not world.control.replicas.unclaimed


def test_what_is_asked_of_the_controller_is_asked_again() -> None:
    cluster = Cluster(2)  # b0 is in its island when the drain is asked for again
    user, world = cluster.user, cluster.world
    array = user.put(cluster.x, cluster.a)
    world.settle()
    asked = [user.ask(msg.GetStatus), user.checkpoint(array)]
    missing = user.ask(lambda request: msg.DrainHost(request, "no-host"))
    drained = user.ask(lambda request: msg.DrainHost(request, "b0"))
    world.drain(user.me.node)
    cluster.lose()
    world.settle()
    late = user.slice(1, "b")
    cluster.start()
    cluster.time(60)
    assert all(future.exception(0) is None for future in (*asked, late))
    assert "no-host" in str(missing.exception(0))
    assert "no spare host" in str(drained.exception(0)), "it was there"


def test_client_numbers_begin_elsewhere_and_are_not_given_twice() -> None:
    numbers = ClientNumbers(CLIENT_NUMBERS * 5 - 2, ())
    assert numbers.claim(1)
    assert not numbers.claim(1)
    assert not numbers.claim(0)
    assert not numbers.claim(CLIENT_NUMBERS)
    taken = [numbers.take({2}) for _ in range(4)]
    assert taken == [CLIENT_NUMBERS - 2, CLIENT_NUMBERS - 1, 3, 4]
    assert client_id(CLIENT_NUMBERS - 1, (1 << 40) - 1) < 1 << 63


def test_client_numbers_never_run_out() -> None:
    numbers = ClientNumbers(1, {5}, end=12, kept=4)
    given = [numbers.take({7}) for _ in range(30)]
    assert given == ([1, 2, 3, 4, 6, 8, 9, 10, 11] * 4)[:30]
    assert not any(numbers.claim(number) for number in (5, *given[-4:]))
    assert numbers.is_known(5)
    assert not numbers.is_known(given[-5])


# --- with processes ----------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
import numpy as np
import pw
from pw.client.connection import current
from pw.processes.daemons import LocalDaemon
from tests.stages.daemons import until

hosts = int(sys.argv[1])
stops = dict(zip((33, 75), [getattr(signal, name) for name in sys.argv[2:]], strict=True))

def start(address):
    child = LocalDaemon("pw.cli.controller", ["--bind", address, "--log-level", "warning"])
    return child, child.address(30)

with pw.LocalCluster(islands=2, hosts_per_island=hosts, log_level="warning") as cluster:
    devices = pw.make_virtual_device_set()
    islands = [devices.add_slice(devices=hosts, island=f"island-{i}").devices for i in range(2)]
    meshes = [pw.Mesh(np.array(one, dtype=object), ("x",)) for one in islands]
    spread = [pw.NamedSharding(mesh, pw.PartitionSpec("x")) for mesh in meshes]
    whole = pw.NamedSharding(meshes[0], pw.PartitionSpec())
    first = pw.jit(
        lambda x: x + x.sum() * 0 + 1,
        in_shardings=spread[0], out_shardings=spread[0], donate_argnums=0,
    )
    second = pw.jit(lambda x: x * 2, in_shardings=spread[1], out_shardings=spread[1])
    total = pw.jit(lambda x: x.sum(), in_shardings=spread[0], out_shardings=whole)
    state = pw.put(np.arange(8.0), sharding=spread[0])
    kept = second(state)
    assert np.array_equal(kept, 2 * np.arange(8.0))
    before = total(state)
    assert float(before) == 28
    daemons = cluster._children
    epochs = {}
    pw.on_island_event(lambda event: epochs.setdefault(event.island, []).append((event.what, event.epoch)))
    steps, restarts = 0, 0
    while steps < 120:
        state = first(state)
        steps += 1
        if steps % 7 == 0:
            pw.checkpoint(state)
        if steps % 10 == 0:
            assert float(total(state)) == 28 + 8 * steps, steps
        if steps in stops:
            controller = daemons[0]
            os.kill(controller.pid, stops[steps])
            until(lambda: controller.exit_code() is not None, "the end of the controller")
            late = [second(state) for _ in range(3)]
            assert np.array_equal(kept, 2 * np.arange(8.0)), "ready, so it is read where it is"
            daemons[0], address = start(cluster.address)
            assert address == cluster.address
            for one in late:
                assert np.array_equal(one, 2 * (np.arange(8.0) + steps)), steps
            restarts += 1
    assert np.array_equal(state, np.arange(8.0) + steps)
    assert np.array_equal(kept, 2 * np.arange(8.0))
    assert float(before) == 28
    new = pw.jit(lambda x: x - 1)(state)
    assert np.array_equal(new, np.arange(8.0) + steps - 1)
    until(lambda: not current.runtime().ask.status().clients[0].runs, "the end of all runs")
    for island in ("island-0", "island-1"):
        until(lambda: ("returned", 1 + restarts) in epochs[island], "the events of all islands")
        ready = [event for event in epochs[island] if event[0] != "left"]
        assert ready == [("joined", 1), ("returned", 2), ("returned", 3)], epochs
    print("went on after", restarts)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("hosts", "how"), [(1, ("SIGTERM", "SIGKILL")), long(2, ("SIGKILL", "SIGTERM"))]
)
def test_a_training_loop_goes_on_under_another_controller(
    tmp_path: Path, hosts: int, how: tuple[str, str]
) -> None:
    script = Script(tmp_path, ["-c", SCRIPT, str(hosts), *how])
    try:
        assert script.end(120) == 0, script.err
        assert script.out == "went on after 2\n"
        script.until_alone()
    finally:
        script.kill()
