"""Between clients and the hosts of their devices: compiling before a program is registered, and calls of
functions in the client's process."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pw.core.landing import Landing
from pw.core.messages.base import ClientToStore, ControllerToStore, HostToController, HostToSession
from pw.core.messages.bounds import Devices
from pw.core.packing import ArrayType
from pw.core.programs.stablehlo import Facts
from pw.core.sharding import DeviceAddress


class Detail(StrEnum):
    """Amount of detail that a client wants about an executable."""

    FACTS = "facts"
    TEXT = "text"
    COSTS = "costs"


class Compile(ClientToStore, frozen=True, tag=150):
    """ClientSession to ObjectStore: compile a StableHLO artifact for these devices, and describe it.

    All hosts of the devices get the message, because some platforms compile together; the client
    uses the first answer. The host keeps the executable for a while, so that a program which is
    installed soon after shares it.
    """

    request: int
    artifact: bytes
    """Encoded `Stablehlo`."""
    devices: Devices
    island: str
    epoch: int
    detail: Detail = Detail.FACTS


class Compiled(HostToSession, frozen=True, tag=151):
    """ObjectStore to ClientSession: the executable is there. `RequestFailed` says that it is not."""

    request: int
    facts: Facts | None = None
    text: str = ""
    costs: dict[str, float] = msgspec.field(default_factory=dict)


class CompileAhead(ControllerToStore, frozen=True, tag=280):
    """Controller to ObjectStore: compile a StableHLO artifact for a client that is to move to these devices.

    All hosts of the devices get the message. Each answers with `CompiledAhead` and keeps the executable
    for a while, so that the client's programs share it when they are installed there.
    """

    client: int
    request: int
    artifact: bytes
    """Encoded `Stablehlo`."""
    devices: tuple[DeviceAddress, ...]
    island: str
    epoch: int


class CompiledAhead(HostToController, frozen=True, tag=281):
    """ObjectStore to Controller: a compilation ahead has ended, with an executable or without one."""

    request: int


class CallClient(HostToSession, frozen=True, tag=152):
    """ObjectStore to ClientSession: a computation calls a function in the client's process.

    The host's part of the computation waits until a `CallReturned` comes, or the client is lost.
    """

    call: int
    artifact: bytes
    """SHA-256 of the code of the computation."""
    index: int
    """Index of the function among the callbacks of the artifact."""
    operands: tuple[ArrayType, ...]
    data: bytes | None
    """Packed operands; None if they come over the bulk plane, to the landing of a `CallLanding`."""


class CallReturned(ClientToStore, frozen=True, tag=153):
    """ClientSession to ObjectStore: the function has returned, or raised."""

    call: int
    results: tuple[ArrayType, ...] = ()
    data: bytes | None = b""
    """Packed results; None if they come over the bulk plane, to the landing of a `CallLanding`."""
    error: str = ""
    """Error that the function raised, with its traceback."""


class CallLanding(ClientToStore, HostToSession, frozen=True, tag=154):
    """ObjectStore and ClientSession to each other: push what belongs to this call to this landing."""

    call: int
    landing: Landing
