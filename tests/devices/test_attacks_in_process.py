"""What a malicious client sends to hosts with real devices makes none of their actors raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import pw
from pw.core import messages as msg
from pw.core.actors.actor import Actor
from pw.core.compact import Compact
from pw.core.dtypes import DTYPES
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address, client_id, store_of
from pw.core.landing import Landing
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing import InProcessCluster
from pw.transport.links.node import Node as Process
from tests.stages.daemons import until
from tests.stages.scripted import digest

WAIT_S = 60.0


class Inbox(Actor):
    """Keeps what it receives."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.received: list[Any] = []

    def receive(self, sender: Address, message: object) -> None:
        self.received.append(message)


class Attacker:
    """A client whose messages a test writes."""

    def __init__(self, cluster: InProcessCluster) -> None:
        self.cluster = cluster
        loop = cluster.thread.loop

        def make() -> tuple[Process, Inbox]:
            node = Process("client-evil", loop, cluster.hub.network("client-evil"))
            return node, node.add("session", Inbox)

        self.node, self.inbox = cluster.thread.call(make)
        self.serial = 0
        self.tell(msg.Attach("evil", 1.0, 0))
        attached = self.wait(msg.Attached)
        self.number = attached.client
        self.tell_host(msg.Identify(self.number, attached.ticket))
        self.slice = self.id()
        self.tell(msg.AllocateSlice(self.slice, 2, None, None, None))
        self.bound: msg.SliceBound = self.wait(msg.SliceBound)

    def id(self) -> int:
        self.serial += 1
        return client_id(self.number, self.serial)

    def tell(self, message: object, to: Address = CONTROL) -> None:
        self.cluster.thread.call(lambda: self.inbox.env.send(to, message))

    def tell_host(self, message: object) -> None:
        self.tell(message, store_of("host-0"))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.inbox.received if isinstance(message, kind)]

    def wait(self, kind: type, wanted: Callable[[Any], bool] = lambda message: True) -> Any:
        until(lambda: any(map(wanted, self.of(kind))), kind.__name__)
        return next(filter(wanted, self.of(kind)))

    def spec(self, shape: tuple[int, ...] = (8,), dtype: str = "int32", **more: Any) -> ArraySpec:
        sharding = more.pop("sharding", Sharding(("x",), (2,), ()))
        return ArraySpec(shape, dtype, sharding, Placement(self.slice, (0, 1)), **more)

    def upload(self, spec: ArraySpec, data: bytes | None) -> int:
        array = self.id()
        self.tell(msg.CreateArray(array, spec, 1))
        where = self.bound.island, self.bound.epoch
        self.tell_host(msg.Upload(array, spec, self.bound.devices, data, *where))
        return array

    def answered(self) -> None:
        """Wait until controller and host have handled everything."""
        request = self.id()
        self.tell(msg.GetStatus(request))
        self.wait(msg.Status, lambda message: message.request == request)
        request = self.id()
        self.tell_host(msg.Fetch(request, client_id(1, 1), self.spec(), (), (), None))
        self.wait(msg.RequestFailed, lambda message: message.request == request)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def work(cluster: InProcessCluster) -> Callable[[], None]:
    """The work of another client."""
    devices = pw.make_virtual_device_set().add_slice(devices=2).devices
    split = pw.NamedSharding(pw.Mesh(devices, ("x",)), PartitionSpec("x"))
    add_one = pw.jit(lambda x: x + 1)

    def add() -> None:
        x = pw.put(np.arange(8), sharding=split)
        np.testing.assert_array_equal(np.asarray(add_one(x)), np.arange(8) + 1)

    return add


@pytest.fixture(scope="module")
def client(cluster: InProcessCluster) -> Iterator[Attacker]:
    attacker = Attacker(cluster)
    yield attacker
    cluster.thread.call(attacker.node.close)


@pytest.fixture
def attacker(
    cluster: InProcessCluster, client: Attacker, work: Callable[[], None]
) -> Iterator[Attacker]:
    """An attacker of a cluster with another client, which works and sees no crash at the end."""
    client.inbox.received.clear()
    yield client
    client.answered()
    work()
    assert not cluster.crashes


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_is_taken_or_refused(attacker: Attacker, dtype: str) -> None:
    for shape in ((), (0,), (8,), (1,) * 64):
        spec = attacker.spec(shape, dtype)
        array = attacker.upload(spec, bytes(spec.size_bytes))
        request = attacker.id()
        asked = msg.Fetch(request, array, spec, attacker.bound.devices, (0,), None)
        attacker.tell_host(asked)
        attacker.wait(
            object,
            lambda m, n=request: isinstance(m, (msg.Fetched, msg.RequestFailed)) and m.request == n,
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "nonsense"},
        {"memory": "pinned_host"},
        {"sharding": Sharding(("",), (2,), ())},
        {"sharding": Sharding(tuple(f"a{at}" for at in range(64)), (2, *(1,) * 63), ())},
        {"sharding": Sharding(("x",), (2,), ((),))},
    ],
    ids=[str(number) for number in range(5)],
)
@pytest.mark.parametrize("size", [0, 32, 33, None])
def test_odd_arrays_are_taken_or_refused(
    attacker: Attacker, wrong: dict[str, Any], size: int | None
) -> None:
    spec = attacker.spec(**wrong)
    array = attacker.upload(spec, None if size is None else bytes(size))
    if size is None:
        landing = attacker.wait(msg.UploadLanding, lambda m: m.array == array).landing
        why = ErrorReport("Skipped", "x")
        attacker.tell_host(msg.UploadAborted(array, landing.transfer, why))
    request = attacker.id()
    attacker.tell_host(msg.Fetch(request, array, spec, attacker.bound.devices, (0,), None))
    attacker.wait(
        object, lambda m: isinstance(m, (msg.Fetched, msg.RequestFailed)) and m.request == request
    )


def test_answers_to_questions_that_nobody_asked_are_dropped(attacker: Attacker) -> None:
    landing = Landing(1, 1 << 62, 0, "", "", "")
    for number in (0, -1, 1, 1 << 62):
        attacker.tell_host(msg.CallReturned(number, (("nonsense", (-1,)),), b"x"))
        attacker.tell_host(msg.CallReturned(number, (), None))
        attacker.tell_host(msg.CallLanding(number, landing))
        attacker.tell_host(msg.UploadAborted(number, number, ErrorReport("X" * 1000, "y")))


def test_garbage_is_not_compiled(attacker: Attacker) -> None:
    for artifact in (b"", b"garbage", bytes(100_000), b"\x93" * 1000):
        for detail in msg.Detail:
            request = attacker.id()
            where = attacker.bound.devices, attacker.bound.island, attacker.bound.epoch
            attacker.tell_host(msg.Compile(request, artifact, *where, detail))
            attacker.wait(msg.RequestFailed, lambda message, n=request: message.request == n)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.RESHARD])
@pytest.mark.parametrize("blob", [b"", b"garbage", bytes(100_000)], ids=["empty", "words", "zeros"])
def test_a_program_of_garbage_fails(attacker: Attacker, kind: Kind, blob: bytes) -> None:
    spec = attacker.spec()
    flags = attacker.spec((2,), "bool")
    odd: list[dict[str, Any]] = [
        {},
        {"outputs": ()},
        {"inputs": ()},
        {"calls_back": True},
        {"checks": ("a", "b"), "outputs": (spec, flags)},
        {"shards": (((0, 0), (0, 1)),)},
        {"shards": (((0, 0), (7, 1)),)},
        {"shards": (((0, 0), (0, -1)),)},
        {"shards": ((),)},
        {"donated": (0,)},
    ]
    for fields in odd:
        program, result = attacker.id(), attacker.id()
        given = {"inputs": (spec,), "outputs": (spec,), "kind": kind} | fields
        computation = Computation(
            "f", digest(blob), spec.placement, given.pop("inputs"), given.pop("outputs"), **given
        )
        args = tuple([ValueRef(-1, 0)] * len(computation.inputs))
        last = ValueRef(0, 0) if computation.outputs else ValueRef(-1, 0)
        body = Program("f", (computation,), (Node(0, args),), (spec,), (Output(last, spec),))
        artifacts = (msg.Artifact(digest(blob), blob),)
        attacker.tell(msg.RegisterProgram(program, Compact.of(body), artifacts))
        attacker.tell(msg.Run(attacker.id(), program, (bytes(32),), (result,)))
        request = attacker.id()
        attacker.tell_host(msg.Fetch(request, result, spec, attacker.bound.devices, (0,), None))
        attacker.wait(
            object,
            lambda m, n=request, r=result: (
                (isinstance(m, (msg.Fetched, msg.RequestFailed)) and m.request == n)
                or (isinstance(m, msg.RunFailed) and r in m.results)
            ),
        )


def test_arrays_come_from_nowhere(attacker: Attacker, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b'{"format":"pw checkpoint","version":1}')
    sources = [
        msg.FileSource(str(tmp_path), "0123456789", "x"),
        msg.FileSource("relative", "0123456789", "x"),
        msg.FileSource("/nowhere", "x" * 100, "x"),
        msg.FileSource("/nowhere", "", "x" * 1000),
        msg.OfferSource(b"", 0),
        msg.OfferSource(bytes(16), -1),
        msg.OfferSource(bytes(1_000_000), 1 << 62),
    ]
    spec = attacker.spec()
    attacker.tell(
        msg.RegisterProgram(
            program := attacker.id(),
            Compact.of(Program("copy", (), (), (spec,), (Output(ValueRef(-1, 0), spec),))),
            (),
        )
    )
    for source in sources:
        array, result = attacker.id(), attacker.id()
        attacker.tell(msg.CreateArray(array, spec, 1, source))
        attacker.tell(msg.Run(attacker.id(), program, (array,), (result,)))
        attacker.wait(msg.RunFailed, lambda message, r=result: r in message.results)
