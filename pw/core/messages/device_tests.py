"""The test of devices: a client asks for it, hosts run it, and say which of their devices are sick."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from pw.core.messages.base import (
    ClientToController,
    ControllerToSession,
    ControllerToStore,
    HostToController,
    Local,
)
from pw.core.messages.bounds import Name
from pw.core.programs.spec_checks import DEVICES

WORDS = 400
"""Number of characters in which a host says what is wrong with a device, at most."""

Words = Annotated[str, msgspec.Meta(max_length=WORDS)]
"""What is wrong with a device."""

Ordinal = Annotated[int, msgspec.Meta(ge=0, le=DEVICES - 1)]
"""Number of a device on its host."""

Rate = Annotated[float, msgspec.Meta(ge=0)]
"""Amount of anything per second."""


class DeviceOutcome(StrEnum):
    """DeviceOutcome of the test of a device."""

    OK = "ok"
    FAILED = "failed"
    """Its results had wrong bits, or it raised an error."""
    UNTESTED = "untested"
    """The test did not come to an end, which says nothing about the device."""


class DeviceTest(msgspec.Struct, frozen=True, array_like=True):
    """The test of one device, as its host has run it."""

    device: Ordinal
    outcome: DeviceOutcome
    words: Words = ""
    """What was wrong, or why there was no test; empty if the device is well."""
    flop_per_s: Rate = 0.0
    """Additions and multiplications of the matrix product per second."""
    read_bytes_per_s: Rate = 0.0
    """Bytes that the sum has read per second."""
    copy_bytes_per_s: Rate = 0.0
    """Bytes that the copy has read and written per second."""


class SickState(StrEnum):
    """State of a device that is sick, or may be."""

    SUSPECT = "suspect"
    """An error named the device, and no test of it has ended since."""
    FAILED = "failed"
    """The last test of the device failed."""


class SickDevice(msgspec.Struct, frozen=True, array_like=True):
    """A device of a host that is sick, or may be."""

    device: Ordinal
    state: SickState
    words: Words = ""
    """What is wrong. It names nothing that belongs to a client."""


class TestDevices(ClientToController, frozen=True, tag=251):
    """ClientSession to Controller: test the devices of all islands that are ready, or of one."""

    request: int
    island: Name = ""
    """Name of the island; empty for all."""


class TestHost(ControllerToStore, frozen=True, tag=252):
    """Controller to ObjectStore: test all devices of this host."""

    request: int
    """Number of the question; 0 if the controller wants no answer."""
    sick: tuple[SickDevice, ...] = ()
    """Devices that an earlier incarnation of the host said to be sick."""


class HostTested(HostToController, frozen=True, tag=253):
    """ObjectStore to Controller: the tests of all devices of this host."""

    request: int
    devices: Annotated[tuple[DeviceTest, ...], msgspec.Meta(max_length=DEVICES)]


class HostDevices(HostToController, frozen=True, tag=254):
    """ObjectStore to Controller: all devices of this host that are suspect or have failed.

    The host sends it when that changes, and to a controller that it meets again.
    """

    sick: Annotated[tuple[SickDevice, ...], msgspec.Meta(max_length=DEVICES)]


class TestRow(msgspec.Struct, frozen=True, array_like=True):
    """The test of one device of the cluster."""

    island: str
    host: str
    test: DeviceTest


class DevicesTested(ControllerToSession, frozen=True, tag=255):
    """Controller to ClientSession: the tests of all devices that were to be tested."""

    request: int
    rows: tuple[TestRow, ...]
    skipped: tuple[str, ...] = ()
    """Hosts without a place in a ready island, whose devices are not open."""


class DevicesFailed(Local, frozen=True, tag=261):
    """Controller to ResourceManager (local): all devices of this host that have failed their test.

    It is sent when that changes. A spare takes the host's place, or its island goes on without the devices.
    """

    node: str
    devices: tuple[SickDevice, ...]


class ReplaceHost(Local, frozen=True, tag=256):
    """IslandScheduler to ResourceManager (local): drain this host if a spare can take its place."""

    node: str
    reason: str
    """Words for what is wrong with it, behind «the host»."""
