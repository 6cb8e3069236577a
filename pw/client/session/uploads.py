"""Host values on their way to devices, and kept afterwards: a client's inputs.

An input that is lost with its hosts, and of which there is no copy, can only come from here once more.
So its value stays after it was sent, until the controller says that nothing can ask for it any more.

    put -> under way -all hosts have it-> kept -the budget is spent-> gone (UploadAgain: InputGone)
             |   ^                          |
             |   +------- UploadAgain ------+
             +- (its slice is not bound, a host was lost, a push failed: stays until UploadAgain)

What the budget pushes out first is what was sent first. A value under way is outside of the budget, and so
is one that its user wants kept. Two ends: `ForgetInputs`, and `RunFailed` for the array itself. Hosts
that still wait for bytes then get them nevertheless, for they count on them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.client.session.hosts import Devices, Hosts
from pw.client.session.notes import Put
from pw.core.actor import Env
from pw.core.errors import ArrayLost, ErrorReport, TransferFailed
from pw.core.ids import CONTROL
from pw.core.landing import Bulk
from pw.core.messages import (
    INLINE_BYTES,
    CreateArray,
    InputGone,
    SliceBound,
    Upload,
    UploadAborted,
    UploadLanding,
)
from pw.core.packing import pack
from pw.core.sharding import ArraySpec, box_bytes, box_slices, host_boxes, packed_offsets

KEEP_BYTES = 256 << 20
"""Default budget for values that are kept after they were sent."""


@dataclass(slots=True, eq=False)
class _Input:
    spec: ArraySpec
    value: np.ndarray[Any, Any]
    keep: bool
    """Exempt from the budget."""
    attempt: int = 0
    bound: SliceBound | None = None
    """How its slice is bound, which the user may give back while the value is under way."""
    missing: set[str] = field(default_factory=set)
    """Hosts that have not got it in this attempt."""
    interrupted: bool = False
    """Will not get there in this attempt: stays until it is asked for again."""
    forgotten: bool = False

    @property
    def under_way(self) -> bool:
        return self.interrupted or bool(self.missing)


class Uploads:
    """The inputs of one client."""

    def __init__(self, env: Env, bulk: Bulk, hosts: Hosts) -> None:
        self._env = env
        self._bulk = bulk
        self._hosts = hosts
        self._inputs: dict[int, _Input] = {}
        self._kept: OrderedDict[int, int] = OrderedDict()
        """Inputs under the budget and their sizes, the first to go first."""
        self._kept_bytes = 0
        self.keep_bytes = KEEP_BYTES
        self._attempts = 0

    def put(self, note: Put) -> None:
        """Announce an array and send its value, unless there is nowhere to send it to."""
        bound = self._hosts.bound(note.spec)
        self._env.send(CONTROL, CreateArray(note.array, note.spec, bound))
        self._inputs[note.array] = _Input(note.spec, note.value, note.keep)
        self._send(note.array)

    def again(self, array: int, name: int) -> None:
        """The controller misses this input: send it, as `name`, to where its slice is now."""
        upload = self._inputs.get(array)
        if upload is None:
            self._env.count("inputs_gone")
            self._env.send(CONTROL, InputGone(name))
            return
        self._env.count("inputs_sent_again")
        if name != array:
            self._inputs[name] = _Input(upload.spec, upload.value, keep=False, forgotten=True)
            self._send(name)
            return
        self._kept_bytes -= self._kept.pop(array, 0)
        self._send(array)

    def forget(self, arrays: tuple[int, ...]) -> None:
        """Nothing will ask for these again."""
        for array in arrays:
            upload = self._inputs.get(array)
            if upload is not None:
                upload.forgotten, upload.interrupted = True, False
                self._settle(array, upload)

    def host_lost(self, node: str) -> None:
        """What was on its way to the host waits to be asked for again, if somebody can still ask."""
        for array, upload in list(self._inputs.items()):
            if upload.forgotten:
                upload.missing.discard(node)
                self._settle(array, upload)

    def slice_moved(self, slice: int) -> None:
        """No host takes any more what was on its way there: that is asked for again, if it is needed."""
        for array, upload in list(self._inputs.items()):
            if upload.forgotten and upload.spec.placement.slice == slice:
                upload.missing.clear()
                self._settle(array, upload)

    def close(self) -> None:
        """Forget everything."""
        self._inputs.clear()
        self._kept.clear()
        self._kept_bytes = 0

    # --- sending -------------------------------------------------------------------------------------

    def _send(self, array: int) -> None:
        upload = self._inputs[array]
        spec, devices = upload.spec, self._hosts.devices(upload.spec)
        binding = self._hosts.binding(spec)
        self._attempts += 1
        upload.attempt, upload.bound = self._attempts, binding
        upload.interrupted = binding is None and not upload.forgotten
        upload.missing.clear()
        if binding is None or devices is None:
            self._settle(array, upload)
            return
        for host in dict.fromkeys(device.host for device in devices):
            boxes = host_boxes(spec, devices, host)
            data = None
            if sum(box_bytes(box, spec.dtype) for box, _ in boxes) <= INLINE_BYTES:
                data = pack([upload.value[box_slices(box)] for box, _ in boxes])
            else:
                upload.missing.add(host)
            place = binding.island, binding.epoch
            message = Upload(array, spec, devices, data, *place, upload.attempt)
            self._hosts.send(host, message)
        self._settle(array, upload)

    def landing(self, host: str, message: UploadLanding) -> None:
        """A host has made room for its shards."""
        upload = self._inputs.get(message.array)
        if upload is None:
            words = "the client does not have the value of this array any more"
            self._abort(host, message, ArrayLost(words))
            return
        if message.attempt != upload.attempt:
            self._abort(
                host, message, TransferFailed("the array is sent once more, from the start")
            )
            return
        devices = self._hosts.devices(upload.spec)
        if devices is not None:
            self._push(host, message, upload, devices)

    def _push(self, host: str, message: UploadLanding, upload: _Input, devices: Devices) -> None:
        spec, attempt = upload.spec, upload.attempt
        boxes = host_boxes(spec, devices, host)
        if not boxes:
            return  # the slice has moved on
        offsets, _ = packed_offsets([box_bytes(box, spec.dtype) for box, _ in boxes])
        parts = [
            (offset, upload.value[box_slices(box)])
            for offset, (box, _) in zip(offsets, boxes, strict=True)
        ]

        def pushed(error: Exception | None) -> None:
            if self._inputs.get(message.array) is not upload or upload.attempt != attempt:
                return  # a new attempt is under way
            upload.missing.discard(host)
            if error is not None:
                upload.interrupted = not upload.forgotten
                self._abort(host, message, error)
            self._settle(message.array, upload)

        self._bulk.push(message.landing, parts, pushed)

    def _abort(self, host: str, asked: UploadLanding, error: Exception) -> None:
        report = ErrorReport.of(error)
        self._hosts.send(host, UploadAborted(asked.array, asked.landing.transfer, report))

    # --- keeping -------------------------------------------------------------------------------------

    def _settle(self, array: int, upload: _Input) -> None:
        """Once nothing of it is under way, an input is forgotten, or comes under the budget."""
        if upload.under_way:
            return
        size = upload.value.nbytes
        if upload.forgotten or (size > self.keep_bytes and not upload.keep):
            self._drop(array)
        elif not upload.keep and array not in self._kept:
            self._kept[array] = size
            self._kept_bytes += size
            while self._kept_bytes > self.keep_bytes:
                self._drop(next(iter(self._kept)))

    def _drop(self, array: int) -> None:
        del self._inputs[array]
        self._kept_bytes -= self._kept.pop(array, 0)
