"""Makes the ops of a view: each host makes its own part of the results, of shards that it has.

An error of a source belongs to all results that have a shard of it. If every host of a result has shards of
the same sources, all of them find the same error. If not, the result is *uneven*: the hosts tell each other
before any op uses it (`pw.devices.host.outcomes`), or one host might keep from a gang what others bring to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pw.core.programs.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, Placement
from pw.devices.host.backend import View, ViewSource
from pw.devices.host.value import Value


class ViewPart(NamedTuple):
    """This host's part of one result of a view."""

    output: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    sources: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Each input with shards in it, and the mesh positions of each shard in the result and in the input."""
    gang: tuple[str, ...]
    """All hosts of the result, if it is uneven."""


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
        here: dict[int, list[tuple[int, int]]] = {}
        on: dict[str, set[int]] = {}
        for position, (device, (source, there)) in enumerate(zip(devices, row, strict=True)):
            on.setdefault(device.host, set()).add(source)
            if device.host == host:
                here.setdefault(source, []).append((position, there))
        if here:
            sources = tuple([(source, tuple(here[source])) for source in sorted(here)])
            is_uneven = any(some != on[host] for some in on.values())
            yield ViewPart(output, spec, devices, sources, tuple(on) if is_uneven else ())


def view_op(part: ViewPart, args: Sequence[Value], result: Value) -> View:
    """Return the op that makes a part of a result, and note which buffers the values share."""
    result.shared = True
    result.buffers = {}
    for source, shards in part.sources:
        value = args[source]
        value.shared = True
        if value.buffers is None:
            value.buffers = {}
        for position, _ in shards:
            ordinal = part.devices[position].ordinal
            result.buffers[ordinal] = value.buffers.setdefault(ordinal, object())
    sources = tuple([ViewSource(args[source], shards) for source, shards in part.sources])
    return View(sources, result, part.spec, part.devices)
