"""What crosses the socket between `pw-worker` and its runtime child.

    supervisor -> child   Begin    who you are; with what the last child handed over, if it did
    child -> supervisor   Beat     my loop turns; every heartbeat, from its first turn on
    child -> supervisor   Handed   keep this for the child after me, in place of what you have
    supervisor -> child   Taken    I have what you handed me
    child -> supervisor   Dropped  nobody here uses any more what you gave me

The end of the file tells either that the other process is gone, however it ended. Bytes are handed over as
one anonymous memory file (see `pw.cli.handover`), of which the supervisor only keeps the descriptor. It
gives it to every child until another one takes its place: if a child is killed, the next begins with
what an earlier one left. What has been sent is taken even if the child has ended since. Such copies may
be of arrays that are gone meanwhile, but they are never wrong, because arrays do not change.

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
"""So much of the socket's 200 KiB may be filled with beats: there is always room for a parcel."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Supervisor to child, first of all."""

    incarnation: int
    spare: bool
    """Take a free place and wait while there is none, instead of asking for one."""
    index_offset: int
    """Where in the parcel that comes with this its index is; -1 without a parcel."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Child to supervisor: my event loop turns."""


class Handed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Child to supervisor: keep the parcel that comes with this (none: nothing is left to keep)."""

    index_offset: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Child to supervisor: the parcel that I began with is of no use to anybody any more."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Supervisor to child: I have what you handed me, once for each."""


_decode = msgspec.msgpack.Decoder(Begin | Beat | Handed | Dropped | Taken).decode
_encode = msgspec.msgpack.Encoder().encode


class Parcel:
    """What a child leaves: an anonymous memory file with arrays and, at its end, an index of them."""

    def __init__(self, descriptor: int, index_offset: int) -> None:
        self.descriptor = descriptor
        self.index_offset = index_offset

    def close(self) -> None:
        """Let go of the file; it is gone when nobody has it open or mapped."""
        os.close(self.descriptor)


class Watch:
    """Judges by its beats whether a child's loop still turns.

    Only somebody who listens can say that another one is silent. So `is_silent` must be asked every
    heartbeat, and when it was not, because this process or the whole machine was stopped, the time is
    not held against the child.

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
        """The child was heard."""
        self._heard_s = now_s

    def is_silent(self, now_s: float) -> bool:
        """Whether it is time to give up the child."""
        gone_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        self._asked_s = now_s
        if self._heard_s is None:
            return False
        if gone_s > self._away_s:
            self._heard_s = min(now_s, self._heard_s + gone_s)
        return now_s - self._heard_s > self._silence_s


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """One message and its descriptor; no bytes at the end of the file."""
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
        """To wait for what the child says."""
        return self._socket.fileno()

    @property
    def child_descriptor(self) -> int:
        """The end that the child inherits."""
        return self._theirs.fileno()

    def started(self) -> None:
        """The child has its end: close ours of it, so that its end can be seen."""
        self._theirs.close()

    def begin(self, incarnation: int, spare: bool, parcel: Parcel | None) -> None:
        """Tell the child to begin, with what the last one left."""
        begin = Begin(incarnation, spare, -1 if parcel is None else parcel.index_offset)
        descriptors = [] if parcel is None else [parcel.descriptor]
        with contextlib.suppress(ConnectionError):  # it has ended already, which is seen elsewhere
            socket.send_fds(self._socket, [_encode(begin)], descriptors)

    def listen(self, kept: Parcel | None) -> Parcel | None:
        """Take all that the child has said; returns the parcel to keep from now on."""
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
                    with contextlib.suppress(OSError):  # it has ended, or hears nothing
                        self._socket.send(_encode(Taken()))
        return kept

    def close(self) -> None:
        """Close this end, which a child that still runs takes for our end."""
        self.ended = True
        self._socket.close()


class SupervisorLink:
    """The child's end. Its methods never wait, but for `begin`."""

    def __init__(self, descriptor: int) -> None:
        self.ended = False
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._order = threading.RLock()
        """What the garbage collector drops, in any thread, is never said behind what is handed over."""
        self._handed = False

    def fileno(self) -> int:
        """To wait for what the supervisor says."""
        return self._socket.fileno()

    def begin(self) -> tuple[Begin, Parcel | None] | None:
        """Wait for the word to begin; None if the supervisor has ended instead."""
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
        """Say that the loop turns, unless many beats are unread: a supervisor that is stopped needs no more."""
        if self._unread_bytes() < BEATS_BYTES:
            with contextlib.suppress(OSError):  # it has ended, which is seen elsewhere
                self._say(Beat(), None)

    def dropped(self) -> None:
        """Nothing uses the parcel of `begin` any more; from any thread."""
        with self._order:
            if not self._handed:
                with contextlib.suppress(OSError):
                    self._say(Dropped(), None)

    def hand_over(self, parcel: Parcel | None) -> None:
        """Leave this to the next child, and nothing else.

        Raises:
            OSError: the supervisor will not get it.
        """
        with self._order:
            self._handed = True
            self._say(Handed(parcel.index_offset if parcel else -1), parcel)

    def taken(self) -> int:
        """How many parcels the supervisor has taken since this was last asked."""
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
        """Close this end, which the supervisor takes for our end."""
        self._socket.close()

    def _unread_bytes(self) -> int:
        """What the supervisor has still to read, as the kernel counts it: some 800 bytes a message."""
        count = array.array("i", [0])
        fcntl.ioctl(self._socket, termios.TIOCOUTQ, count)
        return count[0]

    def _say(self, message: Beat | Handed | Dropped, parcel: Parcel | None) -> None:
        descriptors = [] if parcel is None else [parcel.descriptor]
        socket.send_fds(self._socket, [_encode(message)], descriptors)
