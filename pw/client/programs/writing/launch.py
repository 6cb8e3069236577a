"""`Launch`: a registered program and where each of its inputs comes from; calling it is the hot path."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pw.client.arrays.array import Array, giving_up
from pw.client.arrays.island_parts import IslandPart
from pw.client.arrays.joined import JoinedArray
from pw.client.arrays.signature import ArrayType, host_value
from pw.core.errors import ArgumentError
from pw.core.messages import INLINE_BYTES


class Feed(NamedTuple):
    """The source of a program input: a leaf of the call, or a value that the trace has fixed."""

    leaf: int
    fixed: Array | bytes | np.ndarray[Any, Any] | None
    type: ArrayType


class Launch:
    """A registered program, ready to run."""

    __slots__ = ("_checks", "_donated", "_feeds", "_program", "_results", "name", "runtime", "tree")

    def __init__(
        self,
        session: Any,
        name: str,
        program: int | None,
        feeds: Sequence[Feed],
        results: Sequence[ArrayType],
        donated: dict[int, str],
        tree: Any = None,
        checks: Sequence[Callable[[Sequence[Any]], None]] = (),
    ) -> None:
        self.runtime = session
        self.name = name
        self.tree = tree
        self._program = program
        self._feeds = tuple(feeds)
        self._results = tuple(results)
        self._checks = tuple(checks)
        self._donated = tuple(
            (
                position,
                f"it was donated to the computation {name!r}; use what that returned, or give it a copy, "
                "x.copy(), or do not donate it",
            )
            for position, name in donated.items()
        )

    @property
    def program(self) -> int | None:
        """The number of the program; None if it does nothing."""
        return self._program

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """Run on the leaves of a call; returns at once."""
        session = self.runtime
        if self._program is None:
            return []
        for check in self._checks:
            check(leaves)
        args: list[int | bytes] = []
        uploads = []
        for leaf, fixed, type_ in self._feeds:
            value = leaves[leaf] if fixed is None else fixed
            if type(value) is Array:
                if value._gone is not None:
                    value._check_usable()
                args.append(value._id)
            elif type(value) is bytes:
                args.append(value)
            else:
                array = host_value(value, type_)
                if array.nbytes <= INLINE_BYTES:
                    args.append(array.tobytes())
                else:
                    number = session.upload(array, type_.spec, for_run=True)
                    uploads.append(Array(session, number, type_))
                    args.append(number)
        if self._donated:
            return self._run_donating(leaves, args)
        numbers = session.run(self._program, args, len(self._results))
        results = []
        for number, type_ in zip(numbers, self._results, strict=True):
            results.append(Array(session, number, type_))
        return results

    def _run_donating(self, leaves: Sequence[Any], args: list[int | bytes]) -> list[Array]:
        arrays: list[tuple[Array, str]] = []
        uses = Counter(args) if len(set(args)) < len(args) else None
        for position, fate in self._donated:
            leaf, fixed, _ = self._feeds[position]
            value = leaves[leaf] if fixed is None else fixed
            if isinstance(value, Array):
                if uses is not None and uses[value._id] > 1:
                    raise ArgumentError(
                        f"the array {value.aval.str_short()} is donated, but the same array is passed "
                        f"to {self.name!r} more than once; pass a copy, x.copy(), or do not donate it"
                    )
                arrays.append((value, fate))
        if self.runtime.read_only:
            _check_donated(self.runtime.read_only, self.name, arrays)
        alive = self.runtime.alive
        marked: list[Array] = []
        try:
            with giving_up:
                for value, _ in arrays:
                    if value._gone is not None or not alive:
                        value._check_usable()
                for value, fate in arrays:
                    marked.append(value)
                    value._gone = fate
            numbers = self.runtime.run(self._program, args, len(self._results))
        except BaseException:
            for value in marked:
                value._gone = None
            raise
        for value, _ in arrays:
            value._fetching = None
        return [Array(self.runtime, n, t) for n, t in zip(numbers, self._results, strict=True)]

    def __del__(self) -> None:
        session = getattr(self, "runtime", None)
        if session is not None and self._program is not None and session.alive:
            session.release_program(self._program)


def _check_donated(
    read_only: Mapping[int, tuple[str, int]], name: str, donated: Sequence[tuple[Array, str]]
) -> None:
    """Raise ArgumentError if an array that a lookup has returned is donated."""
    for array, _ in donated:
        version = read_only.get(array.members[0]._id)
        if version is not None:
            raise ArgumentError(
                f"{name!r} donates the array {array.aval.str_short()}, which is version {version[1]} of "
                f"{version[0]!r} and read-only; pass a copy, x.copy(), or do not donate it"
            )


class Pick(NamedTuple):
    """An island's part of a leaf of the call."""

    leaf: int
    island: int
    part: IslandPart

    def of(self, leaves: Sequence[Any]) -> Any:
        """Return the part."""
        value = leaves[self.leaf]
        return value.members[self.island] if isinstance(value, Array) else self.part.of(value)


class JoinedLaunch(Launch):
    """A program with arguments or results that have a part on each of several islands."""

    __slots__ = ("_grouped", "_picks")

    def joining(self, picks: Sequence[Pick], grouped: Sequence[ArrayType]) -> JoinedLaunch:
        """Take `picks` as further leaves, the last one first, and return arrays of the types `grouped`."""
        self._picks = tuple(reversed(picks))
        self._grouped = tuple(grouped)
        return self

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """Run on the leaves of a call; returns at once."""
        for pick in self._picks:
            value = leaves[pick.leaf]
            if isinstance(value, Array):
                value._check_usable()
        values = iter(super().__call__([*leaves, *[pick.of(leaves) for pick in self._picks]]))
        return [
            JoinedArray([next(values) for _ in type_.parts], type_) if type_.parts else next(values)
            for type_ in self._grouped
        ]


class Launches:
    """The launches of a function by the kind of call; forgets those of closed sessions.

    `get` takes no lock. A thread that finds no launch records one under `lock`, so threads that
    make the same new call share one recording.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._by_key: dict[Any, Launch] = {}
        self.get = self._by_key.get

    def newest(self) -> Launch | None:
        """Return the launch that was added last and can still be called."""
        alive = (one for one in reversed(self._by_key.values()) if one.runtime.alive)
        return next((one for one in alive if one.program is not None), None)

    def add(self, key: Any, launch: Launch) -> Launch:
        """Remember `launch`; call with the lock held."""
        for stale in [k for k, entry in self._by_key.items() if not entry.runtime.alive]:
            del self._by_key[stale]
        self._by_key[key] = launch
        return launch
