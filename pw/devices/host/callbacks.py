"""Passes calls of functions in clients' processes on to the clients, and the results back.

Small operands and results travel inside the messages, large ones over the bulk plane:

    called -CallClient-> waiting -CallReturned with the results-> returned
                          |  ^ |                                    ^
              CallLanding |  | +- CallReturned without them -> landing
                          +--+ push the operands

A client that is lost, or has gone, ends its calls with an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ArgumentError, Error
from pw.core.ids import Address, session_of
from pw.core.landing import Bulk, Bytes
from pw.core.messages.checks import ERROR_CHARACTERS, check_landing
from pw.core.packing import pack, packed_bytes, sizes_of, unpack_arrays
from pw.core.programs.spec_checks import shortened
from pw.core.sharding import packed_offsets
from pw.devices.host.backend import Backend, ClientCall
from pw.devices.host.clients import Clients

_GONE = "the client of this computation, in whose process the function is, was lost"


@dataclass(slots=True, eq=False)
class _OpenCall:
    node: str
    call: ClientCall
    called_s: float
    landing: int | None = None


@dataclass(eq=False, repr=False)
class HostCallbacks(Part):
    """The calls that clients have not answered."""

    env: Env
    backend: Backend
    bulk: Bulk
    clients: Clients
    _serial: int = 0
    _open: dict[int, _OpenCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.backend.take_calls(self._called)

    def __len__(self) -> int:
        return len(self._open)

    def oldest(self) -> tuple[tuple[int, float], ...]:
        """The clients that have not answered, and how long ago their oldest call was made, in seconds."""
        now_s = self.env.now_s()
        ages = {one.call.client: now_s - one.called_s for one in reversed(self._open.values())}
        return tuple(ages.items())

    def _called(self, call: ClientCall) -> None:
        node = self.clients.session_node(call.client)
        if node is None:
            call.raised(_GONE)
            return
        self._serial += 1
        self._open[self._serial] = _OpenCall(node, call, self.env.now_s())
        data = pack(call.operands) if packed_bytes(call.operands) <= msg.INLINE_BYTES else None
        types = tuple((array.dtype.name, array.shape) for array in call.operands)
        message = msg.CallClient(self._serial, call.artifact, call.index, types, data)
        self.env.send(session_of(node), message)

    def _of(self, sender: Address, number: int) -> _OpenCall | None:
        open_call = self._open.get(number)
        if open_call is None or open_call.node != sender.node:
            self.env.count("calls_unknown")
            return None
        return open_call

    @handles(msg.CallLanding)
    def _on_landing(self, sender: Address, message: msg.CallLanding) -> None:
        """Push the operands to the client."""
        open_call = self._of(sender, message.call)
        if open_call is None:
            return
        operands = open_call.call.operands
        offsets, total = packed_offsets([array.nbytes for array in operands])
        if total > message.landing.size_bytes:
            self._fail(message.call, f"the client made no room for {total} bytes of its operands")
            return
        try:
            check_landing(message.landing)
        except ArgumentError as error:
            self._fail(message.call, str(error))
            return

        def pushed(error: Exception | None) -> None:
            if error is not None:
                self._fail(message.call, f"the operands did not reach the client: {error}")

        self.bulk.push(message.landing, list(zip(offsets, operands, strict=True)), pushed)

    @handles(msg.CallReturned)
    def _on_returned(self, sender: Address, message: msg.CallReturned) -> None:
        open_call = self._of(sender, message.call)
        if open_call is None:
            return
        call = open_call.call
        if message.error:
            self._fail(message.call, shortened(message.error, ERROR_CHARACTERS))
        elif message.results != call.results:
            self._fail(
                message.call,
                f"the function returned {shortened(str(message.results))}, but the computation takes "
                f"{call.results}",
            )
        elif message.data is not None:
            self._take(message.call, message.data)
        elif open_call.landing is None:
            _, total = packed_offsets(sizes_of(call.results))
            try:
                landing = self.bulk.land(total, lambda buffer: self._take(message.call, buffer))
            except Error as refused:
                self._fail(message.call, str(refused))
                return
            open_call.landing = landing.transfer
            self.env.send(sender, msg.CallLanding(message.call, landing))

    def _take(self, number: int, buffer: bytes | Bytes) -> None:
        open_call = self._open.pop(number, None)
        if open_call is None:
            return
        try:
            results = unpack_arrays(buffer, open_call.call.results)
        except ValueError as error:
            open_call.call.raised(f"the results of the function are damaged: {error}")
        else:
            open_call.call.returned(results)

    def _fail(self, number: int, words: str) -> None:
        open_call = self._open.pop(number, None)
        if open_call is not None:
            if open_call.landing is not None:
                self.bulk.cancel(open_call.landing)
            open_call.call.raised(words)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        self.forget_node(message.node)

    def forget_node(self, node: str) -> None:
        """End all calls of a lost client."""
        for number in [
            number for number, open_call in self._open.items() if open_call.node == node
        ]:
            self._fail(number, _GONE)
