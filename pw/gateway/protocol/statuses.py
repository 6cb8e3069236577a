"""Errors as JAX raises them: a status code, and the words of the error."""

from __future__ import annotations

import re
import traceback
from concurrent.futures import CancelledError

from pw.core import errors

CODES = {
    name: number
    for number, name in enumerate(
        (
            "OK",
            "CANCELLED",
            "UNKNOWN",
            "INVALID_ARGUMENT",
            "DEADLINE_EXCEEDED",
            "NOT_FOUND",
            "ALREADY_EXISTS",
            "PERMISSION_DENIED",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "ABORTED",
            "OUT_OF_RANGE",
            "UNIMPLEMENTED",
            "INTERNAL",
            "UNAVAILABLE",
            "DATA_LOSS",
            "UNAUTHENTICATED",
        )
    )
}
_NAMES = {number: name for name, number in CODES.items()}

_OF_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (errors.ArrayLost, "DATA_LOSS"),
    (errors.HostLost, "DATA_LOSS"),
    (errors.TransferFailed, "UNAVAILABLE"),
    (errors.Disconnected, "UNAVAILABLE"),
    (errors.ConnectionFailed, "UNAVAILABLE"),
    (errors.CheckpointNotFound, "NOT_FOUND"),
    (errors.ArrayDeleted, "INVALID_ARGUMENT"),
    (errors.ArgumentError, "INVALID_ARGUMENT"),
    (errors.PlacementError, "INVALID_ARGUMENT"),
    (errors.ShardingError, "INVALID_ARGUMENT"),
    (errors.CodeRefused, "INVALID_ARGUMENT"),
    (errors.OutOfDeviceMemory, "RESOURCE_EXHAUSTED"),
    (errors.OutOfHostMemory, "RESOURCE_EXHAUSTED"),
    (errors.InsufficientDevices, "RESOURCE_EXHAUSTED"),
    (errors.Cancelled, "CANCELLED"),
    (errors.ComputationTimeout, "DEADLINE_EXCEEDED"),
    (CancelledError, "CANCELLED"),
    (NotImplementedError, "UNIMPLEMENTED"),
)
"""Codes by kinds of errors. Elastic training of `pathwaysutils` goes on after DATA_LOSS, not UNAVAILABLE."""

_XLA = re.compile(rf"\b(?:\w*Error: )?({'|'.join(CODES)}): ")
"""Pattern of the begin of XLA's own words in the text of an error."""


class StatusError(Exception):
    """An error with a status of its own.

    Args:
        code: the code's name.
        words: what JAX shows.
    """

    def __init__(self, code: str, words: str) -> None:
        super().__init__(words)
        self.code = code


def not_found(what: str) -> StatusError:
    """Return the error for a handle that this session does not have."""
    return StatusError("NOT_FOUND", f"{what}; it was deleted, or belongs to another session")


def deleted() -> StatusError:
    """Return the error for an array that was deleted or donated, in JAX's words."""
    return StatusError("INVALID_ARGUMENT", "Array has been deleted or donated.")


def unsupported(words: str) -> StatusError:
    """Return the error for what the gateway does not support."""
    return StatusError("UNIMPLEMENTED", words)


def received(code: int, words: str) -> StatusError:
    """Return the error that a client has sent."""
    return StatusError(_NAMES.get(code, "UNKNOWN"), words)


def status_of(error: BaseException) -> tuple[int, str]:
    """Return the code and the words of an error."""
    words = str(error)
    if isinstance(error, StatusError):
        return CODES[error.code], words
    if (match := _XLA.search(words)) is not None:
        return CODES[match[1]], words[: match.start()] + words[match.end() :]
    for kind, code in _OF_KINDS:
        if isinstance(error, kind):
            return CODES[code], words
    if isinstance(error, errors.Error):
        return CODES["INTERNAL"], words
    return CODES["INTERNAL"], "".join(traceback.format_exception(error))
