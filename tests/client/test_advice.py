"""Warnings for lines of a script that do what costs much; good scripts get none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import results, runtime
from pw.client.display import advice
from pw.client.display.advice import CALLS, LARGE_BYTES, TIMES, WAITS, Habits, Line, user_line
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing import InProcessCluster
from tests.stages.programs import run_python
from tests.stages.stage import mesh_on, split

HERE = Line("script.py", 7)


class Script:
    """A script's habits, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PW_ADVICE", raising=False)
        self.now_s = 5.0
        self.at = HERE
        self.sent = 0
        self.habits = Habits(lambda: self.now_s, lambda: (self.at, {"__name__": "script"}))

    def calls(self, each_s: float) -> None:
        self.now_s += each_s * CALLS
        self.habits.called()

    def steps(self, each_s: float, is_newest: bool = True, calls: float = 1.0) -> None:
        self.now_s += each_s * WAITS
        self.sent += int(calls * WAITS)
        self.habits.waited(self.sent, is_newest)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(monkeypatch)


@pytest.fixture
def told() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def words(told: list[warnings.WarningMessage]) -> list[str]:
    assert all(one.category is pw.PerformanceWarning for one in told)
    return [f"{one.filename}:{one.lineno}: {one.message}" for one in told]


def test_short_calls_are_warned_of_once_for_each_line(script: Script, told: Any) -> None:
    for _ in range(TIMES - 1):
        script.calls(50e-6)
    assert not told
    for _ in range(10):
        script.calls(50e-6)
    (line,) = words(told)
    assert line.startswith("script.py:7: 3072 calls took 50 µs each: a call costs more")
    assert "jax.lax.scan" in line
    script.at = Line("script.py", 9)
    for _ in range(10):
        script.calls(50e-6)
    assert [one.lineno for one in told] == [7, 9]


def test_calls_of_another_pace_or_place_begin_again(script: Script, told: Any) -> None:
    for _ in range(10):
        script.calls(50e-6)
        script.calls(50e-6)
        script.calls(1e-3)
    for number in range(20):
        script.at = Line("script.py", number)
        script.calls(50e-6)
    assert not told


@pytest.mark.parametrize(
    ("how", "is_warned"),
    [
        ({}, True),
        ({"calls": 2.0}, True),  # a step of two calls
        ({"calls": 0.5}, True),  # two reads in a step
        ({"calls": 100.0}, False),  # one step in a hundred is read
        ({"calls": 0.0}, False),  # many reads of what is there
        ({"is_newest": False}, False),  # an earlier step is read
        ({"each_s": 0.5}, False),  # a read costs little beside such a step
    ],
)
def test_a_result_that_is_waited_for_in_each_step(
    script: Script, told: Any, how: dict[str, Any], is_warned: bool
) -> None:
    for _ in range(TIMES + 2):
        script.steps(**{"each_s": 0.002} | how)
    assert [one.lineno for one in told] == [7] * is_warned
    assert all(f"in each of {TIMES * WAITS} steps" in one for one in words(told))


def spec(shape: tuple[int, ...], devices: int, axes: tuple[tuple[str, ...], ...]) -> ArraySpec:
    places = Placement(1, tuple(range(devices)))
    return ArraySpec(shape, "float32", Sharding(("x",), (devices,), axes), places)


@pytest.mark.parametrize(
    ("devices", "axes", "size", "is_warned"),
    [
        (4, (), 1 << 20, True),
        (4, (("x",),), 1 << 20, False),
        (1, (), 1 << 20, False),
        (4, (), 1000, False),
    ],
)
def test_large_copies(
    script: Script,
    told: Any,
    monkeypatch: pytest.MonkeyPatch,
    devices: int,
    axes: Any,
    size: int,
    is_warned: bool,
) -> None:
    monkeypatch.setattr(advice, "REPLICATED_BYTES", 4 << 20)
    script.habits.uploading(np.zeros(size, np.float32), spec((size,), devices, axes))
    assert (
        words(told)
        == [
            "script.py:7: an array of 4.00 MiB is copied to each of 4 devices, 16.00 MiB in all: divide it, "
            "with pw.NamedSharding(mesh, PartitionSpec(axis)) as sharding"
        ]
        * is_warned
    )


def test_it_can_be_turned_off(script: Script, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", pw.PerformanceWarning)
        script.calls(1e-6), script.calls(1e-6)
        with pytest.raises(pw.PerformanceWarning):
            script.calls(1e-6)
    monkeypatch.setenv("PW_ADVICE", "0")
    quiet = Habits(lambda: 5.0, lambda: pytest.fail("no one looks"))
    for _ in range(10):
        quiet.called()
    warnings.simplefilter("ignore", pw.PerformanceWarning)
    script.at = Line("script.py", 9)
    for _ in range(10):
        script.calls(1e-6)
    assert not told


def test_the_line_is_the_user_s() -> None:
    """Frames of pw, JAX and the standard library are left out."""
    found: list[Any] = []
    jax.tree_util.tree_map(lambda _: found.append(user_line()), [1])
    line, module = found[0]
    assert line.file == __file__
    assert module is globals()


# --- in a cluster ------------------------------------------------------------------------------------


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks come after a few calls, and a call is short whatever it takes."""
    monkeypatch.delenv("PW_ADVICE", raising=False)
    for module in (advice, runtime):
        monkeypatch.setattr(module, "CALLS", 8)
    for module in (advice, results):
        monkeypatch.setattr(module, "WAITS", 4)
    monkeypatch.setattr(advice, "SHORT_S", 10.0)
    monkeypatch.setattr(advice, "STEP_S", 10.0)


def line_of(function: Callable[..., Any], text: str) -> int:
    source, first = function.__code__, function.__code__.co_firstlineno
    lines = Path(source.co_filename).read_text().splitlines()
    return next(n for n in range(first, first + 60) if text in lines[n - 1])


@pytest.mark.usefixtures("soon")
def test_habits_of_a_real_script(told: Any) -> None:
    def loss_in_each_step(f: Any) -> None:
        value = f(0.0)
        for _ in range(40):
            value = f(value)
            float(value)  # the newest

    def many_calls(f: Any) -> None:
        value = f(0.0)
        for _ in range(40):
            value = f(value)  # short
        float(value)

    def there_and_back(x: pw.Array, mesh: pw.Mesh) -> None:
        whole = pw.NamedSharding(mesh, pw.PartitionSpec())
        for _ in range(3):
            pw.put(np.asarray(x)[:], whole)  # a view
            pw.jit(lambda x: x)(pw.get(x))  # an argument
            pw.put(np.asarray(x) * 2, whole)

    with InProcessCluster(devices_per_island=2):
        mesh = mesh_on(0)
        f = pw.jit(lambda x: x + 1, mesh=mesh)
        f(0.0).block_until_ready()
        loss_in_each_step(f)
        newest = [one for one in told if "waited for" in str(one.message)]
        assert [one.lineno for one in newest] == [line_of(loss_in_each_step, "# the newest")]
        told.clear()
        many_calls(f)
        assert [one.lineno for one in told] == [line_of(many_calls, "# short")]
        told.clear()
        x = pw.put(np.zeros(LARGE_BYTES // 4, np.float32), sharding=split(mesh))
        there_and_back(x, mesh)
        found = [one for one in words(told) if "come from" in one or "came from" in one]
        assert [one.lineno for one in told] == [
            line_of(there_and_back, "# a view"),
            line_of(there_and_back, "# an argument"),
        ], found
        assert "1.00 MiB came from the cluster and go back to it" in found[0]


@pytest.mark.usefixtures("soon")
def test_good_scripts_are_left_alone(told: Any) -> None:
    with InProcessCluster(devices_per_island=2):
        mesh = mesh_on(0)
        f = pw.jit(lambda x: (x + 1, x.sum()), mesh=mesh)
        x = pw.put(np.zeros((4, 2), np.float32), sharding=pw.NamedSharding(mesh, P("x")))
        before = None
        for number in range(40):
            x, loss = f(x)
            if before is not None:
                float(before)  # one step behind
            before = loss
            if number % 20 == 0:
                pw.get([x, loss])
        assert not [one for one in told if "waited for" in str(one.message)]


@pytest.mark.processes
def test_a_script_sees_its_own_line(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import numpy as np, pw\n"
        "f = pw.jit(lambda x: x + 1)\n"
        "x = f(0.0)\n"
        "for _ in range(400):\n"
        "    x = f(x)\n"
        "    float(x)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PW_ADVICE"}
    with pw.LocalCluster(connect=False) as cluster:
        for variables, count in (({}, 1), ({"PW_ADVICE": "0"}, 0)):
            where = {"PW_ADDRESS": cluster.address}
            done = run_python([str(script)], tmp_path, environment=environment | where | variables)
            assert done.returncode == 0, done.stderr
            assert done.stderr.count("PerformanceWarning") == count, done.stderr
            said = f"{script}:6: PerformanceWarning: a result is waited for"
            assert (said in done.stderr) is bool(count)
