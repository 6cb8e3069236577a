"""Records what a process does, for the timelines of clients (`pw.trace`).

Each node has one `Recorder`, which its actors and its backend share. It is off by default: each place
that may record asks `if recorder.on` first. A record is `WIDTH` values: its kind, two times, a run or
something like it, and more that depends on the kind:

| kind | times | then |
|---|---|---|
| `COMPUTED` | called, ended | run, segment, serial, computation, a maker of its arguments, the other makers |
| `ENDED` | when | serial of a computation whose own `ended` is 0 |
| `SENT`, `RECEIVED` | from, to | run, edge, peer, bytes |
| `UPLOADED`, `FETCHED` | from, to | array, bytes |
| `LAUNCHED` | queued, ended | run, segment, island, when it was launched, device time in µs |
| `CALLED` | began, ended | run, program |

Times are seconds on the clock of the process; 0 is "not yet". Peers, islands, programs and computations are
numbers that `Recorder.name` gives; the name of a computation begins with its devices, as in "0,1 step". Other
tenants get the devices only, and no names of programs. Makers are serials of other computations; 0 is none.
Nearly all computations have one at most, which needs no tuple.

Launches and calls are recorded when they end. Those that have not ended when a client stops are recorded then
(`unfinished`), and perhaps again later: the last record of one is right.

The values of all records are in one list, which costs the least: no object of its own for a record, none that
the garbage collector visits, and they are encoded only when a client reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from pw.core.tenants import may_touch

COMPUTED, ENDED, SENT, RECEIVED, UPLOADED, FETCHED, LAUNCHED, CALLED = range(8)

WIDTH = 9
"""Number of values of a record."""

LIMIT = 1 << 17
"""Number of records that a process keeps for its readers, about 32 MB; later ones are dropped and counted."""

_ROOM = LIMIT * WIDTH


class Recorder:
    """The records of one process; any of its threads may add some.

    Readers belong to the thread of the event loop (`pw.core.timeline`).
    """

    __slots__ = ("_names", "_numbers", "dropped", "first", "on", "unfinished", "values")

    def __init__(self) -> None:
        self.on = False
        """True while a timeline is recorded."""
        self.values: list[Any] = []
        self.first = 0
        """Number of records that were read by all readers and removed."""
        self.dropped = 0
        self.unfinished: dict[str, Callable[[], None]] = {}
        """Function of each actor that records its launches or calls that have not ended."""
        self._names: dict[tuple[str, str, str | None], int] = {}
        self._numbers = count()

    def add(
        self,
        kind: int,
        start_s: float,
        end_s: float,
        run: int,
        a: float = 0,
        b: float = 0,
        c: float = 0,
        d: float = 0,
        makers: tuple[int, ...] = (),
    ) -> None:
        """Add one record, unless the records that wait for a reader have reached `LIMIT`."""
        values = self.values
        if len(values) < _ROOM:
            # One call, so that no other thread adds in between.
            values.extend((kind, start_s, end_s, run, a, b, c, d, makers))
        else:
            self.dropped += 1

    @property
    def end(self) -> int:
        """Number of records that were ever added."""
        return self.first + len(self.values) // WIDTH

    def between(self, first: int, end: int) -> list[Any]:
        """Return the values of some records, from number `first` to before number `end`."""
        return self.values[(first - self.first) * WIDTH : (end - self.first) * WIDTH]

    def forget(self, until: int) -> None:
        """Remove the records before this one, which all readers have read."""
        del self.values[: (until - self.first) * WIDTH]
        self.first = until

    def name(self, name: str, tenant: str | None = None, place: str = "") -> int:
        """Return the number of a name; the same one each time.

        Args:
            name: the name.
            tenant: whose it is; None for names that all may read.
            place: goes before the name, and all may read it.
        """
        key = place, name, tenant
        number = self._names.get(key)
        if number is None:
            number = self._names.setdefault(key, next(self._numbers))
        return number

    def names(self, skip: int, reader: str) -> tuple[tuple[int, str], ...]:
        """Return names with their numbers, without the first `skip` ones, as a tenant may read them."""
        return tuple(
            (number, place + name if tenant is None or may_touch(reader, tenant) else place)
            for (place, name, tenant), number in tuple(self._names.items())[skip:]
        )
