"""Answers clients that read what this process records (`pw.core.recorder`).

A client's reads keep its recording alive: the first one begins it, and without further ones it ends after
`READER_TIMEOUT_S`. So no component has to be told that a client has died. Several clients may read at once,
each at its own place in the same records. No reader holds up the process: when records have no room, they are
dropped and counted. A client does not get the names of other tenants' programs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import ArgumentError, ErrorReport
from pw.core.ids import Address
from pw.core.messages import PeerLost, ReadRecords, Records
from pw.core.recorder import WIDTH
from pw.core.waits import CLIENT_TIMEOUT_S

PART = 4096
"""Number of records in one message, about 100 KB: launches on the same link hardly wait."""

AT_ONCE = 16
"""Number of timelines that a client may record at the same time."""

READER_TIMEOUT_S = CLIENT_TIMEOUT_S
"""Seconds after which a recording ends whose client has read nothing."""

LOOK_S = 2.5
"""Seconds between two looks for such a client."""


@dataclass(slots=True)
class _RecordReader:
    """A client's place in the records."""

    began: int
    """Number of the first record that the client may read."""
    next: int
    names: int
    """Number of names that the client has read."""
    dropped: int
    """Number of records that had been dropped when the client last read."""
    since_s: float
    """Time at which the client came, in seconds."""
    read_s: float
    end: int | None = None
    """Number of the record at which the client has asked to stop."""


class Recordings(Part):
    """The clients that read this process's records.

    Args:
        env: of the actor.
        is_known: whether the sender of a message is a client.
    """

    def __init__(self, env: Env, is_known: Callable[[Address], bool]) -> None:
        self._env = env
        self._recorder = env.recorder
        self._is_known = is_known
        self._readers: dict[tuple[str, int], _RecordReader] = {}
        self._leases = Ticker(env, LOOK_S, self._end_leases)

    @handles(ReadRecords)
    def _read(self, sender: Address, message: ReadRecords) -> None:
        now_s, recorder = self._env.now_s(), self._recorder
        about = message.timeline, message.question, now_s
        if not self._is_known(sender):
            self._env.send(sender, Records(*about, refused=True))
            return
        key = (sender.node, message.timeline)
        reader = self._readers.get(key)
        if reader is None:
            if sum(node == sender.node for node, _ in self._readers) >= AT_ONCE:
                error = ArgumentError(
                    f"a client records {AT_ONCE} timelines at once; end one of them"
                )
                report = ErrorReport.of(error, self._env.address.node)
                self._env.send(sender, Records(*about, error=report))
                return
            here = recorder.end
            reader = self._readers[key] = _RecordReader(
                here, here, 0, recorder.dropped, now_s, now_s
            )
            self._leases.start()
        reader.read_s = now_s
        if message.stop and reader.end is None:
            if recorder.on:
                for record in recorder.unfinished.values():
                    record()
            reader.end = recorder.end
        self._env.send(sender, self._part(reader, sender.node, about))
        if reader.next == reader.end:
            del self._readers[key]
        self._settle()

    def _part(self, reader: _RecordReader, node: str, about: tuple[int, int, float]) -> Records:
        """Return the next records for a reader at a node."""
        recorder = self._recorder
        first = reader.next
        end = recorder.end if reader.end is None else reader.end
        some = recorder.between(first, min(first + PART, end))
        count = len(some) // WIDTH
        # After the records, which may use new ones.
        names = recorder.names(reader.names, self._env.tenant_of(node))
        dropped = recorder.dropped - reader.dropped
        reader.next += count
        reader.names += len(names)
        reader.dropped += dropped
        return Records(
            *about,
            reader.since_s,
            first - reader.began,
            count,
            msgspec.msgpack.encode(some),
            names,
            dropped,
            end - reader.next,
        )

    def _settle(self) -> None:
        """Record as long as a reader wants that; keep what some reader has not read."""
        recorder, readers = self._recorder, self._readers.values()
        recorder.on = any(reader.end is None for reader in readers)
        recorder.forget(min([reader.next for reader in readers], default=recorder.end))

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        self.forget_node(message.node)

    def forget_node(self, node: str) -> None:
        """End the recordings of a client that is lost."""
        for key in [key for key in self._readers if key[0] == node]:
            del self._readers[key]
        self._settle()

    def _end_leases(self) -> bool:
        """End the recordings of clients that do not read any more."""
        since_s = self._env.now_s() - READER_TIMEOUT_S
        for key in [key for key, reader in self._readers.items() if reader.read_s < since_s]:
            self._env.count("timelines_ended")
            del self._readers[key]
        self._settle()
        return bool(self._readers)
