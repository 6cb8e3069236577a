"""Which virtual devices JAX sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pw.client.arrays.devices import Slice
from pw.client.connection.runtime import Runtime
from pw.core.errors import Error, InsufficientDevices


def allocate(
    runtime: Runtime,
    devices: int | None,
    islands: int | Sequence[str] | None,
    environment: Mapping[str, str],
) -> list[Slice]:
    """Allocate one slice on each island that is wanted.

    Args:
        runtime: the session.
        devices: how many devices over all islands; None for `PW_DEVICES`, else all.
        islands: how many islands, or their names; None for `PW_ISLANDS`, else all.
        environment: where the variables are.

    Raises:
        InsufficientDevices: there are not so many.
        Error: a variable is not a positive number, or the devices do not divide over the islands.
    """
    if devices is None:
        devices = _number(environment, "PW_DEVICES")
    if islands is None:
        text = environment.get("PW_ISLANDS", "")
        islands = (
            text.split(",") if text and not text.isdigit() else _number(environment, "PW_ISLANDS")
        )
    known = {
        island.island: sum(host.devices for host in island.hosts)
        for island in runtime.ask.status().islands
        if island.hosts
    }
    if isinstance(islands, int):
        names = sorted(known, key=lambda name: (-known[name], name))[:islands]
        if len(names) < islands:
            raise InsufficientDevices(
                f"{islands} islands are asked for, and there are {len(known)}"
            )
        names.sort()
    else:
        names = sorted(known) if islands is None else list(islands)
    if missing := [name for name in names if name not in known]:
        raise InsufficientDevices(
            f"there is no island {missing[0]!r}; there are {', '.join(sorted(known)) or 'none'}"
        )
    if not names:
        raise InsufficientDevices("the cluster has no island; start workers (see pw status)")
    if devices is None:
        counts = [known[name] for name in names]
    elif devices % len(names):
        raise Error(f"{devices} devices do not divide over {len(names)} islands")
    else:
        counts = [devices // len(names)] * len(names)
    return [
        Slice(runtime, runtime.allocate_slice(count, None, name, None))
        for name, count in zip(names, counts, strict=True)
    ]


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    if not text:
        return None
    if not text.isdigit() or int(text) < 1:
        raise Error(f"{name} must be a number of 1 or more, not {text!r}")
    return int(text)
