"""What programs write on hosts is seen on the client's terminal, with the name of the host, once."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import pw
from pw.cli import streams
from pw.client.connection import current
from pw.client.display import live
from pw.client.display.worker_output import WorkerOutput
from pw.client.session.session import ClientSession
from pw.client.session.thread_messages import Listen, Open
from pw.core import messages as msg
from pw.core.ids import CONTROL, client_id, session_of, store_of
from pw.core.sharding import DeviceAddress
from pw.devices.host.output import LINE_CHARACTERS, LINES, LINES_BYTES, Output
from pw.devices.host.printing import EARLY_LINES, TOGETHER_S, Written
from pw.devices.host.program import owner_of
from pw.devices.host.store import ObjectStore
from tests.devices.test_store import Bench as StoreBench
from tests.stages.actors import TICKETS, Recorder, World
from tests.stages.fake_devices import FakeBackend, FakeBulk
from tests.stages.inside import without_session
from tests.stages.programs import run_python, without_address
from tests.stages.scripts import PRELUDE, finish, start_client


def out(*texts: str) -> tuple[msg.OutputLine, ...]:
    return tuple(msg.OutputLine(False, text) for text in texts)


# --- on the host: lines ---------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


WRITTEN: dict[str, tuple[list[str], list[str]]] = {
    "a line in parts": (["a", "b\n"], ["ab"]),
    "several lines at once": (["a\nb\n\nc\n"], ["a", "b", "", "c"]),
    "a line without an end": (["a\nb"], ["a", "b"]),
    "line ends of another system": (["a\r\n", "b\r\n"], ["a", "b"]),
    "a progress bar": (["\r 10%", "\r 20%", "\r100%\n"], ["100%"]),
    "another progress bar": (["10%\r", "20%\r", "done\r\n"], ["done"]),
    "a long line": (["x" * (LINE_CHARACTERS + 1) + "\n"], ["x" * LINE_CHARACTERS, "x"]),
    "a long line without an end": (["x" * (LINE_CHARACTERS + 1)], ["x" * LINE_CHARACTERS, "x"]),
    "what is no text": (["\udc80 \N{SNOWMAN}\n"], ["\\udc80 \N{SNOWMAN}"]),
}


@pytest.mark.parametrize("what", WRITTEN)
def test_lines_are_whole(what: str) -> None:
    parts, lines = WRITTEN[what]
    output = Output()
    with output.on_behalf_of(3):
        for part in parts:
            output.write(False, part)
    assert output.fetch() == {3: out(*lines)}
    assert output.fetch() == {}


def test_streams_and_clients_and_threads_are_kept_apart() -> None:
    output, told = Output(), []
    output.written = lambda: told.append(threading.current_thread().name)
    assert not output.is_taking
    with output.on_behalf_of(1):
        assert output.is_taking
        output.write(False, "to output, ")
        output.write(True, "to error\n")
        thread = threading.Thread(target=lambda: told.append(output.is_taking))
        thread.start()
        thread.join()
        output.write(False, "and more")
    with output.on_behalf_of(2):
        output.write(False, "another's\n")
    with output.on_behalf_of(0):
        assert not output.is_taking
    assert told == ["MainThread", False], "the loop is woken once for all that is there"
    first = (msg.OutputLine(True, "to error"), msg.OutputLine(False, "to output, and more"))
    assert output.fetch() == {1: first, 2: out("another's")}


def write(output: Output, client: int, count: int, line: str = "x") -> None:
    with output.on_behalf_of(client):
        output.write(False, f"{line}\n" * count)


@pytest.mark.parametrize(
    ("line", "most"), [("x", LINES), ("x" * 1000, LINES_BYTES // 1000)], ids=["lines", "bytes"]
)
def test_so_much_is_taken_in_a_second_and_the_rest_is_counted(line: str, most: int) -> None:
    clock = Clock()
    output = Output(now_s=clock)
    write(output, 1, most + 1500, line)
    write(output, 2, 1)
    found = output.fetch()
    assert found == {1: out(line) * most, 2: out("x")}, "another client has its own measure"
    assert output.is_pending, "it is still to be said how many were left out"
    assert output.fetch() == {}
    clock.now_s = 1.0
    write(output, 1, 1, line)
    (notice, last) = output.fetch()[1]
    assert notice.is_error
    assert notice.text.startswith("… 1,500 lines left out")
    assert (last, output.is_pending) == (msg.OutputLine(False, line), False)
    clock.now_s = 2.0
    assert output.fetch() == {}
    assert not output.clients, "nothing is kept of those who write no more"


def test_the_rest_is_told_though_nothing_follows() -> None:
    clock = Clock()
    output = Output(now_s=clock)
    write(output, 1, LINES + 7)
    output.fetch()
    clock.now_s = 1.5
    assert [line.text[:20] for line in output.fetch()[1]] == ["… 7 lines left out ("]
    assert not output.is_pending


def test_a_loop_that_does_not_turn_keeps_no_more_than_a_second() -> None:
    clock = Clock()
    output = Output(now_s=clock)
    for second in range(10):
        clock.now_s = second
        write(output, 1, LINES)
    assert len(output.fetch()[1]) <= LINES + 10


def test_a_computation_says_whose_it_is() -> None:
    assert owner_of(f"{client_id(7, 12)}/1/0".encode()) == 7
    assert owner_of(b"another name") == 0


# --- on the host: the standard streams and the log ------------------------------------------------------


class Daemon:
    """The streams of a process whose clients' output is taken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, shares_terminal: bool, level: str) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        root = logging.getLogger()
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setattr(sys, "stderr", self.err)
        monkeypatch.setattr(root, "handlers", [logging.StreamHandler(self.err)])
        monkeypatch.setattr(root, "level", logging.getLevelName(level.upper()))
        monkeypatch.setattr(logging.getLogger("pw"), "level", logging.NOTSET)
        monkeypatch.setenv(streams.CLIENTS_ONLY, "1" if shares_terminal else "")
        logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]
        self.output = streams.take_output(level)


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """What loggers remember of the levels that a test has set goes with them."""
    yield
    logging.Logger.manager._clear_cache()  # type: ignore[attr-defined]


SHARES = pytest.mark.parametrize(
    "shares", [True, False], ids=["shares its terminal", "has its own terminal"]
)


def speak() -> None:
    print("printed")
    print("to error", file=sys.stderr)
    sys.stdout.writelines(["in ", "parts\n"])
    logging.getLogger("theirs").warning("number %d", 3)
    logging.getLogger("theirs").info("too little")
    logging.getLogger("pw").error("the daemon's own")
    assert not sys.stdout.isatty()
    sys.stdout.flush()


@SHARES
def test_what_a_program_writes_is_taken_and_shown_once(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Daemon(monkeypatch, shares, "error")
    with process.output.on_behalf_of(5):
        speak()
    (lines,) = process.output.fetch().values()
    assert [line.text for line in lines if not line.is_error] == ["printed", "in parts"]
    errors = [line.text for line in lines if line.is_error]
    assert errors == ["to error", "WARNING:theirs:number 3"]
    assert process.out.getvalue() == ("" if shares else "printed\nin parts\n")
    assert ("to error" in process.err.getvalue()) is not shares
    assert "number 3" not in process.err.getvalue(), "the daemon's own log shows errors only"
    assert "the daemon's own" in process.err.getvalue()


@SHARES
def test_what_others_write_stays_where_it_is(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    process = Daemon(monkeypatch, shares, "error")
    speak()
    assert process.output.fetch() == {}
    assert process.out.getvalue() == "printed\nin parts\n"
    assert "to error" in process.err.getvalue()
    assert "number 3" not in process.err.getvalue()


# --- on the host: to the client -------------------------------------------------------------------------


class Pending:
    """Lines that are there when a test says so."""

    def __init__(self) -> None:
        self.is_pending = False
        self.lines: dict[int, tuple[msg.OutputLine, ...]] = {}

    def write(self, client: int, *texts: str) -> None:
        self.lines[client] = self.lines.get(client, ()) + out(*texts)
        self.is_pending = True

    def fetch(self) -> dict[int, tuple[msg.OutputLine, ...]]:
        lines, self.lines, self.is_pending = self.lines, {}, False
        return lines


class HostBench(StoreBench):
    """The store of host "h", and a client that wants to see what its programs write there."""

    def __init__(self) -> None:
        super().__init__()
        self.output = Pending()
        self.store = self.world.add(
            store_of("h"),
            lambda env: ObjectStore(env, self.backend, self.bulk, dict, output=self.output),
        )
        self.store.joins("i", 1, TICKETS.public, 8, 8)

    def meet(self, wants: bool = True, client: int = 1, node: str = "c") -> None:
        self.say(msg.Identify(client, TICKETS.ticket(client, node), wants), node)

    def write(self, *texts: str, client: int = 1) -> None:
        self.output.write(client, *texts)
        self.world.post(store_of("h"), store_of("h"), Written())
        self.world.settle()

    def printed(self, node: str = "c") -> list[tuple[str, ...]]:
        self.world.settle()
        return [
            tuple(line.text for line in message.lines)
            for message in self.world.to(session_of(node), msg.Printed)
        ]


def test_lines_of_one_moment_are_one_message() -> None:
    bench = HostBench()
    bench.meet()
    bench.write("a")
    bench.write("b")
    assert bench.printed() == []
    bench.world.wait(TOGETHER_S)
    assert bench.printed() == [("a", "b")]
    bench.write("c")
    bench.world.wait(TOGETHER_S)
    assert bench.printed() == [("a", "b"), ("c",)]


def test_what_was_written_before_a_result_comes_before_it() -> None:
    bench = HostBench()
    bench.meet()
    bench.launch()
    bench.write("computed")
    bench.fetch(1)
    bench.world.settle()
    kinds = [type(message) for message in bench.world.to(session_of("c"))]
    assert kinds == [msg.Printed, msg.Fetched]


def test_it_comes_over_the_line_as_long_as_there_is_one() -> None:
    bench = HostBench()
    bench.meet()
    bench.say(msg.Identify(1, TICKETS.ticket(1, "c.lines"), is_line=True), "c.lines")
    bench.write("computed")
    bench.world.wait(TOGETHER_S)
    assert (bench.printed("c"), bench.printed("c.lines")) == ([], [("computed",)])
    bench.say(msg.PeerLost("c.lines", "silent"), "h")
    bench.write("again")
    bench.world.wait(TOGETHER_S)
    assert (bench.printed("c"), bench.printed("c.lines")) == ([("again",)], [("computed",)])


def test_who_does_not_want_it_gets_nothing_and_who_comes_late_the_last_lines() -> None:
    bench = HostBench()
    bench.meet(wants=False)
    bench.write("a")
    bench.write(*map(str, range(EARLY_LINES + 5)), client=2)
    bench.write("never", client=3)
    bench.world.wait(TOGETHER_S)
    bench.meet(client=2, node="d")
    assert bench.printed("c") == []
    assert bench.printed("d") == [tuple(map(str, range(5, EARLY_LINES + 5)))]
    bench.store.drop_client(3)
    bench.write("too late", client=3)
    bench.world.wait(TOGETHER_S)
    assert not bench.store.printing.early_lines


def test_a_ticket_of_another_client_shows_nothing() -> None:
    bench = HostBench()
    bench.say(msg.Identify(2, TICKETS.ticket(1, "c"), True), "c")
    bench.write("secret", client=2)
    bench.world.wait(TOGETHER_S)
    assert bench.printed() == []


# --- on the client: the session -------------------------------------------------------------------------


class ClientBench:
    def __init__(self, wants: bool = True) -> None:
        self.world = World()
        self.shown: list[tuple[str, tuple[msg.OutputLine, ...]]] = []
        self.world.add(CONTROL, Recorder)
        for host in "ab":
            self.world.add(store_of(host), Recorder)
        self.world.backends["client"] = FakeBackend(self.world, "client")
        bulk = FakeBulk(self.world, "client")
        self.session = self.world.add(
            session_of("client"), lambda env: ClientSession(env, bulk, lambda count: None)
        )
        show = (lambda host, lines: self.shown.append((host, lines))) if wants else None

        class Attaching:
            def set_result(self, result: Any) -> None: ...
            def set_exception(self, error: Any) -> None: ...
            def done(self) -> bool:
                return False

        self.tell(Open("test", 1.0, 0, 0, Attaching(), output=show))
        self.tell(
            msg.Directory(tuple(msg.Peer(host, "", True) for host in "ab")),
            msg.Attached(1, b"t", 8, ()),
        )

    def tell(self, *messages: Any, sender: str = "controller") -> None:
        for message in messages:
            self.world.post(store_of(sender), session_of("client"), message)
        self.world.settle()

    def bind(self, slice: int, *hosts: str) -> None:
        devices = tuple(DeviceAddress(host, 0) for host in hosts)
        self.tell(msg.SliceBound(slice, "east", "cpu", "fake", devices, 1))

    def met(self) -> list[str]:
        self.world.settle()
        sent = [(to.node, m) for _, to, m in self.world.sent if isinstance(m, msg.Identify)]
        assert {identify for _, identify in sent} <= {msg.Identify(1, b"t", True)}
        return sorted(node for node, _ in sent)


def test_all_hosts_that_will_run_a_function_of_the_client_are_met() -> None:
    bench = ClientBench()
    bench.bind(10, "a", "b")
    assert bench.met() == []
    bench.tell(Listen((10, 11)))
    assert bench.met() == ["a", "b"]
    bench.tell(Listen((10,)))
    assert bench.met() == ["a", "b"]
    bench.bind(10, "a")
    bench.bind(11, "b")
    assert bench.met() == ["a", "a", "b", "b"], "they are other processes now"
    bench.tell(msg.ReleaseSlice(10))
    bench.bind(10, "a")
    assert bench.met() == ["a", "a", "b", "b"]


def test_a_client_that_wants_nothing_meets_them_when_it_asks_for_something() -> None:
    bench = ClientBench(wants=False)
    bench.bind(10, "a")
    bench.tell(Listen((10,)))
    assert bench.met() == []
    bench.tell(msg.Printed(out("x")), sender="a")
    assert bench.shown == []


def test_only_hosts_are_shown() -> None:
    bench = ClientBench()
    bench.tell(msg.Printed(out("x")), sender="a")
    bench.tell(msg.Printed(out("y")), sender="a stranger")
    assert bench.shown == [("a", out("x"))]


# --- on the client: the terminal ------------------------------------------------------------------------


def test_lines_go_to_the_stream_that_they_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    output = WorkerOutput()
    output.show("a", (*out("one", "two"), msg.OutputLine(True, "bad")))
    output.show("b", out("three"))
    output.close()
    assert capsys.readouterr() == ("(a) one\n(a) two\n(b) three\n", "(a) bad\n")


class Terminal(io.StringIO):
    """One that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.goes_on = threading.Event()
        self.is_writing = threading.Event()

    def write(self, text: str) -> int:
        self.is_writing.set()
        assert self.goes_on.wait(60)
        self.writes.append(text)
        return len(text)


def test_a_slow_terminal_holds_up_neither_the_loop_nor_lines_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    output = WorkerOutput(kept=3)
    output.show("a", out("one"))
    assert terminal.is_writing.wait(60)
    output.show("a", out(*map(str, range(10))))
    terminal.goes_on.set()
    output.close()
    assert terminal.writes == [
        "(a) one\n",
        "(a) 0\n(a) 1\n(a) 2\n",
        "(pw) … 7 lines of hosts left out\n",
    ]


def test_the_line_of_a_long_wait_stays_below(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    terminal = live.Terminal(file=screen, force_terminal=True, width=40, color_system=None)
    line = live.WaitLine(live.About("the array"), terminal, 0.0, lambda: 4.0)
    line.tick()
    output = WorkerOutput()
    output.show("a", out("one"))
    output.close()
    line.close()
    output.show("a", out("two"))
    output.close()
    waiting, erase = "waiting 4 s for the array", "\r\x1b[2K"
    assert screen.getvalue() == (
        f"{erase}{waiting}{erase}(a) one\n{erase}{waiting}{erase}(a) two\n"
    )


@pytest.mark.parametrize("stream", [None, "closed"])
def test_a_terminal_that_is_gone_is_no_error(
    stream: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed if stream else None)
    output = WorkerOutput()
    output.show("a", out("one"))
    output.close()


@pytest.mark.parametrize(
    ("given", "variable", "wanted"),
    [
        (None, None, True),
        (None, "0", False),
        (None, "1", True),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_it_is_switched_by_an_argument_or_a_variable(
    monkeypatch: pytest.MonkeyPatch, given: bool | None, variable: str | None, wanted: bool
) -> None:
    monkeypatch.delenv("PW_WORKER_OUTPUT", raising=False)
    if variable is not None:
        monkeypatch.setenv("PW_WORKER_OUTPUT", variable)
    made: list[dict[str, Any]] = []
    without_session(monkeypatch)
    monkeypatch.setattr(current, "Runtime", lambda *args, **kwargs: made.append(kwargs))
    pw.connect("tcp://127.0.0.1:1", worker_output=given)
    assert [options["worker_output"] for options in made] == [wanted]


def test_a_variable_that_says_neither_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    without_session(monkeypatch)
    monkeypatch.setenv("PW_WORKER_OUTPUT", "yes please")
    with pytest.raises(ValueError, match="PW_WORKER_OUTPUT must be 0 or 1, not 'yes please'"):
        pw.connect("tcp://127.0.0.1:1")


# --- all of it ------------------------------------------------------------------------------------------

SPEAK = """
import logging, sys, warnings
def speak(x):
    print("printed", x.sum())
    print("to error", file=sys.stderr)
    warnings.warn("careful")
    logging.getLogger("mine").warning("logged")
    return x
devices = pw.make_virtual_device_set().add_slice(DEVICES).devices
spoken = pw.host_function(speak, jax.ShapeDtypeStruct((4,), jnp.float32), devices=devices)
print(np.asarray(spoken(np.ones(4, np.float32))))
"""


def check(host: str, said: str, complained: str, result: str = "[1. 1. 1. 1.]") -> None:
    lines = said.splitlines()
    assert lines.count(f"({host}) printed 4.0") == 1
    assert result in lines
    for words in ("to error", "UserWarning: careful", "WARNING:mine:logged"):
        found = [line for line in complained.splitlines() if words in line]
        assert len(found) == 1
        assert found[0].startswith(f"({host}) ")


@pytest.mark.processes
def test_it_is_seen_from_the_embedded_cluster() -> None:
    done = run_python(
        ["-c", PRELUDE + SPEAK.replace("DEVICES", "1")], environment=without_address()
    )
    assert done.returncode == 0, done.stderr
    check("embedded-0", done.stdout, done.stderr)
    before, _, _ = done.stdout.partition("[1.")
    assert "printed" in before, "what was printed before a result is seen before it"


@pytest.mark.processes
def test_it_is_seen_by_the_client_whose_function_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    body = SPEAK.replace("DEVICES", "2")
    with pw.LocalCluster(hosts_per_island=2, connect=False, allow_python=True) as cluster:
        shown = start_client(cluster.address, body + "sys.stdin.readline()")
        quiet = start_client(cluster.address, body, PW_WORKER_OUTPUT="0")
        assert finish(quiet) == "[1. 1. 1. 1.]\n"
        said = ""
        while not all(f"host-{number}) printed" in said for number in (0, 1)):
            line = shown.stdout.readline()
            assert line, "it has ended"
            said += line
        rest, complained = shown.finish(90.0)
        said += rest
        assert shown.process.returncode == 0
    for host in ("island-0-host-0", "island-0-host-1"):
        of_host = [line for line in complained.splitlines() if host in line]
        check(host, said, "\n".join(of_host))
    daemons = capfd.readouterr()
    for words in ("printed", "to error", "careful", "logged"):
        assert words not in daemons.out + daemons.err, "it would be there twice on one terminal"
