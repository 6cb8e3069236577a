"""The life of a logical array at the controller.

Theory of operation. The controller has one entry for an array, whatever the number of its shards.
The bytes are on hosts. An array begins in one of four ways:

- A client uploads it, or its hosts read it from files: it is *arriving* until each of its hosts has
  reported that it has its shards.
- A run makes it: it is *present* from the moment the run is submitted. A client that asks for the
  value asks the hosts, and they know when the value is ready.
- A run or an upload is refused: its arrays are *failed* at once.
- A client of an earlier controller says that it holds the array: it is *lost* to this controller.

When a host is lost, each array that had a shard there is *lost*, and so is what an interrupted run
would have made. Recovery brings a lost array back: from replicas, from files or from the client it
is arriving again; a repeated run makes it present at once. What cannot be brought back has failed.

A failed array carries the error for all that is computed from it. An array that fails while it is
arriving waits until all its hosts have reported, or are lost. The same holds for an array that the
client deletes or donates while it is arriving: it is *discarded*, and the hosts drop it when all
have reported. An array that only a repeated run needs, and no client holds, is discarded from the
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice

from pw.core.actors.lifecycle import Lifecycle
from pw.core.errors import ErrorReport
from pw.core.messages import Uploaded
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.sched.control.lineage import Attempts

NOWHERE = ArraySpec((), "bool", Sharding((), ()), Placement(0, ()))
"""Spec of an array that failed before it had a place."""


class ArrayState(StrEnum):
    """The states of an array."""

    ARRIVING = "arriving"
    """State of an array of which some hosts have not reported their shards."""
    PRESENT = "present"
    """State of an array that is on its hosts, or that a run in flight makes there."""
    LOST = "lost"
    """State of an array that was on a lost host; recovery has to bring it back."""
    FAILING = "failed while arriving"
    """State of an array that carries an error, and of which some hosts have not reported."""
    FAILED = "failed"
    """State of an array that carries an error."""
    DISCARDED = "discarded while arriving"
    """State of an array that no client holds, and of which some hosts have not reported their shards."""
    DELETED = "deleted"
    """State of an array that the controller does not know any more."""


class ArrayEvent(StrEnum):
    """Event that changes the state of an array."""

    ARRIVE = "its last host reports"
    LOSE = "a host is lost"
    BRING = "recovery has its hosts bring it again"
    REPLAY = "recovery runs its run again"
    FAIL = "an error is found"
    DELETE = "the client deletes or donates it"


_S, _E = ArrayState, ArrayEvent

ARRAY = Lifecycle[ArrayState, ArrayEvent](
    "array",
    {
        _S.ARRIVING: {
            _E.ARRIVE: _S.PRESENT,
            _E.LOSE: _S.LOST,
            _E.FAIL: _S.FAILING,
            _E.DELETE: _S.DISCARDED,
        },
        _S.PRESENT: {_E.LOSE: _S.LOST, _E.FAIL: _S.FAILED, _E.DELETE: _S.DELETED},
        _S.LOST: {
            _E.LOSE: _S.LOST,
            _E.BRING: _S.ARRIVING,
            _E.REPLAY: _S.PRESENT,
            _E.FAIL: _S.FAILED,
        },
        _S.FAILING: {_E.ARRIVE: _S.FAILED, _E.LOSE: _S.FAILED, _E.DELETE: _S.DISCARDED},
        _S.FAILED: {_E.DELETE: _S.DELETED},
        _S.DISCARDED: {_E.ARRIVE: _S.DELETED, _E.LOSE: _S.DELETED, _E.FAIL: _S.DISCARDED},
        _S.DELETED: {},
    },
)


@dataclass(slots=True, eq=False)
class ArrayEntry(Attempts):
    """An array with its state, which only the methods of this class change."""

    spec: ArraySpec
    island: str
    hosts: tuple[str, ...]
    state: ArrayState = ArrayState.PRESENT
    awaited: frozenset[str] = frozenset()
    """Names of hosts that have not reported their shards."""
    cause: ErrorReport | None = None
    """Error that lost the array, or made it fail."""
    input: int = 0
    """Id under which the client uploads the array; 0 if it does not come from the client."""
    refused: bool = False
    """True if it takes its tenant beyond what it may have: hosts drop it when all have reported."""
    restored: bool = False
    """True if the array was made from replicas, or brought again, so that hosts may have replicas of it."""
    past: tuple[ArrayState, ...] = ()

    @classmethod
    def failed(cls, error: ErrorReport) -> ArrayEntry:
        """Return an array that never was anywhere."""
        return cls(NOWHERE, "", (), ArrayState.FAILED, cause=error)

    @property
    def error(self) -> ErrorReport | None:
        """The error that the array carries, if it has failed."""
        return None if self.state is ArrayState.LOST else self.cause

    @property
    def is_lost(self) -> bool:
        """Whether recovery has to bring it back."""
        return self.state is ArrayState.LOST

    @property
    def was_lost(self) -> bool:
        """Whether recovery has brought it back."""
        return ArrayState.LOST in self.past

    @property
    def is_good(self) -> bool:
        """Whether it is on its hosts, or arrives there."""
        return self.state in (ArrayState.PRESENT, ArrayState.ARRIVING)

    @property
    def history(self) -> str:
        """States of the array, the present one last."""
        return ", ".join((*self.past, self.state))

    def _after(self, event: ArrayEvent) -> None:
        after = ARRAY.after(self.state, event)
        if after is not self.state:
            self.past += (self.state,)
            self.state = after

    def report(self, host: str) -> None:
        """A host has its shards, or will not have them."""
        self.awaited -= {host}

    def arrive(self) -> None:
        """Change the state when all hosts of the array have reported."""
        self._after(ArrayEvent.ARRIVE)

    def lose(self, error: ErrorReport) -> None:
        """A host was lost that had shards, or was to have them; the first cause stays."""
        self._after(ArrayEvent.LOSE)
        self.awaited = frozenset()
        self.cause = self.cause or error

    def bring(self, island: str, hosts: tuple[str, ...]) -> None:
        """Recovery begins: hosts will receive or compute the array again."""
        self._after(ArrayEvent.BRING)
        self.island, self.hosts, self.awaited = island, hosts, frozenset(hosts)
        self.cause = None

    def replay(self, island: str, hosts: tuple[str, ...]) -> None:
        """A repeated run makes it, on these hosts."""
        self._after(ArrayEvent.REPLAY)
        self.island, self.hosts, self.cause = island, hosts, None

    def fail(self, error: ErrorReport) -> None:
        """Give the array an error."""
        self._after(ArrayEvent.FAIL)
        self.cause = error

    def drop(self) -> None:
        """Its hosts drop it."""
        self.hosts = ()

    def delete(self) -> None:
        """The client does not hold it any more."""
        self._after(ArrayEvent.DELETE)


class ArrayTable:
    """The arrays that a client holds, and those that are discarded and still arriving."""

    def __init__(self) -> None:
        self.held: dict[int, ArrayEntry] = {}
        self.discarded: dict[int, ArrayEntry] = {}
        self.lost: dict[int, ArrayEntry] = {}
        """Lost arrays that the client holds, by number, the first one that was lost first."""
        self.changes = 0
        """How often one of the client's arrays was lost, or was not lost any more."""
        self.unannounced: dict[int, dict[str, Uploaded]] = {}
        """Reports of hosts about uploads that the client's stream has not announced, by array and host."""
        self.newest_input = 0
        """Number of the newest upload that was announced."""

    def __len__(self) -> int:
        return len(self.held)

    def __contains__(self, number: int) -> bool:
        return number in self.held

    def get(self, number: int) -> ArrayEntry | None:
        """Return an array that the client holds."""
        return self.held.get(number)

    def find(self, number: int) -> ArrayEntry | None:
        """Return an array that the client holds, or that is discarded and still arriving."""
        return self.held.get(number) or self.discarded.get(number)

    def is_good(self, number: int) -> bool:
        """Whether the client holds an array that is on its hosts, or arrives there."""
        array = self.held.get(number)
        return array is not None and array.is_good

    def all(self) -> Iterator[tuple[int, ArrayEntry]]:
        """Yield all arrays that `find` returns, with their numbers."""
        yield from self.held.items()
        yield from self.discarded.items()

    def arriving(self, looked_at: int | None = None) -> Iterator[tuple[int, ArrayEntry]]:
        """Yield arrays that some hosts have not reported, of the newest `looked_at` ones."""
        newest = chain(reversed(self.discarded.items()), reversed(self.held.items()))
        return ((number, one) for number, one in islice(newest, looked_at) if one.awaited)

    def is_arriving(self, number: int) -> bool:
        """Whether some hosts of an array that the client holds have not reported it."""
        array = self.held.get(number)
        return array is not None and bool(array.awaited)

    def is_on_its_way(self, number: int) -> bool:
        """Whether an array that the client holds is lost, or some of its hosts have not reported it."""
        array = self.held.get(number)
        return array is not None and (array.is_lost or self.is_arriving(number))

    def add(self, number: int, array: ArrayEntry) -> None:
        """The client holds this array from now on."""
        self.held[number] = array
        if array.is_lost:
            self.lost[number] = array
            self.changes += 1

    def announced(self, number: int) -> dict[str, Uploaded]:
        """Note that an upload was announced; return what hosts have reported of it."""
        self.newest_input = max(self.newest_input, number)
        return self.unannounced.pop(number, {})

    def lose(self, number: int, error: ErrorReport, *, island: bool = False) -> None:
        """A host of an array is lost, or its whole `island`; a discarded array is forgotten."""
        array = self.held.get(number)
        if array is None:
            self.discarded.pop(number).lose(error)
            return
        array.lose(error)
        if array.is_lost:
            self.lost.setdefault(number, array)
            self.changes += 1
        if island:
            array.hosts = ()

    def bring(self, number: int, island: str, hosts: tuple[str, ...]) -> None:
        """A lost array arrives once more."""
        self.lost.pop(number).bring(island, hosts)
        self.changes += 1

    def replay(self, number: int, island: str, hosts: tuple[str, ...]) -> None:
        """A repeated run makes a lost array."""
        self.lost.pop(number).replay(island, hosts)
        self.changes += 1

    def fail(self, numbers: Iterable[int], error: ErrorReport) -> tuple[int, ...]:
        """Fail the arrays that the client holds and that have not failed; return them."""
        failed = []
        for number in numbers:
            array = self.held.get(number)
            if array is not None and array.error is None:
                array.fail(error)
                if self.lost.pop(number, None) is not None:
                    self.changes += 1
                failed.append(number)
        return tuple(failed)

    def take(self, number: int) -> ArrayEntry | None:
        """Take out an array that the client deletes or donates; it may still be arriving."""
        array = self.held.pop(number, None)
        if array is not None:
            array.delete()
            if array.awaited:
                self.discarded[number] = array
        return array

    def arrive(self, number: int, array: ArrayEntry) -> bool:
        """Note that all hosts of an array have reported; return whether it was discarded."""
        array.arrive()
        return self.discarded.pop(number, None) is not None
