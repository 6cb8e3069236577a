"""`checkpoint` makes replicas of arrays, which outlive the loss of a host.

The runtime restores lost arrays by a replay of the runs that made them. A checkpoint ends that
lineage: replicas in the memory of other hosts are faster than a replay, and donated arrays cannot
be computed again. Bytes go from host to host, and to disk with `path=` (see
`pw.client.checkpoints.files`), never to this process.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

import jax

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.signature import signature_of
from pw.client.checkpoints import files as checkpoint_files
from pw.client.connection import current
from pw.client.connection.waiting import Waiting, seconds
from pw.client.functions.wrapped import under_jax_trace
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError, TracerError
from pw.transport.log import log

_FILES = "the files at {0} are complete, only the replicas in memory are missing"
_REPLICAS = "the replicas in memory are there, only the files at {0} have not been written"


class Checkpoint:
    """A checkpoint in flight; it goes on without this object."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> None:
        """Wait until all replicas are safe, for at most `timeout` seconds.

        Raises:
            TimeoutError: it took longer; the checkpoint goes on.
            ArgumentError: `timeout` is no number of seconds.
            Error: the reason why an array could not be copied. With `path` it says whether the files or the
                replicas are there all the same.
        """
        self._future.result(seconds(timeout))

    def done(self) -> bool:
        """Whether all replicas are safe, or the checkpoint has failed."""
        return self._future.done()

    def __await__(self) -> Generator[Any, None, None]:
        # Shielded: the checkpoint does not end with the task that waits for it.
        yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def __repr__(self) -> str:
        if not self.done():
            return "<pw.Checkpoint: under way>"
        error = self._future.exception()
        return f"<pw.Checkpoint: {'done' if error is None else f'failed, {error}'}>"


@checks_keywords
def checkpoint(tree: Any, *, path: Any = None, overwrite: bool = False) -> Checkpoint:
    """Copy arrays to the memory of other hosts, so that they survive the loss of theirs; and to disk.

    It is in order with computations: arrays that are donated later are copied first. Returns at once. When a
    host is lost, the runtime uses the replicas by itself, and keeps them as long as an array can need them. So
    a training loop calls this now and then on its state. A checkpoint on disk outlives the cluster;
    `pw.restore` reads it.

    Args:
        tree: tree of pw arrays, and of jax arrays on virtual devices. Numbers, strings, numpy arrays and other
            jax arrays in it need no replicas; on disk they are included, and must be small.
        path: directory to write as well, on a file system that all hosts share. It appears when it is
            complete: the hosts write beside it. A relative path is one of this process's directory.
        overwrite: replace a checkpoint at the path.

    Raises:
        ArgumentError: the tree has other values.
        CheckpointExists: (by `result`) the path exists.
        CheckpointFailed: (by `result`) the hosts cannot write there, and have changed nothing; or a host could
            not put its replicas where they survive a crash.
        QuotaExceeded: (by `result`) the tenant may not have so many bytes in host memory, or on disk.
        ArrayDeleted: an array was deleted or donated before.
        NotOwner: the arrays belong to different sessions.
        TracerError: called in a function that is being traced.
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    if under_jax_trace([leaf for _, leaf in leaves]):
        raise TracerError(
            "pw.checkpoint was called in a function that JAX traces; call it on what the function returns"
        )
    remote = [leaf for _, leaf in leaves if jax_arrays.is_remote(leaf)]
    if path is not None and remote:  # on disk, they are arrays like the others
        views = jax_arrays.from_jax([leaf for _, leaf in leaves])
        leaves = [(keys, view) for (keys, _), view in zip(leaves, views, strict=True)]
    arrays: list[Array] = []
    for keys, leaf in leaves:
        if isinstance(leaf, Array):
            leaf._check_owner(arrays[0]._runtime if arrays else leaf._runtime)
            arrays.extend(leaf.members)
        elif not jax_arrays.is_remote(leaf):
            _check_host_value(keys, leaf)
    files: list[Future[None]] = []
    if path is not None:
        files.append(checkpoint_files.save(tree, leaves, path, overwrite))
    copies: list[Future[None]] = []
    if arrays:
        copies.append(arrays[0]._runtime.ask.checkpoint([array._id for array in arrays]))
    if remote:
        copies.append(jax_arrays.front().checkpoint(remote))
    if len(copies) == 2:
        copies = [_both(copies[0], copies[1], current.runtime())]
    if not files and not copies:
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return Checkpoint(nothing)
    parts = files + copies
    future = parts[0] if len(parts) == 1 else _both(files[0], copies[0], current.runtime(), path)
    future.add_done_callback(_log_failure)
    return Checkpoint(future)


def _both(
    first: Future[None], second: Future[None], session: Any, path: Any = None
) -> Future[None]:
    """Return a future that is settled when both are; it fails with the first's error, else the second's.

    If the first writes files at `path`, the error says which of the two is there.
    """
    both: Future[None] = Waiting(session.ask.in_the_way, getattr(first, "about", None))

    def settle(_: Future[None]) -> None:
        errors = first.exception(), second.exception()
        error = errors[0] or errors[1]
        if error is None:
            both.set_result(None)
            return
        if path is not None and None in errors:
            error = copy.copy(error)  # others may wait for this one too
            error.args = (f"{error}; {(_FILES if errors[0] is None else _REPLICAS).format(path)}",)
        both.set_exception(error)

    first.add_done_callback(lambda _: second.add_done_callback(settle))
    return both


def _check_host_value(keys: Any, leaf: Any) -> None:
    if isinstance(leaf, str):
        return
    try:
        signature_of(leaf)
    except ArgumentError:
        where = jax.tree_util.keystr(keys) or "its argument"
        raise ArgumentError(
            f"pw.checkpoint was given {leaf!r} of type {type(leaf).__name__} at {where}; it takes pw "
            "arrays, numbers, strings, numpy arrays and jax arrays"
        ) from None


def _log_failure(future: Future[None]) -> None:
    """Log the error, in case the script does not read the result."""
    error = future.exception()
    if error is not None:
        log("warning", "checkpoint failed", "client", error=error)
