"""Virtual devices, and how users name what lies on them.

A client asks for *slices* of virtual devices; which physical ones stand behind them is the resource
manager's affair and may change. A `Mesh` gives the devices of one slice a shape and names for its axes,
a `NamedSharding` says which axes split which dimension of an array. Both mirror their namesakes in
`jax.sharding`, because everything a user knows about those holds here too; the core's `Sharding` and
`Placement` are the same facts in numbers, fit for the wire.

A mesh never spans slices: one computation is one gang, launched together on one island. Programs that
use several slices or islands are made of several computations, between which values move by themselves.
"""

from __future__ import annotations

import collections
import math
import weakref
from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pw.client.arrays import jaxtype
from pw.client.arrays.jaxtype import outside_traces
from pw.client.arrays.recent import Recent
from pw.client.arrays.transformed import traces_for_hosts
from pw.client.connection import current
from pw.client.show import notebook
from pw.core.errors import Disconnected, PlacementError, ShardingError
from pw.core.sharding import Placement, Sharding

__all__ = [
    "Mesh",
    "NamedSharding",
    "PartitionSpec",
    "Slice",
    "VirtualDevice",
    "VirtualDeviceSet",
    "make_virtual_device_set",
]


class Slice:
    """Virtual devices that one island lends to this client; given back when nothing refers to them."""

    __slots__ = (
        "__weakref__",
        "compiled",
        "constants",
        "id",
        "island",
        "kind",
        "platform",
        "runtime",
        "size",
        "types",
    )

    def __init__(self, session: Any, handle: Any) -> None:
        self.runtime = session
        self.id: int = handle.slice
        self.island: str = handle.island
        self.platform: str = handle.platform
        self.kind: str | None = handle.kind
        self.size: int = handle.size
        self.compiled = Recent()
        """Operators and moves for these devices: what pw compiles unasked is forgotten with them, or before."""
        self.constants: dict[Any, Any] = {}
        """What functions closed over and lies here, while it does (see `pw.client.trace.export`)."""
        self.types: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()
        """The types of arrays that lie here, interned (see `pw.client.arrays.signature`)."""

    @property
    def devices(self) -> tuple[VirtualDevice, ...]:
        """The slice's devices, in order."""
        return tuple(VirtualDevice(self, index) for index in range(self.size))

    @property
    def tpus(self) -> tuple[VirtualDevice, ...]:
        """The slice's devices, under the paper's name."""
        return self.devices

    def __len__(self) -> int:
        return self.size

    def __repr__(self) -> str:
        return f"Slice(island={self.island!r}, devices={self.size}, platform={self.platform!r})"

    def _repr_html_(self) -> str:
        return notebook.slice_html(self)

    def __del__(self) -> None:
        session = getattr(self, "runtime", None)
        if session is not None and session.alive:
            session.release_slice(self.id)


class VirtualDevice:
    """One device of a slice; computations are placed on it without knowing where it is."""

    __slots__ = ("index", "slice")

    def __init__(self, slice: Slice, index: int) -> None:
        self.slice = slice
        self.index = index

    @property
    def platform(self) -> str:
        """Kind of backend: "cpu", "cuda" or "tpu"."""
        return self.slice.platform

    @property
    def island(self) -> str:
        """The island that the device is on."""
        return self.slice.island

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VirtualDevice):
            return NotImplemented
        return self.slice is other.slice and self.index == other.index

    def __hash__(self) -> int:
        return hash((id(self.slice), self.index))

    def __repr__(self) -> str:
        return (
            f"VirtualDevice({self.index} of {self.slice.size}, island={self.island!r}, "
            f"platform={self.platform!r})"
        )

    def _repr_html_(self) -> str:
        return notebook.device_html(self)


class VirtualDeviceSet:
    """The slices a client has asked for, in the paper's words."""

    def __init__(self, session: Any) -> None:
        self._runtime = session
        self._slices: list[Slice] = []

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices added so far."""
        return tuple(self._slices)

    def add_slice(
        self,
        devices: int | None = None,
        kind: str | None = None,
        island: str | None = None,
        topology: Sequence[int] | None = None,
        *,
        tpu_devices: int | None = None,
    ) -> Slice:
        """Ask for virtual devices to place computations on; returns when they are bound.

        Args:
            devices: how many.
            kind: device kind they must have, such as "cpu" or "NVIDIA H100"; any if None.
            island: name of the island they must be on; any if None.
            topology: extent of the interconnect they must span, if that matters.
            tpu_devices: the paper's name for `devices`.

        Raises:
            InsufficientDevices: no island can satisfy the request.
        """
        if (devices is None) == (tpu_devices is None):
            raise TypeError("add_slice takes one number of devices: add_slice(devices=4)")
        asked: Any = tpu_devices if devices is None else devices
        try:
            count = 0 if isinstance(asked, bool) else index(asked)
        except TypeError:
            count = 0
        if count < 1:
            raise ValueError(
                f"a slice has a whole number of devices, at least one; {asked!r} were asked for"
            )
        shape = None if topology is None else tuple(map(index, topology))
        handle = self._runtime.allocate_slice(count, kind, island, shape)
        added = Slice(self._runtime, handle)
        self._slices.append(added)
        return added

    def __repr__(self) -> str:
        return f"VirtualDeviceSet({self._slices!r})"

    def _repr_html_(self) -> str:
        return notebook.slices_html(self._slices)


def make_virtual_device_set() -> VirtualDeviceSet:
    """Begin asking for virtual devices; connects to a cluster if nobody did."""
    return VirtualDeviceSet(current.runtime())


class Mesh:
    """Virtual devices of one slice, in an array with named axes.

    Args:
        devices: array-like of distinct `VirtualDevice`s, of any number of dimensions.
        axis_names: one name for each dimension (a single name for one).

    Raises:
        PlacementError: a device occurs twice, or the devices are of several slices.
    """

    def __init__(self, devices: Any, axis_names: str | Sequence[str]) -> None:
        names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
        grid = np.array(devices, dtype=object)
        flat: list[Any] = list(grid.flat)
        if not flat or not all(isinstance(device, VirtualDevice) for device in flat):
            raise PlacementError(
                "a mesh is made of virtual devices, such as add_slice(devices=4).devices; "
                f"{devices!r} was given"
            )
        if grid.ndim != len(names) or len(set(names)) != len(names):
            raise ShardingError(
                f"a mesh of {grid.ndim} dimensions with shape {grid.shape} needs as many different "
                f"axis names; {names} was given"
            )
        if len(set(flat)) != len(flat):
            raise PlacementError("a device occurs twice in a mesh; every position needs its own")
        slices = {id(device.slice): device.slice for device in flat}
        if len(slices) > 1:
            islands = sorted({part.island for part in slices.values()})
            where = f"the islands {', '.join(islands)}" if len(islands) > 1 else "two slices"
            raise PlacementError(
                f"the devices of a mesh lie on {where}, but a computation is one gang and runs on one "
                "slice of one island. Make one mesh for each slice and a separate computation for each "
                "mesh: values move between computations by themselves"
            )
        self._devices = tuple(flat)
        self._extent: tuple[int, ...] = grid.shape
        self.axis_names = names
        self.slice: Slice = flat[0].slice
        self.placement = Placement(self.slice.id, tuple(device.index for device in flat))
        self._hash = hash((id(self.slice), self.placement, grid.shape, names))

    @property
    def devices(self) -> np.ndarray[Any, Any]:
        """The virtual devices, in the shape of the mesh; read-only."""
        # Not kept: the collector does not see through numpy, and meshes and slices are in cycles.
        grid = np.empty(len(self._devices), dtype=object)
        grid[:] = self._devices
        grid = grid.reshape(self._extent)
        grid.flags.writeable = False
        return grid

    @property
    def shape(self) -> collections.OrderedDict[str, int]:
        """Size of every axis by its name."""
        return collections.OrderedDict(zip(self.axis_names, self._extent, strict=True))

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self._extent)

    @property
    def runtime(self) -> Any:
        """The session that the devices belong to."""
        return self.slice.runtime

    @property
    def abstract_mesh(self) -> jax.sharding.AbstractMesh:
        """The mesh as functions see it while they are traced."""
        if jaxtype.is_shard_map():
            raise ShardingError(
                "jax.shard_map takes its mesh from the pw.jit function that it is called in: leave out "
                "mesh=, or give it mesh.abstract_mesh"
            )
        return jax.sharding.AbstractMesh(self._extent, self.axis_names)

    def __enter__(self) -> NoReturn:
        raise ShardingError(
            "a pw.Mesh is no context; name it where it is used: pw.jit(f, mesh=mesh), or "
            "pw.put(x, sharding=pw.NamedSharding(mesh, P()))"
        )

    def __exit__(self, *exc: object) -> None:
        """Never reached; without it, Python would not call `__enter__`."""

    @property
    def _internal_device_list(self) -> NoReturn:
        """What `jax.sharding.NamedSharding` asks for."""
        raise ShardingError(
            "jax.sharding.NamedSharding is over devices of this process; over a pw.Mesh it is "
            "pw.NamedSharding(mesh, spec)"
        )

    def check_alive(self) -> None:
        """Raise Disconnected, or what ended it, if the session that lent the devices is over."""
        if not self.runtime.alive:
            if (ended := self.runtime.ended) is not None:
                raise ended
            raise Disconnected(
                "the session that these virtual devices belong to is closed; connect again and make "
                "new ones with pw.make_virtual_device_set()"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return self is other or (
            self.slice is other.slice
            and self.placement == other.placement
            and self.axis_names == other.axis_names
            and self._extent == other._extent
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Mesh({axes}, island={self.slice.island!r}, platform={self.slice.platform!r})"

    def _repr_html_(self) -> str:
        return notebook.mesh_html(self)


class NamedSharding(jax.sharding.Sharding):
    """How an array is split over a mesh: the axes that split each of its dimensions.

    JAX takes it for one of its own where a function is traced for the hosts, as in
    `jax.lax.with_sharding_constraint`; until it is lowered, when `abstract` stands for it.

    Args:
        mesh: the virtual devices.
        spec: for each dimension a mesh axis, several of them in a tuple, or None.

    Raises:
        ShardingError: the spec names an axis that the mesh does not have, or is no partition spec.
    """

    def __init__(self, mesh: Mesh, spec: PartitionSpec) -> None:
        if not isinstance(mesh, Mesh):
            raise ShardingError(f"a sharding needs a pw.Mesh of virtual devices, not {mesh!r}")
        super().__init__()
        self.mesh = mesh
        self.core = Sharding(mesh.axis_names, mesh._extent, _axes_of(spec))
        self.core.check((math.prod(mesh._extent),) * len(self.core.spec))
        self._hash = hash((mesh, self.core))

    @classmethod
    def replicated(cls, mesh: Mesh) -> NamedSharding:
        """A full copy on every device."""
        return cls(mesh, PartitionSpec())

    @property
    def spec(self) -> PartitionSpec:
        """The axes that split each dimension, as JAX writes them."""
        entries: list[Any] = []
        for axes in self.core.spec:
            entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
        return PartitionSpec(*entries)

    @property
    def placement(self) -> Placement:
        """The devices at the positions of the mesh."""
        return self.mesh.placement

    # --- what JAX asks of a sharding ------------------------------------------------------------------

    memory_kind = None

    @property
    def _is_concrete(self) -> bool:
        """Asked before an array is made like another, as by `jnp.zeros_like`."""
        if outside_traces():
            raise jaxtype.not_here(f"an array on {self.mesh!r}")
        return False

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has a full copy."""
        return not any(self.core.spec)

    @property
    def _device_assignment(self) -> NoReturn:
        raise ShardingError(
            f"{self} is over virtual devices, to which jax cannot send or compute anything from this process: "
            "pw.put(x, sharding=sharding) puts values there, and pw.jit(f, mesh=mesh) computes there"
        )

    _internal_device_list = device_set = is_fully_addressable = _device_assignment

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.mesh.size

    def check_compatible_aval(self, aval_shape: tuple[int, ...]) -> None:
        """Raise ShardingError unless an array of this shape can lie so, in what is now traced."""
        self.core.check(aval_shape)
        traced_for = traces_for_hosts()
        if traced_for is not None and traced_for != self.mesh:
            raise ShardingError(
                f"a sharding over {self.mesh!r} was given to a computation on {traced_for!r}; all "
                "shardings of one computation are over its own mesh"
            )

    def _to_xla_hlo_sharding(self, num_dimensions: int) -> Any:
        return self.abstract()._to_xla_hlo_sharding(num_dimensions)

    def abstract(self) -> jax.sharding.NamedSharding:
        """The same for tracing: over the abstract mesh."""
        return jax.sharding.NamedSharding(self.mesh.abstract_mesh, self.spec)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self is other or (self.core == other.core and self.mesh == other.mesh)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"NamedSharding({self.mesh!r}, {self.spec})"

    def _repr_html_(self) -> str:
        return notebook.sharding_html(self)


def _axes_of(spec: Any) -> tuple[tuple[str, ...], ...]:
    if not isinstance(spec, PartitionSpec):
        raise ShardingError(f"expected a PartitionSpec such as P('x', None), not {spec!r}")
    if spec.unreduced or spec.reduced:
        raise ShardingError(
            f"{spec} has unreduced or reduced axes, which arrays at rest cannot have"
        )
    axes: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is None:
            axes.append(())
        elif isinstance(entry, str):
            axes.append((entry,))
        elif isinstance(entry, tuple) and all(isinstance(axis, str) for axis in entry):
            axes.append(entry)
        else:
            raise ShardingError(
                f"{entry!r} in {spec} is neither None, a mesh axis, nor a tuple of mesh axes"
            )
    while axes and not axes[-1]:
        axes.pop()
    return tuple(axes)


_defaults: dict[tuple[Any, int], Mesh] = {}


def default_mesh(size: int = 1) -> Mesh:
    """So many devices of the current session, allocated once: where calls run that name none."""
    session = current.runtime()
    mesh = _defaults.get((session, size))
    if mesh is None:
        for other in [known for known in list(_defaults) if not known[0].alive]:
            _defaults.pop(other, None)
        fresh = Mesh(VirtualDeviceSet(session).add_slice(devices=size).devices, ("devices",))
        mesh = _defaults.setdefault((session, size), fresh)
    return mesh


def mesh_of(devices: Any) -> Mesh:
    """The one-axis mesh over `devices` (a slice, one device, or a sequence), axis "devices"."""
    if isinstance(devices, Slice):
        devices = devices.devices
    elif isinstance(devices, VirtualDevice):
        devices = (devices,)
    elif isinstance(devices, Iterable):
        devices = list(devices)
    return Mesh(devices, ("devices",))
