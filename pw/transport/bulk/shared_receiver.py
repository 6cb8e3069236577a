"""The receiving end of transfers through shared memory (see `pw.transport.bulk.shared`), on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from pw.transport.access.unix import is_trusted
from pw.transport.bulk.blocks import Block, Bytes, Mapping, map_received
from pw.transport.bulk.shared import (
    BLOCK,
    DROP,
    FINISH,
    GONE,
    INLINE,
    LOST,
    MISSING,
    ON_SOCKET_BYTES,
    RETIRE,
    RETURN,
    SHARE,
    WANT,
    Malformed,
    close_all,
    parse,
    receive,
    record,
    socket_name,
)
from pw.transport.endpoints import NO_DESCRIPTORS_S, unlisten

_BURST_BYTES = 256 * 1024


class Arrivals(Protocol):
    """The plane of a receiver; called on the loop thread."""

    def block(self, number: int) -> Block | None: ...
    def arrived(self, transfer: int, block: int) -> bool: ...
    def inline_size(self, transfer: int) -> int | None: ...
    def arrived_inline(self, transfer: int, payload: Bytes) -> None: ...
    def arrived_shared(
        self, transfer: int, mapping: Mapping, give_back: Callable[[bool], None]
    ) -> None: ...
    def reject(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Caller:
    """One sender's connection, at the receiver."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    descriptors: deque[int] = field(default_factory=deque)
    outbox: deque[tuple[int, int]] = field(default_factory=deque)
    writing: bool = False
    mapped: set[int] = field(default_factory=set)
    inline: tuple[int, int] | None = None  # transfer and size of the payload that comes next


class SharedReceiver:
    """Sends blocks to senders, and reports completed transfers; on the loop thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, arrivals: Arrivals, folder: Path | None = None
    ) -> None:
        random = os.urandom(8).hex()
        self.name = f"pw-bulk-{os.getpid()}-{random}"
        if folder is not None:
            self.name = f"{folder}/bulk-{random[:8]}"
        self._loop = loop
        self._arrivals = arrivals
        self._callers: set[_Caller] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(socket_name(self.name))
        self._socket.listen(4096)
        self._listen()

    def drop(self, number: int) -> None:
        """Tell the senders that have mapped a block to unmap it."""
        for caller in list(self._callers):
            if number in caller.mapped:
                caller.mapped.discard(number)
                self._send(caller, DROP, number)

    def close(self) -> None:
        for caller in list(self._callers):
            self._hang_up(caller)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        unlisten(self._socket)

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors left: senders wait
            self._arrivals.reject()
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(NO_DESCRIPTORS_S, self._listen)
            return
        if not is_trusted(connection):
            self._arrivals.reject()
            connection.close()
            return
        connection.setblocking(False)
        caller = _Caller(connection)
        self._callers.add(caller)
        self._loop.add_reader(connection.fileno(), self._readable, caller)

    def _hang_up(self, caller: _Caller) -> None:
        if caller in self._callers:
            self._callers.discard(caller)
            if not self._loop.is_closed():
                self._loop.remove_reader(caller.socket.fileno())
                self._loop.remove_writer(caller.socket.fileno())
            caller.socket.close()
            close_all(caller.descriptors)

    def _readable(self, caller: _Caller) -> None:
        try:
            received, descriptors = receive(caller.socket, _BURST_BYTES)
            caller.descriptors.extend(descriptors)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._hang_up(caller)
            return
        caller.inbox += received
        try:
            self._take(caller)
        except (Malformed, OSError):
            self._arrivals.reject()
            self._hang_up(caller)

    def _take(self, caller: _Caller) -> None:
        while self._take_payload(caller):
            for kind, first, second in parse(caller.inbox):
                if kind == WANT:
                    self._send(caller, BLOCK, first)
                elif kind == FINISH:
                    if second not in caller.mapped and self._arrivals.block(second):
                        raise Malformed("it finished a transfer in a block it never mapped")
                    if not self._arrivals.arrived(first, second):
                        raise Malformed("it finished a transfer in another one's block")
                elif kind == SHARE:
                    self._take_shared(caller, first, second)
                elif kind == INLINE:
                    if second > ON_SOCKET_BYTES:
                        raise Malformed("an inline transfer is too long")
                    caller.inline = (first, second)
                    break
                else:
                    raise Malformed(f"record {kind} is not for a receiver")
            else:
                return

    def _take_shared(self, caller: _Caller, transfer: int, capacity_bytes: int) -> None:
        if not caller.descriptors:
            raise Malformed("shared pages came without their descriptor")
        descriptor = caller.descriptors.popleft()
        if descriptor == GONE:
            self._send(caller, LOST, transfer)
            return
        try:
            mapping = map_received(descriptor, capacity_bytes, writable=False)
        except (ValueError, OSError) as error:
            raise Malformed(f"shared pages cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._arrivals.arrived_shared(transfer, mapping, partial(self._give_back, caller, transfer))

    def _give_back(self, caller: _Caller, transfer: int, safe: bool) -> None:
        if caller in self._callers:
            self._send(caller, RETURN if safe else RETIRE, transfer)

    def _take_payload(self, caller: _Caller) -> bool:
        """Take the payload of an inline transfer, if one is announced; False if it is not complete."""
        if caller.inline is None:
            return True
        transfer, size_bytes = caller.inline
        if len(caller.inbox) < size_bytes:
            return False
        expected_bytes = self._arrivals.inline_size(transfer)
        if expected_bytes is not None and expected_bytes != size_bytes:
            raise Malformed("an inline transfer has the wrong size")
        payload: Bytes = np.frombuffer(bytes(caller.inbox[:size_bytes]), np.uint8)
        del caller.inbox[:size_bytes]
        caller.inline = None
        self._arrivals.arrived_inline(transfer, payload)
        return True

    def _send(self, caller: _Caller, kind: int, number: int) -> None:
        caller.outbox.append((kind, number))
        if not caller.writing:
            self._flush(caller)

    def _flush(self, caller: _Caller) -> None:
        while caller.outbox:
            try:
                self._send_now(caller, *caller.outbox[0])
            except BlockingIOError:
                if not caller.writing:
                    caller.writing = True
                    self._loop.add_writer(caller.socket.fileno(), self._flush, caller)
                return
            except OSError:
                # The reader then sees the end of the connection and hangs up.
                caller.outbox.clear()
                with contextlib.suppress(OSError):
                    caller.socket.shutdown(socket.SHUT_RDWR)
                break
            caller.outbox.popleft()
        if caller.writing:
            caller.writing = False
            self._loop.remove_writer(caller.socket.fileno())

    def _send_now(self, caller: _Caller, kind: int, number: int) -> None:
        block = self._arrivals.block(number) if kind == BLOCK else None
        if block is not None:
            line = record(BLOCK, number, block.capacity_bytes)
            sent = socket.send_fds(caller.socket, [line], [block.descriptor])
            caller.mapped.add(number)
        else:
            line = record(MISSING if kind == BLOCK else kind, number)
            sent = caller.socket.send(line)
        if sent != len(line):
            # A unix socket takes so small a record whole or not at all.
            raise ConnectionError("a record was cut")
