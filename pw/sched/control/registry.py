"""The programs that clients have registered: takes them in, has them installed on their hosts, lets them go.

A program is lowered when it comes, and again whenever one of its slices is bound to other devices. What is
wrong with it becomes its error, and that of all its runs; so a client hears of it where it looks for results.
"""

from __future__ import annotations

import hashlib

from pw.core.actor import Env
from pw.core.artifacts import Artifacts
from pw.core.errors import ArrayLost, Error, ErrorReport, NotOwner, ProtocolError
from pw.core.ids import client_of, scheduler_of
from pw.core.messages import ProgramInstalled, RegisterProgram, UninstallProgram
from pw.sched.control.clients import Client
from pw.sched.control.ledger import Ledger
from pw.sched.control.programs import RegisteredProgram, check_program


class ProgramRegistry:
    """The controller's part that has programs installed; see the module."""

    def __init__(self, env: Env, ledger: Ledger) -> None:
        self._env = env
        self._ledger = ledger
        self._artifacts = Artifacts()

    def register(self, client: Client, message: RegisterProgram) -> None:
        """Take in a program, and have its hosts compile it."""
        if client_of(message.program) != client.number or message.program in client.programs:
            self._env.count("messages_refused")
            return
        try:
            body = message.body.whole()
        except ProtocolError:
            self._env.count("messages_refused")
            return
        sent = [a for a in message.artifacts if hashlib.sha256(a.blob).digest() == a.digest]
        body = body.with_placed(client.one_spec, lambda placement: placement)
        program = RegisteredProgram(message.program, body, self._artifacts.of(body, sent))
        if client.resuming is not None:
            client.resuming.programs[message.program] = program
            if message.released:
                return
        client.programs[message.program] = program
        needed = {computation.artifact for computation in body.computations}
        if len(program.artifacts) < len(needed):
            program.error = ErrorReport.of(
                ProtocolError(f"program {body.name!r} came without all its artifacts")
            )
        else:
            self.lower(client, program)

    def lower(self, client: Client, program: RegisteredProgram) -> None:
        """Bind a program to devices and have it installed there, if all its slices are bound."""
        bindings = self._ledger.bindings
        try:
            foreign = program.slices - client.slices - client.borrowed
            if foreign:
                raise NotOwner(
                    f"the devices that {program.body.name!r} is to run on have been given back; use the ones "
                    "of another pw.make_virtual_device_set()"
                )
            unbound = program.slices - bindings.keys()
            if unbound and unbound <= client.unbound.keys():
                return  # it is lowered when they are bound
            if unbound:
                raise ArrayLost(
                    f"the devices that {program.body.name!r} is to run on were lost with their island, and "
                    "have not come back. Ask for others with pw.make_virtual_device_set(); pw.status() shows "
                    "what is there"
                )
            check_program(program.body)
            installs = program.lower(bindings, self._ledger.limited)
        except Error as error:
            program.error = ErrorReport.of(error)
            return
        for island, install in installs:
            self._env.send(scheduler_of(island), install)

    def slice_bound(self, client: Client, number: int) -> None:
        """A slice has other devices: lower the programs that use it again."""
        for program in (*client.programs.values(), *client.retired.values()):
            if number in program.slices:
                self.lower(client, program)

    def installed(self, message: ProgramInstalled) -> Client | None:
        """An island's hosts have compiled a program, or cannot; whose work may go on therefore."""
        client = self._ledger.clients.get(client_of(message.program))
        if client is None:
            return None
        number = message.program
        program = client.programs.get(number) or client.retired.get(number)
        if program is None or message.install != program.installs:
            return None
        program.installing.discard(message.island)
        if message.error is not None:
            program.error = message.error
            program.installing.clear()
        return client

    def release(self, client: Client, number: int) -> None:
        """A client needs a program no more."""
        program = client.programs.pop(number, None)
        if program is not None:
            for island, hosts in program.hosts.items():
                self._env.send(scheduler_of(island), UninstallProgram(number, hosts))
