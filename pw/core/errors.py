"""Every failure a user can see.

All derive from `Error`. A failure that happens on another process travels as an `ErrorReport` (type
name and text, never a pickled exception) and is raised on the client as the class of that name, with
the remote traceback in its text.
"""

from __future__ import annotations

import traceback as traceback_module

import msgspec


class Error(Exception):
    """Base of every error pw raises on purpose."""


class ConnectionFailed(Error):
    """The controller, or a host, could not be reached or stopped answering."""


class AccessRefused(ConnectionFailed):
    """Two processes do not have the same cluster secret."""


class Disconnected(Error):
    """The session was closed, so what it named no longer exists."""


class VersionMismatch(Error):
    """Two processes run versions of pw or jax that do not understand each other."""


class ProtocolError(Error):
    """A process said something that no process of pw should say; please report it."""


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
    """A value was needed while a program was being traced, when it does not exist yet."""


class ArrayDeleted(Error, RuntimeError):
    """The array was deleted, or given away by donation, before this use."""


class NotOwner(Error):
    """An array, slice or program of another client was named."""


class CompileError(Error):
    """A host could not compile a computation."""


class ComputationFailed(Error):
    """A computation raised while it ran on a host."""


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
    """A host has no memory for bytes that it was to receive."""


class CheckpointFailed(Error, OSError):
    """A checkpoint could not be written where it is safe, or read from there."""


class CheckpointNotFound(CheckpointFailed, FileNotFoundError):
    """There is no checkpoint at a path, or not all of it."""


class CheckpointExists(CheckpointFailed, FileExistsError):
    """There is something at the path of a new checkpoint already."""


class TransferFailed(Error):
    """Bytes could not be moved from one process to another."""


class IslandFull(Error):
    """A host asked to join an island that already has all its hosts."""


class InternalError(Error):
    """pw broke one of its own rules; please report it."""


_FAULTS = frozenset(kind.__name__ for kind in (InternalError, ProtocolError))
_FAULT = (
    ". This is a fault of pw, not of your program: please report it, with all that is said here"
)

INFRASTRUCTURE = frozenset(kind.__name__ for kind in (HostLost, TransferFailed, ConnectionFailed))
"""Kinds that say nothing about a program: one host of a gang may have met them, and running again helps."""


def _kinds(base: type[Error]) -> dict[str, type[Error]]:
    found = {base.__name__: base}
    for sub in base.__subclasses__():
        found.update(_kinds(sub))
    return found


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """An error as it travels: the class name, the words, where, and the remote traceback."""

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
        """The exception to raise on the side of the user."""
        where = f" [on {self.where}]" if self.where else ""
        fault = _FAULT if self.kind in _FAULTS and not self.message.endswith(_FAULT) else ""
        error = _kinds(Error).get(self.kind, Error)(f"{self.message}{where}{fault}")
        if self.traceback:
            error.add_note(f"Traceback on {self.where or 'the remote side'}:\n{self.traceback}")
        return error
