"""Which clients are meant by requests to suspend, resume or move some, and whether the asker may do that."""

from __future__ import annotations

from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.errors import ArgumentError, ErrorReport
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.suspensions import Suspensions


@dataclass(eq=False)
class SuspensionRequests(ControlPart):
    """Answers requests of clients about others, or themselves."""

    suspensions: Suspensions

    @handles_client(msg.SuspendClients)
    def _suspend_asked(self, asker: Client, message: msg.SuspendClients) -> None:
        clients = self.meant(asker, message, "suspend")
        if clients is None:
            return
        request = (asker.address, message.request)
        by, to_files = self.who(asker), message.to_files
        waiting = [
            client
            for client in clients
            if not self.suspensions.suspend(client, by, request, to_files=to_files)
        ]
        if not waiting:
            self._env.send(asker.address, msg.Answered(message.request, None))

    @handles_client(msg.ResumeClients)
    def _resume_asked(self, asker: Client, message: msg.ResumeClients) -> None:
        clients = self.meant(asker, message, "resume")
        if clients is None:
            return
        for client in clients:
            self.suspensions.resume(client)
        self._env.send(asker.address, msg.Answered(message.request, None))

    def who(self, asker: Client) -> str:
        """Return words for a client that asks."""
        return f"client {asker.number} ({asker.name}) of tenant {asker.tenant!r}"

    def meant(
        self, asker: Client, message: msg.SuspendClients | msg.ResumeClients, verb: str
    ) -> list[Client] | None:
        """Return the clients that a request means; None if it is refused, which the asker is told."""
        clients = [
            client for client in self.sessions.calling if self._is_meant(client, asker, message)
        ]
        error: ErrorReport | None = None
        if message.client and not clients:
            words = f"there is no client {message.client}; see pw status"
            error = ErrorReport.of(ArgumentError(words))
        elif message.island and message.island not in self._islands.schedulers:
            words = f"there is no island {message.island!r}; see pw status"
            error = ErrorReport.of(ArgumentError(words))
        elif message.tenant and not clients:
            words = f"tenant {message.tenant!r} has no other client; see pw status"
            error = ErrorReport.of(ArgumentError(words))
        foreign = [client for client in clients if not self._may_suspend(asker, client)]
        if foreign and error is None:
            what = f"{verb} client {foreign[0].number}, which is of another tenant"
            error = self.sessions.objection(asker, what, "clients of that tenant")
        if error is not None:
            self._env.send(asker.address, msg.Answered(message.request, error))
            return None
        who = {"tenant": asker.tenant, "name": asker.name, "node": asker.address.node}
        for client in clients:
            self._env.audit(verb, **who, client=client.number, of=client.tenant)
        return clients

    def _may_suspend(self, asker: Client, client: Client) -> bool:
        return self.sessions.usage.rights.of(asker.tenant).may_suspend or asker.may_touch(client)

    def may_move(self, asker: Client, client: Client) -> bool:
        """Whether a client could move now, and another one may ask for that."""
        return (
            client.suspension is None
            and client.resuming is None
            and not client.slices.unbound
            and self._may_suspend(asker, client)
        )

    def _is_meant(
        self, client: Client, asker: Client, message: msg.SuspendClients | msg.ResumeClients
    ) -> bool:
        if message.client:
            return client.number == message.client
        if message.tenant:
            return client.tenant == message.tenant and client is not asker
        if message.island:
            left = client.suspension.islands if client.suspension is not None else frozenset()
            is_there = message.island in left | self.suspensions.islands_of(client)
            return is_there and client is not asker
        return client is asker
