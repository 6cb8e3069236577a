"""Who is asked to compile, whose answer counts, and how long an executable stays without a program."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from pw.client.connection.questions import Questions
from pw.client.session.thread_messages import AskCompiler
from pw.core import messages as msg
from pw.core.errors import ArgumentError, CompileError, ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, session_of, store_of
from pw.core.programs.stablehlo import Facts, Stablehlo, encode
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding
from pw.devices.host import compiling
from pw.testing.sim.digests import DOES_NOT_COMPILE
from tests.client import test_session
from tests.devices import test_store

ARTIFACT = encode(Stablehlo(b"module", b""))
BROKEN = encode(Stablehlo(DOES_NOT_COMPILE, b""))
FACTS = Facts("f", (), (), (), *[0] * 5)
EVERYWHERE = ArraySpec((), "bool", Sharding((), ()), Placement(test_session.SLICE, (0, 1)))


class Asking(test_session.Bench):
    """A session that asks the hosts "a" and "b"."""

    def ask(self) -> Future[Any]:
        answer: Future[Any] = Future()
        self.note(AskCompiler(ARTIFACT, EVERYWHERE, msg.Detail.FACTS, answer))
        return answer

    def requests(self) -> dict[str, int]:
        return {host: one.request for host in self.hosts for one in self.asked(host, msg.Compile)}

    def compiled(self, host: str, request: int) -> None:
        self.tell(msg.Compiled(request, FACTS), sender=store_of(host))


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_all_hosts_compile_and_the_first_answer_counts(asking: Asking) -> None:
    answer = asking.ask()
    found = [message for host in asking.hosts for message in asking.asked(host, msg.Compile)]
    places = [(message.island, message.epoch, message.devices) for message in found]
    assert places == [("east", 1, (DeviceAddress("a", 0), DeviceAddress("b", 0)))] * 2
    asking.compiled("b", found[1].request)
    assert answer.result(0).facts == FACTS
    asking.refuse("a", found[0], CompileError("later"))
    assert not asking.asked("a", msg.CancelRequest), "a program will need the executable there too"


def test_a_lost_host_and_a_new_epoch_mean_another_question(asking: Asking) -> None:
    answer = asking.ask()
    first = asking.requests()
    asking.lose("b")
    inquiry = asking.inquiry()
    asking.compiled("a", first["a"])
    assert not answer.done(), "that host belongs to the epoch before"
    asking.bind("b", "a")
    asking.tell(msg.Answered(inquiry.request, None))
    again = asking.requests()
    assert set(again) == {"a", "b"}
    assert not set(again.values()) & set(first.values())
    asking.compiled("a", again["a"])
    assert answer.result(0).facts == FACTS


def test_what_the_compiler_says_is_final(asking: Asking) -> None:
    answer = asking.ask()
    (message,) = asking.asked("a", msg.Compile)
    asking.refuse("a", message, CompileError("INVALID_ARGUMENT: no such thing"))
    assert isinstance(answer.exception(0), CompileError)
    assert not asking.asked("controller", msg.Inquire)


def test_a_module_that_no_message_can_hold() -> None:
    notes: list[object] = []
    ask = Questions(notes.append, None, artifact_bytes=10)
    with pytest.raises(ArgumentError, match="pass large constants to it as arguments"):
        ask.compile(Stablehlo(bytes(10), b""), Placement(1, (0,)))
    assert not notes


class Asked(test_store.Bench):
    """A host's store that clients ask."""

    def ask(
        self, request: int, artifact: bytes = ARTIFACT, epoch: int = 1, node: str = "c"
    ) -> None:
        self.say(msg.Compile(request, artifact, test_store.HERE, "i", epoch), node)

    def told(self, node: str = "c") -> list[Any]:
        self.world.settle()
        return self.world.to(session_of(node))

    @property
    def kept(self) -> int:
        self.world.settle()
        assert len(self.backend.kept) == self.store.census()["compilations_kept"]
        return len(self.backend.kept)


@pytest.fixture
def asked() -> Asked:
    return Asked()


def test_an_executable_stays_for_a_while(asked: Asked) -> None:
    asked.ask(1)
    assert [message.facts.name for message in asked.told()] == [b"module".hex()]
    assert asked.kept == 1
    asked.world.wait(compiling.KEPT_S - 1)
    asked.ask(2)
    assert asked.kept == 2
    asked.world.wait(2)
    assert asked.kept == 1
    asked.world.wait(compiling.KEPT_S)
    asked.check_empty()


def test_a_client_keeps_so_many(asked: Asked) -> None:
    asked.store.compilations.most_kept = 3
    for request in range(1, 6):
        asked.ask(request)
        asked.told()
    assert asked.kept == 3
    assert [key.rpartition(b"/")[2] for key in sorted(asked.backend.kept)] == [b"3", b"4", b"5"]


@pytest.mark.parametrize("when", ["while it compiles", "later"])
def test_a_lost_client_leaves_nothing(asked: Asked, when: str) -> None:
    asked.ask(1)
    if when == "later":
        assert asked.kept == 1
    asked.say(msg.PeerLost("c", "killed"), "h")
    asked.check_empty()
    assert not asked.kept


def test_a_request_that_is_withdrawn_leaves_nothing(asked: Asked) -> None:
    asked.ask(1)
    asked.say(msg.CancelRequest(1))
    asked.check_empty()
    assert not asked.kept


@pytest.mark.parametrize("how", [msg.PeerLost("c", "killed"), msg.CancelRequest(1)])
def test_what_is_not_wanted_any_more_is_not_compiled_to_its_end(
    asked: Asked, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may never end."""
    begun: list[bytes] = []
    forgotten: list[bytes] = []
    monkeypatch.setattr(asked.backend, "compile", lambda key, *how: begun.append(key))
    monkeypatch.setattr(asked.backend, "forget", forgotten.append)
    asked.ask(1)
    asked.world.settle()
    assert len(begun) == 1
    asked.say(how, "h" if isinstance(how, msg.PeerLost) else "c")
    asked.world.settle()
    assert forgotten == begun


def test_what_is_refused(asked: Asked) -> None:
    asked.store.compilations.most_waiting = 1
    asked.ask(1, epoch=2)
    asked.ask(2, BROKEN)
    asked.ask(3)
    asked.ask(4, node="stranger")
    answers = {m.request: m.error for m in asked.told() if isinstance(m, msg.RequestFailed)}
    kinds = {request: error.kind for request, error in answers.items()}
    assert kinds == {1: "HostLost", 2: "CompileError", 3: "ProtocolError"}
    assert "does not compile" in answers[2].message
    (stranger,) = asked.told("stranger")
    assert isinstance(stranger.error, ErrorReport)
    assert stranger.error.kind == "Disconnected"
    asked.check_empty()


def ahead(request: int, artifact: bytes = ARTIFACT, client: int = 7) -> msg.CompileAhead:
    return msg.CompileAhead(client, request, artifact, test_store.HERE, "i", 1)


def answered(asked: Asked) -> list[int]:
    asked.world.settle()
    return [message.request for message in asked.world.to(CONTROL, msg.CompiledAhead)]


def test_what_is_compiled_ahead_stays_until_launched_calls_have_ended(asked: Asked) -> None:
    asked.say(ahead(1), CONTROLLER)
    asked.say(ahead(2, BROKEN), CONTROLLER)
    asked.say(msg.CompileAhead(7, 3, ARTIFACT, test_store.HERE, "i", 2), CONTROLLER)
    assert sorted(answered(asked)) == [1, 2, 3]
    assert asked.kept == 1
    asked.world.wait(compiling.AHEAD_S - 1)
    assert asked.kept == 1
    asked.world.wait(2)
    asked.check_empty()


@pytest.mark.parametrize("who", ["the client", "the controller"])
def test_what_was_compiled_ahead_goes_with(asked: Asked, who: str) -> None:
    asked.say(ahead(1), CONTROLLER)
    assert asked.kept == 1
    asked.say(ahead(2), CONTROLLER)  # and one that has not ended
    if who == "the client":
        asked.store.drop_client(7)
        asked.say(ahead(3), CONTROLLER)
        assert 3 in answered(asked)
    else:
        asked.say(msg.PeerLost(CONTROLLER, "killed"), "h")
    asked.check_empty()
    assert not asked.kept


def test_only_the_controller_has_something_compiled_ahead(asked: Asked) -> None:
    asked.say(ahead(1))
    assert not answered(asked)
    asked.check_empty()
