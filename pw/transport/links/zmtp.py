"""ZMTP 3.1, the wire protocol of ZeroMQ, as one end of one connection sees it.

It has no socket: the connection feeds received bytes, takes messages, and sends `output`. Its
mechanism is NULL: TLS, where there is any, is below it (`pw.transport.access.tls`).

    greeting -64 bytes of the peer's-> handshake, our READY goes out
    handshake -READY-> open
    any -bytes that are not ZMTP, or too many-> ZmtpError; the connection is of no more use

Input is not trusted. The size of a message is bounded, and each part counts as some more bytes, so
neither large nor many parts can fill the memory. No buffer is made before its bytes have come.
"""

from __future__ import annotations

from pw.transport.access.tls import is_tls

LARGEST_COMMAND_BYTES = 4096
_PART_BYTES = 64
"""Bytes that are added to the size of each part of a message."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES, _GREETING_BYTES = 10, 64
_PEERS = {b"ROUTER": (b"DEALER", b"REQ", b"ROUTER"), b"DEALER": (b"ROUTER", b"REP", b"DEALER")}
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_NULL = b"NULL".ljust(20, b"\0")
_SHORT = [bytes((0, size)) for size in range(256)]


class ZmtpError(Exception):
    """The peer does not speak ZMTP 3, or refuses this end."""


class Refusal(ZmtpError):
    """One end refuses the other, so another try would fail as well."""


def metadata(kind: bytes) -> bytes:
    """The metadata of an end of this kind in a handshake."""
    return _property(b"Socket-Type", kind) + _property(b"Identity", b"")


class Zmtp:
    """One end of a connection.

    After each `feed`, call `next_message` until it returns None; then send and clear `output`.

    Args:
        kind: the socket type to present, b"ROUTER" or b"DEALER".
        largest_bytes: the bound of an incoming message.
    """

    def __init__(self, kind: bytes, largest_bytes: int) -> None:
        self.open = False
        """Whether messages may be sent: the handshake is over."""
        self.output = [_SIGNATURE + b"\x03\x01" + _NULL + bytes(32)]
        self._kind = kind
        self._largest = largest_bytes
        self._greeted = False
        self._data = b""
        self._at = 0
        self._pieces: list[bytes] = []
        self.missing_bytes = 0
        """Least number of bytes that the next message or command still lacks."""
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._between = False
        """Whether all bytes so far were whole messages, and have been taken."""

    def message(self, body: bytes) -> bytes:
        """A message of one part as it is sent, once the connection is open."""
        size = len(body)
        return (_SHORT[size] if size < 256 else b"\x02" + size.to_bytes(8, "big")) + body

    def single(self, data: bytes) -> bytes | None:
        """The body, if `data` is exactly one message of one part; otherwise `data` is to be fed.

        Most reads return exactly one small frame, so this is the hot path.
        """
        if not self._between:
            return None
        flags, here = data[0], len(data)
        if flags == 0 and 2 <= here <= self._largest:
            return data[2:] if data[1] == here - 2 else None
        if flags == _LONG and 9 <= here <= self._largest:
            return data[9:] if int.from_bytes(data[1:9], "big") == here - 9 else None
        return None

    def feed(self, data: bytes) -> None:
        """Take bytes from the connection; all messages of earlier ones must have been taken."""
        self._between = False
        if len(data) < self.missing_bytes:
            self._pieces.append(data)
            self.missing_bytes -= len(data)
            return
        if self._pieces:
            self._pieces.append(data)
            data = b"".join(self._pieces)
            self._pieces.clear()
        self.missing_bytes = 0
        self._data, self._at = data, 0

    def next_message(self) -> list[bytes] | None:
        """The parts of the next message; None if it is not complete.

        Raises:
            ZmtpError: the bytes are not ZMTP, or over a bound.
        """
        if self.missing_bytes or not (self._greeted or self._greet()):
            return None
        while (frame := self._next_frame()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                self._obey(body)
                continue
            if not flags & _MORE and not self._parts:
                return [body]
            self._parts.append(body)
            self._parts_bytes += len(body) + _PART_BYTES
            if not flags & _MORE:
                parts, self._parts, self._parts_bytes = self._parts, [], 0
                return parts
        return None

    def _next_frame(self) -> tuple[int, bytes] | None:
        data, at = self._data, self._at
        here = len(data) - at
        head_bytes = 9 if here and data[at] & _LONG else 2
        needed = head_bytes
        if here >= head_bytes:
            size = int.from_bytes(data[at + 1 : at + head_bytes], "big")
            self._check(data[at], size)
            needed += size
        if here < needed:
            self._lack(needed)
            return None
        self._at = at + needed
        return data[at], data[at + head_bytes : self._at]

    def _lack(self, needed: int) -> None:
        rest = self._data[self._at :]
        self._data, self._at = b"", 0
        self._pieces = [rest]
        self.missing_bytes = needed - len(rest)
        self._between = self.open and not rest and not self._parts

    def _check(self, flags: int, size: int) -> None:
        if flags & ~7 or (flags & _COMMAND and flags & _MORE):
            raise ZmtpError(f"a frame with flags {flags:#04x}")
        if flags & _COMMAND:
            if size > LARGEST_COMMAND_BYTES:
                raise ZmtpError(f"a command of {size} bytes")
        elif not self.open:
            raise ZmtpError("a message before the handshake")
        elif size > self._largest or self._parts_bytes + size > self._largest:
            raise ZmtpError(f"a message of more than {self._largest} bytes")

    def _greet(self) -> bool:
        greeting = self._data[:_GREETING_BYTES]
        if is_tls(greeting):
            raise Refusal(
                "it uses TLS, and this process does not; give this process credentials of the cluster "
                "(--credentials or PW_CREDENTIALS)"
            )
        if len(greeting) >= _SIGNATURE_BYTES and (greeting[0] != 0xFF or greeting[9] != 0x7F):
            raise ZmtpError("no greeting")
        if len(greeting) > _SIGNATURE_BYTES and greeting[_SIGNATURE_BYTES] < 3:
            raise ZmtpError("an older version of ZMTP")
        if len(greeting) < _GREETING_BYTES:
            size = _SIGNATURE_BYTES + 1
            self._lack(size if len(greeting) < size else _GREETING_BYTES)
            return False
        if greeting[12:32] != _NULL:
            raise ZmtpError("another security mechanism")
        self._at = _GREETING_BYTES
        self._greeted = True
        self._command(b"READY", metadata(self._kind))
        return True

    def _command(self, name: bytes, body: bytes) -> None:
        command = bytes((len(name),)) + name + body
        self.output.append(bytes((_COMMAND | _LONG,)) + len(command).to_bytes(8, "big") + command)

    def _obey(self, command: bytes) -> None:
        name, body = _counted(command, 0, 1)
        if name == b"ERROR":
            reason = _counted(command, body, 1)[0].decode("utf-8", "replace")
            raise Refusal("".join(filter(str.isprintable, reason)) or "it gives no reason")
        if name == b"READY" and not self.open:
            self._welcome(command[body:])
        elif not self.open:
            raise ZmtpError(f"command {name!r} in the handshake")
        elif name == b"PING":
            self._command(b"PONG", command[body + 2 : body + 18])

    def _welcome(self, their_metadata: bytes) -> None:
        theirs = _properties(their_metadata).get(b"socket-type", b"")
        if theirs not in _PEERS[self._kind]:
            raise ZmtpError(f"a peer of type {theirs!r}")
        self.open = True


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(data: bytes) -> dict[bytes, bytes]:
    properties, at = {}, 0
    while at < len(data):
        name, at = _counted(data, at, 1)
        value, at = _counted(data, at, 4)
        properties[name.lower()] = value
    return properties


def _counted(data: bytes, at: int, width: int) -> tuple[bytes, int]:
    """The bytes at `at` behind their length, and where they end."""
    start = at + width
    end = start + int.from_bytes(data[at:start], "big")
    if len(data) < max(start, end):
        raise ZmtpError("a damaged command")
    return data[start:end], end
