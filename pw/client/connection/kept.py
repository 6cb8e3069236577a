"""The worker of an embedded cluster, started again whenever it is killed.

The worker (`pw.cli.worker`) restarts its runtime, and this module restarts the worker, so the script survives
the loss of either. A worker that exits with an error of its own has written it to standard error and would exit
in the same way again: the session ends then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pw.client.connection.children import Child

LOOK_S = 0.1
"""How often the loop looks whether the worker still runs."""
MOST_RESTARTS = 10
EXIT_ERROR = 1
"""The worker has written a line that says why, and starting it again would not help."""


class KeptWorker:
    """Runs one daemon of `pw.cli` until `stop`; made and watched on the thread of `loop`.

    Args:
        loop: the event loop that watches it.
        module: what to run, `pw.cli.worker` or, where there are no workers, `pw.cli.host`.
        arguments: its command line.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        module: str,
        arguments: Sequence[str],
    ) -> None:
        self.module = module
        self.given_up: Callable[[int], None] = lambda code: None
        """Called on the loop, with the exit code, when it is not started again."""
        self._loop = loop
        self._arguments = arguments
        self._restarts = 0
        self._ended: int | None = None
        self._is_closing = False
        self._child = Child(module, arguments)
        loop.call_later(LOOK_S, self._look)

    @property
    def pid(self) -> int:
        """Process id of the daemon as it is now."""
        return self._child.pid

    def exit_code(self) -> int | None:
        """None as long as it runs, or is started again."""
        return self._ended

    def terminate(self) -> None:
        """Ask it to end, and do not start it again; on the loop's thread."""
        self._is_closing = True
        self._child.terminate()

    def stop(self) -> None:
        """Wait until it has ended, after `terminate`; on any thread."""
        self._child.stop()

    def _look(self) -> None:
        if self._is_closing:
            return
        code = self._child.exit_code()
        if code is not None:
            self._child.let_go()
            self._restarts += 1
            if code == EXIT_ERROR or self._restarts > MOST_RESTARTS:
                self._ended = code
                self.given_up(code)
                return
            self._child = Child(self.module, self._arguments)
        self._loop.call_later(LOOK_S, self._look)
