"""Records what a process does, for the timelines of clients (`pw.trace`).

Each node has one `Recorder`, which its actors and its backend share. It is off by default: each place
that may record asks `if recorder.on` first. A record is a tuple of numbers, the first one its kind:

| kind | fields after it |
|---|---|
| `COMPUTED` | called, ended, serial, run, segment, name, devices, serials of what made its arguments |
| `ENDED` | when, serial of a `COMPUTED` whose own `ended` is 0 |
| `SENT`, `RECEIVED` | from, to, run, edge, peer, bytes |
| `UPLOADED`, `FETCHED` | from, to, array, bytes |
| `QUEUED`, `LAUNCHED` | when, run, segment, island |
| `FINISHED` | when, run, segment, island, device time in µs |
| `SUBMITTED` | when, run, program |
| `SETTLED` | when, run |

Times are seconds on the clock of the process. Names, peers, islands, programs and devices ("0,1") are
numbers that `Recorder.name` gives.
"""

from __future__ import annotations

from itertools import count
from typing import Any

COMPUTED, ENDED, SENT, RECEIVED, UPLOADED, FETCHED = range(6)
QUEUED, LAUNCHED, FINISHED, SUBMITTED, SETTLED = range(6, 11)

LIMIT = 1 << 17
"""Records that a process keeps for its readers, about 32 MB; later ones are dropped and counted."""

Record = tuple[Any, ...]


class Recorder:
    """The records of one process; any of its threads may add some.

    Readers belong to the thread of the event loop (`pw.core.timeline`).
    """

    __slots__ = ("_names", "_numbers", "dropped", "first", "on", "records")

    def __init__(self) -> None:
        self.on = False
        """Whether some timeline is recorded."""
        self.records: list[Record] = []
        self.first = 0
        """How many records were read by all readers and removed."""
        self.dropped = 0
        self._names: dict[str, int] = {}
        self._numbers = count()

    def add(self, *record: Any) -> None:
        """Add one record, unless the records that wait for a reader have reached `LIMIT`."""
        if len(self.records) < LIMIT:
            self.records.append(record)
        else:
            self.dropped += 1

    def name(self, name: str) -> int:
        """Return the number of a name; the same one each time."""
        number = self._names.get(name)
        if number is None:
            number = self._names.setdefault(name, next(self._numbers))
        return number

    def names(self, known: int) -> tuple[tuple[int, str], ...]:
        """Return names with their numbers, without the first `known` ones."""
        return tuple((number, name) for name, number in tuple(self._names.items())[known:])

    def forget(self, until: int) -> None:
        """Remove the records before this one, which all readers have read."""
        del self.records[: until - self.first]
        self.first = until
