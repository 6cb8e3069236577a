"""ZMTP 3.1, the wire protocol of ZeroMQ, as one end of one connection sees it.

It has no socket: the connection feeds received bytes, takes messages, and sends `output`. Its
mechanism is NULL, or the exchange of `pw.transport.proof`.

    greeting -64 bytes of the peer's-> handshake, our READY goes out
    handshake -READY-> open
    any -bytes that are not ZMTP, or too many-> ZmtpError; the connection is of no more use

Input is not trusted. The size of a message is bounded, and each part counts as some more bytes, so
neither large nor many parts can fill the memory. No buffer is made before its bytes have come.
"""

from __future__ import annotations

from pw.transport.proof import Proof, ProofError

LARGEST_COMMAND_BYTES = 4096
_PART_BYTES = 64
"""Added to the size of each part of a message."""

_MORE, _LONG, _COMMAND = 1, 2, 4
_SIGNATURE_BYTES, _GREETING_BYTES = 10, 64
_PEERS = {b"ROUTER": (b"DEALER", b"REQ", b"ROUTER"), b"DEALER": (b"ROUTER", b"REP", b"DEALER")}
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_NULL, SECRET = (name.ljust(20, b"\0") for name in (b"NULL", b"PW-SECRET"))
"""Names of mechanisms in greetings: none, and that of `pw.transport.proof`."""
_SHORT = [bytes((0, size)) for size in range(256)]


class ZmtpError(Exception):
    """The peer does not speak ZMTP 3, or refuses this end."""


class Refusal(ZmtpError):
    """One end does not trust the other, so another try would fail as well."""


def metadata(kind: bytes) -> bytes:
    """The metadata of an end of this kind in a handshake."""
    return _property(b"Socket-Type", kind) + _property(b"Identity", b"")


class Zmtp:
    """One end of a connection.

    After each `feed`, call `next_message` until it returns None; then send and clear `output`.

    Args:
        kind: the socket type to present, b"ROUTER" or b"DEALER".
        largest_bytes: the bound of an incoming message.
        secret: of the cluster; with it, the ends prove that they know it.
    """

    def __init__(self, kind: bytes, largest_bytes: int, secret: bytes | None = None) -> None:
        self.open = False
        """Whether messages may be sent: the handshake is over."""
        self._proof = None if secret is None else _ProofHandshake(secret, kind)
        self._tag = _NULL if self._proof is None else SECRET
        as_server = self._proof is not None and self._proof.as_server
        self.output = [_SIGNATURE + b"\x03\x01" + self._tag + bytes((as_server, *bytes(31)))]
        self._kind = kind
        self._largest = largest_bytes
        self._greeted = False
        self._data = b""
        self._at = 0
        self._pieces: list[bytes] = []
        self.missing_bytes = 0
        """How many bytes, at least, the next message or command still lacks."""
        self._parts: list[bytes] = []
        self._parts_bytes = 0
        self._between = False
        """All bytes so far were whole messages, and have been taken."""

    def message(self, body: bytes) -> bytes:
        """A message of one part as it is sent, once the connection is open."""
        size = len(body)
        return (_SHORT[size] if size < 256 else b"\x02" + size.to_bytes(8, "big")) + body

    def whole(self, data: bytes) -> bytes | None:
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
        if len(greeting) >= _SIGNATURE_BYTES and (greeting[0] != 0xFF or greeting[9] != 0x7F):
            raise ZmtpError("no greeting")
        if len(greeting) > _SIGNATURE_BYTES and greeting[_SIGNATURE_BYTES] < 3:
            raise ZmtpError("an older version of ZMTP")
        if len(greeting) < _GREETING_BYTES:
            whole = _SIGNATURE_BYTES + 1
            self._lack(whole if len(greeting) < whole else _GREETING_BYTES)
            return False
        if greeting[12:32] != self._tag:
            raise _other_mechanism(self._tag, greeting[12:32])
        self._at = _GREETING_BYTES
        self._greeted = True
        if self._proof is None:
            self._command(b"READY", metadata(self._kind))
        else:
            self._commands(self._proof.begin())
        return True

    def _command(self, name: bytes, body: bytes) -> None:
        whole = bytes((len(name),)) + name + body
        self.output.append(bytes((_COMMAND | _LONG,)) + len(whole).to_bytes(8, "big") + whole)

    def _commands(self, commands: list[tuple[bytes, bytes]]) -> None:
        for name, body in commands:
            self._command(name, body)

    def _obey(self, command: bytes) -> None:
        name, body = _counted(command, 0, 1)
        if name == b"ERROR":
            raise ZmtpError(f"refused: {_counted(command, body, 1)[0]!r}")
        if self._proof is not None and not self.open:
            self._commands(self._proof.answer(name, command[body:]))
            if self._proof.peer_metadata is not None:
                self._welcome(self._proof.peer_metadata)
        elif name == b"READY" and not self.open:
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


class _ProofHandshake:
    """The handshake of an end that proves that it knows the cluster's secret."""

    def __init__(self, secret: bytes, kind: bytes) -> None:
        self.as_server = as_server = kind == b"ROUTER"
        self.peer_metadata: bytes | None = None
        self._proof = Proof(secret, b"control", as_server)
        self._metadata = metadata(kind)
        self._expected = b"HELLO" if as_server else b"WELCOME"

    def begin(self) -> list[tuple[bytes, bytes]]:
        """Commands, name and body, to send when the greetings have been exchanged."""
        return [] if self.as_server else [(b"HELLO", self._proof.hello)]

    def answer(self, name: bytes, body: bytes) -> list[tuple[bytes, bytes]]:
        """The commands that answer a command of the handshake.

        Raises:
            Refusal: the peer does not know the secret.
            ZmtpError: it breaks the protocol.
        """
        proof, size = self._proof, self._proof.missing_bytes
        expected, self._expected = self._expected, b""
        if name != expected:
            raise ZmtpError(f"command {name!r} in the handshake")
        try:
            if name == b"HELLO":
                self._expected = b"INITIATE"
                return [(b"WELCOME", proof.answer(body))]
            if name == b"WELCOME":
                self._expected = b"READY"
                return [(b"INITIATE", proof.answer(body) + self._metadata)]
            if name == b"INITIATE":
                proof.answer(body[:size])
                body = body[size:]
        except ProofError as error:
            raise Refusal(str(error)) from error
        assert proof.is_done
        self.peer_metadata = body
        return [(b"READY", self._metadata)] if self.as_server else []


def _other_mechanism(ours: bytes, theirs: bytes) -> ZmtpError:
    if (ours, theirs) == (SECRET, _NULL):
        return Refusal("it has no secret, and this process has the secret of a cluster")
    if (ours, theirs) == (_NULL, SECRET):
        return Refusal("it wants a proof that this process knows its cluster's secret")
    return ZmtpError("another security mechanism")


def _property(name: bytes, value: bytes) -> bytes:
    return bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value


def _properties(data: bytes) -> dict[bytes, bytes]:
    found, at = {}, 0
    while at < len(data):
        name, at = _counted(data, at, 1)
        value, at = _counted(data, at, 4)
        found[name.lower()] = value
    return found


def _counted(data: bytes, at: int, width: int) -> tuple[bytes, int]:
    """The bytes at `at` behind their length, and where they end."""
    start = at + width
    end = start + int.from_bytes(data[at:start], "big")
    if len(data) < max(start, end):
        raise ZmtpError("a damaged command")
    return data[start:end], end
