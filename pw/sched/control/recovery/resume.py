"""The return of a client of an earlier controller: it tells what that controller knew of it.

The client keeps all that its controller has to know: its slices, its programs, and the part of its
lineage that may be needed (`ForgetRuns` and `ForgetInputs` say which part is not). It tells all
this in the order in which it happened, and then which arrays it holds (`Resumed`). Those are lost
to this controller, as after the loss of a host, and are brought back in the same way (`rebuild`).
Hosts have handed over what was ready, so that few runs are run again. A run that was in flight is a
record whose results are lost. It uses no credit here; the client knows that.
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.errors import Error, ErrorReport, HostLost, NotOwner, ProtocolError
from pw.core.ids import arrays_in, client_of, is_repeat
from pw.core.messages.checks import check_source
from pw.core.programs.spec_checks import check_spec
from pw.core.rights import Resource
from pw.core.sharding import ArraySpec
from pw.sched.control.array_states import NOWHERE, ArrayEntry, ArrayState
from pw.sched.control.checkpoints.replicas import REPLICAS, ReplicaTable
from pw.sched.control.clients import Client
from pw.sched.control.handovers import HandoverTable
from pw.sched.control.recovery.rebuild import Rebuilder
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.slices import SliceRequests

PATIENCE_S = 5.0
"""Seconds to wait for hosts that may have replicas of a returning client's arrays."""

_RESTARTED = ErrorReport.of(HostLost("the controller was started again"))


@dataclass(eq=False)
class Resumptions(ControlPart):
    """Handles the journals of returning clients."""

    slices: SliceRequests
    replicas: ReplicaTable
    rebuilder: Rebuilder
    handovers: HandoverTable

    def announced(self, client: Client, message: msg.CreateArray) -> None:
        """The client had uploaded this input."""
        if client_of(message.array) != client.number or is_repeat(message.array):
            self._env.count("messages_refused")
            return
        try:
            self._check(client, message.spec)
            check_source(message.source)
        except Error:
            self._env.count("messages_refused")
            self._env.send(client.address, msg.ForgetInputs((message.array,)))
            return
        client.lineage.add_input(message.array, message.spec, message.source)
        client.arrays.announced(message.array)
        if isinstance(message.source, msg.OfferSource):
            self.handovers.taken_before(client, message.array, message.spec, message.source)

    def ran(self, client: Client, message: msg.Run) -> None:
        """The client had sent this run."""
        assert client.resuming is not None
        if client_of(message.run) != client.number or message.run <= client.last_run:
            return
        client.last_run = message.run
        program = client.resuming.programs.get(message.program)
        if (
            program is None
            or any(client_of(one) != client.number or is_repeat(one) for one in message.results)
            or not all(map(client.owns, arrays_in(message.args)))
            or len(set(message.results)) < len(message.results)
            or len(message.args) != len(program.body.inputs)
            or len(message.results) != len(program.body.outputs)
            or not client.lineage.origins.keys().isdisjoint(message.results)
        ):
            client.lineage.refuse_run(message.run)
            return
        for arg, spec in zip(message.args, program.body.inputs, strict=True):
            if isinstance(arg, int):
                client.lineage.add_known(arg, spec)
        client.lineage.add_run(message.run, program, message.args, message.results)

    @handles_client(msg.Resumed)
    def _resumed(self, client: Client, message: msg.Resumed) -> None:
        """Rebuild the arrays of a returning client: all count as lost until then."""
        if client.resuming is None:
            self._env.count("messages_refused")
            return
        loss, client.resuming = client.resuming.loss, None
        self._take_over(client, message)
        fields = {"arrays": len(message.held), "runs": len(client.lineage)}
        self._env.log("info", "client is back", client=client.number, **fields)
        client.patient_until_s = self._env.now_s() + PATIENCE_S
        self.replicas.claim(client)
        if client.slices.unbound:
            self.slices.expect(client, loss, _RESTARTED)
        self.rebuilder.proceed(client)

    def _check(self, client: Client, spec: ArraySpec) -> None:
        """Raise an Error unless an array can be rebuilt as its spec says, on a slice that was told of."""
        devices = client.slices.devices(spec.placement.slice)
        if devices is None:
            raise NotOwner("the devices of an array were given back")
        check_spec(spec, devices)

    def _take_over(self, client: Client, message: msg.Resumed) -> None:
        lineage = client.lineage
        try:
            entries = message.known.value().arrays
        except ProtocolError:
            entries = ()
        for entry in entries:
            try:
                self._check(client, entry.spec)
            except Error:
                self._env.count("messages_refused")
                continue
            if client_of(entry.array) == client.number:
                lineage.add_known(entry.array, client.one_spec(entry.spec))
        own = (n for n in message.held if client_of(n) == client.number and not is_repeat(n))
        held = dict.fromkeys(own)
        lineage.release([array for array in lineage.origins if array not in held])
        for failed in message.failed:
            if failed.array in held:
                client.arrays.add(failed.array, ArrayEntry.failed(failed.error))
            elif failed.array in lineage.origins:
                lineage.origins[failed.array].error = failed.error
        for number in held:
            if number not in client.arrays:
                origin = lineage.origins.get(number)
                spec = origin.spec if origin is not None else NOWHERE
                lost = ArrayEntry(spec, "", (), ArrayState.LOST, cause=_RESTARTED)
                client.arrays.add(number, lost)
        for array in filter(client.owns, message.copied):
            lineage.was_replicated(array)
            if (origin := lineage.origins.get(array)) is not None:
                amounts = {array: REPLICAS * origin.spec.size_bytes}
                self.sessions.usage.keep(client.number, Resource.HOST_MEMORY, amounts)
