"""Knows the programs of an island, and has its hosts compile them in one order (G6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.compact import Compact
from pw.core.errors import Error, ErrorReport
from pw.core.ids import CONTROL, Address, client_of, executor_of
from pw.sched.island.admission import Admission
from pw.sched.island.install_queues import InstallQueues
from pw.sched.island.installed_program import (
    UNKNOWN,
    InstalledProgram,
    is_plain,
    names_of,
    sites_of,
)
from pw.sched.island.members import Members
from pw.sched.island.quarantine import Quarantine
from pw.sched.island.window import Window


@dataclass(eq=False, repr=False)
class IslandPrograms(Part):
    """The programs of one island, in the order in which hosts compile them."""

    env: Env
    island: str
    members: Members
    window: Window
    admission: Admission
    quarantine: Quarantine
    installed: dict[int, InstalledProgram] = field(default_factory=dict, init=False)
    queues: InstallQueues = field(default_factory=InstallQueues, init=False)

    def __getitem__(self, number: int) -> InstalledProgram:
        """Return a program; `UNKNOWN` if it is not installed."""
        return self.installed.get(number, UNKNOWN)

    def uninstall(self, number: int, install: int) -> bool:
        """Forget a program, unless it was installed again since that installation. Return whether."""
        if self[number].install != install:
            return False
        self.installed.pop(number, None)
        self.queues.drop(number)
        self.quarantine.uninstall(number)
        if self.admission.memory is not None:
            self.admission.memory.uninstall(number)
        return True

    def compiling(self) -> Iterator[tuple[int, InstalledProgram]]:
        """Yield the programs that some host has not compiled, the oldest first."""
        return ((n, program) for n, program in self.installed.items() if program.compiling)

    @handles(msg.InstallProgram)
    def _install(self, sender: Address, message: msg.InstallProgram) -> None:
        number, body = message.program, message.body
        if not self.members.hosts or not self.members.include(
            tuple([plan.host for plan in message.plans])
        ):
            self.env.count("messages_stale")
            return
        installed = self[number]
        if message.again and installed.epoch == self.members.epoch and not installed.compiling:
            # Hosts have it, and earlier runs that still wait here need it as it is.
            installed.install = message.install
            self._answer(number, message.install, installed.error)
            return
        if self.admission.memory is not None:
            self.admission.memory.install(number, body.name, message.memory)
        if (refusal := self.quarantine.install(number, body)) is not None:
            self._answer(number, message.install, refusal)
            return
        self._remember(message)
        self.queues.put(message)
        self._send(client_of(number))

    def _send(self, client: int) -> None:
        """Send hosts the programs of a client that they may compile now."""
        for message in self.queues.take(client):
            number, body, plans = message.program, Compact.of(message.body), message.plans
            what = (message.artifacts, message.install, message.tenant)
            epoch, sequence = self.members.epoch, 0
            try:
                for plan in plans:
                    sequence = self.members.next_number(plan.host)
                    install = msg.Install(epoch, sequence, number, body, Compact.of(plan), *what)
                    self.env.send(executor_of(plan.host), install)
            except Error as error:  # it exceeds the size of a message: refuse the program's runs
                nothing = msg.Discard(epoch, sequence, (), (), ())
                self.env.send(executor_of(plan.host), nothing)
                self.queues.answered(number, message.install, *[plan.host for plan in plans])
                report = ErrorReport.of(error)
                words = f"{message.body.name!r} cannot be sent to its hosts: {report.message}"
                self._ended(number, msgspec.structs.replace(report, message=words))

    def _remember(self, message: msg.InstallProgram) -> None:
        earlier = self.installed.pop(message.program, UNKNOWN)
        self.installed[message.program] = InstalledProgram(
            names_of(message),
            {at: self.window.footprint(where) for at, where in sites_of(message).items()},
            message.install,
            {plan.host for plan in message.plans},
            {} if earlier is UNKNOWN else earlier.estimates_us,
            self.members.epoch,
            on_hosts=message.install,
            is_plain=is_plain(message),
        )

    @handles(msg.Installed)
    def _installed(self, sender: Address, message: msg.Installed) -> None:
        program = self[message.program]
        if not self.members.is_current(message.epoch, sender):
            return
        self.queues.answered(message.program, message.install, sender.node)
        self._send(client_of(message.program))
        if message.install != program.install or not program.compiling:
            self.env.count("messages_stale")
            return
        program.compiling.discard(sender.node)
        if self.admission.memory is not None:
            self.admission.memory.add_temporaries(message.program, message.temporary_bytes)
        if message.error is not None or not program.compiling:
            self.quarantine.compiled(message.program)
            self._ended(message.program, message.error)

    def _ended(self, number: int, error: ErrorReport | None) -> None:
        program = self[number]
        program.compiling.clear()
        program.error = error
        self._answer(number, program.install, error)

    def _answer(self, program: int, install: int, error: ErrorReport | None) -> None:
        self.env.send(CONTROL, msg.ProgramInstalled(self.island, program, error, install))

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        self.queues.clear()
        for program in self.installed.values():
            program.compiling.clear()

    @handles(msg.RemoveClient)
    def _client_removed(self, sender: Address, message: msg.RemoveClient) -> None:
        self.queues.forget(message.client)
        for number in [n for n in self.installed if client_of(n) == message.client]:
            del self.installed[number]
