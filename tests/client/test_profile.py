"""`pw.profile`: the parts of a block's time add up, and the advice fits what costs most."""

from __future__ import annotations

import re
import time
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

import pw
from pw.client.connection import current
from pw.core.ids import client_id
from pw.operating.profiling.report import Profile
from pw.operating.profiling.work import PARTS, common, joined, length_s
from pw.operating.timeline.timeline import Call, Computation, Launch, Timeline, Transfer
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.stage import mesh_on

ME, OTHER = 3, 4
HOST = "island-0-host-0"

spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted).map(tuple), max_size=8
)


def moments(some: Any) -> set[int]:
    return {at for start, end in some for at in range(int(start), int(end))}


@given(spans, spans)
def test_spans(some: Any, others: Any) -> None:
    a, b = joined(some), joined(others)
    assert moments(a) == moments(some)
    assert length_s(a) == len(moments(some))
    assert all(end < start for (_, end), (start, _) in pairwise(a))
    assert moments(common(a, b)) == moments(some) & moments(others)


def run(number: int, client: int = ME) -> int:
    return client_id(client, number)


def computed(
    start: float, end: float, client: int = ME, device: str = "0", host: str = HOST
) -> Any:
    return Computation(host, device, "step", run(1, client), 0, start, start, end)


def timeline(**parts: Any) -> Timeline:
    return Timeline(10.0, **parts, clients={OTHER: "their.py"})


def profiled(recorded: Timeline, sent_s: dict[int, float]) -> Profile:
    profile = Profile()
    profile.take(recorded, ME, sent_s)
    assert sum(profile.parts_s.values()) == pytest.approx(profile.length_s)
    assert tuple(profile.parts_s) == PARTS
    return profile


def test_each_moment_belongs_to_one_part() -> None:
    transfer = Transfer(HOST, True, "edge", 4.5, 6.0, 1 << 20, ME, run(1), 0, "island-1-host-0")
    profile = profiled(
        timeline(
            computations=[computed(4.0, 5.0), computed(6.0, 7.0, OTHER), computed(9.5, 9.9, OTHER)],
            transfers=[transfer],
            launches=[Launch("i", run(1), 0, 2.5, 3.0, 7.5, 1.0)],
            calls=[Call(run(1), "step", 2.0, 8.0)],
        ),
        {run(1): 1.0},
    )
    assert profile.parts_s == pytest.approx(
        {
            "client": 1.0 + 2.0,
            "controller": 2.0 + 0.5,
            "hosts": 1.0 + 0.5,
            "devices": 1.0,
            "transfers": 1.0,
            "other clients": 1.0,
        }
    )
    assert (profile.calls, profile.devices, profile.busy) == (1, 1, pytest.approx(0.1))
    text = repr(profile)
    assert text.startswith("10.00 s, 1 call; 1 device computed for 10% of the time\n")
    assert re.search(
        r"transfers +1\.00 s +10% +\S+ +island-1-host-0 → island-0-host-0 1\.00 MiB", text
    )
    assert re.search(r"other clients .*their\.py", text)
    assert len(text.splitlines()) < 15


def test_a_block_without_calls_is_the_client_s() -> None:
    assert profiled(timeline(), {}).parts_s["client"] == 10.0
    assert profiled(Timeline(), {}).parts_s["client"] == 0.0


def launched(start_s: float, at_s: float, end_s: float, count: int = 1) -> dict[str, Any]:
    return {
        "launches": [
            Launch("i", run(n), 0, start_s, at_s, end_s, 0.0) for n in range(1, count + 1)
        ],
        "calls": [Call(run(n), "step", start_s, end_s) for n in range(1, count + 1)],
    }


@pytest.mark.parametrize(
    ("recorded", "sent", "expected"),
    [
        (
            {"computations": [computed(0, 9)], **launched(0, 0, 9)},
            1,
            ["devices: they are the limit"],
        ),
        (
            {
                "computations": [computed(0, 5), computed(5, 9, host="island-1-host-0")],
                **launched(0, 0, 9),
            },
            1,
            ["devices: each computes for 45% of the time"],
        ),
        (
            {"computations": [computed(8, 9)], **launched(0, 8, 9)},
            1,
            ["controller: a call of 'step' waited 8.00 s"],
        ),
        (  # what keeps the hosts waiting is said once
            {"computations": [computed(8.9, 9)], **launched(0, 5, 9)},
            1,
            ["controller: a call of 'step' waited 5.00 s"],
        ),
        (
            {"computations": [computed(8.9, 9)], **launched(0, 0.1, 9, 1000)},
            1000,
            ["hosts: a call computes for 100 µs only"],
        ),
        (
            {
                "computations": [computed(0, 1)],
                "transfers": [Transfer(HOST, True, "upload", 1, 9, 5, ME)],
                **launched(0, 0, 9),
            },
            1,
            ["transfers: read less"],
        ),
        (
            {"computations": [computed(0, 1), computed(1, 9, OTHER)], **launched(0, 0, 9)},
            1,
            ["other clients: their.py uses the same devices"],
        ),
        (
            {"computations": [computed(9, 10)], **launched(9, 9, 10)},
            0,
            ["client: the devices wait"],
        ),
    ],
)
def test_the_advice_is_about_the_largest_part(
    recorded: dict[str, Any], sent: int, expected: list[str]
) -> None:
    profile = profiled(timeline(**recorded), {run(n): 0.0 for n in range(1, sent + 1)})
    found = [words[: len(start)] for words, start in zip(profile.advice, expected, strict=True)]
    assert found == expected, profile.advice


def test_a_loop_is_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    with InProcessCluster(devices_per_island=2):
        f = pw.jit(lambda x: x + 1, mesh=mesh_on(0))
        x = f(0.0)
        x.block_until_ready()
        slept_s, calls = 0.0, 0
        ran = pw.stats()["controller"]["runs"]

        def runs_are_over() -> bool:
            told = pw.stats()["controller"]
            return told["runs"] == ran + calls and told["runs_in_flight"] == 0

        with pw.profile() as profile:
            for _ in range(10):
                calls += 1
                began_s = time.monotonic()
                x = f(x)
                float(x)
                # Most of the time, however slow a call is; a run under a lease is told of later.
                pause_s = 2 * (time.monotonic() - began_s)
                until(runs_are_over, "the end of the run")
                time.sleep(pause_s)
                slept_s += pause_s
        told = capsys.readouterr().out
        assert told.splitlines()[0] == profile.head
        assert (profile.calls, profile.devices) == (10, 2)
        assert profile.parts_s["client"] > 0.9 * slept_s
        assert sum(profile.parts_s.values()) == pytest.approx(profile.length_s)
        assert any(words.startswith("client: ") for words in profile.advice)
        assert current.runtime().noted_in == ()
        assert "<table" in profile._repr_html_()
        assert profile.advice[0][:40] in profile._repr_html_()
        with pytest.raises(ZeroDivisionError), pw.profile(show=False):
            f(x), 1 / 0
        assert capsys.readouterr().out == ""
        pw.show(profile)
        assert profile.head in capsys.readouterr().out


def test_time_that_is_traced_and_compiled_is_not_the_devices() -> None:
    with InProcessCluster(devices_per_island=1), pw.profile(show=False) as profile:
        pw.jit(lambda x: x * 3)(np.float32(2)).block_until_ready()
    assert profile.calls == 1
    assert profile.parts_s["devices"] < profile.length_s / 2


def test_the_magic_of_notebooks(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        with InProcessCluster(devices_per_island=1):
            shell.run_line_magic("load_ext", "pw")
            shell.push({"f": pw.jit(lambda x: x + 1)})
            shell.run_cell_magic("pw_profile", "", "y = float(f(1.0))\n")
            assert shell.user_ns["y"] == 2.0
            assert re.match(r"\d\.\d\d s, 1 call; 1 device computed", capsys.readouterr().out)
            shell.run_cell_magic("pw_profile", "", "1 / 0\n")
            told = capsys.readouterr().out
            assert "ZeroDivisionError" in told
            assert "computed for" not in told
    finally:
        InteractiveShell.clear_instance()
