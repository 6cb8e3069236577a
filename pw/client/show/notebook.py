"""What a notebook shows of arrays, meshes, devices and clusters: small tables, made at once.

A notebook asks for the text of an object as well as for its HTML. The text of an array is its value, which
may be far away or not be there yet; so there an array answers both from here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from pw.client.show.tables import Table, facts, html
from pw.core.errors import Error

if TYPE_CHECKING:
    from pw.client.arrays.array import Array
    from pw.client.arrays.mesh import Mesh, NamedSharding, Slice, VirtualDevice
    from pw.client.connection.cluster import LocalCluster

SMALL = 1000
"""Elements of a value that is shown: as many as numpy prints without leaving some out."""

LOOK_S = 0.1
"""Whether an array exists is asked of its hosts; so long the answer may take before it is not known."""


def is_notebook() -> bool:
    """Whether what is displayed here goes to a notebook: this process is the kernel of one."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


# --- arrays ------------------------------------------------------------------------------------------


def array_html(array: Array) -> str:
    """An array: what it is, how it lies, whether it exists; its value if that is small and here."""
    return facts("pw.Array", _known_of(array))


def array_bundle(array: Array) -> dict[str, str]:
    """What a notebook shows, text and HTML; nothing elsewhere, where the text is the value."""
    if not is_notebook():
        return {}
    known = _known_of(array)
    text = ", ".join(f"{name}={value}" for name, value in known if name != "value")
    return {"text/plain": f"<pw.Array: {text}>", "text/html": facts("pw.Array", known)}


def _known_of(array: Array) -> list[tuple[str, Any]]:
    sharding = array.sharding
    state, value = _state_of(array)
    known: list[tuple[str, Any]] = [
        ("shape", array.shape),
        ("dtype", array.dtype),
        ("sharding", _split(sharding)),
        ("state", state),
        ("on", _where(sharding.mesh)),
    ]
    return known if value is None else [*known, ("value", value)]


def _state_of(array: Array) -> tuple[str, str | None]:
    """Whether it exists, and its value if that is small, as far as it is known in a moment."""
    try:
        array._check_usable()
        is_small = array.size <= SMALL
        future: Future[Any] = array.start_fetch() if is_small else array.start_wait()
    except Error as error:
        return f"gone: {error}", None
    if not wait([future], LOOK_S).done:
        return "not known yet: it is being computed, or on its way", None
    if (error_found := future.exception()) is not None:
        return f"failed: {type(error_found).__name__}: {error_found}", None
    return "ready", np.array2string(future.result(), separator=", ") if is_small else None


def _split(sharding: NamedSharding) -> str:
    return f"{sharding.spec}" if any(sharding.core.spec) else f"{sharding.spec}: replicated"


# --- devices -----------------------------------------------------------------------------------------


def mesh_html(mesh: Mesh) -> str:
    """A mesh: its axes, and where it is."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return facts("pw.Mesh", [("axes", axes), ("devices", mesh.size), ("on", _where(mesh))])


def sharding_html(sharding: NamedSharding) -> str:
    """A sharding: what splits which dimension, over which mesh."""
    axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
    known = [("spec", _split(sharding)), ("mesh", axes), ("on", _where(sharding.mesh))]
    return facts("pw.NamedSharding", known)


def slice_html(part: Slice) -> str:
    """A slice of virtual devices."""
    known = [("island", part.island), ("devices", part.size), ("platform", part.platform)]
    return facts("Slice", [*known, *([("kind", part.kind)] if part.kind else [])])


def device_html(device: VirtualDevice) -> str:
    """One virtual device."""
    known = [("island", device.island), ("platform", device.platform)]
    return facts("VirtualDevice", [("device", f"{device.index} of {device.slice.size}"), *known])


def slices_html(slices: Sequence[Slice]) -> str:
    """The slices that were asked for together."""
    rows = tuple((part.island, part.size, part.platform, part.kind or "") for part in slices)
    return html("", [Table("Slices", ("island", "devices", "platform", "kind"), rows)])


def _where(mesh: Mesh) -> str:
    devices = f"{mesh.size} device{'' if mesh.size == 1 else 's'}"
    return f"{devices} of island {mesh.slice.island} ({mesh.slice.platform})"


# --- clusters ----------------------------------------------------------------------------------------


def cluster_html(cluster: LocalCluster) -> str:
    """A local cluster: its processes, as this one sees them."""
    rows = tuple((host.name, host.pid, _running(host.exit_code())) for host in cluster.hosts)
    table = Table("Hosts", ("host", "pid", "state"), rows)
    return html(f"{cluster!r}", [table])


def _running(exit_code: int | None) -> str:
    return "running" if exit_code is None else f"ended with exit code {exit_code}"
