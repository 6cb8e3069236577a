"""The programs that clients have registered: has them installed on their hosts, and uninstalled.

A program is lowered when it is registered, and again whenever one of its slices is bound to other
devices. An error in a program is kept with it, and poisons each of its runs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import partial

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import (
    Error,
    ErrorReport,
    IslandLost,
    NotOwner,
    ProtocolError,
    PythonRefused,
    QuotaExceeded,
)
from pw.core.ids import Address, client_of, is_repeat, scheduler_of
from pw.core.messages.artifacts import Artifacts
from pw.core.programs.program import Program
from pw.core.programs.program_checks import check_program
from pw.core.rights import Resource
from pw.sched.control.clients import Client
from pw.sched.control.programs import RegisteredProgram, said_of
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.usage import RoomQueue

_NONE = Program("", (), (), (), ())
"""Program in the place of one that is refused."""

WAITING = 1024
"""Number of programs of a tenant that wait for room, with their artifacts, at most."""


@dataclass(eq=False)
class ProgramRegistry(ControlPart):
    """Programs of all clients."""

    only_transfers: bool = False
    """True if edges go from host to host only, whatever XLA or a relay would cost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.artifacts = Artifacts()
        self.queue = RoomQueue(self.sessions.usage, Resource.PROGRAMS, self._env.now_s)
        """Programs that are not installed because their tenant has as many as it may."""

    @handles_client(msg.RegisterProgram)
    def _register(self, client: Client, message: msg.RegisterProgram) -> None:
        number = message.program
        if client_of(number) != client.number or is_repeat(number) or number in client.programs:
            self._env.count("messages_refused")
            return
        error: ErrorReport | None = None
        try:
            body = message.body.value()
            check_program(body, client.slices.devices)
        except Error as refused:
            self._env.count("messages_refused")
            body, error = _NONE, ErrorReport.of(refused)
        sent = [a for a in message.artifacts if hashlib.sha256(a.blob).digest() == a.digest]
        body = body.with_placed(client.one_spec, lambda placement: placement)
        program = RegisteredProgram(
            number, body, self.artifacts.of(body, sent), self.only_transfers, error
        )
        if client.resuming is not None:
            client.resuming.programs[number] = program
            if message.released:
                return
        client.programs[number] = program
        needed = set(body.artifacts())
        if len(program.artifacts) < len(needed):
            program.error = ErrorReport.of(
                ProtocolError(f"program {body.name!r} came without all its artifacts")
            )
        elif error is None:
            self._count(client, program)

    def _count(self, client: Client, program: RegisteredProgram) -> None:
        """Count a program; if the tenant has as many as it may, its runs fail until others are released."""
        usage, number, tenant = self.sessions.usage, program.program, client.tenant
        if client.resuming is not None:
            usage.keep(client.number, Resource.PROGRAMS, {number: 1})
            self._lower(client, program)
            return
        then = partial(self._go_on, client, program)
        if self.queue.ask(client.number, tenant, number, 1, then):
            return
        exceeded = usage.exceeded(tenant, Resource.PROGRAMS, 1)
        if len(self.queue.of_tenant(tenant)) > WAITING:
            self.queue.drop(number)
            client.programs[number] = RegisteredProgram(number, _NONE, ())
            words = f"{exceeded}. {WAITING} wait for room already, so this one is not kept: make it anew then"
            exceeded = QuotaExceeded(words)
        report = ErrorReport.of(exceeded)
        client.programs[number].error = said_of(f"{program.body.name!r} cannot run", report)

    def _go_on(self, client: Client, program: RegisteredProgram) -> None:
        """Install a program for which there is room."""
        program.error = None
        self._lower(client, program)

    def try_again(self, tenant: str) -> None:
        """Install programs for which the tenant had no room, the first ones first, while there is some."""
        self.queue.try_again(tenant)

    def client_left(self, client: Client) -> None:
        """The programs of a client count no more."""
        self.queue.client_left(client.number, client.tenant)

    def own(self, client: Client, body: Program, kept: int) -> RegisteredProgram:
        """Return the controller's own program for a client; the last `kept` ones stay installed."""
        program = client.views.get(body)
        if program is None:
            placed = body.with_placed(client.one_spec, lambda placement: placement)
            program = RegisteredProgram(client.new_id(), placed, ())
            client.views[body] = client.programs[program.program] = program
            self._lower(client, program)
            if len(client.views) > kept:
                _, oldest = client.views.popitem(last=False)
                self.release(client, msg.ReleaseProgram(oldest.program))
        client.views.move_to_end(body)
        return program

    def _lower(self, client: Client, program: RegisteredProgram) -> None:
        """Bind a program to devices and install it there, if all its slices are bound."""
        if program.program in self.queue.keys:
            return
        bindings = self._islands.bindings
        try:
            for number in sorted(program.slices & client.slices.refused.keys()):
                raise client.slices.refused[number].exception()
            if any(number not in client.slices for number in program.slices):
                raise NotOwner(
                    f"the devices that {program.body.name!r} is to run on have been given back; "
                    "use the ones of another pw.make_virtual_device_set()"
                )
            unbound = program.slices - bindings.keys()
            if unbound and unbound <= client.slices.unbound.keys():
                return  # it is lowered when they are bound
            if unbound:
                raise IslandLost(
                    f"the devices that {program.body.name!r} is to run on were lost with their "
                    "island, and have not come back. Ask for others with "
                    "pw.make_virtual_device_set(); pw.status() shows what is there"
                )
            self._check_python(client, program.body)
            installs = program.lower(bindings, self._islands.limited, self._islands.bounds)
        except Error as error:
            program.error = ErrorReport.of(error)
            return
        for island, install in installs:
            install = msgspec.structs.replace(install, tenant=client.tenant)
            self._env.send(scheduler_of(island), install)

    def _check_python(self, client: Client, body: Program) -> None:
        """Raise PythonRefused if a Python function is on a host that does not run those of the tenant."""
        rights = self.sessions.usage.rights.of(client.tenant)
        if rights.python is True:
            return
        for computation in body.computations:
            if not computation.traits.runs_on_host:
                continue
            place = computation.placement
            for host in {at.host for at in self._islands.bindings[place.slice].located(place)}:
                if not rights.runs_python_on(host):
                    raise PythonRefused(
                        f"{computation.name!r} is a Python function of tenant {client.tenant!r}, which runs "
                        f"none on {host}; {rights.python_in_words()}"
                    )

    @handles(msg.SliceBound)
    def _slice_bound(self, sender: Address, message: msg.SliceBound) -> None:
        """Lower again the programs of a slice that has other devices."""
        client = self.sessions.owner(message.slice)
        if client is not None and message.slice in client.slices:
            for program in (*client.programs.values(), *client.retired.values()):
                if message.slice in program.slices:
                    self._lower(client, program)

    @handles(msg.ProgramInstalled)
    def _installed(self, sender: Address, message: msg.ProgramInstalled) -> None:
        client = self.sessions.owner(message.program)
        if client is None:
            return
        number = message.program
        program = client.programs.get(number) or client.retired.get(number)
        if program is None or message.install != program.installs:
            return
        program.installing.discard(message.island)
        if message.error is not None:
            program.error = message.error
            program.installing.clear()

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        """Do not wait until an island has compiled that has left its epoch."""
        for client in self.sessions.clients:
            for program in (*client.programs.values(), *client.retired.values()):
                program.installing.discard(message.island)

    def fail(self, client: Client, slices: set[int], error: ErrorReport) -> None:
        """Refuse from now on to run what needs one of these slices."""
        for program in client.programs.values():
            if not slices.isdisjoint(program.slices):
                program.error = said_of(f"{program.body.name!r} cannot run", error)

    def release(self, client: Client, message: msg.ReleaseProgram) -> None:
        """A client does not need a program any more, in its order."""
        program = client.programs.pop(message.program, None)
        if program is not None:
            for island, hosts in program.hosts.items():
                uninstall = msg.UninstallProgram(program.program, hosts)
                self._env.send(scheduler_of(island), uninstall)
            self.queue.drop(program.program)
            if self.sessions.usage.give(client.number, Resource.PROGRAMS, program.program):
                self.try_again(client.tenant)

    # --- replays ----------------------------------------------------------------------------------

    def reinstall(self, client: Client, program: RegisteredProgram) -> bool:
        """Install a released program for a replay; return whether hosts are compiling it."""
        if program.program not in client.programs and program.program not in client.retired:
            client.retired[program.program] = program
            self._lower(client, program)
        return bool(program.installing)

    def uninstall_retired(self, client: Client) -> None:
        """Uninstall the programs that were installed for a replay."""
        for program in client.retired.values():
            for island, hosts in program.hosts.items():
                self._islands.tell(island, msg.UninstallProgram(program.program, hosts))
        client.retired.clear()
