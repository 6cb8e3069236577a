"""Refuses programs that crash their hosts: a compiler or a kernel may end the process instead of
raising.

To run such a program again only crashes the next host. So when a host is lost, one program gets a
strike: the oldest that the host was compiling, as hosts compile in order; else the program of the
oldest launch there. Hosts of CPU devices have other processes compile, so there a launch comes first.
If devices work at different launches, it is the one that had its turn last,
since the others had run longer without harm. A program with `STRIKES` strikes, none followed by a
success, is refused from then on. Programs are known by their artifacts, so it does not help to
register one again.
"""

from __future__ import annotations

from collections.abc import Iterable

from pw.core.actors.actor import Part, handles
from pw.core.errors import CompileError, ComputationFailed, ErrorReport
from pw.core.ids import Address, client_of
from pw.core.messages import RemoveClient
from pw.core.programs.program import Program

STRIKES = 4
"""Number of crashes after which a program is refused, fewer than those after which a supervisor gives up."""
REMEMBERED = 1024
"""Number of strikes that are kept; they outlive the client that owns the program."""


class Quarantine(Part):
    """Counts the strikes of the programs of one island."""

    def __init__(self) -> None:
        self._programs: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        """Name and artifacts of installed programs, by number."""
        self.strikes: dict[tuple[str, tuple[bytes, ...]], int] = {}
        """Number of strikes, by "compiled" or "ran" and artifacts."""

    def install(self, program: int, body: Program) -> ErrorReport | None:
        """Return the error if a program must not be compiled."""
        artifacts = body.artifacts()
        if not artifacts:  # a view, which hosts neither compile nor run
            return None
        self._programs[program] = (body.name, artifacts)
        if self.strikes.get(("compiled", artifacts), 0) < STRIKES:
            return None
        return ErrorReport.of(CompileError(_words("compiled", body.name)))

    def refusal(self, program: int) -> ErrorReport | None:
        """Return the error if a program must not be run."""
        name, artifacts = self._programs.get(program, ("", ()))
        if self.strikes.get(("ran", artifacts), 0) < STRIKES:
            return None
        return ErrorReport.of(ComputationFailed(_words("ran", name)))

    def uninstall(self, program: int) -> None:
        """Forget a program, but not its strikes."""
        self._programs.pop(program, None)

    @handles(RemoveClient)
    def _client_removed(self, sender: Address, message: RemoveClient) -> None:
        for program in [p for p in self._programs if client_of(p) == message.client]:
            del self._programs[program]

    def compiled(self, program: int) -> None:
        """Forget the strikes of a program that all hosts have compiled."""
        self._clear("compiled", program)

    def ran(self, program: int) -> None:
        """A launch of a program has ended."""
        self._clear("ran", program)

    def host_lost(
        self, compiling: Iterable[int], running: Iterable[int], *, compiles_apart: bool = False
    ) -> None:
        """A host has ended by itself: strike one program.

        Args:
            compiling: the programs that it was compiling, the oldest first.
            running: the programs that it was running, the likeliest culprit first.
            compiles_apart: other processes compile for it, so what it ran is likelier.
        """
        candidates = [("compiled", compiling), ("ran", running)]
        for did, programs in reversed(candidates) if compiles_apart else candidates:
            for program in programs:
                if program in self._programs:
                    key = (did, self._programs[program][1])
                    self.strikes[key] = self.strikes.pop(key, 0) + 1
                    if len(self.strikes) > REMEMBERED:
                        del self.strikes[next(iter(self.strikes))]
                    return

    def _clear(self, did: str, program: int) -> None:
        if self.strikes and program in self._programs:
            self.strikes.pop((did, self._programs[program][1]), None)


def _words(did: str, name: str) -> str:
    return (
        f"hosts crashed {STRIKES} times in a row while they {did} {name!r}, so it is not tried again. "
        "The logs of the hosts say how they ended; change the function, or divide it to find out which "
        "part crashes them"
    )
