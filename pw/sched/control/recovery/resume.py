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

from pw.core.errors import ErrorReport, HostLost, ProtocolError
from pw.core.messages import CreateArray, OfferSource, Resumed, Run
from pw.sched.control.array_states import NOWHERE, Array, ArrayState
from pw.sched.control.checkpoints.replicas import Replicas
from pw.sched.control.clients import Client
from pw.sched.control.recovery.rebuild import Rebuilder
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.shares import Shares
from pw.sched.control.slices import Slices

PATIENCE_S = 5.0
"""How long to wait for hosts that may have replicas of a returning client's arrays."""

_RESTARTED = ErrorReport.of(HostLost("the controller was started again"))


@dataclass(eq=False)
class Resumptions(ControlPart):
    """Hears what returning clients tell; see the module."""

    slices: Slices
    replicas: Replicas
    rebuilder: Rebuilder
    shares: Shares

    def announced(self, client: Client, message: CreateArray) -> None:
        """The client had uploaded this input."""
        client.lineage.add_input(message.array, message.spec, message.source)
        client.arrays.announced(message.array)
        if isinstance(message.source, OfferSource):
            self.shares.taken_before(client, message.array, message.spec, message.source)

    def ran(self, client: Client, message: Run) -> None:
        """The client had sent this run."""
        assert client.resuming is not None
        if message.run <= client.last_run:
            return
        client.last_run = message.run
        program = client.resuming.programs.get(message.program)
        if (
            program is None
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

    @handles_client(Resumed)
    def _resumed(self, client: Client, message: Resumed) -> None:
        """The client has told everything: what it holds is lost, until it is rebuilt."""
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
            self.slices.expect(loss, _RESTARTED)
        self.rebuilder.proceed(client)

    def _take_over(self, client: Client, message: Resumed) -> None:
        lineage = client.lineage
        try:
            known_arrays = message.known.whole().arrays
        except ProtocolError:
            known_arrays = ()
        for known in known_arrays:
            lineage.add_known(known.array, client.one_spec(known.spec))
        held = set(message.held)
        lineage.release([array for array in lineage.origins if array not in held])
        for failed in message.failed:
            if failed.array in held:
                client.arrays.add(failed.array, Array.failed(failed.error))
            elif failed.array in lineage.origins:
                lineage.origins[failed.array].error = failed.error
        for number in message.held:
            if number not in client.arrays:
                origin = lineage.origins.get(number)
                spec = origin.spec if origin is not None else NOWHERE
                lost = Array(spec, "", (), ArrayState.LOST, cause=_RESTARTED)
                client.arrays.add(number, lost)
        for array in message.copied:
            lineage.was_replicated(array)
