"""Which virtual devices JAX sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pw.client.arrays.devices import Slice
from pw.client.connection.runtime import Runtime
from pw.core.errors import Error, InsufficientDevices
from pw.core.messages import Status


class Wanted(NamedTuple):
    """The devices that a user asks for; None means all there are."""

    devices: int | None
    """Over all islands."""
    island_count: int | None
    island_names: tuple[str, ...] | None

    @classmethod
    def of(cls, devices: int | None, islands: str, environment: Mapping[str, str]) -> Wanted:
        """Return what options ask for, else `PW_DEVICES` and `PW_ISLANDS`.

        Args:
            devices: over all islands.
            islands: how many, or their names, separated by commas; empty if not given.
            environment: where the variables are.

        Raises:
            Error: a variable is not a positive number.
        """
        if devices is None:
            devices = _number("PW_DEVICES", environment.get("PW_DEVICES", ""))
        islands = islands or environment.get("PW_ISLANDS", "")
        if islands and not islands.isdigit():
            names = tuple(name.strip() for name in islands.split(","))
            return cls(devices, len(names), names)
        return cls(devices, _number("PW_ISLANDS", islands), None)

    def devices_each(self, islands: int) -> int | None:
        """Return how many devices each of so many islands has. Raises Error if they do not divide."""
        if self.devices is None:
            return None
        if self.devices % islands:
            raise Error(f"{self.devices} devices do not divide over {islands} islands")
        return self.devices // islands


def are_slices(environment: Mapping[str, str]) -> bool:
    """Whether JAX sees each island as a slice, as `PW_SLICES=islands` asks for. Raises Error."""
    asked = environment.get("PW_SLICES", "")
    if asked not in ("", "one", "islands"):
        raise Error(f"PW_SLICES must be one or islands, not {asked!r}")
    return asked == "islands"


def allocate(runtime: Runtime, wanted: Wanted) -> list[Slice]:
    """Allocate one slice on each island that is wanted.

    Raises:
        InsufficientDevices: there are not so many.
        Error: the devices do not divide over the islands.
    """
    status = _settled(runtime, wanted)
    counts = {
        island.name: island.devices - island.exclusive for island in status.islands if island.hosts
    }
    names = sorted(counts)
    if wanted.island_names is not None:
        names = list(wanted.island_names)
    elif wanted.island_count is not None:
        names = sorted(sorted(names, key=lambda name: -counts[name])[: wanted.island_count])
        if len(names) < wanted.island_count:
            raise InsufficientDevices(
                f"{wanted.island_count} islands are asked for, and there are {len(counts)}"
            )
    if missing := [name for name in names if name not in counts]:
        raise InsufficientDevices(
            f"there is no island {missing[0]!r}; there are {', '.join(sorted(counts)) or 'none'}"
        )
    if not names:
        raise InsufficientDevices("the cluster has no island; start workers (see pw status)")
    each = wanted.devices_each(len(names))
    try:
        return [
            Slice(runtime, runtime.allocate_slice(each or counts[name], None, name, None))
            for name in names
        ]
    except InsufficientDevices as error:
        if each is None or len(names) == 1:
            raise
        raise InsufficientDevices(
            f"{wanted.devices} devices are asked for, {each} on each of {len(names)} islands: {error}"
        ) from None


def _settled(runtime: Runtime, wanted: Wanted) -> Status:
    """Return the state of the cluster once the islands that are wanted have formed.

    The cluster starts, its controller has been started again and no host has come back yet, or an
    island forms again after a loss.
    """
    status = runtime.ask.status()
    if status.awaited_islands or not any(island.hosts for island in status.islands):
        ready = sum(island.state == "ready" for island in status.islands)
        all_islands = max(1, ready + status.awaited_islands)
        have_come = _await(
            runtime, wanted.island_names or (None,) * (wanted.island_count or all_islands)
        )
        status = runtime.ask.status()
        if not have_come:
            return status
    refused: set[str] = set()
    while away := {
        island.name
        for island in status.islands
        if island.state != "ready"
        and not island.is_late
        and island.name not in refused
        and (wanted.island_names is None or island.name in wanted.island_names)
    }:
        refused |= {name for name in sorted(away) if not _await(runtime, (name,))}
        status = runtime.ask.status()
    return status


def _await(runtime: Runtime, names: Sequence[str | None]) -> bool:
    """Wait for different islands, as each request for devices does. Returns False if some have not come.

    A name of None stands for any island.
    """
    numbers: list[int] = []
    try:
        for name in names:
            numbers.append(runtime.allocate_slice(1, None, name, None, apart=tuple(numbers)).slice)
    except InsufficientDevices:
        return False  # those that are there are counted now
    finally:
        for number in numbers:
            runtime.release_slice(number)
    return True


def _number(name: str, text: str) -> int | None:
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise Error(f"{name} must be a number of 1 or more, not {text!r}")
    return int(text)
