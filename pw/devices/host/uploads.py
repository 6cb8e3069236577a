"""Makes arrays from bytes: uploaded by clients, restored from replicas, or read from files.

Each ends with one `Uploaded` to the controller, when the value is made or the bytes will not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import Error, ErrorReport, PlacementError, ProtocolError, TransferFailed
from pw.core.ids import CONTROL, CONTROLLER, Address, client_of
from pw.core.landing import Bulk, Bytes
from pw.core.packing import unpack
from pw.core.programs.spec_checks import check_devices, check_spec, layout_of
from pw.core.recorder import UPLOADED
from pw.core.sharding import ArraySpec, Box, Placement, Sharding, box_bytes, packed_offsets
from pw.devices.host.arrays import Arrays, Entry
from pw.devices.host.backend import Backend, Build, relative
from pw.devices.host.checkpoint_files import Files
from pw.devices.host.clients import Clients
from pw.devices.host.replicas import Replicas
from pw.devices.host.requests import HostRequests
from pw.devices.host.tiers import Tiers
from pw.devices.host.value import Value

_NOWHERE = ArraySpec((), "bool", Sharding((), ()), Placement(0, ()))
"""The spec of an array whose own spec is refused."""


@dataclass(eq=False, repr=False)
class HostUploads(Part):
    """Arrays of a host that are made from bytes."""

    env: Env
    backend: Backend
    bulk: Bulk
    arrays: Arrays
    clients: Clients
    requests: HostRequests
    replicas: Replicas
    files: Files
    tiers: Tiers
    place: tuple[str, int] = ("", 0)
    """The island and the epoch of this host."""
    devices: tuple[int, int] = (0, 0)
    """Number of devices of the island, and of this host."""

    def __len__(self) -> int:
        return sum(entry.landing is not None for entry in self.arrays.values())

    @handles(msg.Upload)
    def _upload(self, sender: Address, message: msg.Upload) -> None:
        array, spec = message.array, message.spec
        entry = self.arrays.get(array)
        if not self.clients.owns(sender, array):
            self.env.count("uploads_refused")
            return
        if (message.island, message.epoch) != self.place:
            # It was meant for an earlier incarnation; the controller asks for what this one lacks.
            self.env.count("uploads_stale")
            return
        try:
            check_spec(spec, None)
            check_devices(message.devices, self.env.address.node, *self.devices)
            if len(message.devices) != spec.sharding.device_count:
                raise PlacementError("an upload names more or fewer devices than its mesh has")
        except Error as refused:
            self.env.count("uploads_refused")
            if entry is None or entry.value.error is not None:
                entry = self.arrays.expect(array, Value(), _NOWHERE, ())
                self._fail(entry, ErrorReport.of(refused, self.env.address.node))
            return
        if entry is not None and entry.value.error is None:
            self.env.count("uploads_doubled")
            if entry.arrived:
                self._tell_uploaded(entry, None, again=True)
            if entry.landing is None:
                return
            self._stop_landing(entry)  # the bytes may have come to a host that is no more
        else:
            entry = self.arrays.expect(
                array, self.tiers.value_of_upload(spec), spec, message.devices
            )
        boxes = self.arrays.boxes(entry)
        offsets, total = packed_offsets([box_bytes(box, spec.dtype) for box, _ in boxes])

        began_s, recorder = self.env.now_s(), self.env.recorder

        def deliver(buffer: bytes | Bytes) -> None:
            self._stop_landing(entry)
            if recorder.on:
                recorder.add(UPLOADED, began_s, self.env.now_s(), array, total)
            views = [
                unpack(buffer, offset, spec, box)
                for (box, _), offset in zip(boxes, offsets, strict=True)
            ]
            self._build(entry, boxes, views)

        def landed(buffer: Bytes) -> None:
            # The bytes may come to an earlier landing of this upload, but they are taken once.
            if self.arrays.get(array) is entry and entry.landing is not None:
                deliver(buffer)

        if message.data is None:
            try:
                landing = self.bulk.land(total, landed)
            except Error as refused:
                self._fail(entry, ErrorReport.of(refused, self.env.address.node))
                return
            entry.landing = landing.transfer
            self.env.send(sender, msg.UploadLanding(array, landing, message.attempt))
        elif len(message.data) != total:
            error = ProtocolError(
                f"{len(message.data)} bytes came for the array {message.spec.short}, of which {total} lie here"
            )
            self._fail(entry, ErrorReport.of(error, self.env.address.node))
        else:
            deliver(message.data)

    def _stop_landing(self, entry: Entry) -> None:
        if entry.landing is not None:
            self.bulk.cancel(entry.landing)
            entry.landing = None

    @handles(msg.UploadAborted)
    def _upload_aborted(self, sender: Address, message: msg.UploadAborted) -> None:
        entry = self.arrays.get(message.array)
        if entry is None or not self.clients.owns(sender, message.array):
            return
        if entry.landing == message.transfer:
            self._stop_landing(entry)
            self._fail(entry, message.error)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        """Fail the uploads of a lost client: the controller asks for the bytes again."""
        client = self.clients.at(message.node)
        if client is None:
            return
        words = (
            f"the connection to the client was lost while an array came from there: {message.words}"
        )
        report = ErrorReport.of(TransferFailed(words), self.env.address.node)
        for array, entry in list(self.arrays.items()):
            if entry.landing is not None and client_of(array) == client:
                self._stop_landing(entry)
                self._fail(entry, report)

    @handles(msg.Restore)
    def _restore(self, sender: Address, message: msg.Restore) -> None:
        if self._is_refused(sender, message.array):
            return
        spec, error = message.spec, message.error
        value = self.tiers.value_of_upload(spec) if error is None else Value(error)
        entry = self.arrays.expect(message.array, value, spec, message.devices)
        if error is not None:
            entry.arrived = True
            self._tell_uploaded(entry, None)
            self.requests.submitted(entry.array, value)
            return
        boxes = self.arrays.boxes(entry)
        sources: dict[Box, list[str]] = {box: [] for box, _ in boxes}
        for source in message.sources:
            if source.box in sources:
                sources[source.box].append(source.host)

        def gathered(result: dict[Box, Bytes] | ErrorReport) -> None:
            entry.gathering = None
            if isinstance(result, ErrorReport):
                self._fail(entry, result)
            else:
                views = [unpack(result[box], 0, spec, box) for box, _ in boxes]
                self._build(entry, boxes, views)

        where = message.copied, spec.dtype, sources, message.permits
        gathering = self.replicas.gather(*where, gathered)
        if not gathering.over:
            entry.gathering = gathering

    @handles(msg.ReadArray)
    def _read_array(self, sender: Address, message: msg.ReadArray) -> None:
        if self._is_refused(sender, message.array):
            return
        old = self.arrays.get(message.array)
        if old is not None and old.value.error is None:
            if old.arrived:
                self._tell_uploaded(old, None, again=True)
            return  # otherwise it is being read, and its end is reported then
        value = self.tiers.value_of_upload(message.spec)
        entry = self.arrays.expect(message.array, value, message.spec, message.devices)

        def done(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if self.arrays.get(message.array) is not entry:
                return
            if isinstance(views, ErrorReport):
                self._fail(entry, views)
            else:
                self._build(entry, boxes, views)

        boxes = self.arrays.boxes(entry)
        self.files.read(message.source, message.spec, [box for box, _ in boxes], done)

    def _is_refused(self, sender: Address, array: int) -> bool:
        """Whether an order to bring an array back is not followed.

        One for an earlier incarnation comes before this one has joined its island, and the array would stay:
        the controller does not know that it is here.
        """
        if sender.node != CONTROLLER or client_of(array) in self.clients.gone_clients:
            self.env.count("messages_refused")
            return True
        if not self.place[1]:
            self.env.count("uploads_stale")
            return True
        return False

    def _build(
        self,
        entry: Entry,
        boxes: Sequence[tuple[Box, tuple[int, ...]]],
        views: Sequence[np.ndarray[Any, Any]],
    ) -> None:
        """Make the value of an array from its boxes on this host."""
        parts = [
            (positions, relative(box), view)
            for (box, positions), view in zip(boxes, views, strict=True)
        ]

        def done(error: ErrorReport | None) -> None:
            entry.arrived = error is None
            if self.arrays.get(entry.array) in (entry, None):
                self._tell_uploaded(entry, error)

        lies = self.tiers.lies(entry.spec, entry.value)
        self.backend.submit([Build(entry.value, lies, entry.devices, parts, done)])
        self.requests.submitted(entry.array, entry.value)

    def _tell_uploaded(
        self, entry: Entry, error: ErrorReport | None, *, again: bool = False
    ) -> None:
        layout = layout_of(entry.spec, entry.devices) if error is None else b""
        self.env.send(CONTROL, msg.Uploaded(entry.array, error, again, layout))

    def _fail(self, entry: Entry, error: ErrorReport) -> None:
        """Fail an array whose bytes will not come."""
        entry.value.fail(error)
        self._tell_uploaded(entry, error)
        self.requests.submitted(entry.array, entry.value)
