"""A host's object store: its clients, their requests, and what a late or dead client leaves behind."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, Address, client_id, session_of, store_of
from pw.core.landing import Landing
from pw.core.programs.spec_checks import DEVICES
from pw.core.sharding import DeviceAddress
from pw.core.tickets import Tickets
from pw.devices.host.store import ObjectStore
from pw.devices.host.value import Value
from tests.stages.actors import TICKETS, Recorder, World
from tests.stages.fake_devices import FakeBackend, FakeBulk
from tests.stages.scripted import SMALL, split

X = np.arange(SMALL)
SPEC = split(client_id(1, 0), 1)
HERE = (DeviceAddress("h", 0),)
ARRAY = client_id(1, 5)


class Bench:
    """The store of host "h", and client 1 on node "c", which has identified itself."""

    def __init__(self) -> None:
        self.world = World()
        self.backend = self.world.backends["h"] = FakeBackend(self.world, "h")
        self.bulk = FakeBulk(self.world, "h")
        self.their_bulk = FakeBulk(self.world, "c")
        self.store: ObjectStore = self.world.add(
            store_of("h"), lambda env: ObjectStore(env, self.backend, self.bulk, dict)
        )
        self.store.joins("i", 1, TICKETS.public, 8, 8)
        self.client: Recorder = self.world.add(session_of("c"), Recorder)
        self.world.add(CONTROL, Recorder)
        self.identify("c", 1)

    def identify(self, node: str, client: int, ticket: bytes | None = None) -> None:
        self.say(
            msg.Identify(client, TICKETS.ticket(client, node) if ticket is None else ticket), node
        )

    def say(self, message: object, node: str = "c") -> None:
        self.world.mailboxes["h"].append((session_of(node), store_of("h"), message))
        self.world.drain("h")

    def launch(self, array: int = ARRAY, made: bool = True) -> Value:
        """A launch that makes the array has arrived; `made` says whether it was handed over."""
        value = Value()
        self.store.arrays.expect(array, value, SPEC, HERE)
        if made:
            value.payload = {0: X}
            self.store.requests.submitted(array, value)
        return value

    def fetch(self, request: int, array: int = ARRAY, **how: Any) -> None:
        landing, node = how.get("landing"), how.get("node", "c")
        positions = how.get("positions", (0,))
        spec = how.get("spec", SPEC)
        self.say(msg.Fetch(request, array, spec, HERE, positions, landing), node)

    def upload(
        self, data: bytes | None, array: int = ARRAY, node: str = "c", place: Any = ("i", 1)
    ) -> None:
        self.say(msg.Upload(array, SPEC, HERE, data, *place), node)

    def landing(self) -> int:
        """Have bytes asked for that come over the bulk plane; the transfer that waits for them."""
        self.upload(None)
        told = self.answers()[-1]
        assert isinstance(told, msg.UploadLanding)
        return told.landing.transfer

    def answers(self, node: str = "c") -> list[Any]:
        self.world.settle()
        return self.world.to(session_of(node))

    def failed(self, node: str = "c") -> dict[int, str]:
        return {m.request: m.error.kind for m in self.answers(node) if type(m) is msg.RequestFailed}

    def uploaded(self) -> list[ErrorReport | None]:
        self.world.settle()
        return [message.error for message in self.world.to(CONTROL, msg.Uploaded)]

    def check_empty(self) -> None:
        self.world.settle()
        assert not any(self.store.census().values()), self.store.census()
        assert not self.store.requests.parked()
        assert not self.bulk.landings


@pytest.mark.parametrize(
    ("client", "ticket"),
    [
        (2, TICKETS.ticket(1, "evil")),
        (1, TICKETS.ticket(1, "c")),
        (1, Tickets(b"other").ticket(1, "evil")),
        (1, b""),
        (0, TICKETS.ticket(0, "evil")),
        (-1, b"x" * 64),
        (1 << 63, b"x" * 64),
    ],
)
def test_tickets_that_prove_nothing(client: int, ticket: bytes) -> None:
    bench = Bench()
    bench.launch()
    bench.identify("evil", client, ticket)
    bench.fetch(1, node="evil")
    bench.upload(X.tobytes(), client_id(1, 6), node="evil")
    assert bench.failed("evil") == {1: "Disconnected"}
    assert not bench.uploaded()
    assert bench.world.counters["tickets_refused"] == 1


def test_no_ticket_counts_before_the_host_has_joined() -> None:
    bench = Bench()
    bench.store.joins("i", 1, b"", 8, 8)
    bench.identify("early", 3, TICKETS.ticket(3, "early"))
    bench.say(msg.GetStats(1), "early")
    assert bench.failed("early") == {1: "Disconnected"}


@pytest.mark.parametrize("place", [("i", 1), ("i", 2), ("j", 3)], ids=str)
def test_what_was_asked_of_an_earlier_incarnation_does_not_wait_here(place: Any) -> None:
    """The client may have given the slice back, and hears nothing more of it."""
    bench = Bench()
    bench.store.joins("i", 3, TICKETS.public, 8, 8)
    bench.say(msg.Fetch(1, ARRAY, SPEC, HERE, (0,), None, *place))
    bench.say(msg.Wait(2, (ARRAY,), *place))
    assert bench.failed() == {1: "HostLost", 2: "HostLost"}
    bench.check_empty()
    bench.say(msg.Fetch(3, ARRAY, SPEC, HERE, (0,), None, "i", 3))
    bench.say(msg.Wait(4, (ARRAY,), "i", 3))
    bench.say(msg.Wait(5, (ARRAY,)))
    assert bench.store.requests.parked() == [ARRAY]
    bench.launch()
    assert [one.request for one in bench.answers()[2:]] == [3, 4, 5]


def test_a_client_reads_only_its_own() -> None:
    bench = Bench()
    bench.launch()
    bench.identify("d", 2)
    bench.fetch(1, node="d")
    bench.say(msg.Wait(2, (client_id(2, 1), ARRAY)), "d")
    bench.upload(X.tobytes(), client_id(1, 9), node="d")
    assert bench.failed("d") == {1: "NotOwner", 2: "NotOwner"}
    assert not bench.uploaded()
    bench.say(msg.GetStats(3), "d")
    assert [type(m) for m in bench.answers("d")][-1] is msg.Stats
    bench.say(msg.Wait(4, ()))
    assert bench.answers() == [msg.Ready(4)]


def test_requests_wait_for_the_launch_and_are_answered_once() -> None:
    bench = Bench()
    bench.fetch(1)
    bench.say(msg.Wait(2, (ARRAY, ARRAY)))
    bench.say(msg.Wait(3, (ARRAY, client_id(1, 6))))
    assert bench.answers() == []
    value = bench.launch(made=False)
    assert bench.answers() == [], "launched, but not handed over: it cannot be watched yet"
    value.payload = {0: X}
    bench.store.requests.submitted(ARRAY, value)
    assert bench.answers() == [msg.Fetched(1, X.tobytes()), msg.Ready(2)]
    bench.launch(client_id(1, 6))
    assert bench.answers()[2:] == [msg.Ready(3)]
    bench.store.drop(ARRAY)
    bench.store.drop(client_id(1, 6))
    bench.check_empty()


def question(number: int, array: int, *positions: int) -> msg.LeasedLaunch:
    """A launch that makes an array, and asks for it."""
    return msg.LeasedLaunch(1, 1, 0, 1, 1, 1, (), (), (array,), number, array, positions)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_with_its_launch_is_answered_as_soon_as_the_value_is_there(
    monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    bench = Bench()
    monkeypatch.setattr(bench.backend, "is_there", lambda value: at_once)
    asked: list[object] = []
    submit = bench.backend.submit
    monkeypatch.setattr(bench.backend, "submit", lambda ops: (asked.extend(ops), submit(ops)))
    at, answer = session_of("c"), bench.store.requests.answer_launch
    answer(at, question(2, ARRAY), False)  # the launch was ignored
    assert bench.answers() == []
    bench.launch()
    assert bench.answers() == [msg.Ready(2)]
    asked.clear()
    bench.launch(client_id(1, 6))
    answer(at, question(3, client_id(1, 6)), False)
    assert bench.answers() == [msg.Ready(2), msg.Ready(3)]
    assert bool(asked) is not at_once
    answer(at, question(4, client_id(2, 1)), False)
    assert bench.failed() == {4: "NotOwner"}


@pytest.mark.parametrize("is_there", [False, True], ids=["later", "there"])
@pytest.mark.parametrize("is_quick", [False, True], ids=["slow", "quick"])
def test_the_value_comes_with_the_answer_to_its_launch(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, is_quick: bool
) -> None:
    bench = Bench()
    views = [X] if is_quick else None
    monkeypatch.setattr(bench.backend, "read_now", lambda op: views, raising=False)
    monkeypatch.setattr(bench.backend, "is_there", lambda value: True, raising=False)
    asked: list[object] = []
    submit = bench.backend.submit
    monkeypatch.setattr(bench.backend, "submit", lambda ops: (asked.extend(ops), submit(ops)))
    bench.launch()
    bench.store.requests.answer_launch(session_of("c"), question(2, ARRAY, 0), is_there)
    assert bench.answers() == [msg.Fetched(2, X.tobytes())]
    assert bool(asked) is not (is_there and is_quick)


def test_the_value_of_an_ignored_launch_comes_when_it_is_made() -> None:
    bench = Bench()
    bench.store.requests.answer_launch(session_of("c"), question(2, ARRAY, 0), False)
    assert bench.answers() == []
    bench.launch()
    assert bench.answers() == [msg.Fetched(2, X.tobytes())]


def test_a_launch_that_names_an_older_array_as_its_result_does_not_hold_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result of its computation is there; the other array may still be computed."""
    bench = Bench()
    monkeypatch.setattr(bench.backend, "is_there", lambda value: False, raising=False)
    read_now = pytest.fail
    monkeypatch.setattr(bench.backend, "read_now", read_now, raising=False)
    bench.launch()
    bench.store.requests.answer_launch(session_of("c"), question(2, ARRAY, 0), True)
    assert bench.answers() == [msg.Fetched(2, X.tobytes())], "by the ordinary way"


def test_a_launch_does_not_ask_twice_for_a_shard() -> None:
    bench = Bench()
    bench.store.requests.answer_launch(session_of("c"), question(2, ARRAY, 0, 0), True)
    assert bench.failed() == {2: "ArgumentError"}
    many = msgspec.msgpack.encode(question(2, ARRAY, *range(DEVICES + 1)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(many, type=msg.LeasedLaunch)


def test_shards_that_are_elsewhere_are_not_read() -> None:
    bench = Bench()
    bench.launch()
    for number, position in enumerate((1, 77, -1), 2):
        launch = question(number, ARRAY, position)
        bench.store.requests.answer_launch(session_of("c"), launch, True)
    assert bench.failed() == dict.fromkeys((2, 3, 4), "ArgumentError")


def test_a_failed_array_fails_its_requests_with_its_error() -> None:
    bench = Bench()
    value = bench.launch(made=False)
    bench.fetch(1)
    bench.say(msg.Wait(2, (ARRAY,)))
    value.error = ErrorReport("ComputationFailed", "it raised", "h", "traceback")
    bench.store.requests.submitted(ARRAY, value)
    assert [m.error for m in bench.answers()] == [value.error] * 2


@pytest.mark.parametrize("late", [False, True])
def test_whoever_waits_for_a_deleted_array_is_told(late: bool) -> None:
    """Also when the request comes behind the delete: it travels by another link."""
    bench = Bench()
    value = bench.launch(made=False)
    if late:
        bench.store.drop(ARRAY, "donated to 'f'")
    bench.fetch(1)
    bench.say(msg.Wait(2, (ARRAY, client_id(1, 6))))
    bench.say(msg.Wait(3, (client_id(1, 6), ARRAY)))
    if not late:
        bench.store.drop(ARRAY, "donated to 'f'")
    value.payload = {0: X}
    bench.store.requests.submitted(ARRAY, value)
    assert bench.failed() == dict.fromkeys((1, 2, 3), "ArrayDeleted")
    assert "donated to 'f'" in bench.answers()[0].error.message
    bench.launch(client_id(1, 6))
    bench.store.drop(client_id(1, 6))
    bench.check_empty()


def test_what_is_remembered_of_deleted_arrays_is_bounded() -> None:
    bench = Bench()
    bench.store.arrays.dropped_kept = 10
    dropped = [client_id(1, serial) for serial in range(100)]
    for array in dropped:
        bench.store.drop(array)
    known = [array for array in dropped if bench.store.arrays.why_missing(array)]
    assert known == dropped[-10:]


def test_who_gives_up_is_not_answered() -> None:
    bench = Bench()
    bench.fetch(1)
    bench.say(msg.Wait(2, (ARRAY,)))
    bench.say(msg.CancelRequest(1))
    bench.say(msg.CancelRequest(2))
    bench.check_empty()
    bench.launch()
    bench.fetch(3)
    bench.say(msg.CancelRequest(3))
    assert bench.answers() == []


def test_too_many_waiting_requests_are_refused() -> None:
    bench = Bench()
    bench.store.requests.most_open = 3
    for request in range(1, 6):
        bench.fetch(request)
    assert bench.failed() == {4: "ArgumentError", 5: "ArgumentError"}
    assert len(bench.store.requests) == 3


def test_the_waiting_requests_of_one_client_do_not_count_for_another() -> None:
    bench = Bench()
    bench.store.requests.most_open = 3
    bench.identify("d", 2)
    for request in range(1, 6):
        bench.fetch(request)
    bench.say(msg.Wait(1, (client_id(2, 1),)), "d")
    assert not bench.failed("d")
    assert len(bench.store.requests) == 4


@pytest.mark.parametrize(
    "how", [{"positions": (1,)}, {"positions": (-1,)}, {"spec": split(client_id(1, 0), 1, 16)}]
)
def test_a_fetch_of_what_is_not_here_is_refused(how: dict[str, Any]) -> None:
    bench = Bench()
    bench.launch()
    bench.fetch(1, **how)
    assert bench.failed() == {1: "ArgumentError"}


def test_an_upload_inside_a_message() -> None:
    bench = Bench()
    bench.fetch(1)
    bench.upload(X.tobytes())
    assert bench.uploaded() == [None]
    assert bench.answers() == [msg.Fetched(1, X.tobytes())]
    bench.upload((X + 1).tobytes())
    assert bench.uploaded() == [None, None], "it is there already, as it was"
    bench.fetch(2)
    assert bench.answers()[-1] == msg.Fetched(2, X.tobytes())
    assert bench.store.census()["live_bytes"] == X.nbytes


def test_an_upload_of_the_wrong_size_fails_the_array() -> None:
    bench = Bench()
    bench.upload(b"short")
    (error,) = bench.uploaded()
    assert error is not None
    assert "5 bytes came for the array int64[8]" in error.message
    bench.fetch(1)
    assert bench.failed() == {1: "ProtocolError"}


def test_an_upload_through_a_landing() -> None:
    bench = Bench()
    bench.say(msg.Wait(1, (ARRAY,)))
    bench.upload(None)
    (told,) = bench.answers()
    assert isinstance(told, msg.UploadLanding)
    assert told.landing.size_bytes == X.nbytes
    bench.their_bulk.push(told.landing, [(0, X)], lambda error: None)
    assert bench.answers()[1:] == [msg.Ready(1)]
    assert bench.uploaded() == [None]


def test_an_upload_that_is_sent_again_gets_another_landing() -> None:
    """The client had no use for the first one: its slice was not bound at that moment."""
    bench = Bench()
    bench.upload(None)
    bench.upload(None)
    first, second = bench.answers()
    assert first.landing.transfer != second.landing.transfer
    bench.their_bulk.push(second.landing, [(0, X)], lambda error: None)
    assert bench.uploaded() == [None]
    bench.fetch(1)
    assert bench.answers()[-1] == msg.Fetched(1, X.tobytes())
    assert bench.store.census()["uploads_arriving"] == 0


def test_bytes_that_came_while_they_were_given_another_landing_are_used_once() -> None:
    bench = Bench()
    bench.upload(None)
    (first,) = bench.answers()
    # The bytes are in, but not delivered yet.
    _, deliver = bench.bulk.landings.pop(first.landing.transfer)
    bench.upload(None)
    second = bench.answers()[-1]
    bench.their_bulk.push(second.landing, [(0, X)], lambda error: None)
    deliver(X.view(np.uint8))
    assert bench.uploaded() == [None]
    bench.fetch(1)
    assert bench.answers()[-1] == msg.Fetched(1, X.tobytes())
    assert not bench.bulk.landings


@pytest.mark.parametrize("place", [("i", 2), ("j", 1)])
def test_an_upload_to_an_earlier_incarnation_leaves_nothing_in_this_one(place: Any) -> None:
    """It was queued for the host when that was elsewhere; the controller would never have it dropped."""
    bench = Bench()
    bench.upload(X.tobytes(), place=place)
    bench.upload(None, ARRAY + 1, place=place)
    assert not bench.uploaded()
    assert not bench.answers()
    bench.check_empty()


def test_an_upload_that_its_client_gives_up_fails_the_array() -> None:
    bench = Bench()
    bench.say(msg.Wait(1, (ARRAY,)))
    transfer = bench.landing()
    bench.say(
        msg.UploadAborted(ARRAY, transfer + 1, ErrorReport("ArrayLost", "of another attempt"))
    )
    assert not bench.uploaded()
    bench.say(msg.UploadAborted(ARRAY, transfer, ErrorReport("ArrayLost", "the value is gone")))
    (error,) = bench.uploaded()
    assert error is not None
    assert error.kind == "ArrayLost"
    assert bench.failed() == {1: "ArrayLost"}


def test_who_asks_for_what_was_lost_waits_and_the_controller_is_told_once() -> None:
    bench = Bench()
    bench.say(msg.Wait(1, (ARRAY,)))
    lost = ErrorReport("TransferFailed", "lost the receiver")
    bench.say(msg.UploadAborted(ARRAY, bench.landing(), lost))
    bench.say(msg.Wait(2, (ARRAY,)))
    assert not bench.failed()
    assert [m for m in bench.world.to(CONTROL) if isinstance(m, msg.ArraysLost)] == [
        msg.ArraysLost((ARRAY,))
    ]
    bench.upload(X.tobytes())
    assert set(bench.answers()[-2:]) == {msg.Ready(1), msg.Ready(2)}


def test_an_upload_that_there_is_no_room_for_fails_the_array() -> None:
    bench = Bench()
    bench.bulk.full = True
    bench.upload(None)
    (error,) = bench.uploaded()
    assert error is not None
    assert error.kind == "OutOfHostMemory"


@pytest.mark.parametrize("removed", [False, True])
def test_an_upload_half_way_when_its_array_or_client_goes(removed: bool) -> None:
    bench = Bench()
    bench.upload(None)
    (told,) = bench.answers()
    bench.their_bulk.push(told.landing, [(0, X)], lambda error: None)
    if removed:
        bench.say(msg.PeerLost("c", "silent"))
        bench.store.drop_client(1)
    else:
        bench.store.drop(ARRAY)
    bench.check_empty()
    kinds = [error and error.kind for error in bench.uploaded()]
    assert kinds == (["TransferFailed"] if removed else []), "it may be asked for again"


def test_nothing_of_a_client_that_has_gone_comes_back() -> None:
    bench = Bench()
    bench.launch()
    bench.launch(client_id(2, 1))
    bench.fetch(1, client_id(1, 77))
    bench.store.drop_client(1)
    bench.identify("c", 1)
    bench.upload(X.tobytes(), client_id(1, 8))
    bench.fetch(2, ARRAY)
    assert bench.failed() == {2: "Disconnected"}
    assert not bench.uploaded()
    assert bench.store.census()["live_arrays"] == 1, "the other client's"
    bench.store.drop_client(2)
    bench.check_empty()


def test_a_fetch_through_a_landing() -> None:
    bench = Bench()
    bench.launch()
    landed: list[Any] = []
    landing = bench.their_bulk.land(X.nbytes, landed.append)
    bench.fetch(1, landing=landing)
    assert bench.answers() == []
    np.testing.assert_array_equal(landed[0].view(np.int64), X)
    bench.fetch(2, landing=Landing(99, X.nbytes - 1, 0, "c", "", ""))
    assert bench.failed() == {2: "ProtocolError"}
    bench.fetch(3, landing=bench.their_bulk.land(X.nbytes, landed.append))
    bench.world.kill("c")
    bench.world.settle()
    bench.store.drop(ARRAY)
    assert bench.store.census()["requests_waiting"] == 0
    assert Address("h", "store") == store_of("h")
