"""The threads of the JAX backend: what they say reaches the loop, in order, with few wakes."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pw.devices.jax.layouts import local_shards
from pw.devices.jax.threads import Completions, QueueThread, join_all

BOUND_S = 60.0


class Loop(asyncio.SelectorEventLoop):
    """Counts how often other threads have woken it; its clock stands still but for `pass_time`."""

    wakes = 0
    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def pass_time(self, seconds: float) -> None:
        """Let time pass, and what is due happen."""
        self.now_s += seconds
        for _ in range(3):
            self.run_until_complete(asyncio.sleep(0))

    def call_soon_threadsafe(self, *args: Any, **how: Any) -> asyncio.Handle:
        self.wakes += 1
        return super().call_soon_threadsafe(*args, **how)

    def until(self, reached: list[Any], count: int) -> None:
        async def wait() -> None:
            while len(reached) < count:
                await asyncio.sleep(0)

        self.run_until_complete(wait())


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def elsewhere(function: Callable[..., None], *args: Any) -> None:
    """Call it on another thread than the loop's."""
    thread = threading.Thread(target=function, args=args)
    thread.start()
    thread.join(BOUND_S)


def test_what_is_not_urgent_wakes_a_loop_that_dozes_no_more(loop: Loop) -> None:
    completions, seen = Completions(loop, 0.05), list[int]()
    elsewhere(completions.post_unhurried, seen.append, 0)
    loop.until(seen, 1)
    assert loop.wakes == 1
    for number in range(1, 10):
        elsewhere(completions.post_unhurried, seen.append, number)
    loop.pass_time(0.04)
    assert seen == [0]
    loop.pass_time(0.01)
    assert seen == list(range(10))
    assert loop.wakes == 1


def test_what_is_urgent_takes_what_is_not_along(loop: Loop) -> None:
    completions, seen = Completions(loop, 1000.0), list[int]()
    elsewhere(completions.post_unhurried, seen.append, 0)
    loop.until(seen, 1)
    elsewhere(completions.post_unhurried, seen.append, 1)
    elsewhere(completions.post_unhurried, seen.append, 2)
    elsewhere(completions.post, seen.append, 3)
    loop.until(seen, 4)
    assert seen == [0, 1, 2, 3]
    assert loop.wakes == 2


def test_a_loop_that_has_dozed_for_nothing_is_woken_again(loop: Loop) -> None:
    completions, seen = Completions(loop, 0.05), list[int]()
    for number in range(3):
        elsewhere(completions.post_unhurried, seen.append, number)
        loop.until(seen, number + 1)
        loop.pass_time(0.05)
    assert loop.wakes == 3
    elsewhere(completions.post_unhurried, seen.append, 3)
    completions.close()
    loop.pass_time(0.05)
    assert seen == [0, 1, 2]


def test_the_loop_does_not_wake_itself(loop: Loop) -> None:
    completions, seen = Completions(loop), list[int]()
    elsewhere(completions.post, seen.append, 0)
    loop.until(seen, 1)
    for number in range(1, 4):
        completions.post(seen.append, number)
        completions.post_unhurried(seen.append, number)
        loop.until(seen, 1 + 2 * number)
    assert seen == [0, 1, 1, 2, 2, 3, 3]
    assert loop.wakes == 1


@pytest.mark.parametrize("nap_s", [0.0, 0.01])
def test_a_thread_handles_all_in_order_and_goes_on_after_an_error(nap_s: float) -> None:
    seen, errors = list[int](), list[BaseException]()

    def handle(number: int) -> None:
        if number == 3:
            raise ValueError(number)
        seen.append(number)

    thread = QueueThread("test", handle, errors.append, nap_s)
    for number in range(5):
        thread.put(number)
    assert join_all([thread], BOUND_S)
    assert seen == [0, 1, 2, 4]
    assert [str(error) for error in errors] == ["3"]


def test_threads_that_take_an_array_apart_at_once_get_all_its_shards() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    ones = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("x")))
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            array, ready, counts = ones + 1, threading.Barrier(3), list[int]()

            def count(array: Any = array, ready: Any = ready, counts: Any = counts) -> None:
                ready.wait(BOUND_S)
                counts.append(len(local_shards(array)))

            together = [threading.Thread(target=count) for _ in range(3)]
            for thread in together:
                thread.start()
            for thread in together:
                thread.join(BOUND_S)
            assert counts == [8, 8, 8]
    finally:
        sys.setswitchinterval(before)
