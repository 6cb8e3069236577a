"""What crosses the channel between `pw-worker` and its runtime child.

    supervisor -> child   Begin    begin, as this incarnation, with the parcel of the last child
    child -> supervisor   Beat     my loop turns; at every heartbeat, from its first turn on
    child -> supervisor   Handed   keep this parcel for the next child, in place of the last one
    supervisor -> child   Receipt  I have your parcel
    supervisor -> child   Drain    you are to end: first have all that you hold moved to other hosts
    child -> supervisor   Dropped  I do not use the parcel of `Begin` any more

The end of the file tells each process that the other one has ended. A parcel is an anonymous memory
file (`pw.cli.handover`), of which the supervisor keeps the descriptor. It gives the parcel to every
child until another one replaces it, so a child that is killed loses only what it has not sent. A
parcel counts even if its child has ended since. It may have arrays that are gone, but no wrong
ones, because arrays do not change.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import termios
import threading
import time

import msgspec

from pw.processes.channel import Channel

BEATS_BYTES = 32 << 10
"""Beats may fill so much of the channel, so that there is always room for a parcel."""


class Begin(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Supervisor to child, once: begin."""

    incarnation: int
    spare: bool
    """Wait for a free place in an island, instead of asking for one."""
    index_offset: int
    """Place of the parcel's index in it, in bytes; -1 without a parcel."""
    is_to_end: bool = False
    """True if this host has been told to end; `Drain` follows."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Child to supervisor: the event loop turns."""


class Handed(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Child to supervisor: keep the parcel that comes with this."""

    index_offset: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Child to supervisor: the parcel of `Begin` is not used any more."""


class Receipt(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Supervisor to child: one parcel has been taken."""


class Drain(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Supervisor to child: leave the cluster once all that the host holds is elsewhere."""


ToSupervisor = Beat | Handed | Dropped
ToRuntime = Begin | Receipt | Drain


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


class ChildLink:
    """The supervisor's end of the channel to one child."""

    def __init__(self, channel: Channel[ToSupervisor], watch: Watch) -> None:
        self.channel = channel
        self.watch = watch

    def begin(
        self, incarnation: int, spare: bool, parcel: Parcel | None, *, is_to_end: bool = False
    ) -> None:
        """Tell the child to begin, with the parcel of the last one."""
        index_offset = -1 if parcel is None else parcel.index_offset
        descriptors = [] if parcel is None else [parcel.descriptor]
        begin = Begin(incarnation, spare, index_offset, is_to_end)
        with contextlib.suppress(ConnectionError):  # it has ended; `listen` sees that
            self.channel.send(begin, descriptors=descriptors)
        if is_to_end:
            self.drain()

    def drain(self) -> None:
        """Tell the child to leave the cluster."""
        with contextlib.suppress(OSError):  # it has ended
            self.channel.send(Drain(), wait=False)

    def listen(self, kept: Parcel | None) -> Parcel | None:
        """Take all messages of the child, and return the parcel to keep from now on."""
        for message, _, descriptors in self.channel.arrived():
            self.watch.beat(time.monotonic())
            if isinstance(message, Beat):
                continue
            if kept is not None:
                kept.close()
            kept = None
            if isinstance(message, Handed):
                kept = Parcel(descriptors[0], message.index_offset)
                with contextlib.suppress(OSError):  # it has ended, or does not read
                    self.channel.send(Receipt(), wait=False)
        return kept


class SupervisorLink:
    """The child's end of the channel. Only `begin` waits."""

    def __init__(self, descriptor: int) -> None:
        self.channel: Channel[ToRuntime] = Channel(descriptor, ToRuntime, descriptors=1)
        self._order = threading.RLock()
        """Lock that keeps a `Dropped` of the garbage collector, in any thread, from going behind a parcel."""
        self._handed = False

    def begin(self) -> tuple[Begin, Parcel | None] | None:
        """Wait for `Begin`; return None if the supervisor has ended instead."""
        try:
            message, _, descriptors = self.channel.receive()
        except EOFError:
            return None
        assert isinstance(message, Begin)
        parcel = Parcel(descriptors[0], message.index_offset) if descriptors else None
        return message, parcel

    def beat(self) -> None:
        """Say that the loop turns, unless many beats are unread."""
        if self._unread_bytes() < BEATS_BYTES:
            with contextlib.suppress(OSError):  # it has ended; `taken` sees that
                self.channel.send(Beat(), wait=False)

    def dropped(self) -> None:
        """Say that the parcel of `begin` is not used any more; from any thread."""
        with self._order:
            if not self._handed:
                with contextlib.suppress(OSError):
                    self.channel.send(Dropped(), wait=False)

    def hand_over(self, parcel: Parcel) -> None:
        """Leave this parcel to the next child, in place of earlier ones.

        Raises:
            OSError: the supervisor has ended.
        """
        with self._order:
            self._handed = True
            handed = Handed(parcel.index_offset)
            self.channel.send(handed, descriptors=[parcel.descriptor], wait=False)

    def arrived(self) -> list[ToRuntime]:
        """Return what the supervisor has said since the last call."""
        return [message for message, _, _ in self.channel.arrived()]

    def _unread_bytes(self) -> int:
        """Return the bytes that the supervisor has not read; a message counts some 800."""
        count = array.array("i", [0])
        fcntl.ioctl(self.channel.socket, termios.TIOCOUTQ, count)
        return count[0]
