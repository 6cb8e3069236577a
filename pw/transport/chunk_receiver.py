"""The receiving end of transfers over tcp (see `pw.transport.chunks`), on the bulk thread."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from pw.transport.blocks import Bytes
from pw.transport.chunks import (
    ACK,
    CHUNK,
    CHUNK_BYTES,
    FINISH,
    HEADER,
    MAGIC,
    PLANE,
    REFUSE,
    header,
    prepare,
)
from pw.transport.endpoints import listen, reachable_endpoint, unlisten
from pw.transport.peers import is_trusted
from pw.transport.pieces import Unwatch, Watch
from pw.transport.proof import PROOF_S, Proof, ProofError

_READS_AT_ONCE = 8
_WORTH_WAKING_BYTES = 512 << 10
_UNREAD_REPLY_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class Inflow:
    """A landing, for the bulk thread."""

    transfer: int
    target: Bytes
    peer: object = None
    received_bytes: int = 0
    sealed: bool = False  # complete or cancelled: nothing may be written any more


class Inflows(Protocol):
    """The plane of a receiver; called on the bulk thread."""

    def inflow(self, transfer: int) -> Inflow | None: ...
    def inflow_complete(self, transfer: int) -> None: ...
    def reject(self) -> None: ...


class _Caller:
    """One sender's connection, at the receiver."""

    def __init__(self, connection: socket.socket, proof: Proof | None) -> None:
        self.socket = connection
        self.proof = proof  # until the sender has proven that it knows the secret
        self.until_s = time.monotonic() + PROOF_S  # when it should have
        self.header = memoryview(bytearray(HEADER.size if proof is None else proof.missing_bytes))
        self.missing = self.header  # where the next bytes go
        self.reading_header = True
        self.inflow: Inflow | None = None  # whose chunk is read; None if it is thrown away
        self.outbox = bytearray()
        self.writing = False
        self.woken_bytes = 1

    def read_header(self) -> None:
        """Receive a header next, or a part of the proof."""
        size = HEADER.size if self.proof is None else self.proof.missing_bytes
        if len(self.header) != size:
            self.header = memoryview(bytearray(size))
        self.inflow, self.missing, self.reading_header = None, self.header, True

    def wait_for_bytes(self) -> None:
        """Wake when many bytes have come, or all that are missing, and not for each packet."""
        wanted_bytes = min(len(self.missing), _WORTH_WAKING_BYTES)
        if wanted_bytes != self.woken_bytes:
            self.woken_bytes = wanted_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)


class ChunkReceiver:
    """The receiving end of a plane's tcp connections.

    Args:
        endpoint: where to listen.
        inflows: the plane.
        watch, unwatch: those of the bulk thread.
        secret: of the cluster, if it has one.

    Raises:
        ConnectionFailed: the endpoint cannot be listened on.
    """

    def __init__(
        self,
        endpoint: str,
        inflows: Inflows,
        watch: Watch,
        unwatch: Unwatch,
        secret: bytes | None = None,
    ) -> None:
        self._inflows = inflows
        self._secret = secret
        self._watch = watch
        self._unwatch = unwatch
        self._callers: dict[int, _Caller] = {}
        self._unproven: set[_Caller] = set()
        self._listener = listen(endpoint)
        self._listening = True
        self._wasted = memoryview(bytearray(CHUNK_BYTES))
        self.endpoint = reachable_endpoint(self._listener, None)
        watch(self._listener.fileno(), self.ready, False)

    @property
    def owed(self) -> bool:
        """Whether it waits for a descriptor, or for a sender's proof."""
        return bool(self._unproven) or not self._listening

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        caller = self._callers.get(descriptor)
        if caller is None:
            self._accept()
            return
        if writable:
            self._flush(caller)
        if readable and descriptor in self._callers:
            self._receive(caller)
            if descriptor in self._callers:
                caller.wait_for_bytes()

    def expire(self) -> None:
        """Listen again after a lack of descriptors, and drop senders without a proof."""
        if not self._listening:
            self._listening = True
            self._watch(self._listener.fileno(), self.ready, False)
        now_s = time.monotonic()
        for caller in list(self._unproven):
            if now_s > caller.until_s:
                self._inflows.reject()
                self._hang_up(caller)

    def close(self) -> None:
        for caller in list(self._callers.values()):
            self._hang_up(caller)
        unlisten(self._listener)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError:
            self._inflows.reject()
            self._listening = False
            self._unwatch(self._listener.fileno())
            return
        if not is_trusted(connection):
            self._inflows.reject()
            connection.close()
            return
        try:
            prepare(connection)
        except OSError:  # the sender is gone
            connection.close()
            return
        proof = None if self._secret is None else Proof(self._secret, PLANE, listens=True)
        self._callers[connection.fileno()] = caller = _Caller(connection, proof)
        if proof is not None:
            self._unproven.add(caller)
        self._watch(connection.fileno(), self.ready, False)

    def _hang_up(self, caller: _Caller) -> None:
        descriptor = caller.socket.fileno()
        self._unproven.discard(caller)
        if self._callers.pop(descriptor, None) is not None:
            self._unwatch(descriptor)
            caller.socket.close()

    def _receive(self, caller: _Caller) -> None:
        """Receive a burst of bytes."""
        for _ in range(_READS_AT_ONCE):
            inflow, wanted_bytes = caller.inflow, len(caller.missing)
            if inflow is not None and inflow.sealed:
                self._waste(caller, inflow.transfer, wanted_bytes)
                inflow = None
            try:
                count = caller.socket.recv_into(caller.missing)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._hang_up(caller)
                return
            if inflow is not None:
                inflow.received_bytes += count
            if count < wanted_bytes:
                caller.missing = caller.missing[count:]
                return
            if not caller.reading_header:
                caller.read_header()
            elif not (self._take(caller) if caller.proof is None else self._prove(caller)):
                self._inflows.reject()
                self._hang_up(caller)
                return

    def _prove(self, caller: _Caller) -> bool:
        """Check a part of the sender's proof; False if it proves nothing."""
        assert caller.proof is not None
        try:
            answer = caller.proof.answer(bytes(caller.header))
        except ProofError:
            return False
        if caller.proof.is_done:
            caller.proof = None
            self._unproven.discard(caller)
        caller.read_header()
        self._reply(caller, answer)
        return True

    def _take(self, caller: _Caller) -> bool:
        """Obey a header; False if it is invalid."""
        magic, kind, transfer, offset, length = HEADER.unpack(caller.header)
        caller.missing = caller.header
        if magic != MAGIC or kind not in (CHUNK, FINISH):
            return False
        if kind == CHUNK and not 0 < length <= CHUNK_BYTES:
            return False
        inflow = self._inflows.inflow(transfer)
        if inflow is not None and (inflow.sealed or inflow.peer not in (None, caller)):
            inflow = None
        if kind == FINISH:
            if inflow is None or inflow.received_bytes != length:
                self._refuse(caller, transfer)
                return True
            inflow.sealed = True
            self._reply(caller, header(ACK, transfer))
            self._inflows.inflow_complete(transfer)
            return True
        if inflow is None or offset + length > inflow.target.size:
            self._waste(caller, transfer, length)
            return True
        inflow.peer = caller
        caller.inflow, caller.reading_header = inflow, False
        caller.missing = memoryview(inflow.target.data)[offset : offset + length]
        return True

    def _waste(self, caller: _Caller, transfer: int, length: int) -> None:
        caller.inflow, caller.reading_header = None, False
        caller.missing = self._wasted[:length]
        self._refuse(caller, transfer)

    def _refuse(self, caller: _Caller, transfer: int) -> None:
        self._inflows.reject()
        self._reply(caller, header(REFUSE, transfer))

    def _reply(self, caller: _Caller, line: bytes) -> None:
        caller.outbox += line
        if not caller.writing:
            self._flush(caller)

    def _flush(self, caller: _Caller) -> None:
        try:
            sent = caller.socket.send(caller.outbox) if caller.outbox else 0
            if len(caller.outbox) - sent > _UNREAD_REPLY_BYTES:
                raise ConnectionError("it does not read what it is told")
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(caller.outbox)
            with contextlib.suppress(OSError):  # the reader then sees the end, and hangs up
                caller.socket.shutdown(socket.SHUT_RDWR)
        del caller.outbox[:sent]
        if caller.writing != bool(caller.outbox):
            caller.writing = bool(caller.outbox)
            self._watch(caller.socket.fileno(), self.ready, caller.writing)
