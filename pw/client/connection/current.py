"""The current runtime, which this process's calls use: connects, changes and closes it."""

from __future__ import annotations

import atexit
import importlib
import os
import threading
from collections.abc import Callable
from typing import Any

from pw.client.connection import jax_backend, threads
from pw.client.connection.runtime import Runtime
from pw.client.display.worker_output import is_wanted
from pw.client.keywords import checks_keywords
from pw.client.session.uploads import KEEP_BYTES
from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.core.variables import warn_of_misspelt
from pw.core.waits import RECONNECT_S
from pw.transport.access.credentials import CREDENTIALS
from pw.transport.access.joined import default_address
from pw.transport.access.security import Security, address_in

EMBEDDED = "pw.cli.embedded"
"""The module that starts a cluster beside a script; it is above the client, because it assembles actors."""

_current: Runtime | None = None
_guard = threading.RLock()


def runtime() -> Runtime:
    """Return the current runtime; connects (see `connect`) if there is none.

    Raises:
        Error: the session has ended by itself, and its arrays with it.
    """
    session = _current
    if session is not None:
        if session.alive:
            return session
        if session.forked or session.ended is not None:
            session.check_alive()
    return connect()


@checks_keywords
def connect(
    address: str | None = None,
    *,
    credentials: str | os.PathLike[str] | None = None,
    share: float = 1.0,
    priority: int = 0,
    keep_bytes: int | None = None,
    reconnect_s: float = RECONNECT_S,
    recovery_timeout: float | None = None,
    worker_output: bool | None = None,
) -> Runtime:
    """Connect this process to a cluster: at `address`, else `PW_ADDRESS`, else that of JAX's devices if they
    are virtual ones (`pw.jax`), else the one that this user has joined (`pw join`), else an embedded one. An
    empty `PW_ADDRESS` leaves out the joined one.

    During a session the threads of this process switch every 0.5 ms (`sys.setswitchinterval`) instead of every
    5 ms, unless the interval is shorter already: a thread that computes in Python would delay each step of a
    call in the session's thread.

    When a session ends by itself (its controller was lost and did not come back, or has evicted it), all calls
    raise the reason until this function is called. It then begins another session, with the same controller if
    no address is given.

    Args:
        address: the controller's `tcp://host:port`.
        credentials: this process's certificate: a file of `pw keys issue`, or a folder with tls.crt, tls.key
            and ca.crt; by default `PW_CREDENTIALS`. If the file names the controller's address, no `address`
            is needed. Without credentials only a controller of this user on this machine can be reached,
            unless `PW_INSECURE` is 1.
        share: weight of this client among those of its tenant under `pw-controller --policy share`.
        priority: importance of this client under `pw-controller --policy priority`.
        keep_bytes: memory in this process for copies of uploads, from which arrays are restored when their
            hosts are lost; `PW_KEEP_BYTES`, else 256 MiB. The oldest upload leaves first. See also
            `pw.put(..., keep=True)` and `pw.checkpoint`.
        reconnect_s: how long calls wait, in seconds, for a lost controller. When it is started again at its
            address, all calls go on.
        recovery_timeout: how long, in seconds, what needs a lost island waits until it is given up
            (`pw.IslandLost`), `math.inf` for as long as it takes; `PW_RECOVERY_TIMEOUT`, else as long as
            `pw-controller --recovery-timeout` says. Other islands go on meanwhile.
        worker_output: show the output, warnings and log records of `pw.host_function`s here, as `(host) line`;
            `PW_WORKER_OUTPUT` (0 or 1), else yes. A host sends at most 1,000 lines and 64 KiB a second, and
            counts the lines that it leaves out.

    Returns:
        The runtime. In a `with` statement its session ends with the block. If this process is connected
        already, to the same address or none was given, that session is returned.

    Raises:
        ConnectionFailed: no controller answers at the address; where nothing listens there, after about 4 s.
        VersionMismatch: the controller runs other versions of pw or jax.
        ValueError: `share` is not positive, `reconnect_s`, `recovery_timeout` or `keep_bytes` is negative, or
            PW_WORKER_OUTPUT is neither 0 nor 1.
        AccessRefused: one end refuses the other's certificate, or another machine is to be reached without any.
        QuotaExceeded: `share` or `priority` is above what the controller allows, or the tenant has as many
            clients as it may.
        Error: this process is connected to another address, or with another `recovery_timeout`, or the
            credentials cannot be used.
    """
    with _guard:
        if not address and _current is not None and _current.ended is not None:
            address = _current.address
        else:
            address = address or os.environ.get("PW_ADDRESS") or address_in(credentials)
            if address is None and (_current is None or not _current.alive):
                address = jax_backend.cluster() or default_address() or None
                _check_meant(address, credentials)
        if _current is not None and _current.alive:
            if address is None or address == _current.address:
                _check_patience(recovery_timeout)
                return _current
            raise Error(
                f"already connected to {_current.address or 'an embedded cluster'}; call "
                f"pw.disconnect() before connecting to {address}"
            )
        if share <= 0:
            raise ValueError(f"share must be positive, not {share}")
        if reconnect_s < 0:
            raise ValueError(f"reconnect_s must not be negative, but is {reconnect_s}")
        patience_s = recovery_s(recovery_timeout)
        warn_of_misspelt(os.environ)
        if address is None:
            start = importlib.import_module(EMBEDDED).start
        else:
            start = _remote(address, credentials)
        if _current is not None:
            _current.close()
        session = Runtime(
            start,
            share,
            priority,
            keep_bytes=_keep_bytes(keep_bytes),
            reconnect_s=reconnect_s,
            recovery_s=patience_s,
            worker_output=is_wanted(worker_output),
        )
        use(session)
        return session


def _check_patience(recovery_timeout: float | None) -> None:
    """Raise Error if the session that there is waits for lost islands for another time."""
    assert _current is not None
    if recovery_timeout is not None and recovery_s(recovery_timeout) != _current.recovery_s:
        raise Error(
            f"this process is connected already, and recovery_timeout={recovery_timeout!r} is for a new "
            "session: call pw.disconnect() first, or pass it to the first pw.connect (a cluster has a time of "
            "its own: pw.LocalCluster(recovery_timeout_s=), pw-controller --recovery-timeout)"
        )


def _check_meant(address: str | None, credentials: str | os.PathLike[str] | None) -> None:
    """Raise Error if there are credentials for a cluster, and no address of it."""
    file = credentials or os.environ.get(CREDENTIALS)
    if file and address is None and "PW_ADDRESS" not in os.environ:
        raise Error(
            f"there are credentials, {os.fspath(file)}, and no address of a controller, which a file of "
            "`pw keys issue --address` names: give it to pw.connect, or in PW_ADDRESS. An empty PW_ADDRESS "
            "means an embedded cluster"
        )


def _remote(
    address: str, credentials: str | os.PathLike[str] | None
) -> Callable[[Runtime], threads.SessionOnNode]:
    return threads.remote(address, security=Security.of(address, credentials, role=Role.CLIENT))


def _keep_bytes(size_bytes: int | None) -> int:
    text = (
        os.environ.get("PW_KEEP_BYTES", str(KEEP_BYTES)) if size_bytes is None else str(size_bytes)
    )
    if not text.isdecimal():
        raise ValueError(f"keep_bytes (PW_KEEP_BYTES) must be a number of bytes, not {text!r}")
    return int(text)


def recovery_s(timeout_s: float | None = None) -> float | None:
    """Return how long a session waits for lost islands, in seconds; None for as long as the cluster says.

    Raises ValueError if `timeout_s`, or else `PW_RECOVERY_TIMEOUT`, is no number of seconds.
    """
    text = os.environ.get("PW_RECOVERY_TIMEOUT") if timeout_s is None else str(timeout_s)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise ValueError(
            f"recovery_timeout (PW_RECOVERY_TIMEOUT) must be a number of seconds, 0 or more, not {text!r}"
        )
    return value


def use(other: Any) -> Any:
    """Make `other` the runtime that this process's calls go to; returns the one before."""
    global _current
    with _guard:
        previous, _current = _current, other
        return previous


def leave(address: str, instead: Any) -> None:
    """Close the session with this controller, if calls go to it, and have them go to `instead`."""
    with _guard:
        if _current is not None and _current.address == address:
            disconnect()
            use(instead)


def is_current(one: Any) -> bool:
    """Whether this process's calls go to this runtime."""
    return _current is one


def disconnect() -> None:
    """Close the session; its arrays, programs and slices are released on every host."""
    global _current
    with _guard:
        former, _current = _current, None
        if former is not None:
            former.close()


def _forked() -> None:
    """Replace the lock, which another thread of the parent may have held."""
    global _guard
    _guard = threading.RLock()


def stats() -> dict[str, dict[str, int]]:
    """Counters of every process of the cluster: `controller`, each host by name, and `client`.

    `messages_*` and `control_bytes_*` count the control plane, `bulk_*` the bulk plane (the
    controller has none), `launches`, `computations` and `compilations` the work of hosts,
    `live_arrays` and `live_bytes` their arrays. A host that is lost while it is asked has the only
    counter `lost`.

    Raises:
        ConnectionFailed: the controller was lost while it was asked.
    """
    return runtime().stats()


def why() -> str:
    """Explain what holds up this client: the most likely cause in the first line, details below.

    It names the run, the computation and its program, the host that others wait for, since when,
    and where its threads are in the code. Call it from another thread (or `pw why` from another
    terminal) during a wait.

    Raises:
        ConnectionFailed: the controller does not answer.
    """
    return runtime().ask.explain().text


atexit.register(disconnect)
os.register_at_fork(after_in_child=_forked)
