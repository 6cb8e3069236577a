"""`pw.profile`, and `%%pw_profile` for notebooks."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import jax

from pw.client.connection import current
from pw.client.keywords import checks_keywords
from pw.client.looking.show import html
from pw.client.looking.show import show as show_it
from pw.operating.profiling.report import Profile
from pw.operating.timeline.tracing import trace

if TYPE_CHECKING:
    from pw.client.connection.runtime import Runtime


class profile:  # noqa: N801 - it is used like a function, as `with pw.profile():`
    """Tell where the time of a block went, and what to change.

        with pw.profile():
            for batch in batches:
                params = step(params, batch)
            params.block_until_ready()

    It prints about ten lines when the block has ended. In a notebook, `%load_ext pw` makes it a magic:
    `%%pw_profile` at the top of a cell. It reads what `pw.trace` records, costs as much, and needs no more
    messages. Call functions once before the block, so that it does not measure their compilation, and wait for
    the last result inside of it.

    The block's value is a `pw.operating.profiling.report.Profile`: its times in seconds, and its advice.

    Args:
        show: whether to print it.
        runtime: the session; by default that of this process's calls (`pw.connect`).

    Raises:
        ConnectionFailed: the controller does not answer.
        Disconnected: the session ended during the block, and the block raised nothing.
    """

    @checks_keywords
    def __init__(self, *, show: bool = True, runtime: Runtime | None = None) -> None:
        self._show = show
        self._runtime = runtime
        self._profile = Profile()

    def __enter__(self) -> Profile:
        runtime = self._runtime = self._runtime or current.runtime()
        self._trace = trace(None, runtime=runtime)
        self._timeline = self._trace.__enter__()
        self._sent_s: dict[int, float] = {}
        self._began_s = time.monotonic()
        runtime.noted_in = (*runtime.noted_in, self._sent_s)
        return self._profile

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        runtime = self._runtime
        assert runtime is not None, "it was entered"
        runtime.noted_in = tuple(one for one in runtime.noted_in if one is not self._sent_s)
        self._trace.__exit__(kind, error, traceback)
        sent_s = {run: moment_s - self._began_s for run, moment_s in self._sent_s.items()}
        self._profile.take(self._timeline, runtime.client, sent_s)
        if error is None and self._show:
            show_it(self._profile)


def load_ipython_extension(ipython: Any) -> None:
    """Register `%%pw_profile`, and what cells show of JAX's meshes and shardings; for `%load_ext pw`."""

    def pw_profile(line: str, cell: str) -> None:
        """Run the cell, and tell where its time went and what to change (see `pw.profile`)."""
        with profile(show=False) as report:
            result = ipython.run_cell(cell)
        if result.success:
            show_it(report)

    ipython.register_magic_function(pw_profile, "cell")
    formats = ipython.display_formatter.formatters["text/html"]
    for kind in (jax.sharding.Mesh, jax.sharding.NamedSharding):
        formats.for_type(kind, html)
