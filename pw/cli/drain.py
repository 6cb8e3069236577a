"""What `pw drain` does: a session that only waits until a host has been emptied."""

from __future__ import annotations

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import Error

CONNECT_S = 3.0


def drain_host(address: str, host: str, timeout_s: float) -> None:
    """Have the cluster at `address` do without `host`; returns when that holds nothing any more.

    Raises:
        ConnectionFailed: nobody answers there.
        VersionMismatch: the controller runs other versions.
        Error: there is no such host, nothing could take its place, or it took longer than `timeout_s`.
    """
    session = Runtime(remote(address), 1.0, 0, connect_s=CONNECT_S)
    try:
        session.ask.drain(host).result(timeout_s)
    except TimeoutError:
        raise Error(
            f"host {host} is not empty after {timeout_s:g} s; the drain goes on, see pw status"
        ) from None
    finally:
        session.close()
