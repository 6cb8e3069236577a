"""Checks of messages that the types of their fields cannot express (`pw.core.messages.bounds`).

Here stand the checks that need nothing but the message. What depends on the state of an actor (whose
array it is, how many devices a slice has) is checked by its handler; specs by
`pw.core.programs.spec_checks`. The sender gets an error as its answer if it expects one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, get_type_hints

import msgspec

from pw.core import messages as msg
from pw.core.coordinates import check_coordinates
from pw.core.errors import ArgumentError, CheckpointFailed, Error, ErrorReport, ProtocolError
from pw.core.landing import Landing
from pw.core.programs.spec_checks import shortened

ERROR_CHARACTERS = 1 << 20
"""Characters of the longest error of a client, its traceback included."""


def check_path(path: str) -> None:
    """Raise CheckpointFailed unless a path can be that of a checkpoint: absolute, in its shortest form."""
    if (
        not path.startswith("/")
        or "\0" in path
        or os.path.normpath(path) != path
        or not os.path.basename(path)
    ):
        raise CheckpointFailed(
            f"{shortened(path)!r} is no path for a checkpoint; it takes the absolute path of a directory, "
            "without . and .. in it"
        )


def check_source(source: msg.FileSource | msg.OfferSource | None) -> None:
    """Raise CheckpointFailed unless an array can come from there."""
    if isinstance(source, msg.FileSource):
        check_path(source.path)


def _upload_aborted(message: msg.UploadAborted) -> None:
    error = message.error
    if sum(map(len, (error.kind, error.where, error.message, error.traceback))) > ERROR_CHARACTERS:
        raise ArgumentError(f"an error has more than {ERROR_CHARACTERS} characters")


def _fetch(message: msg.Fetch) -> None:
    if len(message.positions) > len(message.devices):
        raise ArgumentError("more shards were asked for than there are devices")
    if len(set(message.positions)) < len(message.positions):
        raise ArgumentError("a shard was asked for twice in one message")
    if message.landing is not None:
        check_landing(message.landing)


_FOLDER = r"(/(?!\.{1,2}/)[^/\0]+)+"
_SOCKET = re.compile(rf"pw-bulk-\d+-[0-9a-f]+|{_FOLDER}/bulk-[0-9a-f]+")
_ENDPOINT = re.compile(rf"ipc://(@pw-chunks-\d+-[0-9a-f]+|{_FOLDER}/chunks-[0-9a-f]+)")
_PLANE = re.compile(r"[0-9a-f]{32}")
"""Patterns of where the plane of a client listens, and of its number if it listens nowhere
(`pw.transport.bulk.plane`)."""


def check_landing(landing: Landing) -> None:
    """Raise ArgumentError if a client's landing would have a host dial anything but a plane of pw.

    A client is dialled on its own machine only: at the sockets of its plane (`pw.transport.bulk.plane`).
    """
    dialled = ((_ENDPOINT, landing.endpoint), (_SOCKET, landing.socket), (_PLANE, landing.plane))
    for form, name in dialled:
        if name and not form.fullmatch(name):
            raise ArgumentError(f"a client cannot have its values sent to {shortened(name)}")


def _compile(message: msg.Compile) -> None:
    if not message.devices or len(set(message.devices)) < len(message.devices):
        raise ArgumentError("a function is compiled for different devices, at least one")


def _register_host(message: msg.RegisterHost) -> None:
    if len(set(message.members)) < len(message.members):
        raise ProtocolError("a host comes from an epoch that cannot be")
    check_coordinates(message.coords, message.wraps, message.local_devices)


def _allocate_slice(message: msg.AllocateSlice) -> None:
    topology = message.topology
    if topology is not None and (
        min(topology, default=0) < 1 or math.prod(topology) != message.devices
    ):
        raise ArgumentError(
            f"a slice of {message.devices} devices cannot have the topology {shortened(str(topology))}"
        )
    if message.like and message.memory_bytes:
        raise ArgumentError("a slice on the devices of another one has no memory of its own")


CHECKS: Mapping[type, Callable[[Any], None]] = {
    msg.SaveArrays: lambda message: check_path(message.path),
    msg.UploadAborted: _upload_aborted,
    msg.Describe: lambda message: check_path(message.path),
    msg.Fetch: _fetch,
    msg.Compile: _compile,
    msg.RegisterHost: _register_host,
    msg.AllocateSlice: _allocate_slice,
}
"""Check of each type of message that has one: it raises an `Error`."""


def objection(message: object) -> ErrorReport | None:
    """Return why a message of another process is refused; None if it is not."""
    check = CHECKS.get(type(message))
    if check is not None:
        try:
            check(message)
        except Error as error:
            return ErrorReport.of(error)
    return None


_WITHIN = (msg.Run, msg.LeasedLaunch, msg.Fetch)
"""Messages that a session cannot make too large: programs and slices are checked before."""


@cache
def has_bounds(kind: type) -> bool:
    """Whether a client's message of this type may be beyond its bounds."""
    hints = get_type_hints(kind, include_extras=True).values()
    return kind not in _WITHIN and any("Meta(" in repr(hint) for hint in hints)


def beyond_bounds(message: Any) -> ErrorReport | None:
    """Return why a client may not send a message, which would not decode; None if it may."""
    kind: type[msgspec.Struct] = type(message)
    if has_bounds(kind):
        try:
            msgspec.convert((kind.__struct_config__.tag, *msgspec.structs.astuple(message)), kind)
        except msgspec.ValidationError as error:
            words, _, path = str(error).partition(" - at `$[")
            field = kind.__struct_fields__[int(path.partition("]")[0]) - 1]
            return ErrorReport.of(ArgumentError(f"`{field}` is out of bounds: {words.lower()}"))
    return None


def refusal(message: object, error: ErrorReport) -> object | None:
    """Return what tells the sender of a message that it is refused; None if it expects no answer."""
    match message:
        case msg.Attach():
            return msg.Evicted(error.message, error=error)
        case msg.AllocateSlice():
            return msg.SliceRefused(message.slice, error)
        case msg.RegisterHost():
            return msg.HostRejected(error)
        case msg.Checkpoint() | msg.SaveArrays() | msg.Inquire():
            return msg.Answered(message.request, error)
    request = getattr(message, "request", None)
    return None if request is None else msg.RequestFailed(request, error)
