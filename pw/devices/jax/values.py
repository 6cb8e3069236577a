"""The state of values, and the errors that values carry.

`pw.devices.jax.backend` says which thread writes which field of a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import jax
import msgspec

from pw.core.errors import (
    ArrayDeleted,
    ComputationFailed,
    Error,
    ErrorReport,
    HostLost,
    InternalError,
    OutOfDeviceMemory,
)
from pw.devices.host.value import Value

_DONATED = "deleted or donated buffer"
"""JAX's words for a buffer that a computation has taken."""

_COLLECTIVES = ("Gloo", "NCCL")
"""Libraries whose errors mean, in a group of processes, that a peer has died. Computations of this host
alone that use the results fail with the same error."""


_NO_ROOM = (
    "pw.memory() shows what the devices hold. Delete arrays, donate arguments that are not used again, divide "
    "arrays over more devices, or use smaller batches"
)
"""Advice for a user whose computation finds no memory."""


_OF_DEVICES = re.compile(r"^(INTERNAL|DATA_LOSS)\b|\b(ECC)\b|\b(uncorrectable)\b", re.IGNORECASE)
"""Words of XLA's errors that may mean a sick device."""

_NOT_OF_DEVICES = ("allback", *_COLLECTIVES)
"""Words of errors that come from a client's function or from a peer, whatever else is in them."""


def suspicion(error: BaseException) -> str:
    """Return the word in an error that makes its devices suspect; empty if there is none."""
    words = str(error)
    if not isinstance(error, jax.errors.JaxRuntimeError) or any(
        word in words for word in _NOT_OF_DEVICES
    ):
        return ""
    match = _OF_DEVICES.search(words)
    return "" if match is None else match[0]


class Failures:
    """Makes the errors of one host's values.

    Args:
        host: name of the host.
        suspect: takes devices that an error names, and the word in it; called on any thread.
    """

    def __init__(
        self,
        host: str,
        suspect: Callable[[Collection[jax.Device], str], None] = lambda devices, word: None,
    ) -> None:
        self._host = host
        self._suspect = suspect
        words = "an array was used after it had been donated to a computation; pass a copy there, copy.copy(x)"
        self.deleted = ErrorReport(ArrayDeleted.__name__, words, host)
        """The error of a value whose buffers were donated."""
        words = "a value was used before it was made"
        self.unmade = ErrorReport(InternalError.__name__, words, host)
        """The error of a value that no op has made."""

    def report(
        self,
        error: BaseException,
        computation: str = "",
        devices: Callable[[], Collection[jax.Device]] = tuple,
    ) -> ErrorReport:
        """Describe an error that was raised by the computation of this name.

        `devices` returns those of this host that it ran on, if they are known.
        """
        words = str(error)
        if word := suspicion(error):
            self._suspect(devices(), word)
        error_type: type[Error] = ComputationFailed
        if "RESOURCE_EXHAUSTED" in words:
            error_type = OutOfDeviceMemory
        elif jax.process_count() > 1 and any(library in words for library in _COLLECTIVES):
            error_type = HostLost
        report = ErrorReport.of(error, self._host, error_type)
        words = report.message
        if computation:
            words = f"the computation {computation!r} failed: {words}"
        if error_type is OutOfDeviceMemory:
            words = f"{words.removesuffix('.')}. {_NO_ROOM}"
        return msgspec.structs.replace(report, message=words)

    def of_stopped_gang(self, report: ErrorReport) -> ErrorReport:
        """The error of gang computations that come after one that failed on this host."""
        words = f"host {self._host} stopped, as others may go on where it failed: {report.message}"
        return ErrorReport.of(HostLost(words), self._host)

    def settled(self, value: Value) -> ErrorReport | None:
        """Wait until a made value is ready, and return its error."""
        array = value.payload
        if array is None:
            return value.error or self.unmade
        try:
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - a computation may fail with anything
            if is_donated(array, error):
                return self.deleted
            report = self.report(error, value.maker, partial(local_devices, array))
            value.fail(report, alone=value.is_joint)
            return value.error
        return None


def local_devices(array: jax.Array) -> Collection[jax.Device]:
    """Return the devices of this process on which an array lies."""
    return array.sharding.addressable_devices


def fail(results: Sequence[Value], report: ErrorReport) -> None:
    """Put an error into values that could not be made."""
    for value in results:
        value.fail(report)


def awaited(value: Value) -> Any:
    """Wait for a build or Python call that makes the value; its array, None if there is none."""
    building = value.building
    if building is not None:
        building.wait()
    return value.payload


def is_donated(array: jax.Array, error: Exception) -> bool:
    """Whether waiting for an array failed because a computation has taken it, or is taking it."""
    # JAX looks at the first buffer only, and those on other devices may have been taken before it.
    return array.is_deleted() or _DONATED in str(error)


def is_ready(value: Value) -> bool:
    """Whether a value is made, and its array is ready."""
    array = value.payload
    return array is not None and not array.is_deleted() and array.is_ready()


def is_made(value: Value) -> bool:
    """Whether the op that makes a value has run, with success or not."""
    return value.payload is not None or value.error is not None


def is_pending(value: Value) -> bool:
    """Whether a value is not made, or its array is neither ready nor deleted."""
    array = value.payload
    if array is None:
        return value.error is None
    try:
        return not array.is_deleted() and not array.is_ready()
    except Exception:  # noqa: BLE001 - the execute thread has donated it at this moment
        return False
