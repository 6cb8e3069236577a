"""The controller's side of the coordination child (`pw.devices.jax.coordination`), free of jax.

The first request starts the child, which serves all islands; a request after its death starts it
again. With the child die all members, so no epoch is resumed: the controller sees its hosts restart
and forms new epochs.

Each `start` is answered exactly once, on the loop and after it has returned, unless this object is
closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from pw.devices.jax.coordination import MODULE, Start, Started, Stop
from pw.processes.child import Child, interpreter

logger = logging.getLogger(__name__)

_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"

Done = Callable[[str | None, str | None], None]


class CoordinationServices:
    """Starts and stops one coordination service per island epoch, in a child process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bind_host: str = "127.0.0.1") -> None:
        """Start nothing yet.

        Args:
            loop: loop on which all methods are called and all answers are given.
            bind_host: the numeric address to bind to; workers dial it.
        """
        self._loop = loop
        self._bind_host = bind_host
        self._child: Child[Started] | None = None
        self._pending: dict[tuple[str, int], Done] = {}
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id, for logs; None while there is no child."""
        return None if self._child is None else self._child.pid

    def start(self, island: str, epoch: int, hosts: int, done: Done) -> None:
        """Start the service of one island epoch.

        Args:
            island: the island's name.
            epoch: the epoch to form.
            hosts: number of hosts that will join.
            done: called once with (address, None), or with (None, an error).
        """
        key = (island, epoch)
        if self._closed:
            self._loop.call_soon(done, None, "the coordination services are closed")
            return
        if key in self._pending:
            self._loop.call_soon(done, None, f"epoch {epoch} of {island!r} is being started")
            return
        self._pending[key] = done
        self._request(Start(island, epoch, hosts, self._bind_host))

    def stop(self, island: str, epoch: int) -> None:
        """Stop the roll-call of one island epoch; a service ends with its last member."""
        done = self._pending.pop((island, epoch), None)
        if done is not None:
            self._loop.call_soon(done, None, f"epoch {epoch} of {island!r} was given up")
        if self._child is not None:
            self._request(Stop(island, epoch))

    def close(self) -> None:
        """End the child; pending requests get no answer. May be called again, and at exit."""
        self._closed = True
        self._pending.clear()
        self._part(kill=True)

    def leave(self) -> None:
        """Let the child end when the last member has left, because another controller may take
        over."""
        self._closed = True
        self._pending.clear()
        self._part(kill=False)

    def _request(self, request: Start | Stop) -> None:
        try:
            child = self._child or self._start_child()
            child.channel.send(request, wait=False)  # a child that does not read counts as dead
        except OSError as error:
            self._lost(f"the coordination process cannot be reached: {error}")

    def _start_child(self) -> Child[Started]:
        environment = os.environ | {_LOG_LEVEL: _log_level()}
        child: Child[Started] = Child(interpreter(MODULE, (), environment), Started)
        self._child = child
        self._loop.add_reader(child.channel.fileno(), self._read, child)
        return child

    def _read(self, child: Child[Started]) -> None:
        for reply, _, _ in child.channel.arrived():
            done = self._pending.pop((reply.island, reply.epoch), None)
            if done is not None:
                done(reply.address or None, reply.error or None)
            elif reply.error:
                logger.warning("coordination process: %s", reply.error)
        if child is self._child and child.channel.ended:
            self._lost("the coordination process ended; see its messages on stderr")

    def _lost(self, reason: str) -> None:
        """End the child, and answer all pending requests with the reason."""
        self._part(kill=True)
        pending, self._pending = self._pending, {}
        logger.warning("%s", reason)
        for done in pending.values():
            self._loop.call_soon(done, None, reason)

    def _part(self, *, kill: bool) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        if not self._loop.is_closed():
            self._loop.remove_reader(child.channel.fileno())
        if kill:
            child.kill()
            child.wait()
        child.let_go()


def _log_level() -> str:
    """Return what XLA logs in the child: errors, because it greets with a warning, unless a user wants more.

    1 is JAX's own default, which it puts into the environment of every process that imports it.
    """
    level = os.environ.get(_LOG_LEVEL, "1")
    return "2" if level == "1" else level
