"""Every failure a user can see.

All derive from `Error`. A failure that happens on another process travels as an `ErrorReport` (type
name and text, never a pickled exception) and is raised on the client as the class of that name,
with the remote traceback in its text.
"""

from __future__ import annotations

import traceback as traceback_module

import msgspec


class Error(Exception):
    """Base of all errors of pw."""


class ConnectionFailed(Error):
    """The controller, or a host, could not be reached or stopped answering."""


class AccessRefused(ConnectionFailed):
    """A process may not be in the cluster, or may not do what it asked for: its credentials do not allow it."""


class Disconnected(Error):
    """The session has ended, and its arrays, programs and slices with it."""


class VersionMismatch(Error):
    """Two processes run versions of pw or jax that do not understand each other."""


class ProtocolError(Error):
    """A process received a message that breaks the protocol; please report it."""


class InsufficientDevices(Error):
    """No island can satisfy a request for virtual devices."""


class PlacementError(Error, ValueError):
    """A computation was placed on devices that cannot run it together."""


class ShardingError(Error, ValueError):
    """A sharding does not fit the shape or the mesh it is used with."""


class ArgumentError(Error, TypeError):
    """A call's arguments have the wrong shape, dtype, or tree structure."""


class TracingError(Error):
    """A function could not be traced or exported."""


class TracerError(Error, TypeError):
    """The trace of a program needs a value, which does not exist yet."""


class ArrayDeleted(Error, RuntimeError):
    """The array was deleted or donated before this use."""


class NotOwner(Error):
    """A client has named an array, slice or program of another client."""


class CompileError(Error):
    """A host could not compile a computation."""


class PythonRefused(CompileError):
    """A host runs no Python functions of clients."""


class ComputationFailed(Error):
    """A computation raised while it ran on a host."""


class ResultMismatch(ComputationFailed):
    """A host function or a stream made something else than it declared, or a computation impossible counts."""


class NaNFound(Error, FloatingPointError):
    """A computation whose results are checked (`check_nans`) made a NaN."""


class ComputationTimeout(Error, TimeoutError):
    """A run took longer than its `timeout`."""


class Cancelled(Error):
    """The run that would have made the array was cancelled."""


class HostLost(Error):
    """A host left its island while it was needed."""


class ArrayLost(Error):
    """The buffers of an array are gone and cannot be rebuilt."""


class OutOfDeviceMemory(Error, MemoryError):
    """A computation can never fit in the memory of its devices."""


class OutOfHostMemory(Error, MemoryError):
    """A host has no memory to receive a buffer."""


class CheckpointFailed(Error, OSError):
    """A checkpoint could not be written, or read."""


class CheckpointNotFound(CheckpointFailed, FileNotFoundError):
    """There is no complete checkpoint at the path."""


class CheckpointExists(CheckpointFailed, FileExistsError):
    """The path of a new checkpoint exists already."""


class TransferFailed(Error):
    """Bytes could not be moved from one process to another."""


class IslandFull(Error):
    """A host asked to join an island that already has all its hosts."""


class InternalError(Error):
    """pw broke one of its own rules; please report it."""


_FAULTS = frozenset(kind.__name__ for kind in (InternalError, ProtocolError))
_FAULT = ". This is a fault of pw, not of your program: please report it, with this whole message"

INFRASTRUCTURE = frozenset(kind.__name__ for kind in (HostLost, TransferFailed, ConnectionFailed))
"""Errors without a cause in the program: one host of a gang may have them alone, and a replay helps."""

SKIPPED = "Skipped"
"""The kind of an error in the place of values that a branch which was not taken would have made. No user sees
it: the results of a program are merges of such values (`pw.core.programs.guards`)."""


def _kinds(base: type[Error]) -> dict[str, type[Error]]:
    found = {base.__name__: base}
    for sub in base.__subclasses__():
        found.update(_kinds(sub))
    return found


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """An error in a message: the class name, the text, the host, and the remote traceback."""

    kind: str
    message: str
    where: str = ""
    traceback: str = ""

    @classmethod
    def of(
        cls, error: BaseException, where: str = "", kind: type[Error] | None = None
    ) -> ErrorReport:
        """Describe `error`; an exception that is not pw's own becomes `kind` (or InternalError)."""
        if isinstance(error, Error):
            remote = error.__notes__[0] if getattr(error, "__notes__", None) else ""
            return cls(type(error).__name__, str(error), where, remote)
        text = "".join(traceback_module.format_exception(error))
        name = (kind or InternalError).__name__
        return cls(name, f"{type(error).__name__}: {error}", where, text)

    def exception(self) -> Error:
        """Return the exception to raise in the client."""
        where = f" [on {self.where}]" if self.where else ""
        fault = _FAULT if self.kind in _FAULTS and not self.message.endswith(_FAULT) else ""
        error = _kinds(Error).get(self.kind, Error)(f"{self.message}{where}{fault}")
        if self.traceback:
            error.add_note(f"Traceback on {self.where or 'the remote side'}:\n{self.traceback}")
        return error
