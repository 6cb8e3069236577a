"""Pipeline schedules as data: the named ones, users' own, what is printed, drawn and refused."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pw
from pw.building.pipelines.measured import Names, measured
from pw.building.pipelines.schedules import NAMES, named
from pw.building.pipelines.table import Task
from pw.operating.timeline.timeline import Computation, Timeline

SPLIT = {"F": 1, "B": 1, "W": 1}
WHOLE = {"F": 1, "B": 2}
"""A backward pass computes two gradients, each as long as a forward pass."""


def times(schedule: pw.Schedule) -> dict[str, int]:
    return SPLIT if schedule.split else WHOLE


def most(schedule: pw.Schedule) -> list[int]:
    """The most activations that each stage keeps."""
    return [max(row) for row in schedule.activations(times(schedule))]


@st.composite
def shapes(draw: Any) -> tuple[str, list[int], int]:
    """A schedule's name, the group of each stage, and the number of microbatches."""
    name = draw(st.sampled_from(NAMES))
    groups, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 4)) * (groups if name == "interleaved" else 1)
    return name, [stage % groups for stage in range(groups * chunks)], microbatches


@given(shapes())
def test_named_schedules_are_complete_and_their_groups_never_wait_in_a_circle(
    shape: tuple[str, list[int], int],
) -> None:
    name, groups, microbatches = shape
    schedule = named(name, groups, microbatches)
    schedule.check()
    kinds = 3 if name == "zero-bubble" else 2
    assert len(list(schedule)) == len(groups) * (kinds * microbatches + 1)
    done: set[Task] = set()
    for task in schedule.timetable().order:
        assert done.issuperset(schedule.needs(task))
        done.add(task)


@pytest.mark.parametrize("stages", [2, 4, 6])
@pytest.mark.parametrize("factor", [1, 3])
def test_bubbles_and_activations_are_those_of_the_papers(stages: int, factor: int) -> None:
    count = stages * factor
    gpipe, one, zero = (
        named(name, range(stages), count) for name in ("gpipe", "1f1b", "zero-bubble")
    )
    waiting = {s.name: s.timetable(times(s)).span - 3 * count for s in (gpipe, one, zero)}
    # (p - 1)(F + B + W), and for ZB-H1 (p - 1)(F + B - W) with F = B = W = 1
    assert waiting == {
        "gpipe": 3 * (stages - 1),
        "1f1b": 3 * (stages - 1),
        "zero-bubble": stages - 1,
    }
    assert most(gpipe) == [count] * stages
    assert most(one) == [stages - stage for stage in range(stages)]
    assert most(zero) == [stages] * stages
    assert zero.bubble(SPLIT) < one.bubble(WHOLE) == pytest.approx(gpipe.bubble(WHOLE))


def test_interleaving_divides_the_bubble_by_the_stages_of_a_group() -> None:
    groups, chunks, count = 4, 2, 8
    schedule = named("interleaved", [stage % groups for stage in range(groups * chunks)], count)
    span = schedule.timetable(WHOLE).span
    assert span - 3 * count * chunks == 3 * (groups - 1)


def test_a_schedule_is_printed_as_a_table() -> None:
    assert str(named("1f1b", [0, 1], 3)).splitlines() == [
        "1f1b: 2 stages on 2 device groups, 3 microbatches; bubble 25% if all tasks take equally long; "
        "activations of at most 2, 1 microbatches",
        "  group 0  F0 F1 .  B0 F2 B1 .  B2  U",
        "  group 1  .  F0 B0 F1 B1 F2 B2 .   U",
    ]
    assert "0F1 2F0" in str(named("interleaved", [0, 1, 0, 1], 2))


def test_transfers_and_slow_stages_make_the_expected_bubble_larger() -> None:
    schedule = named("1f1b", [0, 1], 4)
    assert schedule.bubble(WHOLE, transfer=0.5) > schedule.bubble(WHOLE)
    assert schedule.bubble({**WHOLE, (1, "B"): 6}) > schedule.bubble(WHOLE)
    with pytest.raises(pw.ArgumentError, match="no duration for 'B' of stage"):
        schedule.bubble({"F": 1})


def computation(name: str, run: int, host: str, start_s: float, end_s: float) -> Computation:
    return Computation(host, "0", name, run, 0, start_s, start_s, end_s)


def timeline_of(schedule: pw.Schedule, run: int, begin_s: float, wait_s: float) -> Timeline:
    """A step as its timetable says, each group on two hosts; `wait_s` is the time of a transfer."""
    table = schedule.timetable({**times(schedule), "U": 5}, transfer=wait_s)
    return Timeline(
        computations=[
            computation(
                f"stage_{task.stage}_{task.kind}",
                run,
                f"{schedule.group_of[task.stage]}-{host}",
                begin_s + table.begins[task],
                begin_s + table.ends[task],
            )
            for task in table.order
            for host in range(2)
        ]
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_bubble_of_a_timeline_is_that_of_its_timetable(name: str) -> None:
    schedule = named(name, [0, 1, 2, 3] * (2 if name == "interleaved" else 1), 8)
    names: Names = {f"stage_{t.stage}_{t.kind}": t[::2] for t in schedule if t.kind != "U"}
    first, second = timeline_of(schedule, 1, 0.0, 0.5), timeline_of(schedule, 2, 1000.0, 0.5)
    cut_off = timeline_of(schedule, 3, 2000.0, 0.5).computations[:20]
    both = Timeline(computations=first.computations + second.computations + cut_off)
    found = measured(schedule, names, both)
    assert found.steps == 2
    assert found.times == {key: times(schedule)[key[1]] for key in names.values()}
    assert found.expected_bubble == schedule.bubble(times(schedule))
    assert found.bubble == pytest.approx(schedule.bubble(times(schedule), transfer=0.5))
    assert found.bubble > found.expected_bubble
    kept = schedule.timetable(times(schedule), transfer=0.5).activations()
    assert found.activations == tuple(map(max, kept))
    assert found.step_s == pytest.approx(schedule.timetable(times(schedule), transfer=0.5).span)


def test_a_group_does_not_wait_while_its_device_works_for_others() -> None:
    """Two stages, one microbatch, by hand: 10 s, of which group 0 waits 4 and group 1 waits 6."""
    schedule = named("gpipe", [0, 1], 1)
    names: Names = {"a_0_F": (0, "F"), "a_0_B": (0, "B"), "b_1_B": (1, "B")}
    ones = [
        computation("a_0_begin", 1, "h0", 0, 1),
        computation("a_0_F", 1, "h0", 1, 3),
        computation("b_1_B", 1, "h1", 3, 7),  # the forward pass is a part of it
        computation("a_0_B", 1, "h0", 7, 11),
        computation("b_1_update", 1, "h1", 7, 9),
        computation("a_0_update", 1, "h0", 11, 12),
    ]
    found = measured(schedule, names, Timeline(computations=ones))
    assert (found.groups, found.bubble, found.step_s) == ((0.4, 0.6), 0.5, 10)
    assert found.times == {(0, "F"): 2, (0, "B"): 4, (1, "F"): 0, (1, "B"): 4}
    assert found.activations == (1, 1)
    assert str(found) == (
        "bubble 50.0% measured, 50.0% expected from the tasks' times; 1 step of 10.000 s, groups wait "
        "40.0%, 60.0%"
    )
    others = [computation("else", 2, "h1", 0, 2), computation("else", 3, "h1", 10, 20)]
    found = measured(schedule, names, Timeline(computations=ones + others))
    assert found.groups == pytest.approx((0.4, 0.4))


WRONG_TIMELINES = {
    "not begun": "^the timeline shows no whole step of the schedule '1f1b'; call a step",
    "not ended": "^the timeline shows no whole step of the schedule '1f1b'; call a step",
    "nothing": "^the timeline is empty: .*; call a step",
    "another": "^the timeline is not of this pipeline: it shows no task of .*, but 'other_.*, ...; call a step",
}


@pytest.mark.parametrize("how", WRONG_TIMELINES)
def test_a_bubble_needs_a_whole_step(how: str) -> None:
    schedule = named("1f1b", [0, 1], 2)
    names: Names = {f"stage_{t.stage}_{t.kind}": t[::2] for t in schedule if t.kind != "U"}
    timeline = timeline_of(schedule, 1, 0.0, 0.0)
    if how == "not ended":
        timeline.computations[-3] = replace(timeline.computations[-3], is_open=True)
        assert timeline.computations[-3].name in names
    elif how == "another":
        names = {f"my_{name}": task for name, task in names.items()}
        timeline.computations[:] = [
            replace(one, name=f"other_{one.name}") for one in timeline.computations
        ]
    else:
        timeline.computations[: 2 if how == "not begun" else None] = []
    with pytest.raises(pw.ArgumentError, match=WRONG_TIMELINES[how]):
        measured(schedule, names, timeline)


def test_a_users_own_table_gets_its_updates() -> None:
    schedule = pw.Schedule([[(0, 0, "F"), (0, 0, "B")], [(1, 0, "F"), (1, 0, "B")]], "mine")
    schedule.check()
    assert [str(task) for row in schedule.rows for task in row] == [
        "F0",
        "B0",
        "U",
        "F0",
        "B0",
        "U",
    ]
    early = pw.Schedule([[(0, 0, "F"), (0, 0, "B"), (0, -1, "U"), (1, 0, "F")]])
    with pytest.raises(pw.ArgumentError, match="lacks B of stage 1, microbatch 0"):
        early.check()


F, B, W = "FBW"
WRONG: list[tuple[str, list[list[Any]], str]] = [
    ("double", [[(0, 0, F), (0, 0, F), (0, 0, B)]], "has F of stage 0, microbatch 0 2 times"),
    ("missing", [[(0, 0, F), (0, 1, F), (0, 0, B)]], "lacks B of stage 0, microbatch 1"),
    (
        "no W",
        [[(0, 0, F), (0, 1, F), (0, 0, B), (0, 1, B), (0, 0, W)]],
        "lacks W of stage 0, microbatch 1",
    ),
    (
        "before",
        [[(0, 0, B), (0, 0, F)]],
        "B of stage 0, microbatch 0 waits for F of stage 0, microbatch 0",
    ),
    (
        "circle",
        [
            [(0, 0, F), (0, 0, B), (0, 1, F), (0, 1, B)],
            [(1, 1, F), (1, 1, B), (1, 0, F), (1, 0, B)],
        ],
        "cannot go on: B of stage 0, microbatch 0 waits for B of stage 1, microbatch 0; F of stage 1",
    ),
    ("two groups", [[(0, 0, F)], [(0, 0, B)]], "a stage belongs to one group"),
    ("early update", [[(0, 0, F), (0, 0, "U"), (0, 0, B)]], "U of stage 0 waits for B of stage 0"),
]


@pytest.mark.parametrize(("rows", "said"), [case[1:] for case in WRONG], ids=[c[0] for c in WRONG])
def test_a_wrong_table_is_refused_in_one_sentence(rows: Sequence[Any], said: str) -> None:
    with pytest.raises(pw.ArgumentError) as refused:
        pw.Schedule(rows, "mine").check()
    assert said in str(refused.value)
    assert "the schedule 'mine'" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("entry", [(0, 0, "X"), (0, 0), "F0", (-1, 0, "F"), (0, 0.5, "F"), None])
def test_what_is_no_task_is_refused(entry: Any) -> None:
    with pytest.raises(pw.ArgumentError, match="a task is"):
        pw.Schedule([[entry]])


def test_names_and_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        pw.ArgumentError, match="choose one of gpipe, 1f1b, interleaved, zero-bubble"
    ):
        named("pipedream", [0, 1], 2)
    with pytest.raises(
        pw.ArgumentError, match="multiple of 2 microbatches, not 3; give microbatches=4, or"
    ):
        named("interleaved", [0, 1, 0, 1], 3)
    with pytest.raises(
        pw.ArgumentError, match=r"stage s on group s % 2.* \[0, 0, 1, 1\]\. .* 4 or 6 stages; or"
    ):
        named("interleaved", [0, 0, 1, 1], 2)
    with pytest.raises(pw.ArgumentError, match="has no tasks"):
        pw.Schedule([[]])


def test_a_schedule_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = named("zero-bubble", [0, 1], 2).plot(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 1000
    assert len(figure.axes[0].patches) == 2 * (3 * 2 + 1)


def test_without_matplotlib_a_drawing_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install matplotlib, or print\(schedule\)"):
        named("1f1b", [0, 1], 2).plot()
