"""Compiling before a program is registered: between clients and the hosts of their devices."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pw.core.messages.base import Base
from pw.core.sharding import DeviceAddress
from pw.core.stablehlo import Facts


class Detail(StrEnum):
    """What a client wants to know of an executable."""

    FACTS = "facts"
    TEXT = "text"
    COSTS = "costs"


class Compile(Base, frozen=True, tag=150):
    """ClientSession to ObjectStore: compile a StableHLO artifact for these devices, and describe it.

    All hosts of the devices get the message, because some platforms compile together; the client
    uses the first answer. The host keeps the executable for a while, so that a program which is
    installed soon after shares it.
    """

    request: int
    artifact: bytes
    """A `Stablehlo`, encoded."""
    devices: tuple[DeviceAddress, ...]
    island: str
    epoch: int
    detail: Detail = Detail.FACTS


class Compiled(Base, frozen=True, tag=151):
    """ObjectStore to ClientSession: the executable is there. `RequestFailed` says that it is not."""

    request: int
    facts: Facts | None = None
    text: str = ""
    costs: dict[str, float] = msgspec.field(default_factory=dict)
