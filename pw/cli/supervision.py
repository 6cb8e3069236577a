"""What crosses the socket between `pw-worker` and its runtime child.

    supervisor -> child   Begin    begin, as this incarnation, with the parcel of the last child
    child -> supervisor   Beat     my loop turns; at every heartbeat, from its first turn on
    child -> supervisor   Handed   keep this parcel for the next child, in place of the last one
    supervisor -> child   Taken    I have your parcel
    child -> supervisor   Dropped  I do not use the parcel of `Begin` any more

The end of the file tells each process that the other one has ended. A parcel is an anonymous memory
file (`pw.cli.handover`), of which the supervisor keeps the descriptor. It gives the parcel to every
child until another one replaces it, so a child that is killed loses only what it has not sent. A
parcel counts even if its child has ended since. It may have arrays that are gone, but no wrong
ones, because arrays do not change.

This module imports nothing heavy, for the supervisor's sake.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import termios
import threading
import time

import msgspec

MESSAGE_BYTES = 4096

BEATS_BYTES = 32 << 10
"""Beats may fill so much of the socket's 200 KiB, so that there is always room for a parcel."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Supervisor to child, once: begin."""

    incarnation: int
    spare: bool
    """Wait for a free place in an island, instead of asking for one."""
    index_offset: int
    """Where the index of the parcel begins; -1 without a parcel."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Child to supervisor: the event loop turns."""


class Handed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Child to supervisor: keep the parcel that comes with this."""

    index_offset: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Child to supervisor: the parcel of `Begin` is not used any more."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Supervisor to child: one parcel has been taken."""


_decode = msgspec.msgpack.Decoder(Begin | Beat | Handed | Dropped | Taken).decode
_encode = msgspec.msgpack.Encoder().encode


class Parcel:
    """An anonymous memory file with arrays and, at its end, an index of them."""

    def __init__(self, descriptor: int, index_offset: int) -> None:
        self.descriptor = descriptor
        self.index_offset = index_offset

    def close(self) -> None:
        """Close the file; its pages are freed when no process has it open or mapped."""
        os.close(self.descriptor)


class Watch:
    """Decides from its beats whether a child's loop still turns.

    The time in which this process did not ask does not count: it, or the machine, was stopped.

    Args:
        heartbeat_s: how often the child beats, and how often `is_silent` is asked.
        silence_s: how long it may be silent, once it has beaten.
    """

    def __init__(self, heartbeat_s: float, silence_s: float) -> None:
        self._away_s = 2 * heartbeat_s + 0.5
        self._silence_s = silence_s
        self._heard_s: float | None = None
        self._asked_s: float | None = None

    def beat(self, now_s: float) -> None:
        """Note that the child was heard."""
        self._heard_s = now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether the child has been silent for too long."""
        gone_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        self._asked_s = now_s
        if self._heard_s is None:
            return False
        if gone_s > self._away_s:
            self._heard_s = min(now_s, self._heard_s + gone_s)
        return now_s - self._heard_s > self._silence_s


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """Return one message and its descriptor; no bytes at the end of the file."""
    said, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return said, descriptors[0] if descriptors else None


class ChildLink:
    """The supervisor's end of the socket to one child."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.ended = False
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to wait for messages of the child."""
        return self._socket.fileno()

    @property
    def child_descriptor(self) -> int:
        """The descriptor that the child inherits."""
        return self._theirs.fileno()

    def started(self) -> None:
        """Close the child's end here, so that the end of the child can be seen."""
        self._theirs.close()

    def begin(self, incarnation: int, spare: bool, parcel: Parcel | None) -> None:
        """Tell the child to begin, with the parcel of the last one."""
        begin = Begin(incarnation, spare, -1 if parcel is None else parcel.index_offset)
        descriptors = [] if parcel is None else [parcel.descriptor]
        with contextlib.suppress(ConnectionError):  # it has ended; `listen` sees that
            socket.send_fds(self._socket, [_encode(begin)], descriptors)

    def listen(self, kept: Parcel | None) -> Parcel | None:
        """Take all messages of the child, and return the parcel to keep from now on."""
        while not self.ended:
            try:
                said, descriptor = _receive(self._socket)
            except BlockingIOError:
                break
            except ConnectionError:
                said, descriptor = b"", None
            if not said:
                self.ended = True
                break
            message = _decode(said)
            self.watch.beat(time.monotonic())
            if isinstance(message, Handed | Dropped):
                if kept is not None:
                    kept.close()
                kept = None
                if isinstance(message, Handed):
                    if descriptor is not None:
                        kept = Parcel(descriptor, message.index_offset)
                    with contextlib.suppress(OSError):  # it has ended, or does not read
                        self._socket.send(_encode(Taken()))
        return kept

    def close(self) -> None:
        """Close this end; a child that still runs takes that for the end of the supervisor."""
        self.ended = True
        self._socket.close()


class SupervisorLink:
    """The child's end of the socket. Only `begin` waits."""

    def __init__(self, descriptor: int) -> None:
        self.ended = False
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._order = threading.RLock()
        """No `Dropped` of the garbage collector, in any thread, goes behind a parcel."""
        self._handed = False

    def fileno(self) -> int:
        """Return the descriptor to wait for messages of the supervisor."""
        return self._socket.fileno()

    def begin(self) -> tuple[Begin, Parcel | None] | None:
        """Wait for `Begin`; return None if the supervisor has ended instead."""
        said, descriptor = _receive(self._socket)
        if not said:
            return None
        message = _decode(said)
        assert isinstance(message, Begin)
        self._socket.setblocking(False)
        if descriptor is None:
            return message, None
        return message, Parcel(descriptor, message.index_offset)

    def beat(self) -> None:
        """Say that the loop turns, unless many beats are unread."""
        if self._unread_bytes() < BEATS_BYTES:
            with contextlib.suppress(OSError):  # it has ended; `taken` sees that
                self._say(Beat(), None)

    def dropped(self) -> None:
        """Say that the parcel of `begin` is not used any more; from any thread."""
        with self._order:
            if not self._handed:
                with contextlib.suppress(OSError):
                    self._say(Dropped(), None)

    def hand_over(self, parcel: Parcel) -> None:
        """Leave this parcel to the next child, in place of earlier ones.

        Raises:
            OSError: the supervisor has ended.
        """
        with self._order:
            self._handed = True
            self._say(Handed(parcel.index_offset), parcel)

    def taken(self) -> int:
        """Return how many parcels the supervisor has taken since the last call."""
        count = 0
        while not self.ended:
            try:
                said, _ = _receive(self._socket)
            except BlockingIOError:
                break
            except ConnectionError:
                said = b""
            self.ended = not said
            count += bool(said)
        return count

    def close(self) -> None:
        """Close this end; the supervisor takes that for the end of the child."""
        self._socket.close()

    def _unread_bytes(self) -> int:
        """Return the bytes that the supervisor has not read; a message counts some 800."""
        count = array.array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, count)
        return count[0]

    def _say(self, message: Beat | Handed | Dropped, parcel: Parcel | None) -> None:
        descriptors = [] if parcel is None else [parcel.descriptor]
        socket.send_fds(self._socket, [_encode(message)], descriptors)
