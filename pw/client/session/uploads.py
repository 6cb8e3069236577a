"""Uploads: sends a client's host values to devices, and keeps them in case hosts are lost.

When hosts are lost together with all copies of an input, only the client can provide it again. So
the client keeps the value until the controller says that nothing can ask for it any more.

    put -> under way -all hosts have it-> kept -the budget is spent-> gone (UploadAgain: InputGone)
             |   ^                          |
             |   +------- UploadAgain ------+
             +- (its slice is not bound, a host was lost, a push failed: stays until UploadAgain)

The oldest value leaves the budget first. Values under way, and those that the user wants kept, do
not count. `ForgetInputs`, and `RunFailed` for the array itself, end the life of an input. Hosts
that still wait for its bytes get them nevertheless, because they rely on them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.client.session.hosts import Devices, Hosts
from pw.client.session.thread_messages import Put
from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ArrayLost, ErrorReport, TransferFailed
from pw.core.ids import CONTROL, Address, is_repeat
from pw.core.landing import Bulk
from pw.core.packing import pack
from pw.core.sharding import ArraySpec, box_bytes, box_slices, host_boxes, packed_offsets

LINE_BYTES = 64 << 10
"""Bytes of a value that goes over lines, at most: no host asks for it, and what follows may read it."""
KEEP_BYTES = 256 << 20
"""Default budget for values that are kept after they were sent."""


@dataclass(slots=True, eq=False)
class _Input:
    spec: ArraySpec
    value: np.ndarray[Any, Any]
    keep: bool
    """True if the value does not count for the budget."""
    attempt: int = 0
    bound: msg.SliceBound | None = None
    """Binding of its slice; the user may give the slice back while the value is under way."""
    missing: set[str] = field(default_factory=set)
    """Hosts that have not received it in this attempt."""
    interrupted: bool = False
    """True if this attempt fails: the value stays until the controller asks for it again."""
    forgotten: bool = False
    """The controller will not ask for it again."""

    @property
    def under_way(self) -> bool:
        return self.interrupted or bool(self.missing)


@dataclass(eq=False, repr=False)
class Uploads(Part):
    """The inputs of one client."""

    _env: Env
    _bulk: Bulk
    _hosts: Hosts
    inputs: dict[int, _Input] = field(default_factory=dict)
    _kept: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """The sizes of inputs that count for the budget, the oldest first."""
    _kept_bytes: int = 0
    keep_bytes: int = KEEP_BYTES
    announced: int = 0
    """The newest array of the notes that were handled."""
    _attempts: int = 0
    _closed: bool = False

    @handles(Put)
    def on_put(self, sender: Address, note: Put) -> None:
        """Announce an array, and send its value if its slice is bound."""
        if self._closed:
            return
        upload = self.inputs[note.array] = _Input(note.spec, note.value, note.keep)
        if note.bound:
            self._settle(note.array, upload)
            return
        self.announced = note.array
        bound = self._hosts.bound(note.spec)
        self._env.send(CONTROL, msg.CreateArray(note.array, note.spec, bound))
        if self._hosts.are_paused:
            upload.interrupted = True  # the controller asks for it
        else:
            self._send(note.array)

    def over_lines(self, note: Put) -> list[tuple[str, msg.Upload]]:
        """Return what hosts get of a small value if it goes over their lines; from any thread.

        None of them waits for the bytes then, and what follows on the line may read the array.
        """
        spec, bound = note.spec, self._hosts.bound(note.spec)
        binding, devices = self._hosts.slices.get(spec.placement.slice), self._hosts.devices(spec)
        if note.value.nbytes > LINE_BYTES or not bound or binding is None or devices is None:
            return []
        note.bound = bound
        messages = []
        for host in dict.fromkeys(device.host for device in devices):
            data = pack([note.value[box_slices(box)] for box, _ in host_boxes(spec, devices, host)])
            place = binding.island, binding.epoch
            messages.append((host, msg.Upload(note.array, spec, devices, data, *place, 0)))
        return messages

    @handles(msg.UploadAgain)
    def _on_again(self, sender: Address, message: msg.UploadAgain) -> None:
        """Send a lost input again, under the name that the controller gives."""
        if self._closed:
            return
        array, name = message.array, message.name
        upload = self.inputs.get(array)
        if upload is None:
            self._env.count("inputs_gone")
            self._env.send(CONTROL, msg.InputGone(name))
            return
        self._env.count("inputs_sent_again")
        if name != array:
            self.inputs[name] = _Input(upload.spec, upload.value, keep=False, forgotten=True)
            self._send(name)
            return
        self._kept_bytes -= self._kept.pop(array, 0)
        self._send(array)

    @handles(msg.ForgetInputs)
    def _on_forget(self, sender: Address, message: msg.ForgetInputs) -> None:
        self._forget(message.arrays)

    @handles(msg.RunFailed)
    def _on_run_failed(self, sender: Address, message: msg.RunFailed) -> None:
        self._forget(message.results)

    def _forget(self, arrays: tuple[int, ...]) -> None:
        for array in arrays:
            upload = self.inputs.get(array)
            if upload is not None:
                upload.forgotten, upload.interrupted = True, False
                self._settle(array, upload)

    def host_lost(self, node: str) -> None:
        """Stop waiting for this host; a live input stays until the controller asks for it again.

        So does one that the controller has asked for. It may be on its way to the host's next incarnation
        already; if not, its slice moves, or the controller asks once more.
        """
        for array, upload in list(self.inputs.items()):
            if upload.forgotten and not is_repeat(array):
                upload.missing.discard(node)
                self._settle(array, upload)

    def slice_moved(self, slice: int) -> None:
        """Stop waiting for the slice's hosts; a live input stays until the controller asks for it again."""
        for array, upload in list(self.inputs.items()):
            if upload.forgotten and upload.spec.placement.slice == slice:
                upload.missing.clear()
                self._settle(array, upload)

    @handles(msg.SliceLost)
    def _on_slice_lost(self, sender: Address, message: msg.SliceLost) -> None:
        self.slice_moved(message.slice)

    def close(self) -> None:
        """Forget everything."""
        self._closed = True
        self.inputs.clear()
        self._kept.clear()
        self._kept_bytes = 0

    # --- sending -------------------------------------------------------------------------------------

    def _send(self, array: int) -> None:
        upload = self.inputs[array]
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
            if sum(box_bytes(box, spec.dtype) for box, _ in boxes) <= msg.INLINE_BYTES:
                data = pack([upload.value[box_slices(box)] for box, _ in boxes])
            else:
                upload.missing.add(host)
            place = binding.island, binding.epoch
            message = msg.Upload(array, spec, devices, data, *place, upload.attempt)
            self._hosts.send(host, message)
        self._settle(array, upload)

    @handles(msg.UploadLanding)
    def _on_landing(self, sender: Address, message: msg.UploadLanding) -> None:
        """Push the shards of a host that has made room for them."""
        if self._closed:
            return
        host = sender.node
        upload = self.inputs.get(message.array)
        if upload is None:
            words = "the client does not have the value of this array any more"
            self._abort(host, message, ArrayLost(words))
            return
        if message.attempt != upload.attempt:
            again = TransferFailed("the array is sent once more, from the start")
            self._abort(host, message, again)
            return
        devices = self._hosts.devices(upload.spec)
        if devices is not None:
            self._push(host, message, upload, devices)

    def _push(
        self, host: str, message: msg.UploadLanding, upload: _Input, devices: Devices
    ) -> None:
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
            if self.inputs.get(message.array) is not upload or upload.attempt != attempt:
                return  # a new attempt is under way
            upload.missing.discard(host)
            if error is not None:
                upload.interrupted = not upload.forgotten
                self._abort(host, message, error)
            self._settle(message.array, upload)

        self._bulk.push(message.landing, parts, pushed)

    def _abort(self, host: str, asked: msg.UploadLanding, error: Exception) -> None:
        report = ErrorReport.of(error)
        self._hosts.send(host, msg.UploadAborted(asked.array, asked.landing.transfer, report))

    # --- keeping -------------------------------------------------------------------------------------

    def _settle(self, array: int, upload: _Input) -> None:
        """Once no host waits for it, drop an input, or count it for the budget."""
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
        del self.inputs[array]
        self._kept_bytes -= self._kept.pop(array, 0)
