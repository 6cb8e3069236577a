"""Each decoder takes changed inputs of `tests.fuzz`: it raises the errors that it promises."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fuzz import mutation
from tests.fuzz.running import INPUT_S, fuzz
from tests.fuzz.table import TARGETS, share_of
from tests.fuzz.target import Target


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("target", TARGETS.values(), ids=list(TARGETS))
def test_inputs_are_taken_or_refused(target: Target) -> None:
    report = fuzz(target, share_of(target))
    assert not report.failures, [(one.why, one.data[:200]) for one in report.failures]
    assert report.accepted, "no changed input is valid: the mutator does not reach far"


def _takes(data: bytes) -> None:
    if data[:2] == b"ab" and len(data) > 10 and data[3] > 0x7F:
        raise KeyError("found")
    if data[:1] != b"a":
        raise ValueError


def test_a_decoder_that_fails_is_found() -> None:
    target = Target("a test", lambda: [b"abcdef"], _takes, allowed=(ValueError,))
    report = fuzz(target, 20_000)
    (failure,) = {one.place: one for one in report.failures}.values()
    assert failure.why.startswith("KeyError")
    with pytest.raises(KeyError):
        _takes(failure.data)


def test_a_decoder_that_takes_too_much_memory_is_found() -> None:
    def takes(data: bytes) -> None:
        bytes(100 << 20)

    report = fuzz(Target("a test", lambda: [b"abc"], takes), 10, measure=True)
    assert "MiB" in report.failures[0].why


def test_a_decoder_that_takes_too_long_is_found() -> None:
    def takes(data: bytes) -> None:
        until_s = time.thread_time() + 2 * INPUT_S
        while time.thread_time() < until_s:
            pass

    report = fuzz(Target("a test", lambda: [b"abc"], takes), 10)
    assert "takes more than" in report.failures[0].why


@pytest.mark.parametrize("make", [mutation.of_bytes, mutation.of_trees])
def test_a_seed_decides_all_inputs(
    make: Callable[[random.Random, list[bytes]], Callable[[], bytes]],
) -> None:
    seeds = [b"\x93\x01\xa2xy\x92\xc4\x02ab\xc0", b"\x92\x00\x91\x05"]
    first, second = (make(random.Random(7), seeds) for _ in range(2))
    found = [first() for _ in range(500)]
    assert found == [second() for _ in range(500)]
    assert len(set(found)) > 100
