"""The line that a long wait shows: what it says, where, when, and what it leaves behind."""

from __future__ import annotations

import io
import os
import pty
import signal
import sys
import threading
import types
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection import threads
from pw.client.connection.waiting import Waiting
from pw.client.display import live
from pw.client.display.live import ASK_S, QUIET_S, TICK_S, About, Count, Together, patiently
from pw.core.errors import ConnectionFailed
from pw.core.messages import Explanation
from pw.sched.control.explain.story import story
from pw.testing import InProcessCluster
from tests.stages.daemons import BOUND_S
from tests.stages.programs import ROOT, start
from tests.stages.stage import held, mesh_on, numbers, split

# --- what is said, on a clock that moves with the wait -----------------------------------------------------


class Clock:
    """Seconds that pass while something is waited for; at set times things happen."""

    def __init__(self, over_s: float) -> None:
        self.now_s = 100.0
        self.over_s = 100.0 + over_s
        self.waits: list[float | None] = []
        self.events: list[tuple[float, Callable[[], Any]]] = []

    def __call__(self) -> float:
        return self.now_s

    def at(self, after_s: float, what: Callable[[], Any]) -> None:
        self.events.append((100.0 + after_s, what))

    def settles(self, timeout_s: float | None) -> bool:
        self.waits.append(timeout_s)
        rest_s = self.over_s - self.now_s
        self.now_s += rest_s if timeout_s is None else min(timeout_s, rest_s)
        for event in [event for event in self.events if event[0] <= self.now_s]:
            self.events.remove(event)
            event[1]()
        return self.now_s >= self.over_s


class Shown:
    """A screen that keeps what it showed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: list[float | None] = []
        self.cleared = 0

    def show(self, line: str, part: float | None = None) -> None:
        assert not self.cleared
        self.lines.append(line)
        self.parts.append(part)

    def clear(self) -> None:
        self.cleared += 1


def wait(clock: Clock, about: Any, screen: Any, timeout_s: float | None = None) -> None:
    look = about if callable(about) else lambda: about
    patiently(clock.settles, look, timeout_s, find_screen=lambda: screen, clock=clock)


def test_a_short_wait_is_one_wait_and_nothing_else() -> None:
    clock = Clock(QUIET_S - 0.1)

    def never() -> Any:
        raise AssertionError("nothing is asked for")

    patiently(clock.settles, never, find_screen=never, clock=clock)
    assert clock.waits == [QUIET_S]


def test_a_long_wait_says_so_once_a_second_and_cleans_up() -> None:
    clock, shown = Clock(6), Shown()
    wait(clock, About("float32[4] of 'step'"), shown)
    assert shown.lines == [f"waiting {s} s for float32[4] of 'step'" for s in (3, 4, 5, 6)]
    assert shown.cleared == 1
    assert set(clock.waits[1:]) == {TICK_S}


def test_where_nobody_looks_it_is_waited_for_in_one_go() -> None:
    clock = Clock(60)
    wait(clock, lambda: pytest.fail("was not asked"), None)
    assert clock.waits == [QUIET_S, None]
    clock = Clock(60)
    wait(clock, lambda: pytest.fail("was not asked"), None, timeout_s=20)
    assert clock.waits == [QUIET_S, 17]


@pytest.mark.parametrize("timeout_s", [1.0, 5.125])
def test_a_timeout_is_kept(timeout_s: float) -> None:
    clock, shown = Clock(60), Shown()
    wait(clock, About("it"), shown, timeout_s)
    assert clock.now_s == pytest.approx(100 + timeout_s)
    assert bool(shown.lines) == (timeout_s > QUIET_S)


def test_how_many_are_ready() -> None:
    clock, shown = Clock(6.5), Shown()
    parts: list[Future[None]] = [Future() for _ in range(8)]
    clock.at(1, lambda: [part.set_result(None) for part in parts[:3]])
    clock.at(5, lambda: parts[3].set_exception(ValueError()))
    wait(clock, About("8 arrays", parts=parts), shown)
    assert shown.lines[0] == "waiting 3 s for 8 arrays: 3 of 8 are ready"
    assert shown.lines[-1].endswith("4 of 8 are ready, about 13 s left")


def test_arrays_that_are_waited_for_in_turn_are_counted_together() -> None:
    clock, shown = Clock(3.1), Shown()
    parts: list[Future[None]] = [Future() for _ in range(2)]
    parts[1].set_result(None)
    with Together(parts):
        wait(clock, About("float32[4]"), shown)
    assert shown.lines == ["waiting 3 s for float32[4]: 1 of 2 are ready"]
    clock, shown = Clock(3.1), Shown()
    wait(clock, About("float32[4]", progress=lambda: Count(1, 2, "are here")), shown)
    assert shown.lines == ["waiting 3 s for float32[4]: 1 of 2 are here"]


def test_the_controller_is_asked_why_again_and_again_and_never_waited_for() -> None:
    clock, shown = Clock(20), Shown()
    asked: list[Future[Any]] = []

    def ask() -> Future[Any]:
        asked.append(Future())
        return asked[-1]

    def answer(text: str) -> Callable[[], None]:
        return lambda: asked[-1].set_result(types.SimpleNamespace(text=text, left=()))

    clock.at(5, answer("east-1 has not finished 'step': it computes. That is why\nand more"))
    clock.at(5 + ASK_S + 2, lambda: asked[-1].set_exception(ConnectionFailed("gone")))
    wait(clock, About("it", ask), shown)
    assert shown.lines[1] == "waiting 4 s for it"
    assert shown.lines[-1] == "waiting 20 s: east-1 has not finished 'step': it computes; for it"
    assert len(asked) == 3


def test_what_is_left_is_counted_and_how_long_it_takes() -> None:
    clock, shown = Clock(23.2), Shown()
    asked: list[Future[Any]] = []

    def ask() -> Future[Any]:
        asked.append(Future())
        left = {1: (("compilations are done", 2),), 2: (("replicas are made", 8),)}.get(
            len(asked), (("replicas are made", 2),)
        )
        asked[-1].set_result(types.SimpleNamespace(text="", left=left if len(asked) < 4 else ()))
        return asked[-1]

    wait(clock, About("a checkpoint", ask), shown)
    assert "waiting 8 s for a checkpoint: 0 of 2 compilations are done" in shown.lines
    assert "waiting 13 s for a checkpoint: 0 of 8 replicas are made" in shown.lines
    assert (
        "waiting 16 s for a checkpoint: 6 of 8 replicas are made, about 2 s left" in shown.lines
    ), shown.lines
    assert (
        shown.parts[shown.lines.index("waiting 8 s for a checkpoint: 0 of 2 compilations are done")]
        == 0
    )
    assert 0.75 in shown.parts
    assert shown.parts[-1] is None
    clock, shown = Clock(6.5), Shown()
    parts: list[Future[None]] = [Future() for _ in range(8)]
    clock.at(5, lambda: [part.set_result(None) for part in parts[:4]])
    wait(clock, About("8 arrays", parts=parts), shown)
    assert shown.lines[-1] == "waiting 6 s for 8 arrays: 4 of 8 are ready, about 3 s left"


def test_that_nothing_is_under_way_is_no_reason_to_wait() -> None:
    clock, shown = Clock(5), Shown()
    idle: Future[Any] = Future()
    idle.set_result(types.SimpleNamespace(text=live.IDLE, left=()))
    wait(clock, About("the hosts", lambda: idle), shown)
    assert shown.lines[-1] == "waiting 5 s for the hosts"
    facts = Explanation(1, "", (), (), (), (), ())
    assert list(story(facts)) == [live.IDLE]


def test_a_session_that_has_ended_does_not_end_the_wait() -> None:
    clock, shown = Clock(20), Shown()

    def gone() -> Any:
        raise ConnectionFailed("the controller was lost")

    wait(clock, About("it", gone), shown)
    assert clock.now_s == clock.over_s
    wait(Clock(20), gone, Shown())
    after = Shown()
    wait(Clock(4), About("it"), after)
    assert after.lines, "the next wait has the line"


def test_a_screen_that_breaks_does_not_end_the_wait() -> None:
    class Broken(Shown):
        def show(self, line: str, part: float | None = None) -> None:
            raise BrokenPipeError

    clock = Clock(20)
    wait(clock, About("it"), Broken())
    assert clock.now_s == clock.over_s


def test_of_several_threads_that_wait_one_has_the_line() -> None:
    first, second = Shown(), Shown()
    clock = Clock(10)

    def other() -> None:
        inner = Clock(6)
        thread = threading.Thread(target=wait, args=(inner, About("second"), second))
        thread.start()
        thread.join()

    clock.at(4, other)
    wait(clock, About("first"), first)
    assert first.lines
    assert not second.lines
    wait(Clock(6), About("second"), second)
    assert second.lines


def test_the_line_is_out_of_the_way_while_something_else_is_written() -> None:
    told: list[str] = []

    class Screen:
        def show(self, line: str, part: float | None = None) -> None:
            told.append(line)

        def clear(self) -> None:
            told.append("")

    def write() -> None:
        with live.aside():
            told.append("(host) hello")

    def write_in_another_thread() -> None:
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()

    write()
    clock = Clock(5)
    clock.at(4.1, write_in_another_thread)
    wait(clock, About("it"), Screen())
    assert told == [
        "(host) hello",
        "waiting 3 s for it",
        "waiting 4 s for it",
        "",
        "(host) hello",
        "waiting 4 s for it",
        "waiting 5 s for it",
        "",
    ]


# --- futures ------------------------------------------------------------------------------------------


def test_a_future_that_waits_is_still_a_future(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("pw.client.display.live", "pw.client.connection.waiting"):
        monkeypatch.setattr(f"{module}.QUIET_S", 0.01)
    monkeypatch.setattr(live, "TICK_S", 0.01)
    shown = Shown()
    monkeypatch.setattr(live, "screen_here", lambda: shown)

    def made() -> Waiting[int]:
        return Waiting(lambda: "explained", lambda: About("it"))

    good = made()
    threading.Timer(0.2, good.set_result, [7]).start()
    assert good.result() == 7
    assert shown.cleared
    shown.cleared = 0
    bad = made()
    threading.Timer(0.05, bad.set_exception, [ValueError("mine")]).start()
    with pytest.raises(ValueError, match="mine"):
        bad.result()
    shown.cleared = 0
    with pytest.raises(TimeoutError, match=r"not within 0\.6 s\. explained"):
        made().result(0.6)
    shown.cleared = 0
    late = made()
    late.set_exception(TimeoutError("its own"))
    with pytest.raises(TimeoutError, match="its own"):
        late.result()
    given_up = made()
    given_up.cancel()
    with pytest.raises(CancelledError):
        given_up.result()


# --- screens ------------------------------------------------------------------------------------------


def test_a_terminal_shows_one_line_cut_at_its_edge() -> None:
    out = io.StringIO()
    terminal = live.Terminal(file=out, force_terminal=True, width=20, color_system=None)
    terminal.show("waiting 3 s for float32[4] of [bold]step")
    assert out.getvalue() == "\r\x1b[2Kwaiting 3 s for fl…"
    terminal.clear()
    assert out.getvalue().endswith("\r\x1b[2K")
    terminal.show("waiting 3 s for it", 0.5)
    assert out.getvalue().endswith("\r\x1b[2K██████░░░░░░ waiti…")
    assert "\n" not in out.getvalue()


def test_a_cell_is_changed_in_place_and_left_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Handle:
        def update(self, shown: Any, raw: bool) -> None:
            told.append((shown["text/plain"], shown["text/html"]))

    def display(shown: Any, raw: bool, display_id: bool) -> Handle:
        told.append(("new", shown["text/plain"], shown["text/html"]))
        return Handle()

    ipython: Any = types.ModuleType("IPython")
    ipython.display = types.ModuleType("IPython.display")
    ipython.display.display = display
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    screen = live.screen_here()
    assert screen is not None
    screen.show("one")
    screen.show("<two>", 0.25)
    screen.clear()
    assert told == [
        ("new", "one", "<div>one</div>"),
        ("<two>", '<div><progress value="0.250" max="1"></progress> &lt;two&gt;</div>'),
        ("", ""),
    ]
    monkeypatch.setenv("PW_PROGRESS", "0")
    assert live.screen_here() is None


def test_where_there_is_no_terminal_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert live.screen_here() is None
    monkeypatch.setattr("sys.stderr", None)
    assert live.screen_here() is None


# --- in a cluster -------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """Whatever is waited for for longer than a moment is shown here."""
    shown = Shown()

    def anew() -> Shown:
        shown.cleared = 0
        return shown

    for module in ("pw.client.display.live", "pw.client.connection.waiting"):
        monkeypatch.setattr(f"{module}.QUIET_S", 0.01)
    monkeypatch.setattr(live, "TICK_S", 0.01)
    monkeypatch.setattr(live, "screen_here", anew)
    return shown


def during(cluster: InProcessCluster, seen: Shown, call: Callable[[], Any], words: str) -> None:
    """Wait while the host enqueues nothing, until the words are shown."""

    class Told(Exception):
        pass

    def told(line: str, part: float | None = None) -> None:
        seen.lines.append(line)
        if words in line:
            raise Told

    seen.show = told  # type: ignore[method-assign]
    with pytest.raises(Told), held(cluster):
        call()


def test_reads_say_which_function_they_wait_for(seen: Shown) -> None:
    def step(x: Any) -> Any:
        return x + 1

    with InProcessCluster() as cluster:
        mesh = mesh_on(0)
        f = pw.jit(step, mesh=mesh)
        x = pw.put(numbers(4), sharding=split(mesh))
        f(x).block_until_ready()
        for read in (np.asarray, pw.get, str, lambda y: y.block_until_ready()):
            during(cluster, seen, lambda read=read: read(f(x)), "s for float32[4] of 'step'")
        during(
            cluster,
            seen,
            lambda: pw.checkpoint([x, f(x)]).result(),
            "s for a checkpoint of 2 arrays",
        )
        during(cluster, seen, lambda: pw.get([f(x), f(x), x]), "of 'step': 1 of 3 are ready")
        during(cluster, seen, lambda: pw.block_until_ready([f(x), f(x), x]), " of 3 are ready")
        during(cluster, seen, lambda: np.asarray(f(x)), " s: ")  # why, whatever it is


def test_a_call_that_is_far_ahead_says_what_it_waits_for(seen: Shown) -> None:
    with InProcessCluster(devices_per_island=1) as cluster:
        f = pw.jit(lambda x: x + 1)
        f(1.0).block_until_ready()
        during(
            cluster, seen, lambda: [f(1.0) for _ in range(600)], "for one of 512 calls in flight"
        )


def test_a_start_says_how_many_hosts_are_ready(
    seen: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect = threads.SessionOnNode.expect_hosts
    with InProcessCluster(devices_per_island=1) as cluster:
        monkeypatch.setattr(threads, "HOSTS_S", 0.3)
        monkeypatch.setattr(
            threads.SessionOnNode, "expect_hosts", lambda self, n, made: expect(self, n + 1, made)
        )
        with pytest.raises(ConnectionFailed, match="2 hosts were not ready within"):
            cluster.client()
    assert any("for the hosts of the cluster: 1 of 2 are ready" in line for line in seen.lines)


SCRIPT = """
import signal, sys, time
import numpy as np
import pw
from pw.client.connection import waiting
from pw.testing import InProcessCluster
from tests.stages.stage import held, mesh_on, numbers

waiting.QUIET_S = 0.2
with InProcessCluster(devices_per_island=1) as cluster:
    f = pw.jit(lambda x: x + 1)
    f(1.0).block_until_ready()
    with held(cluster):
        y = f(2.0)
        try:
            print("waits", flush=True)
            y.block_until_ready()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    print(float(y), flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("progress", ["1", "0"])
def test_ctrl_c_ends_a_wait_at_once_and_leaves_a_clean_terminal(progress: str) -> None:
    ours, theirs = pty.openpty()
    said, says = os.pipe()
    environment = {**os.environ, "PW_PROGRESS": progress, "TERM": "xterm", "COLUMNS": "80"}
    with open(os.devnull) as nothing:
        streams = (nothing.fileno(), says, theirs)
        script = start(["-c", SCRIPT], environment, ROOT, streams)
    os.close(says)
    os.close(theirs)
    try:
        with os.fdopen(said) as out:
            assert out.readline() == "waits\n"
            terminal = b""
            if progress == "1":
                while b"waiting" not in terminal:
                    terminal += os.read(ours, 4096)
            script.send_signal(signal.SIGINT)
            assert out.readline() == "interrupted\n", terminal
            assert out.readline() == "3.0\n"
            assert script.wait(BOUND_S) == 0
        try:
            while more := os.read(ours, 4096):
                terminal += more
        except OSError:  # the other end is closed
            pass
    finally:
        script.kill()
        script.wait()
        os.close(ours)
    if progress == "1":
        assert b"for float" in terminal
        assert terminal.endswith(b"\r\x1b[2K")
        assert b"\n" not in terminal
    else:
        assert terminal == b""


def test_ctrl_c_in_a_long_wait_is_raised_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No TimeoutError came before it."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pw.client.connection.waiting.QUIET_S", 0.0)
    monkeypatch.setattr("pw.client.connection.waiting.patiently", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        Waiting(about=lambda: About("it")).result()
    assert caught.value.__context__ is None
