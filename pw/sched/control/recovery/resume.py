"""What a client tells a controller that was started after the one which knew it.

The client keeps all that its controller has to know: its slices, its programs, and as much of its lineage
as may be needed (`ForgetRuns`, `ForgetInputs` say what is not). Another controller hears it in the order in
which it happened, and then what the client has of it (`Resumed`). All that is *lost* to this controller, as
after the loss of a host, and is brought back in the same way (`pw.sched.control.recovery.rebuild`): hosts
have handed over what was ready, so that little has to be run again. A run that was in flight is no more than a
record whose results are lost. It counts no more among the runs in flight; the client knows that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core.errors import ErrorReport, HostLost, ProtocolError
from pw.core.messages import CreateArray, Resumed, Run
from pw.sched.control.clients import NOWHERE, Array, Client
from pw.sched.control.programs import RegisteredProgram

RESTARTED = ErrorReport.of(HostLost("the controller was started again"))


@dataclass(slots=True)
class Resumption:
    """A client that is telling what it has."""

    loss: int
    """What its slices are unbound by."""
    programs: dict[int, RegisteredProgram] = field(default_factory=dict)

    def create(self, client: Client, message: CreateArray) -> None:
        """It had announced this input."""
        client.lineage.add_input(message.array, message.spec, message.source)
        client.newest_input = max(client.newest_input, message.array)

    def run(self, client: Client, message: Run) -> None:
        """It had asked for this run."""
        if message.run <= client.last_run:
            return
        client.last_run = message.run
        program = self.programs.get(message.program)
        body = program.body if program is not None else None
        if (
            program is None
            or body is None
            or len(message.args) != len(body.inputs)
            or len(message.results) != len(body.outputs)
            or not client.lineage.origins.keys().isdisjoint(message.results)
        ):
            client.lineage.refuse_run(message.run)
            return
        for arg, spec in zip(message.args, body.inputs, strict=True):
            if isinstance(arg, int):
                client.lineage.add_known(arg, spec)
        client.lineage.add_run(message.run, program, message.args, message.results)

    def finish(self, client: Client, message: Resumed) -> None:
        """It has told everything: what it holds is lost from now on, until it is rebuilt."""
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
                client.arrays[failed.array] = Array(NOWHERE, "", (), error=failed.error)
            elif failed.array in lineage.origins:
                lineage.origins[failed.array].error = failed.error
        for number in message.held:
            if number not in client.arrays:
                origin = lineage.origins.get(number)
                spec = origin.spec if origin is not None else NOWHERE
                client.arrays[number] = Array(spec, "", ())
                client.lost[number] = RESTARTED
        for array in message.copied:
            lineage.was_copied(array)
