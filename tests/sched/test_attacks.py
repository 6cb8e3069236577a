"""Messages that no honest client sends: their sender gets an error, and no other client notices anything.

The messages are those that a malicious client could put on its link. After each attack the hosts are in the
epoch that they were in, no actor has raised, and another client works.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ArgumentError, ErrorReport, PlacementError, ShardingError
from pw.core.ids import CONTROL, client_id, store_of
from pw.core.landing import Landing
from pw.core.messages.checks import beyond_bounds, check_landing
from pw.core.programs.lower import lower, lower_with_memory
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.programs.spec_checks import check_spec
from pw.core.sharding import (
    ArraySpec,
    Binding,
    DeviceAddress,
    Placement,
    Sharding,
    box_bytes,
    host_boxes,
)
from pw.core.tenants import NO_SECRET, OPERATOR
from pw.sched.control.clients import REPEATS
from pw.sched.control.sessions import RUN_CREDITS
from pw.transport.links import codec
from tests.stages.actors import FakeHost, World
from tests.stages.scripted import SMALL, Client, chain, digest, join, split

X = np.arange(SMALL)
HUGE = 1 << 60


def crossed(message: Any) -> Any:
    """The message as it arrives in another process."""
    return codec.decode(codec.encode_frame(1, [("controller", "session", message)])).envelopes[0][2]


class Stage:
    """One island of two hosts, an honest client and an attacker; each has a slice of two devices."""

    def __init__(self) -> None:
        self.world = World()
        self.world.controller()
        self.hosts: list[FakeHost] = [self.world.host(f"h{rank}", "i", 2) for rank in range(2)]
        self.world.settle()
        self.honest, self.slice = self._join("honest")
        self.attacker, self.theirs = self._join("attacker")
        self.spec = split(self.theirs, 2)
        self.program = self.honest.program(chain([split(self.slice, 2)]))
        self.world.settle()

    def _join(self, name: str) -> tuple[Client, int]:
        client = join(self.world, name)
        number = client.slice(2)
        self.world.settle()
        return client, number

    def tell(self, message: Any) -> None:
        """The attacker tells the controller."""
        self.attacker.tell(crossed(message))
        self.world.settle()

    def tell_host(self, message: Any, host: str = "h0") -> None:
        """The attacker tells a host."""
        self.attacker.tell_host(host, crossed(message))
        self.world.settle()

    def check_well(self) -> None:
        """Nothing has happened to the hosts, and the honest client works."""
        (y,) = self.honest.run(self.program, X)
        np.testing.assert_array_equal(self.honest.value(y), X + 1)
        assert not any(host.stopped for host in self.hosts)
        assert not self.world.control.runs.in_flight


WRONG: dict[str, dict[str, Any]] = {
    "an unknown dtype": {"dtype": "nonsense"},
    "objects": {"dtype": "object"},
    "a name that numpy knows": {"dtype": "datetime64"},
    "a class of another module": {"dtype": "finfo"},
    "a dtype of 20 MB": {"dtype": "x" * 20_000_000},
    "a negative size": {"shape": (-SMALL,)},
    "more elements than there are": {"shape": (HUGE, HUGE)},
    "many dimensions": {"shape": (1,) * 100_000},
    "an unknown axis": {"sharding": Sharding(("x",), (2,), (("y",),))},
    "an axis of size 0": {"sharding": Sharding(("x",), (0,), (("x",),))},
    "an axis of negative size": {"sharding": Sharding(("x",), (-2,), (("x",),))},
    "an axis without a size": {"sharding": Sharding(("x", "y"), (2,), (("x",),))},
    "two axes of one name": {"sharding": Sharding(("x", "x"), (1, 2), (("x",),))},
    "an axis used twice": {"sharding": Sharding(("x",), (2,), (("x", "x"),))},
    "many axes": {"sharding": Sharding(("x",) * 100_000, (1,) * 100_000, ())},
    "another number of devices": {"sharding": Sharding(("x",), (4,), (("x",),))},
    "a mesh of a million": {"sharding": Sharding(("x",), (1_000_000,), ())},
    "a size that does not divide": {"shape": (7,)},
    "a partition spec that is too long": {"sharding": Sharding(("x",), (2,), ((), ("x",)))},
    "no device": {"sharding": Sharding((), (), ()), "placement": ()},
    "a device that the slice does not have": {"placement": (0, 2)},
    "a negative device": {"placement": (0, -1)},
    "a device twice": {"placement": (1, 1)},
    "a long kind of memory": {"memory": "x" * 1_000_000},
}


def wrong_spec(spec: ArraySpec, wrong: dict[str, Any]) -> ArraySpec:
    changed = dict(wrong)
    if "placement" in changed:
        changed["placement"] = Placement(spec.placement.slice, changed["placement"])
    return msgspec.structs.replace(spec, **changed)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_an_array_that_cannot_be_is_refused_by_the_controller(wrong: dict[str, Any]) -> None:
    stage = Stage()
    array, spec = stage.attacker.id(), wrong_spec(stage.spec, wrong)
    stage.tell(msg.CreateArray(array, spec, 1))
    error = stage.attacker.failed[array]
    assert error.kind in (ShardingError.__name__, PlacementError.__name__)
    assert len(error.message) < 10_000
    assert error == stage.attacker.failed[array]
    stage.tell(msg.Checkpoint(1, (array,)))
    (answer,) = stage.attacker.of(msg.Answered)
    assert answer.error == error
    stage.check_well()


@pytest.mark.parametrize("wrong", WRONG.values(), ids=list(WRONG))
def test_an_upload_that_cannot_be_is_refused_by_the_host(wrong: dict[str, Any]) -> None:
    stage = Stage()
    array, spec = stage.attacker.id(), wrong_spec(stage.spec, wrong)
    stage.attacker.tell(
        msg.CreateArray(array, stage.spec, 1)
    )  # it tells the controller another thing
    devices = tuple(
        DeviceAddress("h0" if index == 0 else "h1", 0)
        for index in range(len(spec.placement.devices))
    )
    stage.tell_host(msg.Upload(array, spec, devices, bytes(4 * SMALL), "i", 1))
    if wrong.get("placement") != (0, 2):  # hosts do not know how many devices a slice has
        assert stage.world.counters["uploads_refused"] == 1
        stage.attacker.specs[array] = stage.spec
        error = stage.attacker.value(array)
        assert error.kind in (ShardingError.__name__, PlacementError.__name__)
        stage.hosts[0].store.census()
        list(stage.hosts[0].store.save())
    stage.check_well()


@pytest.mark.parametrize(
    "devices",
    [
        (),
        (DeviceAddress("h0", 0),),
        (DeviceAddress("h0", 0), DeviceAddress("h0", 0)),
        (DeviceAddress("h0", 0), DeviceAddress("h0", 7)),
        (DeviceAddress("h0", 0), DeviceAddress("h1", -1)),
        (DeviceAddress("h1", 0), DeviceAddress("unknown", 0)),
        tuple(DeviceAddress("h0", at) for at in range(100_000)),
    ],
    ids=["none", "too few", "twice", "unknown", "negative", "elsewhere", "many"],
)
def test_an_upload_for_devices_that_are_not_there_is_refused(
    devices: tuple[DeviceAddress, ...],
) -> None:
    stage = Stage()
    array = stage.attacker.id()
    stage.attacker.tell(msg.CreateArray(array, stage.spec, 1))
    stage.tell_host(msg.Upload(array, stage.spec, devices, bytes(4 * SMALL), "i", 1))
    assert stage.world.counters["uploads_refused"] == 1
    stage.attacker.specs[array] = stage.spec
    assert stage.attacker.value(array).kind == PlacementError.__name__
    stage.check_well()


def test_numbers_that_only_the_controller_gives_are_refused() -> None:
    stage = Stage()
    number = client_id(stage.attacker.number, REPEATS + 1)
    stage.tell(msg.CreateArray(number, stage.spec, 1))
    assert stage.attacker.failed[number].kind == "ProtocolError"
    stage.tell(msg.RegisterProgram(number, Compact.of(chain([stage.spec])), ()))
    assert number not in stage.world.client(stage.attacker.number).programs
    stage.attacker.sent_runs += 1
    stage.tell(msg.Run(number, number, (), (stage.attacker.id(),)))
    assert not stage.world.control.runs.in_flight
    stage.check_well()


def test_an_array_of_somebody_else_is_not_announced() -> None:
    stage = Stage()
    mine = stage.honest.upload(X, split(stage.slice, 2))
    stage.tell(msg.CreateArray(mine, stage.spec, 1))
    assert stage.attacker.failed[mine].kind == "ProtocolError"
    np.testing.assert_array_equal(stage.honest.value(mine), X)
    stage.check_well()


# --- programs --------------------------------------------------------------------------------------------


def one_call(spec: ArraySpec, **changed: Any) -> Program:
    computation = Computation("f", digest(b"1"), spec.placement, (spec,), (spec,))
    body = Program(
        "f",
        (msgspec.structs.replace(computation, **changed.pop("computation", {})),),
        (Node(0, (ValueRef(-1, 0),)),),
        (spec,),
        (Output(ValueRef(0, 0), spec),),
    )
    return msgspec.structs.replace(body, **changed)


def flags(spec: ArraySpec, count: int, axes: tuple[tuple[str, ...], ...] = ()) -> ArraySpec:
    sharding = msgspec.structs.replace(spec.sharding, spec=axes)
    return msgspec.structs.replace(spec, shape=(count,), dtype="bool", sharding=sharding)


PROGRAMS: dict[str, Callable[[ArraySpec], Program]] = {
    "a long name": lambda spec: one_call(spec, name="x" * 20_000_000),
    "a long name of a function": lambda spec: one_call(spec, computation={"name": "x" * 1_000_000}),
    "a timeout that is no number": lambda spec: one_call(spec, timeout_s=float("nan")),
    "an endless timeout": lambda spec: one_call(spec, timeout_s=float("inf")),
    "a negative timeout": lambda spec: one_call(spec, timeout_s=-1.0),
    "an unknown function": lambda spec: one_call(spec, nodes=(Node(1, (ValueRef(-1, 0),)),)),
    "a function before the first": lambda spec: one_call(
        spec, nodes=(Node(-1, (ValueRef(-1, 0),)),)
    ),
    "an unknown value": lambda spec: one_call(spec, nodes=(Node(0, (ValueRef(0, 0),)),)),
    "a donated input that is not there": lambda spec: one_call(spec, donated=(1,)),
    "an input donated before the first": lambda spec: one_call(spec, donated=(-1,)),
    "an input donated twice": lambda spec: one_call(spec, donated=(0,) * 100_000),
    "an argument donated twice": lambda spec: one_call(spec, computation={"donated": (0, 0)}),
    "many calls": lambda spec: one_call(spec, nodes=(Node(0, (ValueRef(-1, 0),)),) * 100_000),
    "many inputs": lambda spec: one_call(spec, inputs=(spec,) * 300_000),
    "many counts": lambda spec: one_call(
        spec, nodes=(Node(0, (ValueRef(-1, 0),), counted=((0, ValueRef(-1, 0)),) * 300_000),)
    ),
    "checks without flags": lambda spec: one_call(spec, computation={"checks": ("x",)}),
    "checks with too few flags": lambda spec: one_call(
        spec, computation={"checks": ("x", "y"), "outputs": (spec, flags(spec, 1))}
    ),
    "checks with flags that are split": lambda spec: one_call(
        spec, computation={"checks": ("x", "y"), "outputs": (spec, flags(spec, 2, (("x",),)))}
    ),
    **{
        name: lambda spec, wrong=wrong: one_call(  # type: ignore[misc]
            spec, inputs=(wrong_spec(spec, wrong),)
        )
        for name, wrong in WRONG.items()
    },
}


@pytest.mark.parametrize("make", PROGRAMS.values(), ids=list(PROGRAMS))
def test_a_program_that_cannot_be_is_refused_when_it_is_run(
    make: Callable[[ArraySpec], Program],
) -> None:
    stage = Stage()
    program, result = stage.attacker.id(), stage.attacker.id()
    body = Compact.of(make(stage.spec))
    stage.attacker.tell(msg.RegisterProgram(program, body, (msg.Artifact(digest(b"1"), b"1"),)))
    stage.attacker.sent_runs += 1
    stage.attacker.tell(msg.Run(stage.attacker.id(), program, (X.tobytes(),), (result,)))
    stage.world.settle()
    assert 0 < len(stage.attacker.failed[result].message) < 10_000
    assert not any(
        host.backend.installed for host in stage.hosts if len(host.backend.installed) > 1
    )
    stage.check_well()


def wide(arguments: int, donated: bool = True) -> tuple[Program, dict[int, Binding]]:
    """One call that takes so many arguments, and gives each of them back."""
    devices = (DeviceAddress("h0", 0), DeviceAddress("h1", 0))
    spec = split(1, 2)
    every = tuple(range(arguments)) if donated else ()
    computation = Computation(
        "f", b"", spec.placement, (spec,) * arguments, (spec,) * arguments, every
    )
    body = Program(
        "f",
        (computation,),
        (Node(0, tuple([ValueRef(-1, index) for index in range(arguments)])),),
        (spec,) * arguments,
        tuple([Output(ValueRef(0, index), spec) for index in range(arguments)]),
        every,
    )
    return body, {1: Binding.of(1, "i", devices)}


@pytest.mark.parametrize("lowering", [lower, lower_with_memory])
@pytest.mark.long
def test_lowering_takes_time_in_proportion_to_the_arguments(lowering: Callable[..., Any]) -> None:
    """Ten times the arguments took a hundred times as long."""

    def seconds(arguments: int) -> float:
        body, bindings = wide(arguments)
        taken = []
        for _ in range(3):
            gc.collect()
            gc.disable()
            began = time.thread_time()
            lowering(body, bindings)
            taken.append(time.thread_time() - began)
            gc.enable()
        return min(taken)

    assert seconds(20_000) < 60 * seconds(2_000)


# --- other messages --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wanted",
    [
        {"devices": 0},
        {"devices": -HUGE},
        {"devices": 2, "topology": (-1, -2)},
        {"devices": 2, "topology": (0, 2)},
        {"devices": 2, "topology": ()},
        {"devices": 2, "hosts": ("h0", "h0")},
        {"devices": 2, "like": -1},
        {"devices": 2, "like": HUGE},
    ],
    ids=[str(number) for number in range(8)],
)
def test_a_slice_that_cannot_be_is_refused(wanted: dict[str, Any]) -> None:
    stage = Stage()
    number = stage.attacker.id()
    request: dict[str, Any] = {"kind": None, "island": None, "topology": None} | wanted
    stage.tell(msg.AllocateSlice(number, **request))
    (refused,) = stage.attacker.of(msg.SliceRefused)
    assert refused.slice == number
    assert len(refused.error.message) < 10_000
    stage.check_well()


MANY = tuple(range(1, 200_000))
LONG = "x" * 20_000_000
NO_NUMBER = float("nan")
PLACES = tuple([DeviceAddress("h0", at) for at in range(100_000)])


def slice_of(devices: int, **wanted: Any) -> msg.AllocateSlice:
    return msg.AllocateSlice(
        7, devices, **{"kind": None, "island": None, "topology": None} | wanted
    )


BEYOND = [
    msg.Attach(LONG, 1.0, 0),
    *[msg.Attach("x", share, 0) for share in (0.0, -1.0, NO_NUMBER, float("inf"), 5e-324, 1e308)],
    slice_of(HUGE),
    slice_of(2, topology=(HUGE,)),
    slice_of(2, topology=(1,) * 300_000),
    slice_of(2, island=LONG),
    slice_of(2, kind=LONG),
    slice_of(2, formerly=LONG),
    slice_of(2, hosts=(LONG,)),
    slice_of(2, hosts=("x",) * 200_000),
    slice_of(2, former_hosts=(LONG,)),
    slice_of(2, apart=MANY),
    msg.Offer(7, bytes(16), MANY, ()),
    msg.Checkpoint(7, MANY),
    msg.Inquire(7, MANY),
    msg.Cancel(tuple(range(300_000))),
    msg.SaveArrays(7, "0123456789", "/tmp/x", False, MANY, (), b"{}"),
    msg.SaveArrays(7, "0123456789", "/tmp/x", False, (1,), ("x",) * 200_000, b"{}"),
    msg.SaveArrays(7, "0123456789", "/tmp/x", False, (1,), ("x" * 100_000,), b"{}"),
    msg.SaveArrays(7, "0123456789", "/tmp/x", False, (1,), ("x",), bytes(40_000_000)),
    msg.SaveArrays(7, "0123456789", "/" + "x" * 5000, False, (1,), ("x",), b"{}"),
    msg.Explain(7, (LONG,)),
    msg.Explain(7, ("x",) * 200_000),
    msg.GetPlan(7, LONG),
    msg.DrainHost(7, LONG),
    msg.LinkLost(LONG),
    msg.Wait(7, MANY),
    msg.Describe(7, "/" + "x" * 1_000_000),
    msg.Compile(7, b"", PLACES, "i", 1),
]


@pytest.mark.parametrize("message", BEYOND, ids=lambda message: type(message).__name__)
def test_what_is_beyond_its_bounds_does_not_arrive_and_no_session_sends_it(message: Any) -> None:
    with pytest.raises(codec.MalformedFrame) as raised:
        crossed(message)
    error = beyond_bounds(message)
    assert error is not None
    assert error.kind == ArgumentError.__name__
    assert max(len(error.message), len(str(raised.value))) < 1000


@pytest.mark.parametrize(
    "message",
    [
        msg.Run(7, 1, (bytes(1_000_000),), (8,)),
        msg.Run(7, 1, tuple(range(300_000)), (8,)),
        msg.Run(7, 1, (), tuple(range(300_000))),
        msg.Fetch(7, 0, split(0, 1), PLACES, (), None),
        msg.Fetch(7, 0, split(0, 1), (), (), Landing(0, 8, 0, "m", "", "")),
        msg.Fetch(7, 0, split(0, 1), (), (), Landing(1, -8, 0, "m", "", "")),
        msg.Fetch(7, 0, split(0, 1), (), (), Landing(1, 8, -1, "m", "", "")),
        msg.Fetch(7, 0, split(0, 1), (), (), Landing(1, 8, 0, LONG, "", "")),
        msg.CreateArray(7, split(0, 1), 1, msg.FileSource("/x", LONG, "x")),
        msg.CreateArray(7, split(0, 1), 1, msg.FileSource("/x", "", LONG)),
        msg.RegisterHost(LONG, 1, 1, "cpu", "", 1),
        msg.RegisterHost("i", -1, 1, "cpu", "", 1),
        msg.RegisterHost("i", 1, 0, "cpu", "", 1),
        msg.RegisterHost("i", 1, HUGE, "cpu", "", 1),
        msg.RegisterHost("i", 1, 1, "cpu", "", 1, epoch=-1),
        msg.RegisterHost("i", 1, 1, "cpu", "", 1, members=("x",) * 200_000),
        msg.IslandJoined("i", 1, LONG, 1, None),
        msg.IslandJoined("i", 1, "cpu", 1, -1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_no_process_of_pw_sends_does_not_arrive(message: Any) -> None:
    with pytest.raises(codec.MalformedFrame) as raised:
        crossed(message)
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize(
    "message",
    [
        msg.SaveArrays(7, "0123456789", "relative", False, (1,), ("x",), b"{}"),
        msg.SaveArrays(7, "0123456789", "/tmp/../etc", False, (1,), ("x",), b"{}"),
        msg.SaveArrays(7, "0123456789", "/", False, (1,), ("x",), b"{}"),
        msg.SaveArrays(7, "0123456789", "/tmp/x\0y", False, (1,), ("x",), b"{}"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_request_that_cannot_be_is_answered_with_an_error(message: Any) -> None:
    stage = Stage()
    stage.tell(message)
    answers = (*stage.attacker.of(msg.RequestFailed), *stage.attacker.of(msg.Answered))
    assert [answer.request for answer in answers] == [7]
    assert isinstance(answers[0].error, ErrorReport)
    assert len(answers[0].error.message) < 10_000
    stage.check_well()


@pytest.mark.parametrize(
    "message",
    [
        msg.Describe(7, "relative/path"),
        msg.Describe(7, "/tmp/../etc"),
        msg.Fetch(7, 0, split(0, 1), (DeviceAddress("h0", 0),), (0,) * 200_000, None),
        msg.Compile(7, b"", (), "i", 1),
        msg.Compile(7, b"", (DeviceAddress("h0", 0),) * 2, "i", 1),
        msg.Compile(7, b"", (DeviceAddress("h0", 9),), "i", 1),
        msg.Compile(7, b"", (DeviceAddress("h1", 0),), "i", 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_request_to_a_host_that_cannot_be_is_answered_with_an_error(message: Any) -> None:
    stage = Stage()
    stage.tell_host(message)
    (answer,) = stage.attacker.of(msg.RequestFailed)
    assert answer.request == 7
    assert len(answer.error.message) < 10_000
    stage.check_well()


def test_a_fetch_names_its_devices_in_vain() -> None:
    """What counts is where the array lies, not where its client says that it does."""
    stage = Stage()
    array = stage.attacker.upload(X, stage.spec)
    stage.world.settle()
    here = (DeviceAddress("h0", 0), DeviceAddress("h0", 0))
    stage.tell_host(msg.Fetch(7, array, stage.spec, here, (1,), None))
    (answer,) = stage.attacker.of(msg.RequestFailed)
    assert "does not lie on this host" in answer.error.message
    stage.check_well()


@pytest.mark.parametrize(
    ("socket", "endpoint", "plane"),
    [
        ("/run/docker.sock", "", ""),
        ("", "tcp://10.0.0.9:22", ""),
        ("", "ipc:///run/docker.sock", ""),
        ("", "tcp://10.0.0.9:22/chunks-1", ""),
        ("/run/../tmp/bulk-1/../x.sock", "", ""),
        ("pw-bulk-7-abc/../../run/docker.sock", "", ""),
        ("", "ipc:///run/pw-1/../bulk/chunks-1\0x", ""),
        ("", "", "0" * 31),
        ("", "", "tcp://10.0.0.9:22"),
    ],
)
def test_a_client_cannot_have_a_host_dial_anything(socket: str, endpoint: str, plane: str) -> None:
    stage = Stage()
    array = stage.attacker.upload(X, stage.spec)
    stage.world.settle()
    landing = Landing(1, X.nbytes, 0, "h0", socket, endpoint, plane)
    here = (DeviceAddress("h0", 0),)
    stage.tell_host(msg.Fetch(7, array, stage.spec, here, (0,), landing))
    (answer,) = stage.attacker.of(msg.RequestFailed)
    assert "cannot have its values sent to" in answer.error.message
    stage.check_well()


def test_the_sockets_of_planes_may_be_dialled() -> None:
    for socket, endpoint in (
        ("", ""),
        ("pw-bulk-7-abc", "ipc://@pw-chunks-7-abc"),
        ("/run/user/1/pw-cluster-x/bulk-12345678", "ipc:///run/user/1/pw-cluster-x/chunks-1"),
    ):
        check_landing(Landing(1, 8, 0, "m", socket, endpoint))


def test_a_client_cannot_have_more_runs_in_flight_than_it_has_credits() -> None:
    stage = Stage()
    program = stage.attacker.program(chain([stage.spec], b"forever"), b"forever")
    stage.world.settle()
    made = [stage.attacker.run(program, X) for _ in range(RUN_CREDITS + 10)]
    stage.world.settle()
    refused = [array for (array,) in made if array in stage.attacker.failed]
    assert refused == [array for (array,) in made[RUN_CREDITS:]]
    assert len(stage.world.control.runs.in_flight) == RUN_CREDITS


@pytest.mark.long
def test_offered_arrays_are_deleted_in_proportion_to_their_number() -> None:
    """Each deleted array was compared with each offered one."""

    def seconds(count: int) -> float:
        stage = Stage()
        arrays = [stage.attacker.id() for _ in range(count)]
        for array in arrays:
            stage.attacker.tell(msg.CreateArray(array, stage.spec, 1))
        stage.world.settle()
        offer = msg.Offer(stage.attacker.id(), bytes(16), tuple(arrays), (stage.spec,) * count)
        stage.tell(offer)
        client = stage.world.client(stage.attacker.number)
        assert len(client.offered) == count
        began = time.thread_time()
        stage.tell(msg.Delete(tuple(arrays)))
        return time.thread_time() - began

    few = min(seconds(2_000) for _ in range(3))
    assert min(seconds(20_000) for _ in range(2)) < 60 * few


def test_a_client_that_comes_back_may_tell_any_story() -> None:
    """It tells of arrays, runs and programs that cannot be, and of those of others."""
    stage = Stage()
    resumed = join(stage.world, "resumed")
    resumed.tell(msg.Attach("resumed", 1.0, 0, 77, NO_SECRET.claim(77, OPERATOR)))
    stage.world.settle()
    assert resumed.number == 77
    number = resumed.number
    slice_ = client_id(number, 1)

    def own(serial: int) -> int:
        return client_id(number, serial)

    spec = split(slice_, 2)
    early = split(client_id(number, 40), 2)
    resumed.tell(msg.CreateArray(own(41), early, 0))  # before its slice
    resumed.tell(
        msg.RegisterProgram(
            own(42), Compact.of(chain([early])), (msg.Artifact(digest(b"1"), b"1"),)
        )
    )
    resumed.tell(msg.Run(own(43), own(42), (own(41),), (own(44),)))
    resumed.tell(msg.AllocateSlice(client_id(number, 40), 1, None, None, None, resumed=True))
    resumed.tell(msg.AllocateSlice(slice_, 2, None, None, None, resumed=True))
    known = []
    for serial, wrong in enumerate(WRONG.values(), 50):
        bad = wrong_spec(spec, wrong)
        resumed.tell(msg.CreateArray(own(serial), bad, 0))
        known.append(msg.KnownArray(own(serial + 100), bad))
        program = own(serial + 200)
        body = Compact.of(one_call(spec, inputs=(bad,)))
        resumed.tell(msg.RegisterProgram(program, body, (msg.Artifact(digest(b"1"), b"1"),)))
        resumed.tell(msg.Run(own(serial + 300), program, (own(serial),), (own(serial + 400),)))
    good = own(1000)
    resumed.tell(
        msg.RegisterProgram(good, Compact.of(chain([spec])), (msg.Artifact(digest(b"1"), b"1"),))
    )
    resumed.tell(msg.Run(own(1001), good, (X.tobytes(),), (own(1002), own(1002))))
    resumed.tell(msg.Run(own(1003), good, (X.tobytes(),), (client_id(stage.honest.number, 1),)))
    resumed.tell(msg.Run(own(1004), good, (X.tobytes(),), (own(1005),)))
    held = tuple(own(serial) for serial in (*range(41, 600), 1002, 1005))
    theirs = client_id(stage.honest.number, 1)
    resumed.tell(
        msg.Resumed((*held, theirs), Compact.of(msg.KnownArrays(tuple(known))), (), (theirs, *held))
    )
    stage.world.settle()
    stage.world.wait(100.0)
    assert own(1005) not in resumed.failed
    assert own(50) in resumed.failed
    stage.check_well()


def test_a_spec_is_checked_without_a_slice() -> None:
    """The number of devices of a slice is not always known; those of a spec are few in any case."""
    spec = split(1, 2)
    check_spec(spec, None)
    for wrong in WRONG.values():
        if wrong.get("placement") != (0, 2):
            with pytest.raises((ShardingError, PlacementError)):
                check_spec(wrong_spec(spec, wrong), None)


@pytest.mark.parametrize("early", [False, True], ids=["announced before", "announced behind"])
@pytest.mark.parametrize(
    "other",
    [
        {"dtype": "int32"},
        {"shape": (2 * SMALL,)},
        {"sharding": Sharding(("x",), (2,), ())},
        {"memory": "pinned_host"},
        {"reverse": True},
    ],
    ids=["dtype", "shape", "sharding", "memory", "devices"],
)
def test_one_host_cannot_be_told_of_another_array_than_the_controller(
    other: dict[str, Any], early: bool
) -> None:
    """The hosts of a gang could not run what takes the array, and their island would be formed anew."""
    stage = Stage()
    attacker, spec, other = stage.attacker, stage.spec, dict(other)
    devices = attacker.devices(spec)
    program = attacker.program(chain([spec]))
    stage.world.settle()
    array, (result,) = attacker.id(), (attacker.id(),)
    if not early:
        stage.tell(msg.CreateArray(array, spec, 1))
    half = bytes(X.nbytes // 2)
    named = devices[::-1] if other.pop("reverse", False) else devices
    told = msgspec.structs.replace(spec, **other)
    size = sum(box_bytes(box, told.dtype) for box, _ in host_boxes(told, named, "h0"))
    stage.tell_host(msg.Upload(array, told, named, bytes(size), "i", 1), "h0")
    stage.tell_host(msg.Upload(array, spec, devices, half, "i", 1), "h1")
    if early:
        stage.tell(msg.CreateArray(array, spec, 1))
    attacker.sent_runs += 1
    stage.tell(msg.Run(attacker.id(), program, (array,), (result,)))
    assert "another form" in attacker.failed[result].message
    stage.check_well()


def test_a_host_speaks_only_of_arrays_that_lie_on_it() -> None:
    """Neither the loss of an array nor an upload is believed from a host of another island."""
    stage = Stage()
    stage.world.host("other", "o", 1)
    stage.world.settle()
    (y,) = stage.honest.run(stage.program, X)
    stage.world.settle()
    own = stage.world.client(stage.honest.number)
    refused = stage.world.counters["messages_refused"]
    stage.world.post(store_of("other"), CONTROL, msg.ArraysLost((y,)))
    stage.world.post(store_of("other"), CONTROL, msg.Uploaded(stage.honest.id(), None))
    stage.world.settle()
    assert stage.world.counters["messages_refused"] == refused + 2
    assert not own.arrays.unannounced
    array = own.arrays.find(y)
    assert array is not None
    assert not array.is_lost
    assert stage.world.counters["runs_repeated"] == 0
    np.testing.assert_array_equal(stage.honest.value(y), X + 1)
