"""`pw cancel` and `pw drain`: one request to the controller, in a session of its own."""

from __future__ import annotations

from contextlib import closing

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import Error
from pw.core.ids import client_id

CONNECT_S = 3.0


def parse(what: str) -> tuple[int, int]:
    """Return the numbers of a client and of its run, 0 for all. Raises Error if `what` names neither."""
    client, dot, run = what.partition(".")
    if not client.isdecimal() or (dot and not run.isdecimal()):
        raise Error(f"{what!r} is neither a run (client.number) nor a client; see pw status")
    return int(client), client_id(int(client), int(run)) if dot else 0


def cancel(address: str, what: list[str], timeout_s: float) -> None:
    """Cancel runs, and wait until the controller has.

    Raises:
        ConnectionFailed: no controller answers at `address` within `timeout_s`.
        Error: there is no such client, or no such run in flight.
    """
    chosen = [parse(one) for one in what]
    with closing(Runtime(remote(address), 1.0, 0, connect_s=timeout_s)) as session:
        for client, run in chosen:
            session.ask.cancel_runs(client, run).result(timeout_s)


def drain(address: str, host: str, timeout_s: float) -> None:
    """Drain `host`; returns when the host holds nothing any more.

    Raises:
        ConnectionFailed: no controller answers at `address`.
        Error: there is no such host, no other host can take its place, or it took longer than `timeout_s`.
    """
    with closing(Runtime(remote(address), 1.0, 0, connect_s=CONNECT_S)) as session:
        try:
            session.ask.drain(host).result(timeout_s)
        except TimeoutError:
            raise Error(
                f"host {host} is not empty after {timeout_s:g} s; the drain goes on, see pw status"
            ) from None
