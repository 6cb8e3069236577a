"""How many questions one client may have open that cost hosts and other clients time."""

from __future__ import annotations

from pw.core.errors import ErrorReport, ProtocolError
from pw.core.messages import Explain, GetMemory, RequestFailed
from pw.sched.control.clients import Client
from pw.sched.control.sessions import Sessions

AT_ONCE = 4
"""Questions of one kind and one client that are answered at once; more are refused."""


def may_ask(
    sessions: Sessions, client: Client, message: Explain | GetMemory, are_open: int
) -> bool:
    """Return whether a client may ask now; it is told if not.

    Args:
        sessions: the clients.
        client: the client.
        message: its question.
        are_open: how many of its questions of this kind are not answered yet.
    """
    if are_open < AT_ONCE:
        return True
    sessions.env.count("questions_refused")
    what = "why it waits" if isinstance(message, Explain) else "what holds the devices' memory"
    error = ProtocolError(
        f"client {client.number} has asked {AT_ONCE} times {what}, and is not answered yet; wait for an "
        "answer, then ask again"
    )
    failed = RequestFailed(message.request, ErrorReport.of(error))
    sessions.env.send(client.address, failed)
    return False
