"""The runner of JAX's suite, on a test file of its own: what it counts, and as what."""

from __future__ import annotations

import importlib.metadata
import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.jax_suite import processes
from tests.jax_suite.__main__ import main
from tests.jax_suite.child import chosen, first_words
from tests.jax_suite.compare import compare, kind_of
from tests.jax_suite.processes import FileRun, Outcome
from tests.jax_suite.report import BEGIN, END

LIMIT_S = 600
TINY = """
import os, signal, unittest

PLAIN = os.environ["JAX_PLATFORMS"] == "cpu"
assert os.environ["JAX_NUM_CPU_DEVICES" if PLAIN else "PW_DEVICES"] == "2"


class TinyTest(unittest.TestCase):
    def test_crashes(self):
        if not PLAIN:
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_fails_one(self):
        self.assertTrue(PLAIN, "shapes (1, 2) and (3,) differ at 0x7f01")

    def test_fails_two(self):
        self.assertTrue(PLAIN, "shapes (4, 2) and (5,) differ at 0x7f02")

    def test_fails_in_both(self):
        self.fail("not the gateway's fault")

    def test_hangs(self):
        if not PLAIN:
            open("HANGS", "w").write(str(os.getpid()))
            signal.pause()

    def test_is_skipped(self):
        if not PLAIN:
            self.skipTest("needs a feature")

    def test_passes(self):
        pass

    def test_subtests(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertTrue(PLAIN or number != 1, "the second subtest")
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a checkout of JAX and has one small test file.

    The runner's clock is fast while a test of the file hangs.
    """
    folder = tmp_path / "source"
    (folder / "jax").mkdir(parents=True)
    (folder / "tests").mkdir()
    version = importlib.metadata.version("jax")
    (folder / "jax" / "version.py").write_text(f'_version = "{version}"\n')
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    hangs = tmp_path / "hangs"
    (folder / "tests" / "tiny_test.py").write_text(TINY.replace("HANGS", str(hangs)))
    ahead_s = 0.0

    def monotonic() -> float:
        nonlocal ahead_s
        if hangs.exists() and Path("/proc", hangs.read_text()).exists():
            ahead_s += LIMIT_S / 2
        return time.monotonic() + ahead_s

    clock = SimpleNamespace(monotonic=monotonic, sleep=time.sleep)
    monkeypatch.setattr(processes, "time", clock)
    return folder


def run(source: Path, *arguments: str) -> dict:
    """Run the tiny file with two "platforms", and return its results."""
    out = source.parent / "out.json"
    limits = ["--seconds", str(LIMIT_S), "--devices", "2"]
    main(
        [
            "tiny",
            "--jax",
            str(source),
            "--out",
            str(out),
            "--platform",
            "other",
            *limits,
            *arguments,
        ]
    )
    return json.loads(out.read_text())["files"]["tiny_test.py"]


def test_each_ending_of_a_test_is_counted(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = source.parent / "jax.md"
    document.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    kept = source.parent / "baseline.json"
    result = run(source, "--markdown", str(document), "--baseline", str(kept))

    assert (result["base"], result["passed"], result["failed"], result["skipped"]) == (7, 1, 5, 1)
    reasons = {test: group["reason"] for group in result["failures"] for test in group["tests"]}
    assert "crash: SIGSEGV" in reasons["TinyTest.test_crashes"]
    assert f"hang: no end after {LIMIT_S} s in tiny_test.py" in reasons["TinyTest.test_hangs"]
    assert "the second subtest" in reasons["TinyTest.test_subtests"]
    assert "TinyTest.test_fails_in_both" not in reasons
    assert result["failures"][0]["tests"] == ["TinyTest.test_fails_one", "TinyTest.test_fails_two"]
    assert result["skips"] == [{"reason": "needs a feature", "tests": ["TinyTest.test_is_skipped"]}]
    assert result["run"]["processes"] == 3  # one more after the crash, and one after the hang
    assert "2  AssertionError: False is not true : shapes" in capsys.readouterr().out
    words = document.read_text()
    assert words.startswith(f"before\n{BEGIN}\n| file |")
    assert words.endswith(f"|\n{END}\nafter\n")
    assert "| tiny_test.py | 7 | 1 | 5 | 1 | 14.3 |" in words

    first = (source.parent / "out.json").rename(source.parent / "first.json")

    # The kept outcomes of plain JAX serve a run of some of the tests.
    (source / "tests" / "tiny_test.py").write_text(TINY.replace("not PLAIN", "False"))
    assert run(source, "-k", "crashes|passes", "--baseline", str(kept))["passed"] == 2
    again = run(source, "--again", str(first), "--baseline", str(kept))
    assert (again["base"], again["passed"]) == (6, 3)  # the crash, the hang and the skip are mended
    assert "plain JAX\n" not in capsys.readouterr().out
    with pytest.raises(SystemExit, match="name another file with --baseline"):
        run(source, "--cases", "7", "--baseline", str(kept))


def test_a_file_that_does_not_import_fails_all_its_tests(source: Path) -> None:
    tiny = source / "tests" / "tiny_test.py"
    tiny.write_text(TINY + "\nassert PLAIN, 'no such backend'\n")
    result = run(source)
    assert (result["base"], result["failed"]) == (7, 7)
    assert "no such backend" in result["failures"][0]["reason"]


def test_the_runner_gives_up_after_many_crashes(source: Path) -> None:
    result = run(source, "--processes", "1")
    assert result["failed"] == 7
    assert "gave up after 1 process" in result["note"]


def test_a_sample_is_a_part_and_always_the_same(source: Path) -> None:
    tests = {f"TinyTest.{name}" for name in re.findall(r"def (test_\w+)", TINY)}
    sample = {test for test in tests if chosen(test, "", 2)}
    assert 0 < len(sample) < len(tests)
    assert set(run(source, "--sample", "2")["run"]["outcomes"]) == sample - {
        "TinyTest.test_fails_in_both"
    }


def test_a_test_without_an_outcome_has_failed() -> None:
    gateway = FileRun({"a": Outcome("passed"), "b": Outcome("failed", "E: 1 of 2")})
    comparison = compare("x_test.py", ["a", "b", "c"], gateway)
    assert (comparison.base, comparison.passed, comparison.failed) == (3, 1, 2)
    assert "did not collect" in comparison.failures[1].reason


def test_of_a_traceback_the_last_line_counts() -> None:
    text = "INTERNAL: Traceback (most recent call last):\n  File x\nTypeError: no 'dtype'\n"
    assert first_words(text) == "INTERNAL: TypeError: no 'dtype'"
    assert first_words("E:\n\n  one\n  two") == "E: one two"


def test_known_causes_are_said_in_words() -> None:
    words = (
        "jaxlib.JaxRuntimeError: This operation is implemented for a PjRt-compatible backend only."
    )
    outcomes = {"a": Outcome("failed", f"{words} [pxla.py:1254]"), "b": Outcome("failed", words)}
    comparison = compare("x_test.py", ["a", "b"], FileRun(outcomes))
    assert sorted(group.reason for group in comparison.failures) == [
        "jaxlib's client of the remote protocol cannot analyse costs before compiling",
        "the array's memory is in another process: it has no address here",
    ]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("shape (2, 3) at 0x7f", "shape (4,) at 0x80", True),
        ("tolerance 1e-05, 3 of 8", "tolerance 0.1, 7 of 9", True),
        ("a tracer leaked", "an array was deleted", False),
        ("E: not implemented [pxla.py:1254]", "E: not implemented [prng.py:250]", False),
    ],
)
def test_reasons_that_differ_in_numbers_are_one(one: str, other: str, same: bool) -> None:
    assert (kind_of(one) == kind_of(other)) is same


@pytest.mark.parametrize(
    ("version", "words"), [("0.0.1", "has JAX 0.0.1"), (None, "is no checkout of JAX")]
)
def test_another_checkout_is_refused_with_the_way_to_get_one(
    source: Path, version: str | None, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = source / "jax" / "version.py"
    path.unlink() if version is None else path.write_text(f'_version = "{version}"\n')
    with pytest.raises(SystemExit):
        main(["tiny", "--jax", str(source)])
    said = capsys.readouterr().err
    assert words in said
    assert "git clone --depth 1 --branch jax-v" in said
