"""What crosses the channel between a host and its Python processes.

The host sends `BeginFunction`, then `Load`, `FunctionCall` and `Drop`; the process answers each `FunctionCall`
with `Returned` or `CallRaised`, after any `Wrote`.
"""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.functions.parts import HostPart


class BeginFunction(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a process begin; the socket for questions comes with this."""


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a process know a function under a key."""

    key: bytes
    artifact: bytes
    share: HostPart


class FunctionCall(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host has a process call a function with the arrays that come with this."""

    key: bytes


class Drop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The host does not need a function any more."""

    key: bytes


class Wrote(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function wrote text to standard output or standard error."""

    is_error: bool
    text: str


class Returned(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function returned the arrays that come with this."""


class CallRaised(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The function raised, or could not be loaded."""

    report: ErrorReport


ToProcess = Load | FunctionCall | Drop
ToHost = Wrote | Returned | CallRaised
