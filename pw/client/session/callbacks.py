"""Answers hosts whose computations call functions in this process.

The session's thread only passes a call on (`Called`); whatever thread runs the function posts the
answer (`AnswerCall`). Large operands and results travel over the bulk plane (see
`pw.devices.host.callbacks`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pw.client.session.hosts import Hosts
from pw.client.session.thread_messages import AnswerCall, Called
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import Error
from pw.core.ids import Address
from pw.core.landing import Bulk, Bytes
from pw.core.messages import INLINE_BYTES, CallClient, CallLanding, CallReturned
from pw.core.packing import pack, packed_bytes, sizes_of, unpack_arrays
from pw.core.sharding import packed_offsets

_Key = tuple[str, int]
"""The host, and its number of the call."""


@dataclass(eq=False, repr=False)
class Callbacks(Part):
    """The calls of hosts that are not over.

    `arrived` is called on the session's thread, and must not block.
    """

    env: Env
    bulk: Bulk
    hosts: Hosts
    arrived: Callable[[Called], None]
    _landings: dict[_Key, int] = field(default_factory=dict)
    """Transfers of operands that have not arrived."""
    _open: dict[_Key, AnswerCall | None] = field(default_factory=dict)
    """The answer, if its results are to be pushed when the host has made room."""

    @handles(CallClient)
    def _on_call(self, sender: Address, message: CallClient) -> None:
        if not self.hosts.knows(sender.node):
            self.env.count("calls_refused")
            return
        key = (sender.node, message.call)
        self._open[key] = None
        if message.data is not None:
            self._deliver(key, message, message.data)
            return

        def landed(buffer: Bytes) -> None:
            self._landings.pop(key, None)
            self._deliver(key, message, buffer)

        _, total = packed_offsets(sizes_of(message.operands))
        try:
            landing = self.bulk.land(total, landed, self.hosts.endpoint(sender.node))
        except Error as refused:
            self._answer(AnswerCall(key, error=str(refused)))
            return
        self._landings[key] = landing.transfer
        self.hosts.send(sender.node, CallLanding(message.call, landing))

    def _deliver(self, key: _Key, message: CallClient, buffer: bytes | Bytes) -> None:
        if key not in self._open:
            return
        try:
            operands = unpack_arrays(buffer, message.operands)
        except ValueError as error:
            self._answer(AnswerCall(key, error=f"the operands are damaged: {error}"))
            return
        self.arrived(Called(key, message.artifact, message.index, operands))

    @handles(AnswerCall)
    def _on_answer(self, sender: Address, note: AnswerCall) -> None:
        self._answer(note)

    def _answer(self, note: AnswerCall) -> None:
        if self._open.get(note.key, note) is not None:
            return  # it is answered, or its host was lost
        host, number = note.key
        types = tuple((array.dtype.name, array.shape) for array in note.results)
        data: bytes | None = b""
        if not note.error:
            data = pack(note.results) if packed_bytes(note.results) <= INLINE_BYTES else None
        if data is None:
            self._open[note.key] = note
        else:
            del self._open[note.key]
        self.hosts.send(host, CallReturned(number, types, data, note.error))

    @handles(CallLanding)
    def _on_landing(self, sender: Address, message: CallLanding) -> None:
        """Push the results to a host that has made room for them."""
        note = self._open.pop((sender.node, message.call), None)
        if note is None:
            return
        offsets, _ = packed_offsets([array.nbytes for array in note.results])

        def pushed(error: Exception | None) -> None:
            if error is not None:
                words = f"the results did not reach the host: {error}"
                self.hosts.send(sender.node, CallReturned(message.call, error=words))

        parts = list(zip(offsets, note.results, strict=True))
        self.bulk.push(message.landing, parts, pushed)

    def host_lost(self, node: str) -> None:
        """Forget the calls of a lost host."""
        for key in [key for key in self._open if key[0] == node]:
            del self._open[key]
            transfer = self._landings.pop(key, None)
            if transfer is not None:
                self.bulk.cancel(transfer)

    def close(self) -> None:
        """Forget all calls; hosts end them when they lose this client."""
        for host in {host for host, _ in self._open}:
            self.host_lost(host)
