"""A client's session when hosts are lost: what it asks again, what it sends again, what it gives up.

The controller and the hosts are played by the test, so each rule is seen message by message.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from pw.client.connection.waiting import Fetching
from pw.client.session.hosts import Hosts
from pw.client.session.requests import RETRIES, WITHDRAWN_S
from pw.client.session.session import ClientSession
from pw.client.session.thread_messages import (
    Allocate,
    Ask,
    AskedAhead,
    Await,
    Close,
    DescribeCheckpoint,
    Forget,
    Get,
    Meet,
    Open,
    Put,
    Tell,
    TellLaunched,
    resolve,
)
from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import (
    ArgumentError,
    ArrayDeleted,
    ArrayLost,
    ComputationFailed,
    ConnectionFailed,
    Disconnected,
    Error,
    ErrorReport,
    HostLost,
    InternalError,
    TransferFailed,
    VersionMismatch,
)
from pw.core.ids import CONTROL, CONTROLLER, Address, session_of, store_of
from pw.core.packing import pack
from pw.core.sharding import ArraySpec, DeviceAddress, box_slices
from tests.stages.actors import Recorder, World
from tests.stages.fake_devices import FakeBulk
from tests.stages.scripted import LARGE, SMALL, chain, split

ME = session_of("client")
SLICE, X, Y = 1, 10, 11
ERROR = ErrorReport("HostLost", "the island is gone")


class Bench:
    """A session, and all nodes that it talks to."""

    def __init__(self, keep_bytes: int = 1 << 30, hosts: tuple[str, ...] = ("a", "b")) -> None:
        self.world = World()
        self.epoch = 0
        self.bulk = {name: FakeBulk(self.world, name) for name in ("client", *hosts)}
        self.session = self.world.add(
            ME, lambda env: ClientSession(env, self.bulk["client"], lambda count: None)
        )
        self.controller: Recorder = self.world.add(CONTROL, Recorder)
        self.hosts: dict[str, Recorder] = {h: self.world.add(store_of(h), Recorder) for h in hosts}
        attached: Future[Any] = Future()
        self.note(Open("test", 1.0, 0, keep_bytes, attached))
        self.directory(dict.fromkeys(hosts, ""))
        self.tell(msg.Attached(1, b"ticket", 8, ("east",)))
        assert attached.result(0).client == 1
        self.bind(*hosts)
        self.controller.received.clear()

    def note(self, note: Any) -> None:
        self.world.post(ME, ME, note)
        self.world.settle()

    def tell(self, *messages: Any, sender: Address = CONTROL) -> None:
        for message in messages:
            self.world.post(sender, ME, message)
        self.world.settle()

    def bind(self, *hosts: str) -> None:
        self.epoch += 1
        devices = tuple(DeviceAddress(host, 0) for host in hosts)
        self.tell(msg.SliceBound(SLICE, "east", "cpu", "fake", devices, self.epoch))

    def directory(self, endpoints: dict[str, str]) -> None:
        self.tell(msg.Directory(tuple(msg.Peer(*entry) for entry in endpoints.items())))

    def lose(self, host: str) -> None:
        self.note(msg.PeerLost(host, "killed"))

    def asked(self, where: str, kind: type = object) -> list[Any]:
        """What the controller or a host was sent since the last look."""
        actor = self.controller if where == CONTROLLER else self.hosts[where]
        found, actor.received[:] = actor.of(kind) if kind is not object else actor.received[:], []
        return found

    def answer(self, host: str, request: Any) -> None:
        """A host's answer to a fetch or a wait."""
        if isinstance(request, msg.Wait):
            self.tell(msg.Ready(request.request), sender=store_of(host))
            return
        parts = [value(request.spec)[box_slices(request.spec.box(i))] for i in request.positions]
        self.tell(msg.Fetched(request.request, pack(parts)), sender=store_of(host))

    def refuse(self, host: str, request: Any, error: Error) -> None:
        self.tell(msg.RequestFailed(request.request, ErrorReport.of(error)), sender=store_of(host))

    def get(self, spec: ArraySpec | None = None, array: int = X) -> Future[Any]:
        future: Future[Any] = Future()
        self.note(Get(array, spec or split(SLICE, 2), future))
        return future

    def wait(self, *arrays: int) -> Future[Any]:
        future: Future[Any] = Future()
        self.note(Await(tuple((array, split(SLICE, 2)) for array in arrays), future))
        return future

    def inquiry(self) -> msg.Inquire:
        """The one question that the controller was asked."""
        (inquiry,) = self.asked(CONTROLLER, msg.Inquire)
        return inquiry

    def put(self, spec: ArraySpec, keep: bool = False, array: int = X) -> Any:
        self.note(Put(array, spec, value(spec), keep))
        return value(spec)

    def attempt(self, host: str) -> int:
        """Which attempt at an upload the host has heard of last."""
        return int(self.asked(host, msg.Upload)[-1].attempt)

    def take(self, host: str, array: int = X) -> np.ndarray[Any, Any]:
        """A host lets the client push its shard of a large upload, and returns what has come."""
        upload = self.asked(host, msg.Upload)[-1]
        assert (upload.array, upload.data) == (array, None)
        came: list[Any] = []
        shard_bytes = upload.spec.shard_bytes
        landing = self.bulk[host].land(shard_bytes, came.append)
        self.tell(msg.UploadLanding(array, landing, upload.attempt), sender=store_of(host))
        (buffer,) = came
        return buffer[:shard_bytes].view(np.int64)


def value(spec: ArraySpec) -> np.ndarray[Any, Any]:
    return np.arange(spec.shape[0], dtype=np.int64)


def whole(future: Future[Any]) -> list[int]:
    parts = sorted(future.result(0), key=lambda part: part[0])
    return [int(number) for _, part in parts for number in part]


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- what is asked again ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [HostLost("x"), TransferFailed("x"), ConnectionFailed("x"), ArrayDeleted("x")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("kind", ["get", "wait"])
def test_what_a_host_cannot_give_is_asked_again_where_the_slice_is_then(
    bench: Bench, kind: str, error: Error
) -> None:
    future = bench.get() if kind == "get" else bench.wait(X)
    (early,) = bench.asked("a", (msg.Fetch if kind == "get" else msg.Wait))
    (late,) = bench.asked("b", (msg.Fetch if kind == "get" else msg.Wait))
    bench.answer("a", early)
    bench.refuse("b", late, error)
    inquiry = bench.inquiry()
    assert inquiry.arrays == (X,)
    assert not future.done()

    bench.bind("b", "a")
    assert not bench.asked("a", msg.Fetch) + bench.asked("b", msg.Fetch), (
        "the controller has not answered"
    )
    bench.tell(msg.Answered(inquiry.request, None))
    for host in ("a", "b"):
        (request,) = [m for m in bench.asked(host) if isinstance(m, (msg.Fetch, msg.Wait))]
        bench.answer(host, request)
    if kind == "get":
        assert whole(future) == list(range(SMALL))
    else:
        assert future.result(0) is None


def test_a_request_names_the_epoch_in_which_the_slice_is_on_its_hosts(bench: Bench) -> None:
    for epoch in (1, 2):
        bench.get()
        bench.wait(X, Y)
        for host in ("a", "b"):
            asked = [m for m in bench.asked(host) if isinstance(m, (msg.Fetch, msg.Wait))][-2:]
            assert [(one.island, one.epoch) for one in asked] == [("east", epoch)] * 2
        bench.bind("a", "b")
        for inquiry in bench.asked(CONTROLLER, msg.Inquire):
            bench.tell(msg.Answered(inquiry.request, None))


def test_a_lost_host_withdraws_what_was_asked_of_the_others(bench: Bench) -> None:
    future = bench.get(split(SLICE, 2, LARGE))
    (fetch,) = bench.asked("a", msg.Fetch)
    bench.lose("b")
    assert bench.asked("a") == [msg.CancelRequest(fetch.request)]
    assert not bench.bulk["client"].landings, "the buffers are given up"
    inquiry = bench.inquiry()
    bench.answer("a", fetch)  # it was on its way
    assert not future.done()
    bench.tell(msg.Answered(inquiry.request, None))
    assert [type(m) for m in bench.asked("b")][-2:] == [msg.Identify, msg.Fetch]


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "note",
    [
        lambda future: Allocate(msg.AllocateSlice(9, 1, None, LONG, None), future),
        lambda future: Ask(lambda request: msg.GetPlan(request, LONG), future),
        lambda future: Ask(lambda request: msg.Checkpoint(request, (X,) * 70_000), future),
        lambda future: DescribeCheckpoint("/" + LONG, split(SLICE, 2), future),
        lambda future: Await(((X, split(SLICE, 2)),) * 70_000, future),
    ],
    ids=["a slice", "a question", "a request", "a path", "arrays"],
)
def test_a_request_beyond_its_bounds_fails_and_is_not_sent(note: Callable[[Any], Any]) -> None:
    bench = Bench()
    for host in ("a", "b"):
        bench.asked(host)
    future: Future[Any] = Future()
    bench.note(note(future))
    with pytest.raises(ArgumentError, match="out of bounds: expected"):
        future.result(0)
    assert not bench.asked(CONTROLLER)
    assert not any(isinstance(message, (msg.Wait, msg.Describe)) for message in bench.asked("a"))
    assert bench.world.counters["messages_refused"] >= 1
    bench.get()
    assert bench.asked("a", msg.Fetch)


def test_a_client_with_an_impossible_share_is_told_so() -> None:
    bench = Bench()
    attached: Future[Any] = Future()
    bench.note(Open("test", 0.0, 0, 0, attached))
    with pytest.raises(ArgumentError, match="`share` is out of bounds"):
        attached.result(0)
    assert not bench.asked(CONTROLLER)


@pytest.mark.parametrize("error", [ComputationFailed("x"), ArrayLost("x"), ArgumentError("x")])
def test_what_a_host_says_about_the_program_is_final(bench: Bench, error: Error) -> None:
    future = bench.get()
    bench.refuse("a", bench.asked("a", msg.Fetch)[0], error)
    assert type(future.exception(0)) is type(error)
    assert not bench.asked(CONTROLLER, msg.Inquire)
    assert [type(m) for m in bench.asked("b")][-1] is msg.CancelRequest


def test_a_value_of_a_slice_that_is_not_bound_waits(bench: Bench) -> None:
    bench.tell(msg.SliceLost(SLICE, ERROR))
    future = bench.get()
    inquiry = bench.inquiry()
    bench.bind("b", "b")
    bench.tell(msg.Answered(inquiry.request, None))
    (fetch,) = bench.asked("b", msg.Fetch)
    assert fetch.positions == (0, 1)
    bench.answer("b", fetch)
    assert whole(future) == list(range(SMALL))


@pytest.mark.parametrize("news", ["lost", "bound elsewhere"])
def test_when_a_slice_moves_its_old_hosts_are_not_waited_for(bench: Bench, news: str) -> None:
    """One that does not answer any more may only be noticed much later."""
    future, other = bench.get(), bench.get(split(2, 1))  # the other's slice is not bound at all
    assert len(bench.asked(CONTROLLER, msg.Inquire)) == 1
    if news == "lost":
        bench.tell(msg.SliceLost(SLICE, ERROR))
    else:
        bench.bind("a", "a")
    assert bench.inquiry().arrays == (X,)
    assert not future.done()
    assert not other.done()


def test_the_controller_may_say_that_it_is_over(bench: Bench) -> None:
    future = bench.get()
    bench.lose("a")
    bench.tell(msg.Answered(bench.inquiry().request, ErrorReport("ArrayDeleted", "no such array")))
    with pytest.raises(ArrayDeleted, match="no such array"):
        future.result(0)


def test_a_failed_run_ends_the_wait_for_its_results(bench: Bench) -> None:
    future, other = bench.wait(X, Y), bench.get(array=12)
    bench.lose("a")
    inquiries = bench.asked(CONTROLLER, msg.Inquire)
    bench.tell(msg.RunFailed(0, (Y,), ErrorReport("ArrayLost", "cannot be rebuilt")))
    with pytest.raises(ArrayLost):
        future.result(0)
    bench.tell(*(msg.Answered(inquiry.request, None) for inquiry in inquiries))
    assert not other.done(), "that one goes on"
    with pytest.raises(ArrayLost):
        bench.get(array=Y).result(0)


def test_asking_in_vain_is_bounded_and_tells_the_cause(bench: Bench) -> None:
    future = bench.get(split(SLICE, 1))
    bench.refuse("a", bench.asked("a", msg.Fetch)[0], TransferFailed("no room"))
    for attempt in range(RETRIES):
        assert not future.done()
        bench.tell(msg.Answered(bench.inquiry().request, None))
        if attempt:
            assert not bench.asked("a", msg.Fetch), "not at once again"
            bench.world.wait(10.0)
        bench.refuse("a", bench.asked("a", msg.Fetch)[0], ArrayDeleted("it is not here"))
    with pytest.raises(TransferFailed, match="no room"):
        future.result(0)
    assert not bench.asked(CONTROLLER, msg.Inquire)


def test_a_slice_that_was_bound_again_is_worth_as_many_tries_again(bench: Bench) -> None:
    future = bench.get(split(SLICE, 1))
    for _ in range(3 * RETRIES):
        (fetch,) = bench.asked("a", msg.Fetch)
        bench.refuse("a", fetch, HostLost("again"))
        inquiry = bench.inquiry()
        bench.tell(msg.SliceLost(SLICE, ERROR))
        bench.bind("a", "b")
        bench.tell(msg.Answered(inquiry.request, None))
    bench.answer("a", bench.asked("a", msg.Fetch)[0])
    assert whole(future) == list(range(SMALL))


def test_a_pause_ends_with_what_was_asked(bench: Bench) -> None:
    future = bench.get(split(SLICE, 1))
    for _ in range(2):
        assert not bench.world.alarms
        bench.refuse("a", bench.asked("a", msg.Fetch)[0], HostLost("x"))
        bench.tell(msg.Answered(bench.inquiry().request, None))
    assert bench.world.alarms
    bench.tell(msg.RunFailed(1, (X,), ErrorReport("ComputationFailed", "x")))
    bench.world.wait(10.0)
    assert isinstance(future.exception(0), ComputationFailed)
    assert not bench.asked("a", msg.Fetch)


@pytest.mark.parametrize("how", ["deleted", "donated"])
def test_what_the_client_gave_away_itself_is_not_asked_for_again(bench: Bench, how: str) -> None:
    spec = split(SLICE, 2)
    program = chain([spec], donated=(0,))
    bench.note(Tell(msg.RegisterProgram(5, Compact.of(program), (msg.Artifact(b"", b""),))))
    mine, other = bench.wait(X, Y), bench.wait(Y)
    bench.note(Forget((X,)) if how == "deleted" else Tell(msg.Run(6, 5, (X,), (7,))))
    sent = [type(m) for m in bench.asked(CONTROLLER)]
    assert sent == [msg.RegisterProgram, msg.Delete if how == "deleted" else msg.Run]
    bench.lose("a")
    assert isinstance(mine.exception(0), HostLost)
    assert bench.inquiry().arrays == (Y,)
    assert not other.done()


def test_errors_of_what_was_given_away_are_not_kept(bench: Bench) -> None:
    """A loop of runs that fail, and donate what has failed, would add some with each."""
    bench.session.link.keeps = True
    program = chain([split(SLICE, 2)], donated=(0,))
    bench.note(Tell(msg.RegisterProgram(5, Compact.of(program), (msg.Artifact(b"", b""),))))
    bench.note(Tell(msg.Run(20, 5, (b"x" * 64,), (X,))))
    waiting = bench.wait(X)
    bench.note(Tell(msg.Run(21, 5, (X,), (Y,))))
    bench.tell(msg.RunFailed(20, (X,), ERROR), msg.RunFailed(21, (Y,), ERROR))
    assert isinstance(waiting.exception(0), HostLost)
    assert isinstance(bench.wait(Y).exception(0), HostLost)
    late = bench.wait(X)
    assert isinstance(late.exception(0), HostLost), "it waited on a line until its slice moved"
    bench.world.wait(WITHDRAWN_S)
    assert bench.session.requests.failed.keys() == {Y}


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_that_no_thread_has_waited_for_has_not_been_raised(
    bench: Bench, waits: bool
) -> None:
    """A question that went with its run fails with it, and the end of the session tells of the run."""
    ahead, future = AskedAhead(), Future[Any]()
    bench.note(Await(((X, ONE),), future, ahead))
    ahead.is_waited_for = waits
    failed = msg.RunFailed(20, (X,), ERROR)
    bench.tell(failed)
    assert isinstance(future.exception(0), HostLost)
    assert bench.session.requests.unraised == ({} if waits else {20: failed})


def test_the_error_of_what_was_deleted_and_a_run_still_reads_is_told_again(bench: Bench) -> None:
    """To another controller, which would take the argument for lost."""
    bench.session.link.keeps = True
    program = chain([split(SLICE, 2)])
    bench.note(Tell(msg.RegisterProgram(5, Compact.of(program), (msg.Artifact(b"", b""),))))
    bench.note(Tell(msg.Run(20, 5, (b"x" * 64,), (X,))))
    bench.note(Tell(msg.Run(21, 5, (X,), (Y,))))
    bench.note(Forget((X,)))
    bench.tell(msg.RunFailed(20, (X,), ERROR))
    *_, runs, resumed = bench.session.link.journal.retold()
    assert isinstance(runs, msg.Run)
    assert runs.run == 21
    assert isinstance(resumed, msg.Resumed)
    assert [failed.array for failed in resumed.failed] == [X]


def test_what_was_deleted_is_told_as_that(bench: Bench) -> None:
    future = bench.get()
    bench.note(Forget((X,)))
    bench.refuse("a", bench.asked("a", msg.Fetch)[0], ArrayDeleted("it was deleted"))
    assert isinstance(future.exception(0), ArrayDeleted)


def test_a_host_that_refuses_to_talk_fails_what_was_asked_of_it(bench: Bench) -> None:
    future = bench.get()
    bench.note(msg.PeerRefused("a", ErrorReport.of(VersionMismatch("other jax"))))
    assert isinstance(future.exception(0), VersionMismatch)


def test_of_a_value_that_was_fetched_in_parts_only_the_whole_is_kept() -> None:
    spec = split(SLICE, 2)
    halves = [np.full(SMALL // 2, index) for index in range(2)]
    kept = [weakref.ref(half) for half in halves]
    future = Fetching(spec)
    resolve(future, [(spec.box(index), half) for index, half in enumerate(halves)])
    assert future.done()
    del halves
    whole = future.result(0)
    assert [ref() for ref in kept] == [None, None]
    assert future.result(0) is whole
    assert whole.shape == spec.shape
    assert set(np.unique(whole)) == {0, 1}


def test_everything_ends_with_the_controller_and_with_close() -> None:
    for end in ("lost", "closed"):
        bench = Bench()
        open_, inquiring = bench.get(split(SLICE, 1)), bench.get()
        bench.lose("b")
        if end == "lost":
            bench.note(msg.PeerLost(CONTROLLER, "killed"))
        else:
            closed: Future[None] = Future()
            bench.note(Close(Disconnected("bye"), closed))
            assert closed.done()
        for future in (open_, inquiring, bench.get()):
            kind = ConnectionFailed if end == "lost" else Disconnected
            assert isinstance(future.exception(0), kind)
        assert not any(map(bench.session.requests.is_open, range(10)))


# --- who has met the client ------------------------------------------------------------------------------


@pytest.mark.parametrize("news", ["lost", "moved", "gone for a while", "bound again", "none"])
def test_a_new_process_is_told_who_asks(bench: Bench, news: str) -> None:
    bench.get(split(SLICE, 1))
    identify, fetch = bench.asked("a")
    assert identify == msg.Identify(1, b"ticket")
    bench.answer("a", fetch)
    if news == "lost":
        bench.lose("a")
    elif news == "moved":
        bench.directory({"a": "elsewhere", "b": ""})
    elif news == "gone for a while":
        bench.directory({"b": ""})
        bench.directory({"a": "", "b": ""})
    elif news == "bound again":
        bench.bind("a", "b")
    bench.get(split(SLICE, 1))
    kinds = [type(m) for m in bench.asked("a")]
    assert kinds == ([msg.Fetch] if news == "none" else [msg.Identify, msg.Fetch])


def traces(bench: Bench) -> dict[str, bool]:
    """Where the session has something of the slice."""
    hosts = bench.session.hosts
    places = {"slices": hosts.slices, "bounds": hosts.bounds, "former": hosts.former}
    return {name: SLICE in place for name, place in places.items()}


def test_a_slice_is_forgotten_when_the_controller_has_heard_that_it_was_given_back() -> None:
    """A run that was asked for before may need an input there, on other hosts than before."""
    bench = Bench(hosts=("a", "b", "c"))
    spec = split(SLICE, 2)
    sent = bench.put(spec)
    bench.asked(CONTROLLER)
    bench.note(Tell(msg.ReleaseSlice(SLICE)))
    assert bench.asked(CONTROLLER) == [msg.ReleaseSlice(SLICE)]
    bench.tell(msg.SliceLost(SLICE, ERROR))
    bench.bind("c", "b")
    bench.asked("b")
    bench.tell(msg.UploadAgain(X, X))
    np.testing.assert_array_equal(np.concatenate([inline(bench, "c"), inline(bench, "b")]), sent)
    bench.tell(msg.ReleaseSlice(SLICE))
    assert not any(traces(bench).values())
    bench.tell(msg.ForgetInputs((X,)))
    bench.world.sent.clear()  # the record of all messages
    assert bench.session.hosts.devices(spec) is None


def test_an_input_gets_to_a_slice_that_was_given_back() -> None:
    """Its user has let go of everything; a run whose result lies elsewhere still reads it."""
    bench = Bench()
    spec = split(SLICE, 2, LARGE)
    sent = bench.put(spec)
    bench.note(Forget((X,)))
    bench.note(Tell(msg.ReleaseSlice(SLICE)))
    bench.tell(msg.ForgetInputs((X,)), msg.ReleaseSlice(SLICE))
    assert not any(traces(bench).values())
    first = bench.take("a")
    bench.tell(msg.UploadAgain(X, X))  # the link to a host was lost
    np.testing.assert_array_equal(first, sent[: LARGE // 2])
    np.testing.assert_array_equal(np.concatenate([bench.take("a"), bench.take("b")]), sent)
    bench.world.sent.clear()
    assert not bench.session.hosts.given_back


def test_a_slice_that_is_refused_is_forgotten(bench: Bench) -> None:
    bench.tell(msg.SliceLost(SLICE, ERROR), msg.SliceRefused(SLICE, ERROR))
    assert not any(traces(bench).values())


def test_hosts_knows_where_an_array_lies() -> None:
    hosts = Hosts(World().add(Address("me", "x"), Recorder).env)
    spec = split(SLICE, 2)
    devices = tuple(DeviceAddress("a", i) for i in range(3))
    assert hosts.devices(spec) is None
    assert not hosts.bind(msg.SliceBound(SLICE, "east", "cpu", "fake", devices, 1))
    assert hosts.devices(spec) == devices[:2]
    assert hosts.bind(msg.SliceBound(SLICE, "east", "cpu", "fake", devices, 2))
    hosts.handlers()[msg.SliceLost](Address("me", "x"), msg.SliceLost(SLICE, ERROR))
    assert hosts.devices(spec) is None


# --- inputs ----------------------------------------------------------------------------------------------


def inline(bench: Bench, host: str) -> np.ndarray[Any, Any]:
    (upload,) = bench.asked(host, msg.Upload)
    return np.frombuffer(upload.data, np.int64, upload.spec.shape[0] // 2)


@pytest.mark.parametrize("elements", [SMALL, LARGE])
def test_an_input_is_sent_again_to_where_its_slice_is(elements: int) -> None:
    bench = Bench(hosts=("a", "b", "c"))
    bench.bind("a", "b")
    spec = split(SLICE, 2, elements)
    sent = bench.put(spec)
    assert bench.asked(CONTROLLER)[-1] == msg.CreateArray(X, spec, 2)
    take = (lambda host: inline(bench, host)) if elements == SMALL else bench.take
    np.testing.assert_array_equal(np.concatenate([take("a"), take("b")]), sent)

    bench.lose("a")
    bench.bind("c", "b")
    assert not bench.asked("b", msg.Upload) + bench.asked("c", msg.Upload), (
        "only when it is asked for"
    )
    assert bench.asked(CONTROLLER) == [msg.LinkLost("a")]
    bench.tell(msg.UploadAgain(X, X))
    np.testing.assert_array_equal(np.concatenate([take("c"), take("b")]), sent)


def test_an_input_without_hosts_waits_until_it_is_asked_for() -> None:
    bench = Bench(keep_bytes=0)
    bench.tell(msg.SliceLost(SLICE, ERROR))
    spec = split(SLICE, 2)
    sent = bench.put(spec)
    assert bench.asked(CONTROLLER)[-1] == msg.CreateArray(X, spec, 0)
    bench.bind("b", "a")
    assert not bench.asked("a", msg.Upload) + bench.asked("b", msg.Upload)
    bench.tell(msg.UploadAgain(X, X))
    np.testing.assert_array_equal(np.concatenate([inline(bench, "b"), inline(bench, "a")]), sent)
    bench.tell(msg.UploadAgain(X, X))
    assert bench.asked(CONTROLLER) == [msg.InputGone(X)], "it is sent, and there is no budget"


def test_an_interrupted_input_is_kept_without_a_budget() -> None:
    bench = Bench(keep_bytes=0)
    spec = split(SLICE, 2, LARGE)
    bench.put(spec)
    bench.take("a")
    bench.lose("b")
    bench.tell(msg.UploadAgain(X, X))
    bench.take("a")
    bench.take("b")
    bench.asked(CONTROLLER)
    bench.tell(msg.UploadAgain(X, X))
    assert bench.asked(CONTROLLER) == [msg.InputGone(X)]


def test_a_push_that_fails_is_told_and_the_input_kept() -> None:
    bench = Bench(keep_bytes=0)
    bench.put(split(SLICE, 1, LARGE))
    landing = bench.bulk["a"].land(LARGE * 8, lambda buffer: None)
    host = bench.world.actors.pop("a")  # for the bulk plane it is gone
    bench.tell(msg.UploadLanding(X, landing, bench.attempt("a")), sender=store_of("a"))
    bench.world.actors["a"] = host
    bench.world.settle()
    (aborted,) = bench.asked("a", msg.UploadAborted)
    assert (aborted.array, aborted.transfer) == (X, landing.transfer)
    assert aborted.error.kind == "TransferFailed"
    bench.tell(msg.UploadAgain(X, X))
    bench.take("a")


def test_a_landing_for_an_old_attempt_is_not_taken_for_that_of_the_new_one() -> None:
    """Or the value would be gone with the first push, before the host asks where the second one is."""
    bench = Bench()
    bench.put(split(SLICE, 1, LARGE), keep=True)
    bench.take("a")
    landings = []
    for _ in range(2):
        bench.tell(msg.UploadAgain(X, Y))
        landing = bench.bulk["a"].land(LARGE * 8, lambda buffer: None)
        landings.append(msg.UploadLanding(Y, landing, bench.attempt("a")))
    bench.tell(landings[0], sender=store_of("a"))
    (aborted,) = bench.asked("a", msg.UploadAborted)
    assert aborted.transfer == landings[0].landing.transfer
    assert aborted.error.kind == "TransferFailed", (
        "so that it is asked for again if it is still waited for"
    )
    bench.tell(landings[1], sender=store_of("a"))
    assert not bench.asked("a", msg.UploadAborted)


def test_the_end_of_an_old_attempt_says_nothing_about_the_new_one() -> None:
    bench = Bench(keep_bytes=0)
    bench.put(split(SLICE, 1, LARGE))
    landing = bench.bulk["a"].land(LARGE * 8, lambda buffer: None)
    first = msg.UploadLanding(X, landing, bench.attempt("a"))
    bench.session.receive(store_of("a"), first)
    bench.session.receive(CONTROL, msg.UploadAgain(X, X))  # before the push has ended
    bench.world.settle()
    assert [type(m) for m in bench.hosts["a"].received] == [msg.Upload]
    assert bench.session.uploads.inputs, "the first push was not of the second attempt"
    bench.take("a")
    assert not bench.session.uploads.inputs


def test_the_oldest_values_go_first() -> None:
    spec = split(SLICE, 2)  # 64 bytes
    bench = Bench(keep_bytes=3 * 64)
    arrays = range(20, 26)
    for array in arrays:
        bench.put(spec, keep=array == 20, array=array)
    bench.asked(CONTROLLER)
    bench.tell(*(msg.UploadAgain(array, array) for array in arrays))
    assert bench.asked(CONTROLLER) == [msg.InputGone(21), msg.InputGone(22)]
    assert [upload.array for upload in bench.asked("a", msg.Upload)][-4:] == [20, 23, 24, 25]

    bench.tell(msg.ForgetInputs((20, 24)))
    bench.put(spec, array=30)
    bench.put(split(SLICE, 2, 1024), array=31)  # more than all of the budget: pushes nothing out
    bench.asked(CONTROLLER)
    bench.tell(*(msg.UploadAgain(array, array) for array in (20, 23, 24, 25, 30, 31)))
    assert bench.asked(CONTROLLER) == [msg.InputGone(20), msg.InputGone(24), msg.InputGone(31)]


@pytest.mark.parametrize("end", [msg.ForgetInputs((X,)), msg.RunFailed(0, (X,), ERROR)])
def test_hosts_get_what_they_wait_for_even_if_nothing_will_ask_again(end: Any) -> None:
    bench = Bench()
    spec = split(SLICE, 2, LARGE)
    sent = bench.put(spec, keep=True)
    bench.tell(end)
    np.testing.assert_array_equal(np.concatenate([bench.take("a"), bench.take("b")]), sent)
    assert not bench.session.uploads.inputs

    bench.put(spec, array=Y)
    bench.asked("b")
    bench.tell(type(end)(*((Y,) if field == (X,) else field for field in fields(end))))
    bench.take("a", Y)
    assert bench.session.uploads.inputs, "b may still want it"
    bench.lose("b")
    assert not bench.session.uploads.inputs


@pytest.mark.parametrize("is_bound", [True, False])
def test_what_no_host_takes_any_more_is_forgotten_when_its_slice_moves(is_bound: bool) -> None:
    """It is sent as another array, which is not asked for again: the next time it has another name."""
    bench = Bench(hosts=("a", "b", "c"))
    spec = split(SLICE, 2, LARGE)
    bench.put(spec, keep=True)
    bench.take("a")
    bench.take("b")
    if not is_bound:
        bench.tell(msg.SliceLost(SLICE, ERROR))
    bench.tell(msg.UploadAgain(X, Y))
    assert (Y in bench.session.uploads.inputs) == is_bound
    bench.tell(msg.SliceLost(SLICE, ERROR))
    bench.bind("c", "b")
    assert list(bench.session.uploads.inputs) == [X]
    bench.asked("b")
    bench.tell(msg.UploadAgain(X, Y))
    assert [(m.island, m.epoch) for m in bench.asked("b", msg.Upload)] == [("east", 2)]


def fields(message: Any) -> list[Any]:
    return [getattr(message, name) for name in message.__struct_fields__]


def test_a_host_that_wants_what_is_gone_is_told(bench: Bench) -> None:
    landing = bench.bulk["a"].land(8, lambda buffer: None)
    bench.tell(msg.UploadLanding(99, landing, 1), sender=store_of("a"))
    assert [type(m) for m in bench.asked("a")] == [msg.Identify, msg.UploadAborted]


def test_a_failed_input_that_was_never_sent_is_forgotten(bench: Bench) -> None:
    bench.tell(msg.SliceLost(SLICE, ERROR))
    bench.put(split(SLICE, 2))
    bench.tell(msg.RunFailed(0, (X,), ErrorReport("ArrayLost", "given up")))
    assert not bench.session.uploads.inputs
    assert isinstance(bench.get().exception(0), ArrayLost)


# --- checkpoints, drains, reports ------------------------------------------------------------------------


def test_a_checkpoint_is_one_message_and_ends_with_its_answer(bench: Bench) -> None:
    done: list[Future[Any]] = [Future(), Future()]
    for future in done:
        bench.note(Ask(lambda request: msg.Checkpoint(request, (X, Y)), future, (X, Y)))
    first, second = bench.asked(CONTROLLER, msg.Checkpoint)
    assert first.arrays == (X, Y)
    bench.lose("a")
    assert bench.asked(CONTROLLER) == [msg.LinkLost("a")], (
        "the controller knows itself what was lost"
    )
    bench.tell(msg.Answered(first.request, None))
    assert done[0].result(0) is None
    bench.tell(msg.Answered(second.request, ErrorReport("HostLost", "a target was lost")))
    assert isinstance(done[1].exception(0), HostLost)


def test_a_checkpoint_of_what_failed_fails_and_copies_the_rest(bench: Bench) -> None:
    later: Future[Any] = Future()
    bench.note(Ask(lambda request: msg.Checkpoint(request, (X, Y)), later, (X, Y)))
    bench.tell(msg.RunFailed(3, (Y,), ErrorReport("ComputationFailed", "it raised")))
    assert isinstance(later.exception(0), ComputationFailed)
    known: Future[Any] = Future()
    bench.note(Ask(lambda request: msg.Checkpoint(request, (X, Y)), known, (X, Y)))
    assert isinstance(known.exception(0), ComputationFailed)
    sent = bench.asked(CONTROLLER, msg.Checkpoint)
    assert len(sent) == 2
    bench.tell(*(msg.Answered(checkpoint.request, None) for checkpoint in sent))


def test_a_drain_ends_with_its_answer(bench: Bench) -> None:
    future: Future[Any] = Future()
    bench.note(Ask(lambda request: msg.DrainHost(request, "a"), future))
    (drain,) = bench.asked(CONTROLLER, msg.DrainHost)
    assert drain.node == "a"
    bench.lose("a")
    assert not future.done()
    bench.tell(msg.Answered(drain.request, None))
    assert future.result(0) is None


def counters(answer: Future[Any]) -> dict[str, dict[str, int]]:
    return {node: one.counters for node, one in answer.result(0).items()}


def test_counters_are_those_of_every_process(bench: Bench) -> None:
    future: Future[Any] = Future()
    bench.note(Ask(msg.GetStats, future))
    for where in (CONTROLLER, "a", "b"):
        (request,) = bench.asked(where, msg.GetStats)
        bench.tell(msg.Stats(request.request, where, {"n": 1}))
    assert counters(future) == {where: {"n": 1} for where in (CONTROLLER, "a", "b")}


def test_counters_of_a_host_that_is_lost_do_not_take_those_of_others_along(bench: Bench) -> None:
    future: Future[Any] = Future()
    bench.note(Ask(msg.GetStats, future))
    bench.lose("a")
    for where in (CONTROLLER, "b"):
        (request,) = bench.asked(where, msg.GetStats)
        assert not future.done()
        bench.tell(msg.Stats(request.request, where, {"n": 1}))
    assert counters(future) == {CONTROLLER: {"n": 1}, "b": {"n": 1}, "a": {"lost": 1}}
    failed: Future[Any] = Future()
    bench.note(Ask(msg.GetStats, failed))
    (request,) = bench.asked(CONTROLLER, msg.GetStats)
    bench.tell(msg.RequestFailed(request.request, ErrorReport.of(InternalError("no"))))
    assert isinstance(failed.exception(0), InternalError)


# --- lines, and launches under leases ----------------------------------------------------------------

ONE = split(SLICE, 1)


class Wires:
    """The network of a session's lines; what is sent is kept, and hosts answer as the test says."""

    name = "client-lines"

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.sent: list[tuple[str, Any]] = []
        self.closed: list[str] = []
        bench.session.lines.wires = self

    def introduce(self, node: str, endpoint: str) -> None:
        pass

    def tell(self, hosts: Sequence[Address], message: Any) -> None:
        self.sent += [(host.node, message) for host in hosts]

    def forget(self, node: str) -> None:
        self.closed.append(node)

    def within(self, act: Callable[[], object]) -> None:
        act()

    def take(self, kind: type[Any]) -> list[Any]:
        """What was sent of a kind since the last look."""
        found = [message for _, message in self.sent if isinstance(message, kind)]
        self.sent = [one for one in self.sent if not isinstance(one[1], kind)]
        return found

    def answer(self, message: Any, host: str = "a") -> None:
        """A host answers."""
        self.bench.session.lines.received(host, message)
        self.bench.session.lines.settle()
        self.bench.world.settle()

    def lose(self, host: str = "a") -> None:
        """The line to a host is lost."""
        self.bench.session.lines.lost(host)
        self.bench.world.settle()

    def open(self) -> None:
        """A host answers the first question."""
        (wait,) = self.take(msg.Wait)
        self.answer(msg.Ready(wait.request))


def run_and_wait(bench: Bench, run: int, arg: int | bytes, made: int) -> tuple[bool, Future[Any]]:
    """Run program 5, and wait for its result; returns whether it was launched from here."""
    future: Future[Any] = Future()
    wanted = Await(((made, ONE),), future)
    leases = bench.session.leases
    if leases.launch(run, 5, (arg,), (made,), wanted):
        bench.note(TellLaunched())
        return True, future
    message = msg.Run(run, 5, (arg,), (made,))
    leases.ordinary(message)
    bench.note(Tell(message))
    if not bench.session.lines.ask(wanted):
        bench.note(wanted)
    return False, future


@pytest.fixture
def lined() -> tuple[Bench, Wires]:
    """A session with a line to its host, on which it has met the client."""
    bench = Bench(hosts=("a",))
    wires = Wires(bench)
    bench.tell(msg.Attached(1, b"ticket", 8, ("east",), line_ticket=b"another"))
    bench.note(Meet(("a",)))
    assert wires.take(msg.Identify) == [msg.Identify(1, b"another", is_line=True)]
    wires.open()
    return bench, wires


@pytest.fixture
def lent(lined: tuple[Bench, Wires]) -> tuple[Bench, Wires]:
    """A session that has waited on host "a" and has a lease of it."""
    bench, wires = lined
    is_launched, ready = run_and_wait(bench, 20, b"x" * 64, X)
    assert not is_launched
    (wait,) = wires.take(msg.Wait)
    wires.answer(msg.Ready(wait.request))
    assert ready.result(0) is None
    lend(bench)
    bench.controller.received.clear()
    return bench, wires


def lend(bench: Bench, last_run: int = 20) -> None:
    program = msg.LentProgram(5, 1, ((msg.LaunchStep(0, True),),))
    bench.tell(msg.Lent(3, 1, ("a",), (program,), 0, 100, last_run))


def test_a_leased_launch_asks_for_the_result(lent: tuple[Bench, Wires]) -> None:
    bench, wires = lent
    is_launched, ready = run_and_wait(bench, 21, X, Y)
    assert is_launched
    (launch,) = wires.take(msg.LeasedLaunch)
    assert launch.request > 0
    assert launch.awaited == Y
    assert not wires.take(msg.Wait)
    assert not bench.asked("a")
    assert bench.asked(CONTROLLER) == [msg.Run(21, 5, (X,), (Y,), 3, 0)]
    assert not ready.done()
    wires.answer(msg.Ready(launch.request))
    assert ready.result(0) is None


def run_and_read(bench: Bench, run: int, arg: int, made: int) -> Future[Any]:
    """Launch program 5 under the lease, and ask for the value of its result."""
    future: Future[Any] = Future()
    assert bench.session.leases.launch(run, 5, (arg,), (made,), Get(made, ONE, future))
    bench.note(TellLaunched())
    return future


def test_a_leased_launch_asks_for_the_value(lent: tuple[Bench, Wires]) -> None:
    bench, wires = lent
    read = run_and_read(bench, 21, X, Y)
    (launch,) = wires.take(msg.LeasedLaunch)
    assert (launch.awaited, launch.positions) == (Y, (0,))
    assert not wires.take(msg.Fetch)
    value = np.arange(ONE.size_bytes, dtype=np.uint8)
    wires.answer(msg.Fetched(launch.request, value.tobytes()))
    ((box, part),) = read.result(0)
    assert box == ONE.box(0)
    assert part.tobytes() == value.tobytes()


def test_the_session_asks_for_a_value_that_is_ready_where_the_launch_was_ignored(
    lent: tuple[Bench, Wires],
) -> None:
    bench, wires = lent
    read = run_and_read(bench, 21, X, Y)
    (launch,) = wires.take(msg.LeasedLaunch)
    wires.answer(msg.Ready(launch.request))
    assert not read.done()
    (fetch,) = bench.asked("a", msg.Fetch)
    assert fetch.array == Y


def test_only_the_hosts_of_a_result_are_asked_for_it() -> None:
    """The others would keep the question, as none of their launches makes the array."""
    bench = Bench(hosts=("a", "b"))
    wires = Wires(bench)
    bench.tell(msg.Attached(1, b"ticket", 8, ("east",), line_ticket=b"another"))
    bench.note(Meet(("a", "b")))
    for host, wait in zip(("a", "b"), wires.take(msg.Wait), strict=True):
        wires.answer(msg.Ready(wait.request), host)
    run_and_wait(bench, 20, b"x" * 64, X)
    step = (msg.LaunchStep(0, True),)
    program = msg.LentProgram(5, 1, (step, step))
    bench.tell(msg.Lent(3, 1, ("a", "b"), (program,), 0, 100, 20))
    wires.sent.clear()
    is_launched, ready = run_and_wait(bench, 21, X, Y)
    assert is_launched
    asked = {host: message.request for host, message in wires.sent}
    assert sorted(asked) == ["a", "b"]
    assert bool(asked["a"])
    assert not asked["b"]
    wires.answer(msg.Ready(asked["a"]))
    assert ready.done()


def test_a_lease_begins_when_there_are_lines() -> None:
    bench = Bench(hosts=("a",))
    wires = Wires(bench)
    bench.tell(msg.Attached(1, b"ticket", 8, ("east",), line_ticket=b"another"))
    assert not run_and_wait(bench, 20, b"x" * 64, X)[0]
    lend(bench)
    assert not run_and_wait(bench, 21, X, Y)[0]
    wires.open()
    lend(bench, 21)
    assert run_and_wait(bench, 22, X, Y)[0]


def test_what_was_asked_with_a_launch_is_asked_again_after_a_loss(
    lent: tuple[Bench, Wires],
) -> None:
    bench, wires = lent
    _, ready = run_and_wait(bench, 21, X, Y)
    bench.controller.received.clear()
    wires.lose()
    assert bench.asked(CONTROLLER) == [msg.LinkLost("a")]
    (wait,) = bench.asked("a", msg.Wait)
    assert wait.arrays == (Y,)
    bench.answer("a", wait)
    assert ready.result(0) is None
    assert not run_and_wait(bench, 22, X, Y)[0]


@pytest.mark.parametrize("error", [ArrayDeleted("gone"), Disconnected("who is it?")])
def test_a_question_that_fails_on_a_line_is_asked_by_the_session(
    lined: tuple[Bench, Wires], error: Error
) -> None:
    bench, wires = lined
    future: Future[Any] = Future()
    assert bench.session.lines.ask(Await(((X, ONE),), future))
    (wait,) = wires.take(msg.Wait)
    wires.answer(msg.RequestFailed(wait.request, ErrorReport.of(error)))
    (again,) = bench.asked("a", msg.Wait)
    bench.answer("a", again)
    assert future.result(0) is None
    assert bench.session.lines.ask(Await(((X, ONE),), Future())) is isinstance(error, ArrayDeleted)


def test_output_that_comes_over_a_line_is_shown_before_the_answer_behind_it(
    lined: tuple[Bench, Wires],
) -> None:
    bench, wires = lined
    seen: list[str] = []
    bench.note(
        Open("test", 1.0, 0, 1 << 20, Future(), output=lambda host, lines: seen.append(host))
    )
    future: Future[Any] = Future()
    future.add_done_callback(lambda _: seen.append("ready"))
    assert bench.session.lines.ask(Await(((X, ONE),), future))
    wires.answer(msg.Printed((msg.OutputLine(False, "computed"),)))
    (wait,) = wires.take(msg.Wait)
    wires.answer(msg.Ready(wait.request))
    assert seen == ["a", "ready"]


def test_a_small_value_comes_over_a_line(lined: tuple[Bench, Wires]) -> None:
    bench, wires = lined
    future: Future[Any] = Future()
    assert bench.session.lines.ask(Get(X, ONE, future))
    (fetch,) = wires.take(msg.Fetch)
    wires.answer(msg.Fetched(fetch.request, pack([value(ONE)])))
    ((_, part),) = future.result(0)
    np.testing.assert_array_equal(part, value(ONE))


@pytest.mark.parametrize("news", ["failed", "lost", "moved"])
def test_the_session_asks_for_arrays_that_have_failed_or_moved(
    lined: tuple[Bench, Wires], news: str
) -> None:
    bench, wires = lined
    future: Future[Any] = Future()
    assert bench.session.lines.ask(Await(((X, ONE),), future))
    (wait,) = wires.take(msg.Wait)
    if news == "failed":
        bench.tell(msg.RunFailed(20, (X,), ErrorReport.of(InternalError("no"))))
        assert isinstance(future.exception(0), InternalError)
    elif news == "lost":
        bench.tell(msg.SliceLost(SLICE, ERROR))
        assert bench.inquiry().arrays == (X,)
    else:
        bench.bind("a")
        assert [again.arrays for again in bench.asked("a", msg.Wait)] == [(X,)]
    assert wires.take(msg.CancelRequest) == [msg.CancelRequest(wait.request)]


@pytest.mark.parametrize("news", ["failed", "moved"])
def test_news_that_come_while_a_thread_asks_are_not_missed(
    lined: tuple[Bench, Wires], monkeypatch: pytest.MonkeyPatch, news: str
) -> None:
    """The session handles them in its own thread, just before the question is noted."""
    bench, wires = lined
    lines, future = bench.session.lines, Future[Any]()
    hosts = lines.holders(ONE)

    def holders(spec: ArraySpec) -> frozenset[str]:
        if news == "failed":
            bench.tell(msg.RunFailed(20, (X,), ErrorReport.of(InternalError("no"))))
        else:
            bench.bind("a")
        return hosts

    monkeypatch.setattr(lines, "holders", holders)
    assert lines.ask(Await(((X, ONE),), future))
    bench.world.settle()
    assert not wires.take(msg.Wait)
    if news == "failed":
        assert isinstance(future.exception(0), InternalError)
    else:
        assert [again.arrays for again in bench.asked("a", msg.Wait)] == [(X,)]


def test_what_has_its_place_among_launches_ends_a_lease_in_the_thread_that_posts_it(
    lent: tuple[Bench, Wires],
) -> None:
    bench, _ = lent
    bench.session.leases.posting(Tell(msg.Delete((Y,))))
    assert run_and_wait(bench, 21, X, Y)[0]
    bench.session.leases.posting(Ask(lambda n: msg.Checkpoint(n, (X,)), Future(), (X,)))
    assert not run_and_wait(bench, 22, X, Y)[0]


def test_another_controller_hears_of_launches_that_the_last_one_was_not_told_of() -> None:
    bench = Bench(hosts=("a",))
    bench.session.link.keeps = True
    run = msg.Run(21, 5, (), (Y,), 3, 0)
    bench.note(Tell(msg.RegisterProgram(5, Compact.of(chain([ONE])), ())))
    bench.session.link.launched(run)
    bench.note(msg.PeerLost(CONTROLLER, "killed"))
    bench.asked(CONTROLLER)
    bench.tell(msg.Attached(1, b"ticket", 8, ("east",)))
    assert [m for m in bench.asked(CONTROLLER) if isinstance(m, msg.Run)] == [run]


def test_a_wait_with_a_run_of_an_ended_session_fails(lined: tuple[Bench, Wires]) -> None:
    bench, _ = lined
    future: Future[Any] = Future()
    assert bench.session.lines.ask(Await(((X, ONE),), future))
    bench.note(Close(Disconnected("closed"), Future()))
    assert isinstance(future.exception(0), Disconnected)
    assert isinstance(run_and_wait(bench, 20, b"x", X)[1].exception(0), Disconnected)


def test_a_client_that_hears_of_the_end_of_its_lease_tells_of_its_launches_at_once(
    lent: tuple[Bench, Wires],
) -> None:
    bench, wires = lent
    assert bench.session.leases.launch(21, 5, (X,), (Y,), None)
    assert not bench.asked(CONTROLLER)
    wires.answer(msg.LeaseOver(2))  # an earlier one
    assert bench.session.leases.launch(22, 5, (X,), (X + 100,), None)
    wires.answer(msg.LeaseOver(3))
    assert [run.run for run in bench.asked(CONTROLLER)] == [21, 22]
    assert not bench.session.leases.launch(23, 5, (X,), (Y,), None)


def test_launches_need_no_more_memory_than_their_lease_has(lined: tuple[Bench, Wires]) -> None:
    bench, _ = lined
    run_and_wait(bench, 20, b"x" * 64, X)
    program = msg.LentProgram(5, 1, ((msg.LaunchStep(0, True),),), 100)
    bench.tell(msg.Lent(3, 1, ("a",), (program,), 0, 100, 20, room_bytes=250))
    leases = bench.session.leases
    assert leases.launch(21, 5, (X,), (Y,), None)
    assert not leases.is_short
    assert leases.launch(22, 5, (X,), (Y,), None)
    assert leases.is_short
    assert not leases.launch(23, 5, (X,), (Y,), None)
    bench.tell(msg.LeaseWindow(3, 100, 350))
    assert leases.launch(24, 5, (X,), (Y,), None)
    assert not leases.launch(25, 5, (X,), (Y,), None)


def test_arrays_that_share_a_buffer_are_not_read_under_a_lease(lined: tuple[Bench, Wires]) -> None:
    bench, _ = lined
    run_and_wait(bench, 20, b"x" * 64, X)
    program = msg.LentProgram(5, 1, ((msg.LaunchStep(0, True),),))
    bench.tell(msg.Lent(3, 1, ("a",), (program,), 0, 100, 20, shared=(X,)))
    assert not bench.session.leases.launch(21, 5, (X,), (Y,), None)
