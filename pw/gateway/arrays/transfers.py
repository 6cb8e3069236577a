"""Requests about arrays: from host buffers, to host buffers, copies, and views."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.messages import INLINE_BYTES
from pw.core.sharding import dtype_of
from pw.gateway.arrays.arrays import ProxyArray, ProxyArrays, Stored
from pw.gateway.arrays.buffers import HostBuffers
from pw.gateway.arrays.constants import Constants
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs
from pw.gateway.protocol import protos, shardings, statuses
from pw.gateway.protocol.dtypes import STRING, name_of
from pw.gateway.protocol.shardings import ShardLayout

REUSE, DONATE = 2, 3
"""The protocol's numbers for copies that may share the source's buffers, and that take them over."""


class Transfers:
    """Makes, moves and reads the arrays of one client."""

    def __init__(
        self,
        arrays: ProxyArrays,
        buffers: HostBuffers,
        devices: Devices,
        runs: Runs,
        constants: Constants,
    ) -> None:
        self._arrays = arrays
        self._buffers = buffers
        self._devices = devices
        self._runs = runs
        self._constants = constants

    # --- from the host -------------------------------------------------------------------------------

    def make_array_from_host_buffer(self, body: Any, response: Any) -> None:
        """Make an array whose shards are all one host buffer."""
        dtype, shape = shardings.dtype_and_shape(body)
        layout = shardings.read(body.sharding, shape)
        strides = body.byte_strides.strides if body.HasField("byte_strides") else None
        value = self._value(body.host_buffer_handle, dtype, shape, strides)
        array = self.from_host(dtype, shape, layout, [value] * len(layout.devices))
        handle = self._arrays.name(array, body.array_handle)
        response.make_array_from_host_buffer_response.array_handle = handle

    def make_arrays_from_host_buffer_shards(self, body: Any, response: Any) -> None:
        """Make arrays of host buffers, each of which is the value of some shards."""
        handles = list(body.array_handles) or [0] * len(body.specs)
        reply = response.make_arrays_from_host_buffer_shards_response
        for handle, one in zip(handles, body.specs, strict=True):
            dtype, shape = shardings.dtype_and_shape(one.array_spec)
            layout = shardings.read(one.array_spec.sharding, shape)
            shards: list[Any] = [None] * len(layout.devices)
            for indices, buffer in zip(
                one.addressable_shard_indices, one.host_buffers, strict=True
            ):
                strides = buffer.byte_strides.strides if buffer.HasField("byte_strides") else None
                value = self._value(
                    buffer.host_buffer_handle, dtype, tuple(buffer.shape.dims), strides
                )
                for index in indices.indices:
                    shards[index] = value
            if any(shard is None for shard in shards):
                raise statuses.StatusError(
                    "INVALID_ARGUMENT",
                    f"an array of {len(shards)} shards has shards without a value",
                )
            array = self.from_host(dtype, shape, layout, shards)
            reply.array_handles.append(self._arrays.name(array, handle))

    def _value(
        self, handle: int, dtype: str, shape: tuple[int, ...], strides: Sequence[int] | None
    ) -> np.ndarray[Any, Any]:
        data = self._buffers.take(handle)
        value = shardings.strided(data, dtype_of(dtype), shape, strides)
        value = np.ascontiguousarray(value).reshape(shape)
        value.flags.writeable = False
        return value

    def from_host(
        self,
        dtype: str,
        shape: tuple[int, ...],
        layout: ShardLayout,
        shards: Sequence[np.ndarray[Any, Any]],
    ) -> ProxyArray:
        """Return an array of host values, one for each device."""
        groups = self._devices.by_slice(layout.devices)
        if len(groups) > 1:  # each island gets its shards; together they are pieces of an array
            pieces: list[Any] = [None] * len(shards)
            for positions in groups.values():
                part = layout._replace(
                    devices=tuple(layout.devices[at] for at in positions), sharding=None
                )
                array = self.from_host(dtype, shape, part, [shards[at] for at in positions])
                for there, position in enumerate(positions):
                    pieces[position] = (array, there)
            return self._of_pieces(dtype, shape, layout, pieces)
        first = shards[0]
        is_replicated = all(shard is first for shard in shards)
        array = ProxyArray(dtype, shape, first.shape, layout.devices, layout.memory, is_replicated)
        array.sharding = layout.sharding
        if is_replicated or not first.shape:
            array.value = first
        else:
            array.value = np.concatenate(shards)
            array.value.flags.writeable = False
        if array.value.nbytes > INLINE_BYTES:
            self._runs.own(array)
            self._runs.hurry()
        else:
            self._constants.add(array)
        return array

    def make_error_arrays(self, body: Any, response: Any) -> None:
        """Make arrays whose every use raises the client's error."""
        error = statuses.received(body.error.code, body.error.message)
        for handle in body.array_handles:
            self._arrays.fail(handle, error)
        response.make_error_arrays_response.array_handles.extend(body.array_handles)

    # --- to the host ---------------------------------------------------------------------------------

    def copy_to_host(self, array: ProxyArray, strides: Sequence[int] | None, buffer: int) -> None:
        """Begin to read an array whose shards are all equal into a host buffer."""
        is_text = array.dtype == STRING

        def came(value: np.ndarray[Any, Any] | None, error: BaseException | None) -> None:
            try:
                if error is not None:
                    raise error
                assert value is not None
                data = _text(value) if is_text else self.laid_out(value, strides)
            except Exception as wrong:  # noqa: BLE001 - the lookup of the buffer raises it
                self._buffers.fail(buffer, wrong)
            else:
                self._buffers.put(buffer, data)

        self._runs.read(array, 0, came)

    def laid_out(self, value: np.ndarray[Any, Any], strides: Sequence[int] | None) -> Any:
        """Return the bytes of a value that lies as the strides say."""
        if strides is None or not value.ndim or not value.size:
            return _bytes_of(value)
        if value.ndim != len(strides):
            raise statuses.StatusError("INVALID_ARGUMENT", "strides do not fit the array's shape")
        extents = zip(value.shape, strides, strict=True)
        size = sum((count - 1) * stride for count, stride in extents) + value.dtype.itemsize
        laid_out = bytearray(size)
        np.ndarray(value.shape, value.dtype, laid_out, 0, tuple(strides))[...] = value
        return laid_out

    # --- copies --------------------------------------------------------------------------------------

    async def copy_arrays(self, body: Any, response: Any) -> None:
        """Copy arrays to other devices, or to another memory of the same devices."""
        handles = list(body.result_handles) or [0] * len(body.array_handles)
        memory = body.memory_kind if body.HasField("memory_kind") else None
        sources = [self._arrays.usable(handle) for handle in body.array_handles]
        copies = []
        moved = []
        for array in sources:
            devices = tuple(body.device_ids) or array.devices
            kind = array.memory if memory is None else memory
            copy = self._like(array, devices, kind)
            copies.append(copy)
            is_same = (devices, kind) == (array.devices, array.memory)
            if is_same and body.copy_semantics == REUSE:
                copy.pieces = tuple((array, position) for position in range(len(devices)))
            else:
                moved.append((array, copy))
        await self._fill([one for one, _ in moved], [one for _, one in moved])
        for copy, handle in zip(copies, handles, strict=True):
            response.copy_arrays_response.array_handles.append(self._arrays.name(copy, handle))
        if body.copy_semantics == DONATE:
            for array in sources:
                array.delete()

    async def copied(self, array: ProxyArray, devices: tuple[int, ...], memory: str) -> ProxyArray:
        """Return a copy of an array on these devices."""
        copy = self._like(array, devices, memory)
        await self._fill([array], [copy])
        return copy

    def _like(self, array: ProxyArray, devices: tuple[int, ...], memory: str) -> ProxyArray:
        copy = ProxyArray(
            array.dtype, array.shape, array.shard_shape, devices, memory, array.is_replicated
        )
        copy.sharding = array.sharding
        return copy

    async def _fill(self, sources: Sequence[ProxyArray], copies: Sequence[ProxyArray]) -> None:
        """Copy shard by shard; what one run can move is one run."""
        moves: list[tuple[Stored, ProxyArray]] = []
        for array, copy in zip(sources, copies, strict=True):
            groups = self._groups(array.devices, copy.devices)
            if array.value is not None and len(self._devices.by_slice(copy.devices)) == 1:
                copy.value = array.value
            elif len(groups) == 1:
                moves.append((await self._stored(array), copy))
            else:
                copy.pieces = await self._piecewise(array, copy, groups)
        waiting = []
        for source, copy in moves:
            target = self._runs.spec_of(copy)
            if target == source.spec:
                copy.consist_of(source)
            else:
                waiting.append((source, copy, target))
        if waiting:
            await self._runs.credit()
            results = self._runs.moved(
                [one for one, _, _ in waiting], [one for _, _, one in waiting]
            )
            for stored, (_, copy, _) in zip(results, waiting, strict=True):
                copy.consist_of(stored)

    def _groups(self, there: tuple[int, ...], here: tuple[int, ...]) -> list[list[int]]:
        """Group positions by the slices that they are moved from and to."""
        return [
            both
            for sources in self._devices.by_slice(there).values()
            for targets in self._devices.by_slice(here).values()
            if (both := [position for position in sources if position in targets])
        ]

    async def _stored(self, array: ProxyArray) -> Stored:
        wanted = self._runs.spec_of(array)
        if array.stored is None and array.pieces:
            await self._runs.credit()
        return self._runs.stored(array, wanted)

    async def _piecewise(
        self, array: ProxyArray, copy: ProxyArray, groups: Sequence[Sequence[int]]
    ) -> tuple[tuple[ProxyArray, int], ...]:
        pieces: dict[int, tuple[ProxyArray, int]] = {}
        for positions in groups:
            part = self._part(array, positions)
            devices = tuple(copy.devices[position] for position in positions)
            moved = self._like(part, devices, copy.memory)
            await self._fill([part], [moved])
            pieces.update({position: (moved, at) for at, position in enumerate(positions)})
        return tuple(pieces[position] for position in range(len(copy.devices)))

    def _part(self, array: ProxyArray, positions: Sequence[int]) -> ProxyArray:
        """Return the array of some shards."""
        return array.part(positions, ((array, position) for position in positions))

    # --- views ---------------------------------------------------------------------------------------

    def _of_pieces(
        self, dtype: str, shape: tuple[int, ...], layout: ShardLayout, pieces: Sequence[Any]
    ) -> ProxyArray:
        shard_shape = pieces[0][0].shard_shape
        if any(source.shard_shape != shard_shape for source, _ in pieces):
            raise statuses.unsupported(
                "arrays whose shards have different shapes are not supported"
            )
        array = ProxyArray(
            dtype, shape, shard_shape, layout.devices, layout.memory, layout.is_replicated
        )
        array.sharding = layout.sharding
        array.pieces = tuple(pieces)
        return array

    def assemble(self, body: Any, response: Any) -> None:
        """Make one array of arrays' shards."""
        sources = [self._arrays.usable(handle) for handle in body.single_device_array_handles]
        pieces = [(one, at) for one in sources for at in range(len(one.devices))]
        shape = tuple(body.shape.dims)
        layout = shardings.read(body.sharding, shape)
        if len(pieces) != len(layout.devices):
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"an array over {len(layout.devices)} devices cannot have {len(pieces)} shards",
            )
        dtype = name_of(body.dtype.kind) if body.HasField("dtype") else sources[0].dtype
        array = self._of_pieces(dtype, shape, layout, pieces)
        handle = self._arrays.name(array, body.result_handle)
        response.assemble_array_from_single_device_arrays_response.array_handle = handle

    def disassemble(self, body: Any, response: Any) -> None:
        """Make an array of each shard."""
        source = self._arrays.usable(body.array_handle)
        handles = list(body.result_handles) or [0] * len(source.devices)
        reply = response.disassemble_into_single_device_arrays_response
        for position, handle in enumerate(handles):
            reply.array_handles.append(self._arrays.name(self._part(source, [position]), handle))

    def fully_replicated_shard(self, body: Any, response: Any) -> None:
        """Make an array of the first shard."""
        part = self._part(self._arrays.usable(body.array_handle), [0])
        handle = self._arrays.name(part, body.result_handle)
        response.fully_replicated_shard_response.array_handle = handle

    def remap(self, body: Any, response: Any) -> None:
        """Make arrays of other arrays' shards."""
        sources = [self._arrays.usable(handle) for handle in body.array_handles]
        targets = []
        for one in body.plan.output_specs:
            dtype, shape = shardings.dtype_and_shape(one)
            layout = shardings.read(one.sharding, shape)
            targets.append((dtype, shape, layout, [None] * len(layout.devices)))
        for mapping in body.plan.mappings:
            source, pieces = sources[mapping.in_array], targets[mapping.out_array][3]
            steps = (
                (mapping.from_start, mapping.from_end, mapping.from_step),
                (mapping.to_start, mapping.to_end, mapping.to_step),
            )
            starts, ends = ([range(*each) for each in zip(*one, strict=True)] for one in steps)
            for there, here in zip(starts, ends, strict=True):
                for at, onto in zip(there, here, strict=True):
                    pieces[onto] = (source, at)
        handles = list(body.result_handles) or [0] * len(targets)
        for handle, one in zip(handles, targets, strict=True):
            array = self._of_pieces(*one)
            response.remap_arrays_response.array_handles.append(self._arrays.name(array, handle))

    # --- ends ----------------------------------------------------------------------------------------

    def delete(self, handles: Sequence[int]) -> None:
        """Delete arrays; unknown ones are no error."""
        for handle in handles:
            if (array := self._arrays.get(handle)) is not None and array.error is None:
                array.delete()

    def destruct(self, handles: Sequence[int]) -> None:
        """Forget the names of arrays."""
        for handle in handles:
            self._arrays.pop(handle, None)


def _text(value: np.ndarray[Any, Any]) -> Any:
    text = value.tobytes().rstrip(bytes(1))
    return protos.message("xla.ifrt.proto.StringArrayContents")(strings=[text]).SerializeToString()


def _bytes_of(value: np.ndarray[Any, Any]) -> Any:
    if not value.size:
        return b""
    flat: Any = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return memoryview(flat)
