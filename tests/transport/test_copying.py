"""Copies that several threads make: all pieces arrive, and nothing ends while a thread reads it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pw.core.landing import Landing
from pw.transport.bulk import copying
from pw.transport.bulk.blocks import Array, Block, Bytes
from pw.transport.bulk.copying import PIECE_BYTES, PIECES_AT_ONCE, Copy, Copying, Target
from pw.transport.bulk.pieces import checked, place

WAIT_S = 60.0
LONG = 4 * PIECES_AT_ONCE * PIECE_BYTES


class Stage:
    """Copies of one bulk thread, which is the caller."""

    def __init__(self) -> None:
        self._woken = threading.Semaphore(0)
        self.copies = Copying(self._woken.release)

    def begin(self, source: Array, receiver: str = "receiver") -> Target:
        """Begin a copy into new pages."""
        block = Block(1, 1 << max(16, (source.nbytes - 1).bit_length()))
        os.close(block.descriptor)
        block.word[0] = 1
        landing = Landing(1, block.capacity_bytes, 1, "machine", receiver, "")
        target = Target(block.mapping, block.bytes, block.word)
        self.copies.begin(checked(landing, [(0, source)], lambda error: None), target)
        return target

    def ended(self, count: int) -> list[Copy]:
        """Copy until so many copies are over."""
        over: list[Copy] = []
        while len(over) < count:
            worked, before = self.copies.work(), len(over)
            over += self.copies.settled()
            if not worked and len(over) == before:
                assert self._woken.acquire(timeout=WAIT_S)
        return over


@contextmanager
def stage(threads: int, patch: pytest.MonkeyPatch) -> Iterator[Stage]:
    """A stage on a machine of so many processors."""
    patch.setattr(copying, "processors", lambda: threads)
    made = Stage()
    try:
        yield made
    finally:
        made.copies.close()


class Held:
    """Stands before `place`: helpers wait in their first piece until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch, work: Callable[..., None] = place) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self._main, self._work = threading.current_thread(), work
        patch.setattr(copying, "place", self._place)

    def _place(self, target: Bytes, offset: int, piece: Array) -> None:
        if threading.current_thread() is self._main:
            place(target, offset, piece)
        else:
            self.entered.set()
            assert self.go_on.wait(WAIT_S)
            self._work(target, offset, piece)


def noise(size_bytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)


@pytest.mark.parametrize("threads", [1, 2, 4, 8])
def test_all_pieces_arrive(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [noise(LONG), noise(LONG + 12345), noise(100), noise(0), noise(LONG)[::2]]
    with stage(threads, monkeypatch) as made:
        targets = [made.begin(source) for source in sources]
        assert [copy.error for copy in made.ended(len(sources))] == [""] * len(sources)
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(target.bytes[: source.nbytes], source)


def test_a_short_copy_ends_before_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with stage(1, monkeypatch) as made:
        made.begin(noise(LONG))
        made.begin(noise(PIECE_BYTES))
        assert [copy.push.size_bytes for copy in made.ended(2)] == [PIECE_BYTES, LONG]


def test_a_copy_is_not_over_while_a_helper_is_at_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with stage(2, monkeypatch) as made:
        source = noise(LONG)
        target = made.begin(source)
        assert held.entered.wait(WAIT_S)
        while made.copies.work():
            """The bulk thread copies all other pieces."""
        assert not list(made.copies.settled())
        held.go_on.set()
        assert [copy.error for copy in made.ended(1)] == [""]
        assert np.array_equal(target.bytes[:LONG], source)


def test_a_lost_receiver_fails_a_copy_when_no_thread_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Held(monkeypatch)
    with stage(2, monkeypatch) as made:
        made.begin(noise(LONG), "lost")
        assert held.entered.wait(WAIT_S)
        made.begin(noise(PIECE_BYTES), "lost")
        made.begin(noise(PIECE_BYTES), "there")
        made.copies.give_up("lost", "it is gone")
        (idle,) = made.copies.settled()
        assert (idle.push.size_bytes, idle.error) == (PIECE_BYTES, "it is gone")
        assert [copy.error for copy in made.ended(1)] == [""]
        assert not made.copies.work()
        assert not list(made.copies.settled())
        held.go_on.set()
        assert [copy.error for copy in made.ended(1)] == ["it is gone"]


def test_a_receiver_lost_after_the_last_piece_fails_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stage(1, monkeypatch) as made:
        made.begin(noise(100), "lost")
        assert made.copies.work()
        made.copies.give_up("lost", "it is gone")
        assert [copy.error for copy in made.copies.settled()] == ["it is gone"]


def test_an_error_of_a_helper_fails_its_copy_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*piece: object) -> None:
        raise ValueError("no such pages")

    held = Held(monkeypatch, fail)
    with stage(2, monkeypatch) as made:
        made.begin(noise(LONG))
        assert held.entered.wait(WAIT_S)
        made.begin(noise(100))
        assert made.copies.work()  # before the helper can take a piece of it
        held.go_on.set()
        errors = {copy.push.size_bytes: copy.error for copy in made.ended(2)}
        assert errors[100] == ""
        assert "no such pages" in errors[LONG]


def test_a_landing_that_is_not_wanted_any_more_is_not_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with stage(2, monkeypatch) as made:
        held = Held(monkeypatch)
        target = made.begin(noise(LONG))
        assert held.entered.wait(WAIT_S)
        target.word[0] = 2
        held.go_on.set()
        (copy,) = made.ended(1)
        assert "does not want" in copy.error
        assert np.count_nonzero(target.bytes) <= PIECE_BYTES


def test_closing_waits_for_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    with stage(2, monkeypatch) as made:
        made.begin(noise(LONG))
        assert held.entered.wait(WAIT_S)
        made.copies.give_up("receiver", "this process ends")
        threading.Timer(0.05, held.go_on.set).start()
        made.copies.close()
        assert not [one for one in threading.enumerate() if one.name.startswith("pw-bulk-")]
        assert [copy.error for copy in made.copies.settled()] == ["this process ends"]
