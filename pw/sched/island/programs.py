"""Knows the programs of an island, and has its hosts compile them in one order (G6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pw.core.actor import Env, Part, handles
from pw.core.compact import Compact
from pw.core.errors import Error, ErrorReport
from pw.core.ids import CONTROL, Address, client_of, executor_of
from pw.core.messages import (
    Install,
    Installed,
    InstallProgram,
    IslandLost,
    ProgramInstalled,
    RemoveClient,
)
from pw.sched.island.admission import Admission
from pw.sched.island.installed_program import UNKNOWN, InstalledProgram, names_of, sites_of
from pw.sched.island.members import Members
from pw.sched.island.quarantine import Quarantine
from pw.sched.island.window import Window


@dataclass(eq=False, repr=False)
class Programs(Part):
    """The programs of one island, in the order in which hosts compile them."""

    env: Env
    island: str
    members: Members
    window: Window
    admission: Admission
    quarantine: Quarantine
    installed: dict[int, InstalledProgram] = field(default_factory=dict, init=False)

    def __getitem__(self, number: int) -> InstalledProgram:
        """Return a program; `UNKNOWN` if it is not installed."""
        return self.installed.get(number, UNKNOWN)

    def uninstall(self, number: int, install: int) -> bool:
        """Forget a program, unless it was installed again since that installation. Return whether."""
        if self[number].install != install:
            return False
        self.installed.pop(number, None)
        self.quarantine.uninstall(number)
        if self.admission.memory is not None:
            self.admission.memory.uninstall(number)
        return True

    def compiling(self) -> Iterator[tuple[int, InstalledProgram]]:
        """Yield the programs that some host has not compiled, the oldest first."""
        return ((n, program) for n, program in self.installed.items() if program.compiling)

    @handles(InstallProgram)
    def _install(self, sender: Address, message: InstallProgram) -> None:
        number, body = message.program, message.body
        if not self.members.hosts or not self.members.include(p.host for p in message.plans):
            self.env.count("messages_stale")
            return
        if self.admission.memory is not None:
            self.admission.memory.install(number, body.name, message.memory)
        if (refusal := self.quarantine.install(number, body)) is not None:
            self._answer(number, message.install, refusal)
            return
        program = self._remember(message)
        compact = Compact.of(body)
        try:
            for plan in message.plans:
                what = (number, compact, Compact.of(plan), message.artifacts, message.install)
                install = Install(self.members.epoch, *what, message.tenant)
                self.env.send(executor_of(plan.host), install)
        except Error as error:  # it exceeds the size of a message: refuse the program's runs
            program.compiling.clear()
            report = ErrorReport.of(error)
            words = f"{body.name!r} cannot be sent to its hosts: {report.message}"
            report = msgspec.structs.replace(report, message=words)
            self._answer(number, message.install, report)

    def _remember(self, message: InstallProgram) -> InstalledProgram:
        earlier = self.installed.pop(message.program, UNKNOWN)
        program = self.installed[message.program] = InstalledProgram(
            names_of(message),
            {at: self.window.footprint(where) for at, where in sites_of(message).items()},
            message.install,
            {plan.host for plan in message.plans},
            {} if earlier is UNKNOWN else earlier.estimates_us,
        )
        return program

    @handles(Installed)
    def _installed(self, sender: Address, message: Installed) -> None:
        program = self[message.program]
        if not self.members.is_current(message.epoch, sender):
            return
        if message.install != program.install or not program.compiling:
            self.env.count("messages_stale")
            return
        program.compiling.discard(sender.node)
        if self.admission.memory is not None:
            self.admission.memory.add_temporaries(message.program, message.temporary_bytes)
        if message.error is not None or not program.compiling:
            program.compiling.clear()
            self.quarantine.compiled(message.program)
            self._answer(message.program, message.install, message.error)

    def _answer(self, program: int, install: int, error: ErrorReport | None) -> None:
        self.env.send(CONTROL, ProgramInstalled(self.island, program, error, install))

    @handles(IslandLost)
    def _epoch_ended(self, sender: Address, message: IslandLost) -> None:
        for program in self.installed.values():
            program.compiling.clear()

    @handles(RemoveClient)
    def _client_removed(self, sender: Address, message: RemoveClient) -> None:
        for number in [n for n in self.installed if client_of(n) == message.client]:
            del self.installed[number]
