"""Makes the ops of a view: each host makes its own part of the results, of shards that it has.

An error of a source belongs to all results that have a shard of it. Other hosts of such a result may have
no shard of that source, and so no error: then it is an error of this host alone, which no gang may read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pw.core.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, Placement
from pw.devices.host.backend import Value, View, ViewSource


class ViewPart(NamedTuple):
    """This host's part of one result of a view."""

    output: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    sources: tuple[tuple[int, tuple[int, ...], bool], ...]
    """Each input with shards in it, the mesh positions of these, and whether every host of the result has some.

    In the order of the inputs, so that all hosts report the same of several errors."""


def view_parts(
    view: Computation, located: Mapping[Placement, tuple[DeviceAddress, ...]], host: str
) -> Iterator[ViewPart]:
    """Yield the parts of a view's results that lie on `host`.

    Args:
        view: the computation.
        located: the physical devices of the placement of each result.
        host: the name of this host.
    """
    for output, (spec, row) in enumerate(zip(view.outputs, view.shards, strict=True)):
        devices = located[spec.placement]
        hosts = {device.host for device in devices}
        if host not in hosts:
            continue
        here: dict[int, list[int]] = {}
        on: dict[int, set[str]] = {}
        for position, (device, (source, _)) in enumerate(zip(devices, row, strict=True)):
            on.setdefault(source, set()).add(device.host)
            if device.host == host:
                here.setdefault(source, []).append(position)
        sources = [(source, tuple(here[source]), on[source] == hosts) for source in sorted(here)]
        yield ViewPart(output, spec, devices, tuple(sources))


def view_op(part: ViewPart, args: Sequence[Value], result: Value) -> View:
    """Return the op that makes a part of a result, and note which buffers the values share."""
    result.shared = True
    result.buffers = {}
    for source, positions, _ in part.sources:
        value = args[source]
        value.shared = True
        if value.buffers is None:
            value.buffers = {}
        for position in positions:
            ordinal = part.devices[position].ordinal
            result.buffers[ordinal] = value.buffers.setdefault(ordinal, object())
    sources = tuple(
        [ViewSource(args[source], positions, all_) for source, positions, all_ in part.sources]
    )
    return View(sources, result, part.spec, part.devices)
