"""Readings, results and contenders of the benchmarks, and a quick run of one benchmark."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import bars, many, measure, paper, pictures, report
from bench.__main__ import duration, main
from bench.baselines import line
from bench.baselines.peer import Peer
from bench.clients import sizes_to
from bench.many_clients import ClientProcess
from bench.measure import GaveUp, Sample
from bench.processor import resident_bytes
from pw.operating.timeline.timeline import Computation, Process, Timeline, Transfer

ROOT = Path(__file__).resolve().parents[2]


@given(st.lists(st.integers(0, 600), max_size=8), st.integers(1, 50))
def test_frames_of_the_model_come_whole_however_they_are_cut(sizes: list[int], cut: int) -> None:
    bodies = [bytes([size % 251]) * size for size in sizes]
    data = b"".join(map(line.framed, bodies))
    frames = line.Frames()
    parts = [data[at : at + cut] for at in range(0, len(data), cut)]
    assert [body for part in parts for body in frames.of(part)] == bodies


def test_a_sample_has_a_median_and_quartiles() -> None:
    sample = Sample((4.0, 1.0, 3.0, 2.0, 5.0))
    assert (sample.low, sample.median, sample.high) == (2.0, 3.0, 4.0)
    assert Sample((7.0,)).low == Sample((7.0,)).high == 7.0


@pytest.mark.parametrize("values", [(), (1.0, float("nan")), (float("inf"),)])
def test_a_sample_refuses_readings_that_are_not_finite(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError):
        Sample(values)


def test_ratios_and_differences_are_taken_round_by_round() -> None:
    assert Sample((2.0, 30.0)).over(Sample((1.0, 10.0))).values == (2.0, 3.0)
    assert Sample((2.0, 30.0)).minus(Sample((1.0, 10.0))).values == (1.0, 20.0)
    with pytest.raises(ValueError, match="same rounds"):
        Sample((1.0,)).over(Sample((1.0, 2.0)))
    with pytest.raises(ValueError, match="zero"):
        Sample((1.0,)).over(Sample((0.0,)))


def test_cases_take_turns_in_an_order_that_rotates() -> None:
    calls: list[str] = []

    def case(name: str) -> Callable[[], float]:
        def reading() -> float:
            calls.append(name)
            return float(len(calls))

        return reading

    samples = measure.alternate({name: case(name) for name in "abc"}, rounds=2, warm_up=1)
    assert calls == [*"abc", *"bca", *"cab"]
    assert samples["a"].values == (6.0, 8.0)


def test_a_case_that_gives_up_is_left_out_with_a_note() -> None:
    def crashed() -> float:
        raise GaveUp("it crashed")

    notes: list[str] = []
    samples = measure.alternate({"a": lambda: 1.0, "b": crashed}, rounds=3, notes=notes)
    assert samples == {"a": Sample((1.0, 1.0, 1.0))}
    assert notes == ["b was left out: it crashed"]
    with pytest.raises(GaveUp):
        measure.alternate({"b": crashed}, rounds=1)


@pytest.mark.parametrize(("multiple_of", "count"), [(1, 1000), (128, 1024)])
def test_a_count_is_found_for_readings_of_the_wanted_length(multiple_of: int, count: int) -> None:
    asked: list[int] = []

    def timed(number: int) -> float:
        asked.append(number)
        return number / 2000

    case = measure.sized(timed, reading_s=0.5, multiple_of=multiple_of)
    assert case() == 2000
    assert asked[-1] == count


def test_a_result_is_printed_and_written(tmp_path: Path) -> None:
    samples = {"pw": Sample((3.0, 6.0)), "JAX": Sample((1.0, 3.0))}
    result = report.Result("fake", "nothing (paper: nowhere)", notes=["[this] is no markup"])
    result.compare(samples, unit="1/s", params={"hosts": 2}, baseline="JAX")
    result.at_least(3.0, 2.5, "a high one")
    result.at_most(3.0, 2.5, "a low one")
    result.figures.append(report.Figure("t", "x", "y", {"pw": [(1, 2.0)]}))
    console = Console(width=120, record=True, file=io.StringIO())
    report.show(result, console)
    printed = console.export_text()
    assert "2.25 – 2.75" in printed
    assert "does not hold  2.5 ≥ 3: a high one" in printed
    assert "holds          2.5 ≤ 3: a low one" in printed
    assert "[this] is no markup" in printed

    written = json.loads(report.write(result, {"cores": 2}, tmp_path).read_text())
    assert written["machine"] == {"cores": 2}
    assert written["rows"][0]["values"] == [3.0, 6.0]
    assert written["rows"][0]["ratio"]["median"] == 2.5
    assert [bar["holds"] for bar in written["bars"]] == [False, True]


def made_timeline() -> Timeline:
    """Two hosts, and a transfer of 2 s; for one of them its receiver computes."""
    ones = [("h0", "f", 0.0, 4.0), ("h1", "g", 1.0, 3.0), ("h1", "f", 4.0, 6.0)]
    return Timeline(
        length_s=6.0,
        computations=[Computation(h, "0", name, 1, 0, a, a, b) for h, name, a, b in ones],
        transfers=[
            Transfer("h1", True, "edge", 2.0, 4.0, 8, 0, 1, 0, "h0"),
            Transfer("h0", False, "edge", 2.0, 4.0, 8, 0, 1, 0, "h1"),
            Transfer("h1", True, "upload", 0.0, 1.0, 8, 0),
        ],
        processes=[Process(host, 0.0, 1, 0, "") for host in ("h0", "h1")],
    )


def test_each_row_is_printed_as_it_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = report.Result("echo", "echoes a second")
    fast, slow = Sample((4.0, 4.0)), Sample((2.0, 2.0))
    result.compare({"pw": fast, "ray": slow}, unit="1/s", baseline="ray", params={"hosts": 2})
    assert capsys.readouterr().err.splitlines() == [
        "  echo: pw, hosts 2: 4 1/s, 2 of ray",
        "  echo: ray, hosts 2: 2 1/s",
    ]
    assert duration("latency", tmp_path).startswith("latency takes up to 5 minutes")
    report.write(report.Result("latency", ""), {"took_s": 90.0}, tmp_path)
    assert duration("latency", tmp_path) == "latency took 1.5 minutes the last time"


def test_a_timeline_becomes_rows_of_computations_and_transfers() -> None:
    spans = pictures.of_hosts(made_timeline(), lambda one: one.name)
    assert [(s.row, s.kind, s.start_s, s.end_s) for s in pictures.window(spans, 1.0, 5.0)] == [
        ("h0", "f", 0.0, 3.0),
        ("h1", "g", 0.0, 2.0),
        ("h1", "f", 3.0, 4.0),
        ("to h1", "transfer", 1.0, 3.0),
    ]
    assert pictures.hidden(spans) == 0.5
    assert [span.start_s for span in pictures.middle(spans, 1.0)] == [0.0, 0.0, 0.0]
    with pytest.raises(GaveUp, match="no computations"):
        pictures.window(spans, 7.0, 8.0)


def test_charts_of_a_figure_are_drawn_and_their_timelines_are_written(tmp_path: Path) -> None:
    timeline = made_timeline()
    spans = pictures.of_hosts(timeline, lambda one: one.name)
    result = report.Result("fake", "nothing")
    for name in ("one", "two"):
        result.charts.append(report.Chart("figure-0", name, spans, {name: timeline}))
    written = json.loads(report.write(result, {}, tmp_path).read_text())
    assert [chart["title"] for chart in written["charts"]] == ["one", "two"]
    traced = json.loads((tmp_path / "figure-0-two.trace.json").read_text())
    assert any(event["name"] == "g [A]" for event in traced["traceEvents"])
    pytest.importorskip("matplotlib")
    from bench import plots

    plots.draw_charts(result.charts, tmp_path)
    assert (tmp_path / "figure-0.png").read_bytes()[:4] == b"\x89PNG"
    drawn = (tmp_path / "figure-0.svg").read_text()
    assert drawn.count("<!-- to h1 -->") == 2


@pytest.mark.parametrize(
    ("value", "printed"),
    [(0.0, "0"), (0.1234, "0.123"), (12.34, "12.3"), (12345.6, "12,346"), (2e7, "2e+07")],
)
def test_numbers_are_printed_with_three_digits(value: float, printed: str) -> None:
    assert report.number(value) == printed


PEER = """
    import os
    from bench.baselines.peer import serve

    def fails(count):
        if count > 4:
            raise ValueError("too many")

    def ends(count):
        if count > 4:
            os._exit(3)

    def prepare():
        print("this is not an answer")
        return {"works": lambda count: None, "own": lambda _: 42.0, "fails": fails, "ends": ends}

    serve(prepare)
"""


def test_calls_in_flight_are_bounded_and_end_in_order() -> None:
    begun: list[int] = []
    ended: list[int] = []

    def begin() -> int:
        begun.append(len(begun))
        assert len(begun) - len(ended) <= 3
        return begun[-1]

    measure.in_flight(10, 3, begin, ended.append)
    assert ended == begun == list(range(10))


@pytest.mark.processes
@pytest.mark.parametrize("freeze", [False, True])
def test_a_contender_answers_from_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, freeze: bool
) -> None:
    (tmp_path / "contender.py").write_text(textwrap.dedent(PEER))
    monkeypatch.setattr("bench.baselines.peer.SEARCHED", f"{ROOT}{os.pathsep}{tmp_path}")
    with Peer("it", "contender", [(), ()], freeze=freeze) as peer:
        assert peer.cases == ("works", "own", "fails", "ends")
        assert 0 <= peer.seconds("works", 3) < 42
        assert peer.seconds("own", 3) == 42
        with pytest.raises(GaveUp, match="it: ValueError: too many"):
            peer.seconds("fails", 5)
        assert peer.seconds("works", 3) >= 0
        with pytest.raises(GaveUp, match="it ended with 3"):
            peer.seconds("ends", 5)
        with pytest.raises(GaveUp, match="it is gone"):
            peer.seconds("works", 3)
    with pytest.raises(GaveUp, match="it ended with 1"):
        Peer("it", "no_such_contender")


def test_memory_is_that_of_all_descendants() -> None:
    alone = resident_bytes([os.getpid()])
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert resident_bytes([child.pid]) > 1 << 20
        assert resident_bytes([os.getpid()]) > alone
        child.kill()


@pytest.mark.processes
def test_a_benchmark_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench", "latency", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "pw, embedded" in done.stdout
    written = json.loads((tmp_path / "latency.json").read_text())
    assert written["rows"]
    assert not written["bars"]  # a quick run has no bars


@pytest.mark.long
@pytest.mark.processes
def test_the_gpu_benchmark_runs_as_a_script_and_reports_a_missing_gpu(tmp_path: Path) -> None:
    """The folder of the script has a module `concurrent`, which must not hide Python's own."""
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--out", str(tmp_path)]
    cpu_only = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=cpu_only)
    assert done.returncode == 0, done.stderr
    assert "skipped: JAX finds no GPU here" in done.stdout


def test_figures_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    figure = report.Figure(
        "t", "hosts", "y", {"pw": [(1, 2.0), (4, 8.0)]}, modelled={"pw": [(16, 8.0)]}
    )
    result = report.Result("fake", "nothing", figures=[figure])
    written = json.loads(report.write(result, {}, tmp_path).read_text())
    assert paper.figures_of(written) == [figure]


def test_figure_6_has_measured_and_modelled_hosts_in_one_curve() -> None:
    curves = {"4 real": [[1000.0, 0.5]], "512 modelled": [[2000.0, 1.0]]}
    smallest = {"real": [[4, 0.5]], "modelled": [[512, 2.0]]}
    labels = {"title": "", "x_label": "", "y_label": ""}
    written = {"figures": [labels | {"series": curves}, labels | {"series": smallest}]}
    of_size, of_hosts = paper.throughput(written)
    assert of_size.series["pw, 4 hosts"] == [(1.0, 500.0)]
    assert of_size.modelled == {"pw, 512 hosts": [(2.0, 500.0)]}
    assert (of_hosts.series, of_hosts.modelled) == ({"pw": [(4, 0.5)]}, {"pw": [(512, 2.0)]})


def test_pictures_are_drawn_from_results_and_missing_ones_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    figure = report.Figure("t", "hosts", "y", {"a": [(1, 2.0)]}, modelled={"b": [(16, 8.0)]})
    report.write(report.Result("dispatch", "nothing", figures=[figure]), {}, tmp_path)
    assert paper.main(["--out", str(tmp_path), "--to", str(tmp_path / "pictures")]) == 1
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["figure-5.png"]
    assert "figure-8: run python -m bench concurrent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (64, [1, 4, 16, 64]), (100, [1, 4, 16, 64, 100])]
)
def test_numbers_of_clients_grow_to_the_most(most: int, sizes: list[int]) -> None:
    assert sizes_to(most) == sizes


def test_an_option_of_one_benchmark_is_refused_with_others() -> None:
    for names in ([], ["latency"], ["concurrent", "latency"]):
        with pytest.raises(SystemExit):
            main([*names, "--clients", "2"])


def test_a_table_has_the_median_of_each_bar_over_several_runs(tmp_path: Path) -> None:
    for run, rate in (("first", 0.5), ("second", 2.0), ("third", 4.0)):
        result = report.Result("latency", "what it measures")
        result.at_least(1.3, rate, "calls, to those of xoscar")
        result.at_most(1.5, rate, "hops")
        report.write(result, {"cores": 2, "zmq_round_trip_us": 120.0}, tmp_path / run)
    runs = [tmp_path / run for run in ("first", "second", "third")]
    assert bars.table(bars.read(runs)).splitlines() == [
        "1 of 2 bars hold.",
        "",
        "| benchmark | figure | bar | newest median | holds | machine |",
        "|---|---|---|---|---|---|",
        "| latency | calls, to those of xoscar | ≥ 1.3 | 2 | yes | 2 cores, slow wakes |",
        "| latency | hops | ≤ 1.5 | 2 | no | 2 cores, slow wakes |",
    ]
    with pytest.raises(FileNotFoundError, match="--out"):
        bars.read([tmp_path / "fourth"])


def test_runs_are_stored_in_the_place_of_older_ones_and_written_into_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, readings = tmp_path / "page.md", tmp_path / "readings.json"
    page.write_text("before\n<!-- made: bars -->\n<!-- end -->\nbehind\n")
    readings.write_text("[]")
    monkeypatch.setattr(bars, "PAGE", page)
    monkeypatch.setattr(bars, "STORED", readings)
    for rate in (0.5, 2.0):
        result = report.Result("latency", "what it measures")
        result.at_least(1.3, rate, "calls")
        report.write(result, {"cores": 4, "zmq_round_trip_us": 60.0}, tmp_path / "run")
        assert main(["table", str(tmp_path / "run")]) == 0
    assert len(json.loads(readings.read_text())) == 1
    before, *_, row, end, behind = page.read_text().splitlines()
    assert row == "| latency | calls | ≥ 1.3 | 2 | yes | 4 cores |"
    assert (before, end, behind) == ("before", "<!-- end -->", "behind")


def test_parts_of_clients_that_train_are_compared_with_their_shares() -> None:
    clients: dict[ClientProcess, list[many.Call]] = {}
    charged: list[many.Charges] = []
    for pid, share in ((11, 1.0), (22, 3.0)):
        one = Mock(**{"process.pid": pid, "client.share": share})
        clients[one] = [
            many.Call(0.0, 0.2 * step / share, 0.1) for step in range(1, int(25 * share))
        ]
    for tenth in range(51):
        times = {"script, pid 11": 0.025 * tenth, "script, pid 22": 0.065 * tenth}
        charged.append((0.1 * tenth, times))
    result = report.Result("many", "parts")
    many.add_shares(result, charged, clients, 2.0)
    time, calls = result.bars
    assert time.value == pytest.approx(0.0278, abs=1e-3)
    assert time.holds
    assert calls.value < 0.03
    assert [figure.y_label for figure in result.figures] == ["part", "part"]
