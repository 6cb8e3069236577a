"""The processes that compile for a simulated host, as `pw.devices.jax.compile_processes` does.

Each client has one task at a time, and clients do not wait for one another. Of the artifacts that do
not compile, half end their process: the task fails, the client's next one waits for another process,
and neither the host nor any other client notices.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from pw.core.errors import CompileError, ErrorReport
from pw.devices.host.program import owner_of
from pw.testing.sim.digests import crashes_compiler
from pw.testing.sim.node import SimNode

COMPILE_S = 2e-3
RESTART_S = 0.1

T = TypeVar("T")


class Compilers:
    """The tasks of one incarnation of a host.

    Args:
        node: the host.
        random: the source of chance.
        awake: calls a function, unless the incarnation has ended.
        answer: calls a function on the node's loop.
    """

    def __init__(
        self,
        node: SimNode,
        random: Random,
        awake: Callable[[Callable[[], None]], None],
        answer: Callable[[Callable[[], None]], None],
    ) -> None:
        self._node = node
        self._random = random
        self._awake = awake
        self._answer = answer
        self._busy_until_s: dict[int, float] = {}
        """Time until which the compiler of each client is busy, in seconds."""
        self._tasks: dict[bytes, Callable[[ErrorReport], None]] = {}
        """Function that fails each task that has not ended."""
        self.crashed: Callable[[bytes], None] = lambda key: None
        """Function that is called when a task has ended its process."""

    def put(
        self,
        key: bytes,
        artifact: bytes,
        make: Callable[[], T],
        done: Callable[[T | ErrorReport], None],
        *,
        is_there: bool = False,
    ) -> None:
        """Call `done` with what `make` returns or raises, when the client's earlier tasks have ended.

        What `is_there` already takes no time.
        """
        client, world = owner_of(key), self._node.world
        start_s = max(world.now_s, self._busy_until_s.get(client, 0.0))
        delay_s = COMPILE_S * self._node.slowness * self._random.uniform(0.5, 2.0)
        delay_s = 0.0 if is_there else delay_s
        ends_s = start_s + delay_s
        crashes = crashes_compiler(artifact)
        self._busy_until_s[client] = ends_s + (RESTART_S if crashes else 0.0)
        self._tasks[key] = fail = lambda report: self._answer(lambda: done(report))

        def ended() -> None:
            if self._tasks.get(key) is not fail:
                return  # it was not wanted any more, or has failed
            result: T | ErrorReport
            if crashes:
                result = ErrorReport.of(CompileError("the compiler crashed on it"), self._node.name)
                self.crashed(key)
            else:
                try:
                    result = make()
                except CompileError as error:
                    result = ErrorReport.of(error, self._node.name)

            def answer() -> None:
                if self._tasks.get(key) is fail:
                    # Else it was released while the answer was on its way.
                    del self._tasks[key]
                    done(result)

            self._answer(answer)

        world.at(ends_s, self._awake, ended)

    def fail(self, keys: Callable[[bytes], bool], words: str) -> bool:
        """Fail the tasks with these keys; whether there are any."""
        failed = [key for key in self._tasks if keys(key)]
        for key in failed:
            self._tasks.pop(key)(ErrorReport.of(CompileError(words), self._node.name))
        return bool(failed)
