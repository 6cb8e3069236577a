"""What `pw cancel` does: it ends runs of any client, which `pw status` lists."""

from __future__ import annotations

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import Error
from pw.core.ids import client_id


def parse(what: str) -> tuple[int, int]:
    """A client's number, and the number of a run of its, 0 for all. Raises Error if `what` is neither."""
    client, dot, run = what.partition(".")
    if not client.isdecimal() or (dot and not run.isdecimal()):
        raise Error(f"{what!r} is neither a run (client.number) nor a client; see pw status")
    return int(client), client_id(int(client), int(run)) if dot else 0


def cancel(address: str, what: list[str], timeout_s: float) -> None:
    """End runs and wait until the controller has given them up.

    Raises:
        ConnectionFailed: nobody answers there within `timeout_s`.
        Error: there is no such client, or no such run in flight.
    """
    chosen = [parse(one) for one in what]
    session = Runtime(remote(address), 1.0, 0, connect_s=timeout_s)
    try:
        for client, run in chosen:
            session.ask.cancel_runs(client, run).result(timeout_s)
    finally:
        session.close()
