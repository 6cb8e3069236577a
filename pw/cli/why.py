"""What `pw why` shows: the controller's story, or all that it was made of."""

from __future__ import annotations

from typing import Any

import msgspec

from pw.cli.status import island_fields
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.messages import Explanation


def explain(address: str, timeout_s: float) -> Explanation:
    """Ask the controller at `address` why it does not go on.

    Raises:
        ConnectionFailed: no controller answers there within `timeout_s`.
        VersionMismatch: the controller runs other versions.
    """
    session = Runtime(remote(address), 1.0, 0, connect_s=timeout_s)
    try:
        return session.ask.explain(timeout_s)
    finally:
        session.close()


def document(explanation: Explanation) -> dict[str, Any]:
    """All of it as JSON: `verdict` is the first line of `text`; numbers of runs carry their client's."""
    fields: dict[str, Any] = _plain(explanation)
    del fields["request"]
    fields["islands"] = [island_fields(island) for island in explanation.islands]
    return {"verdict": explanation.text.splitlines()[0]} | fields


def _plain(value: Any) -> Any:
    """Structs as objects with named fields."""
    if isinstance(value, msgspec.Struct):
        return {name: _plain(field) for name, field in msgspec.structs.asdict(value).items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
