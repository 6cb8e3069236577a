"""The gateway beside a script: a process of its own, and JAX's client of it in the script's process.

It is another process because JAX's client holds Python's lock while it waits for some answers, so no
thread of the script's process could give them. JAX reaches it over a unix socket in a folder that
only this user can enter. It ends with the script.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pw.client.connection.script import process_name
from pw.core.waits import CLUSTER_START_S
from pw.gateway import forks
from pw.gateway.functions import FromGateway, Functions
from pw.processes.child import STOP_S
from pw.processes.daemons import LocalDaemon
from pw.transport.access.private import PrivateFolder

SOCKET = "gateway"
START_S = CLUSTER_START_S + 120.0
"""Seconds that the gateway may take to begin: it waits for the islands of a cluster that starts."""
_INSECURE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
_FILES = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY"
_LARGE = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES"
LARGE_BYTES = 1 << 20
"""Bytes above which host buffers reach the gateway as files in memory: the stream would copy them twice."""
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS, _FATAL = 2, 3
_OF_CALLBACK = "error calling callback"
"""Words in the error of a run one of whose Python functions has raised."""
_COLOCATED = "jax.experimental.colocated_python"
_CURRENT = "pw.client.connection.current"

_running: dict[LocalDaemon, tuple[PrivateFolder, str]] = {}
"""The gateways of this process, with the folders that JAX shares with each."""
_clusters: set[str] = set()
"""Addresses of the clusters that end with gateways of this process."""


def client(arguments: Sequence[str], has_cluster: bool) -> Any:
    """Return JAX's client of a gateway that is started now.

    Args:
        arguments: those of `pw gateway`, but for `--bind`.
        has_cluster: true if the gateway starts a cluster, which ends with it.

    Raises:
        ConnectionFailed: the gateway could not begin, with its words.
    """
    from jax.extend.backend import ifrt_proxy

    folder = PrivateFolder.make()
    files = _memory_folder()
    daemon = LocalDaemon(
        "pw.cli.gateway",
        [
            *("--bind", f"ipc://{folder.path / SOCKET}"),
            *("--files", files),
            *("--script", process_name()),
            *arguments,
        ],
        kinds=FromGateway,
    )
    _running[daemon] = folder, files
    address = daemon.address(START_S)
    os.environ[_INSECURE] = "true"
    if files:
        os.environ[_FILES] = files
        os.environ.setdefault(_LARGE, str(LARGE_BYTES))
    if os.environ.get(_LOG_LEVEL, "1") == "1":  # JAX's default
        _log_from(_ERRORS)
    forks.close_in_forks_of(address)
    own_client = ifrt_proxy.get_client(address, ifrt_proxy.ClientConnectionOptions())
    if has_cluster:
        _clusters.add(own_client.devices()[0].pw_cluster)
    Functions(daemon.channel).install(lambda backend: backend is own_client)
    return own_client


def _memory_folder() -> str:
    """Make a folder in memory, in which JAX leaves large host buffers; empty if there is no such place."""
    try:
        return tempfile.mkdtemp(prefix="pw-jax-", dir="/dev/shm")
    except OSError:
        return ""


def _log_from(level: int) -> None:
    """Let JAX's native code log nothing below this level: it would warn of the socket, and of its end."""
    from pw.core.jax_private import native_logs

    native_logs.set_min_level(level)


def _wait_for_effects() -> None:
    """Let the effects of the last calls happen, as JAX does at exit: only then may its gateway end.

    An error that nothing has raised yet is told in one line. The errors of callbacks are left out: JAX has
    logged each when it happened.
    """
    from pw.core.jax_private.runtime import tokens

    lines: set[str] = set()
    for token in (*tokens.current_tokens.values(), *tokens.output_runtime_tokens.values()):
        try:
            token.block_until_ready()
        except Exception as error:  # noqa: BLE001 - the script ends, whatever went wrong
            words = next(iter(str(error).splitlines()), type(error).__name__)
            if _OF_CALLBACK not in words and words not in lines:
                lines.add(words)
                print(f"a call of this script has failed: {words}", file=sys.stderr)
    tokens.clear()


def _hand_over_calls() -> None:
    """Wait until the gateway has read the calls before: no token says when a colocated function has ended."""
    import jax
    import numpy as np

    with suppress(Exception):  # the gateway is gone
        jax.device_put(np.int8(0), jax.devices("pw")[0]).block_until_ready()


def _leave_clusters() -> None:
    """Close the session of `pw` first: the end of its cluster is no event, and its checkpoints are written."""
    if (current := sys.modules.get(_CURRENT)) is not None:
        for address in _clusters:
            current.leave(address, None)


def _exit() -> None:
    patience_s: float | None = STOP_S
    if _running:
        _wait_for_effects()
        _leave_clusters()
        if _COLOCATED in sys.modules:
            _hand_over_calls()
            patience_s = None  # its session ends when colocated functions have ended
        _log_from(_FATAL)
    for daemon, (folder, files) in _running.items():
        daemon.stop(patience_s)
        folder.leave()
        shutil.rmtree(files, ignore_errors=True)  # if the gateway was killed


atexit.register(_exit)
os.register_at_fork(after_in_child=_running.clear)
