"""`jax.Array`s on virtual devices become `pw.Array`s, and back: no bytes move.

JAX's arrays belong to the session of its gateway, pw's arrays to the session of this process. Each gets
arrays of its own, which are views of the other's (`pw.sched.control.handovers`): they are deleted, donated
and checkpointed apart. The gateway is asked by plugin programs (`pw.gateway.plugins`). For each slice of the
gateway this process has one that is bound to the same physical devices.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from threading import RLock, Thread
from typing import Any

import jax
import numpy as np
from jax.extend.ifrt_programs import ifrt_programs

from pw.client.arrays.array import Array
from pw.client.arrays.devices import Slice, VirtualDevice
from pw.client.arrays.joined import JoinedArray
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType, is_key
from pw.client.connection import current, jax_backend
from pw.core.errors import ArrayDeleted, CheckpointFailed, Error, PlacementError, ShardingError
from pw.core.jax_private.arrays import devices_of, result_handlers
from pw.core.jax_private.releases import shards_by_device
from pw.core.messages import OFFER_TOKEN_BYTES

SHARDINGS_KEPT = 4096


def run_plugin(client: Any, name: str, args: Sequence[Any] = (), **asked: Any) -> Any:
    """Run a program of the gateway whose client this is; all arguments have as many shards."""
    if args:
        asked["devices"] = {"device_ids": [device.id for device in args[0].sharding.device_set]}
    program = ifrt_programs.make_plugin_program(json.dumps({name: asked}))
    options = ifrt_programs.make_plugin_compile_options()
    executable = client.compile_ifrt_program(program, options)
    return executable.execute_sharded(args, with_tokens=True)


class Front:
    """JAX's virtual devices, and this process's slices on the same physical devices.

    Args:
        client: JAX's client of the gateway.
        session: the session of this process.

    Raises:
        Error: the session is connected to another cluster.
    """

    def __init__(self, client: Any, session: Any) -> None:
        self.client = client
        self.session = session
        self._devices: dict[int, list[Any]] = {}
        """JAX's devices by the numbers of the gateway's slices."""
        for device in client.devices():
            self._devices.setdefault(device.pw_slice, []).append(device)
        there = client.devices()[0].pw_cluster
        if there not in (session.address, session.endpoint):
            raise Error(
                f"this process is connected to {session.address or 'an embedded cluster'}, and JAX's devices "
                f"belong to {there or 'one that other processes cannot reach'}; call pw.disconnect(), and "
                "then pw.connect() without an address"
            )
        self._slices: dict[int, Slice] = {}
        self._numbers: dict[int, int] = {}
        """The gateway's slices by those of this process."""
        self._shardings: dict[Any, OwnSharding] = {}
        """The shardings of pw by those of JAX, with the shape of the array where it has a part in them."""
        self._originals: dict[OwnSharding, Any] = {}
        """The shardings of JAX by those of pw."""

    def slice(self, number: int) -> Slice:
        """Return this process's slice on the devices of a slice of the gateway."""
        own = self._slices.get(number)
        if own is None:
            bound = self.session.allocate_slice(len(self._devices[number]), like=number)
            own = self._slices[number] = Slice(self.session, bound)
            self._numbers[own.id] = number
        return own

    def devices_of(self, slice_: Slice) -> Sequence[VirtualDevice]:
        """Return the devices of this process's slices that are JAX's and those of another slice.

        Raises PlacementError if JAX does not have them all.
        """
        here = {
            address: device
            for number in self._devices
            for own in (self.slice(number),)
            for address, device in zip(self.session.devices(own.id), own.devices, strict=True)
        }
        addresses = self.session.devices(slice_.id)
        if not all(address in here for address in addresses):
            raise PlacementError(
                "the arrays lie on devices that JAX does not have here; say where they are to go: "
                "pw.jax.lookup(name, like=sharding), with a sharding over jax.devices()"
            )
        return [here[address] for address in addresses]

    # --- shardings ------------------------------------------------------------------------------------

    def from_jax(self, sharding: Any, shape: tuple[int, ...]) -> OwnSharding:
        """Return the sharding of pw with the same shards. Raises ShardingError."""
        is_named = isinstance(sharding, jax.sharding.NamedSharding)
        key = sharding if is_named else (sharding, shape)
        own = self._shardings.get(key)
        if own is None:
            if is_named:
                mesh = self.mesh(sharding.mesh.devices, sharding.mesh.axis_names)
                own = OwnSharding(mesh, sharding.spec, sharding.memory_kind)
            else:
                own = self._even(sharding, shape)
            if len(self._shardings) >= SHARDINGS_KEPT:
                self._shardings.clear()
                self._originals.clear()
            self._shardings[key] = own
            self._originals.setdefault(own, sharding)
        return own

    def mesh(self, devices: Any, names: Sequence[str]) -> OwnMesh:
        """Return the mesh of this process's slices on the same devices."""
        grid = np.empty(devices.shape, object)
        for place, device in np.ndenumerate(devices):
            grid[place] = self.slice(device.pw_slice).devices[device.pw_index]
        return OwnMesh(grid, tuple(names))

    def _even(self, sharding: Any, shape: tuple[int, ...]) -> OwnSharding:
        """Return the sharding over a mesh with an axis for each dimension, and one for the copies."""
        parts = sharding.shard_shape(shape)
        counts = [size // part if part else 1 for size, part in zip(shape, parts, strict=True)]
        copies = sharding.num_devices // max(1, math.prod(counts))
        grid = np.empty((*counts, copies), object)
        for device, index in sharding.devices_indices_map(shape).items():
            at = tuple(
                (one.start or 0) // part if part else 0
                for one, part in zip(index, parts, strict=True)
            )
            free = [copy for copy in range(copies) if grid[*at, copy] is None]
            if not free:
                raise ShardingError(f"{sharding} does not divide an array of shape {shape} evenly")
            grid[*at, free[0]] = device
        names = [f"axis{dimension}" for dimension in range(len(shape))]
        mesh = self.mesh(grid, (*names, "copies"))
        return OwnSharding(mesh, PartitionSpec(*names), sharding.memory_kind)

    def to_jax(self, sharding: OwnSharding) -> Any:
        """Return the sharding of JAX with the same shards. Raises PlacementError for other devices."""
        original = self._originals.get(sharding)
        if original is not None:
            return original
        grid = np.empty(sharding.mesh.devices.shape, object)
        for place, device in np.ndenumerate(sharding.mesh.devices):
            number = self._numbers.get(device.slice.id)
            if number is None or device.slice is not self._slices[number]:
                raise PlacementError(
                    f"an array on {sharding.mesh!r} lies on devices that JAX does not have; move it first, "
                    "with pw.put(x, sharding=pw.jax.sharding_of(s)), where s is one over jax.devices()"
                )
            grid[place] = self._devices[number][device.index]
        mesh = jax.sharding.Mesh(grid, sharding.mesh.axis_names)
        kind = sharding.memory or None
        return jax.sharding.NamedSharding(mesh, sharding.spec, memory_kind=kind)

    # --- arrays ---------------------------------------------------------------------------------------

    def take(self, arrays: Sequence[Any]) -> list[Array]:
        """Return arrays of pw with the shards of arrays of JAX."""
        types = [self._type(array) for array in arrays]
        parts = [part for pair in zip(arrays, types, strict=True) for part in self._parts(*pair)]
        views = iter(self._take(parts, [part for one in types for part in one.parts or (one,)]))
        return [
            JoinedArray([next(views) for _ in one.parts], one) if one.parts else next(views)
            for one in types
        ]

    def _parts(self, array: Any, type_: ArrayType) -> list[Any]:
        """Return the array of JAX of each island's shards, or the array if it is on one."""
        base = array._base_array if is_key(array.dtype) else array  # of keys their integers
        if not type_.parts:
            return [base]
        shards = shards_by_device(base)
        return [_assembled(part, self.to_jax(part.sharding), shards) for part in type_.parts]

    def _take(self, arrays: Sequence[Any], types: Sequence[ArrayType]) -> list[Array]:
        """Return arrays of pw with the shards of arrays of JAX on one island each."""
        views: dict[int, Array] = {}
        for places in _grouped(types):
            token = secrets.token_bytes(OFFER_TOKEN_BYTES)
            run_plugin(self.client, "pw_offer", [arrays[at] for at in places], token=token.hex())
            specs = [types[at].spec for at in places]
            numbers = self.session.handovers.take(token, specs)
            for at, number in zip(places, numbers, strict=True):
                views[at] = Array(self.session, number, types[at])
        return [views[at] for at in range(len(arrays))]

    def _type(self, array: Any) -> ArrayType:
        if array.is_deleted():
            raise ArrayDeleted(
                f"the jax.Array {array.aval.str_short()} was deleted or donated before this use; keep a "
                "copy, or do not donate it"
            )
        return ArrayType.of(array.aval, self.from_jax(array.sharding, array.shape))

    def offer(self, arrays: Sequence[Array]) -> list[Any]:
        """Return arrays of JAX with the shards of arrays of pw."""
        for array in arrays:
            array._check_usable()
            array._check_owner(self.session)
        views = iter(self._offer([member for array in arrays for member in array.members]))
        results = []
        for type_ in (array._type for array in arrays):
            if type_.parts:
                shards: dict[Any, Any] = {}
                for _ in type_.parts:
                    shards |= shards_by_device(next(views))
                view = _assembled(type_, self.to_jax(type_.sharding), shards)
            else:
                view = next(views)
            if type_.key_impl is not None:
                view = jax.random.wrap_key_data(view, impl=type_.key_impl)
            results.append(view)
        return results

    def _offer(self, arrays: Sequence[Array]) -> list[Any]:
        """Return arrays of JAX with the shards of arrays on one island each; of keys, the integers."""
        types = [array._type for array in arrays]
        shardings = [self.to_jax(type_.sharding) for type_ in types]
        views: dict[int, Any] = {}
        for places in _grouped(types):
            token = secrets.token_bytes(OFFER_TOKEN_BYTES)
            self.session.handovers.offer([(arrays[at]._id, types[at].spec) for at in places], token)
            described, avals = [], []
            for at in places:
                spec = types[at].spec
                described.append(
                    {
                        "dtype": spec.dtype,
                        "shape": spec.shape,
                        "shard": spec.sharding.shard_shape(spec.shape),
                        "devices": [device.id for device in devices_of(shardings[at])],
                        "replicated": not any(spec.sharding.spec),
                        "memory_kind": types[at].sharding.memory_kind,
                    }
                )
                is_weak = types[at].key_impl is None and types[at].aval.weak_type
                avals.append(jax.core.ShapedArray(spec.shape, spec.dtype, weak_type=is_weak))
            results = run_plugin(self.client, "pw_take", token=token.hex(), arrays=described)
            own = [shardings[at] for at in places]
            handlers = result_handlers(avals, own)
            views.update(zip(places, results.consume_with_handlers(handlers), strict=True))
        return [views[at] for at in range(len(arrays))]

    def checkpoint(self, arrays: Sequence[Any]) -> Future[None]:
        """Have the gateway's session make replicas of arrays of JAX; returns when they are safe."""
        by_count: dict[int, list[Any]] = {}
        for array in arrays:
            for part in self._parts(array, self._type(array)):
                by_count.setdefault(part.sharding.num_devices, []).append(part)
        ends = [
            run_plugin(self.client, "pw_checkpoint", parts).consume_token()
            for parts in by_count.values()
        ]
        done: Future[None] = Future()

        def wait() -> None:
            try:
                for end in ends:
                    end.block_until_ready()
            except Exception as error:  # noqa: BLE001 - JAX raises what the gateway says
                done.set_exception(CheckpointFailed(str(error)))
            else:
                done.set_result(None)

        Thread(target=wait, name="pw-jax-checkpoint", daemon=True).start()
        return done


_fronts: dict[Any, Front] = {}
_making = RLock()


def front() -> Front:
    """Return JAX's devices as this process's session has them; connects it to their cluster.

    Raises:
        Error: JAX has no virtual devices, or the session is connected to another cluster.
    """
    client = jax_backend.client()
    if client is None:
        raise Error(
            "JAX has no virtual devices in this process; start the script with JAX_PLATFORMS=pw, or call "
            "pw.jax.connect() before the first use of JAX"
        )
    session = current.runtime()
    with _making:
        for ended in [other for other in _fronts if not other.alive]:
            del _fronts[ended]
        if session not in _fronts:
            _fronts[session] = Front(client, session)
        return _fronts[session]


def is_remote(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX on virtual devices."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, (Array, jax.core.Tracer)):
        return False
    client = jax_backend.client()
    if client is None:
        return False
    devices: Any = leaf.sharding.device_set  # also of deleted arrays
    return next(iter(devices)).client is client


def from_jax(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with arrays of pw in the place of arrays of JAX on virtual devices."""
    places = [at for at, leaf in enumerate(leaves) if type(leaf) is not Array and is_remote(leaf)]
    changed = list(leaves)
    if places:
        for at, view in zip(places, front().take([leaves[at] for at in places]), strict=True):
            changed[at] = view
    return changed


def to_jax(leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves with arrays of JAX in the place of arrays of pw."""
    arrays = [leaf for leaf in leaves if isinstance(leaf, Array)]
    views = iter(front().offer(arrays) if arrays else ())
    return [next(views) if isinstance(leaf, Array) else leaf for leaf in leaves]


def _grouped(types: Sequence[ArrayType]) -> list[list[int]]:
    """Group places by the slice and the number of shards of the type there: an offer is of one slice."""
    places: dict[tuple[int, int], list[int]] = {}
    for at, type_ in enumerate(types):
        placement = type_.spec.placement
        places.setdefault((placement.slice, len(placement.devices)), []).append(at)
    return list(places.values())


def _assembled(type_: ArrayType, sharding: Any, shards: Mapping[Any, Any]) -> Any:
    """Return the array of JAX of this type that has these shards on its devices."""
    own = [shards[device] for device in devices_of(sharding)]
    return jax.make_array_from_single_device_arrays(type_.spec.shape, sharding, own)
