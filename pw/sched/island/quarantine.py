"""Programs that crash their hosts: a compiler or a kernel may end the process instead of raising.

Running such a program again is no recovery, it is the next crash, and soon no host is left for anybody. So
whenever a host is lost, what it was working at is suspected: the oldest program that it was compiling, as hosts
compile in order; else the program of the oldest segment that was launched there, and if devices work at
different ones, that which had its turn last: the others had gone well for longer. A program that was
suspected `STRIKES` times in a row, and has not once been compiled (or run) in between, is refused from then
on. Programs are known by their artifacts, so that it does not help to register one again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pw.core.errors import CompileError, ComputationFailed, ErrorReport
from pw.core.ids import client_of
from pw.core.program import Program

STRIKES = 4
"""Fewer than the crashes after which a host's supervisor gives up."""

REMEMBERED = 1024
"""Suspicions that are kept; they outlive the client whose program it was."""

_Deed = tuple[str, tuple[bytes, ...]]
"""Compiling or running, and what."""


class Suspects:
    """What the hosts of one island were lost over."""

    def __init__(self) -> None:
        self._programs: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        self._strikes: dict[_Deed, int] = {}

    def __bool__(self) -> bool:
        """Whether anything is suspected."""
        return bool(self._strikes)

    def install(self, program: int, body: Program) -> ErrorReport | None:
        """A program is to be compiled; the reason if it must not be."""
        artifacts = tuple(computation.artifact for computation in body.computations)
        self._programs[program] = (body.name, artifacts)
        if self._strikes.get(("compiled", artifacts), 0) < STRIKES:
            return None
        return ErrorReport.of(CompileError(_words("compiled", body.name)))

    def refusal(self, program: int) -> ErrorReport | None:
        """A program is to be run; the reason if it must not be."""
        name, artifacts = self._programs.get(program, ("", ()))
        if self._strikes.get(("ran", artifacts), 0) < STRIKES:
            return None
        return ErrorReport.of(ComputationFailed(_words("ran", name)))

    def uninstall(self, program: int) -> None:
        """The program is not known any more; what it is suspected of is."""
        self._programs.pop(program, None)

    def forget(self, client: int) -> None:
        """Nothing of a client is known any more."""
        for program in [program for program in self._programs if client_of(program) == client]:
            del self._programs[program]

    def compiled(self, program: int) -> None:
        """All hosts have compiled it."""
        self._clear("compiled", program)

    def ran(self, program: int) -> None:
        """A segment of it has ended."""
        self._clear("ran", program)

    def host_lost(
        self,
        host: str,
        compiling: Mapping[int, Iterable[str]],
        running: Iterable[int],
    ) -> None:
        """A host has ended unasked.

        Args:
            host: which one.
            compiling: the hosts that were compiling each program, the oldest first.
            running: what it was running, the likeliest first.
        """
        compiled = [program for program, hosts in compiling.items() if host in hosts]
        for did, programs in (("compiled", compiled), ("ran", running)):
            for program in programs:
                if program in self._programs:
                    deed = (did, self._programs[program][1])
                    self._strikes[deed] = self._strikes.pop(deed, 0) + 1
                    if len(self._strikes) > REMEMBERED:
                        del self._strikes[next(iter(self._strikes))]
                    return

    def _clear(self, did: str, program: int) -> None:
        if self._strikes and program in self._programs:
            self._strikes.pop((did, self._programs[program][1]), None)


def _words(did: str, name: str) -> str:
    return (
        f"hosts were lost {STRIKES} times in a row while they {did} {name!r}, so it is not tried again. The "
        "logs of the hosts say how they ended; change the function, or divide it to find out which "
        "part does that"
    )
