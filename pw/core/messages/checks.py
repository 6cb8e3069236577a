"""Checks messages of other processes before their handlers see them.

Other processes are not trusted: a message may come from any process that may connect. Here stand
the checks that need nothing but the message: how long a name or a list may be, which numbers make sense.
What depends on the state of an actor (whose array it is, how many devices a slice has) is checked by its
handler; specs by `pw.core.programs.spec_checks`. The sender gets an error as its answer if it expects one.

The types of messages bound nothing by themselves: a frame of the transport has up to a million objects.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pw.core.errors import ArgumentError, CheckpointFailed, Error, ErrorReport, ProtocolError
from pw.core.ids import NAME_CHARACTERS
from pw.core.landing import Landing
from pw.core.messages import (
    INLINE_BYTES,
    AllocateSlice,
    Answered,
    Attach,
    Cancel,
    Checkpoint,
    Compile,
    Describe,
    DrainHost,
    Evicted,
    Explain,
    Fetch,
    FileSource,
    GetPlan,
    HostRejected,
    Inquire,
    IslandJoined,
    LinkLost,
    Offer,
    OfferSource,
    RegisterHost,
    RequestFailed,
    Run,
    RunFailed,
    SaveArrays,
    SliceRefused,
    UploadAborted,
    Wait,
)
from pw.core.programs.spec_checks import DEVICES, DIMENSIONS, shortened

VALUES = 1 << 18
"""The most arrays that one message names: arguments and results of a run, inputs of a program."""

VALUE_BYTES = 8 * INLINE_BYTES
"""The largest value that comes with a call."""

ARRAYS = 1 << 16
"""The most arrays in one checkpoint, offer, wait or inquiry."""

HOSTS = 1 << 14
"""The most hosts that one message names."""

PATH_CHARACTERS = 4096
TREE_BYTES = 32 << 20
"""The most that a client may describe of a checkpoint: the answer to `Describe` has room for it."""

ERROR_CHARACTERS = 1 << 20
"""The longest error of a client, its traceback included."""

KEY_CHARACTERS = 4096
"""The longest JAX path of an array in a tree."""

SHARES = (1e-6, 1e6)
"""The least and the largest weight of a client."""


def check_name(what: str, name: str) -> None:
    """Raise ArgumentError if a name is too long, or cannot be printed on one line."""
    if len(name) > NAME_CHARACTERS:
        raise ArgumentError(
            f"{what} {shortened(name, 40)!r} has {len(name)} characters; {NAME_CHARACTERS} are the most"
        )


def check_path(path: str) -> None:
    """Raise CheckpointFailed unless a path can be that of a checkpoint: absolute, in its shortest form."""
    if len(path) > PATH_CHARACTERS or "\0" in path:
        raise CheckpointFailed(f"{shortened(path, 80)!r} is no path for a checkpoint")
    if not path.startswith("/") or os.path.normpath(path) != path or not os.path.basename(path):
        raise CheckpointFailed(
            f"{path!r} is no path for a checkpoint; it takes the absolute path of a directory, without "
            ". and .. in it"
        )


def _check_count(what: str, things: Sequence[Any], most: int) -> None:
    if len(things) > most:
        raise ArgumentError(f"{len(things)} {what} were named at once; {most} are the most")


def _attach(message: Attach) -> None:
    check_name("the name of a client", message.name)
    least, most = SHARES
    if not least <= message.share <= most:  # also if it is NaN
        raise ArgumentError(
            f"a share must be positive, from {least:g} to {most:g}, not {message.share}"
        )


def _allocate_slice(message: AllocateSlice) -> None:
    check_name("the kind of devices", message.kind or "")
    check_name("the island", message.island or "")
    check_name("the island", message.formerly)
    _check_hosts(message.hosts)
    _check_hosts(message.former_hosts)
    _check_count("slices", message.apart, ARRAYS)
    _check_count("dimensions of a topology", message.topology or (), DIMENSIONS)
    sizes = (message.devices, *(message.topology or ()))
    if max(sizes) > DEVICES:
        raise ArgumentError(
            f"a slice has {DEVICES} devices at most, in each dimension and in all, not {max(sizes)}"
        )


def _check_hosts(hosts: Sequence[str]) -> None:
    _check_count("hosts", hosts, HOSTS)
    for host in hosts:
        check_name("the host", host)


def _run(message: Run) -> None:
    _check_count("arguments", message.args, VALUES)
    _check_count("results", message.results, VALUES)
    for arg in message.args:
        if isinstance(arg, bytes) and len(arg) > VALUE_BYTES:
            raise ArgumentError(
                f"a value of {len(arg)} bytes came with a call; {VALUE_BYTES} are the most, and larger "
                "ones are uploaded"
            )


def _upload_aborted(message: UploadAborted) -> None:
    error = message.error
    if sum(map(len, (error.kind, error.where, error.message, error.traceback))) > ERROR_CHARACTERS:
        raise ArgumentError(f"an error has more than {ERROR_CHARACTERS} characters")


def _offer(message: Offer) -> None:
    _check_count("arrays", message.arrays, ARRAYS)
    _check_count("specs", message.specs, ARRAYS)


def _save_arrays(message: SaveArrays) -> None:
    check_path(message.path)
    _check_count("arrays", message.arrays, ARRAYS)
    if len(message.tree) > TREE_BYTES:
        raise ArgumentError(
            f"the description of a checkpoint has {len(message.tree)} bytes; {TREE_BYTES} are the most. Put "
            "large host values on devices"
        )
    for name in message.names:
        if len(name) > KEY_CHARACTERS:
            raise ArgumentError(f"an array of a checkpoint has a path of {len(name)} characters")


def check_source(source: FileSource | OfferSource | None) -> None:
    """Raise CheckpointFailed or ArgumentError unless an array can come from there."""
    if not isinstance(source, FileSource):
        return
    check_path(source.path)
    if len(source.name) > KEY_CHARACTERS:
        raise ArgumentError(f"an array of a checkpoint has a path of {len(source.name)} characters")
    check_name("the checkpoint", source.checkpoint)


def _fetch(message: Fetch) -> None:
    _check_count("devices", message.devices, DEVICES)
    _check_count("shards", message.positions, len(message.devices))
    if len(set(message.positions)) < len(message.positions):
        raise ArgumentError("a shard was asked for twice in one message")
    if message.landing is not None:
        check_landing(message.landing)


_FOLDER = r"(/(?!\.{1,2}/)[^/\0]+)+"
_SOCKET = re.compile(rf"pw-bulk-\d+-[0-9a-f]+|{_FOLDER}/bulk-[0-9a-f]+")
_ENDPOINT = re.compile(rf"ipc://(@pw-chunks-\d+-[0-9a-f]+|{_FOLDER}/chunks-[0-9a-f]+)")
_PLANE = re.compile(r"[0-9a-f]{32}")
"""Where the plane of a client listens, and its number if it listens nowhere (`pw.transport.bulk.plane`)."""


def check_landing(landing: Landing) -> None:
    """Raise ArgumentError if a client's landing would have a host dial anything but a plane of pw.

    A client is dialled on its own machine only: at the sockets of its plane (`pw.transport.bulk.plane`).
    """
    dialled = ((_ENDPOINT, landing.endpoint), (_SOCKET, landing.socket), (_PLANE, landing.plane))
    for form, name in dialled:
        if name and not form.fullmatch(name):
            raise ArgumentError(f"a client cannot have its values sent to {shortened(name)}")
    check_name("the machine of a client", landing.machine)
    if landing.transfer <= 0 or landing.size_bytes < 0 or landing.block < 0:
        raise ArgumentError("a client named a buffer for its values that cannot be")


def _compile(message: Compile) -> None:
    _check_count("devices", message.devices, DEVICES)
    if not message.devices or len(set(message.devices)) < len(message.devices):
        raise ArgumentError("a function is compiled for different devices, at least one")


def _register_host(message: RegisterHost) -> None:
    for what, name in (
        ("the island", message.island),
        ("the platform", message.platform),
        ("the endpoint", message.endpoint),
    ):
        check_name(what, name)
    _check_hosts(message.members)
    if not 0 < message.local_devices <= DEVICES or not 0 <= message.island_hosts <= HOSTS:
        raise ProtocolError(
            f"a host has 1 to {DEVICES} devices and its island up to {HOSTS} hosts, not "
            f"{message.local_devices} and {message.island_hosts}"
        )
    if message.epoch < 0 or len(set(message.members)) < len(message.members):
        raise ProtocolError("a host comes from an epoch that cannot be")


def _island_joined(message: IslandJoined) -> None:
    check_name("the island", message.island)
    check_name("the kind of devices", message.kind)
    if message.memory_bytes is not None and not 0 <= message.memory_bytes < math.inf:
        raise ProtocolError(f"a device cannot have {message.memory_bytes} bytes of memory")


CHECKS: Mapping[type, Callable[[Any], None]] = {
    Attach: _attach,
    AllocateSlice: _allocate_slice,
    Run: _run,
    Offer: _offer,
    SaveArrays: _save_arrays,
    Checkpoint: lambda message: _check_count("arrays", message.arrays, ARRAYS),
    Inquire: lambda message: _check_count("arrays", message.arrays, ARRAYS),
    Cancel: lambda message: _check_count("arrays", message.arrays, VALUES),
    UploadAborted: _upload_aborted,
    Wait: lambda message: _check_count("arrays", message.arrays, ARRAYS),
    Explain: lambda message: _check_hosts(message.hosts),
    LinkLost: lambda message: check_name("the host", message.host),
    DrainHost: lambda message: check_name("the host", message.node),
    GetPlan: lambda message: check_name("the program", message.name),
    Describe: lambda message: check_path(message.path),
    Fetch: _fetch,
    Compile: _compile,
    RegisterHost: _register_host,
    IslandJoined: _island_joined,
}
"""The check of each type of message that has one: it raises an `Error`."""


def objection(message: object) -> ErrorReport | None:
    """Return why a message of another process is refused; None if it is not."""
    check = CHECKS.get(type(message))
    if check is not None:
        try:
            check(message)
        except Error as error:
            return ErrorReport.of(error)
    return None


def refusal(message: object, error: ErrorReport) -> object | None:
    """Return what tells the sender of a message that it is refused; None if it expects no answer."""
    match message:
        case Attach():
            return Evicted(error.message)
        case AllocateSlice():
            return SliceRefused(message.slice, error)
        case Run():
            return RunFailed(message.run, message.results[:VALUES], error)
        case RegisterHost():
            return HostRejected(error)
        case Checkpoint() | SaveArrays() | Inquire():
            return Answered(message.request, error)
    request = getattr(message, "request", None)
    return None if request is None else RequestFailed(request, error)
