"""A client's side of the protocol: its connection, its slices, and the way to everything else.

The session is an actor like all others; the API's threads reach it with notes. It forwards runs to the
controller, asks hosts directly for values (`requests.py`), sends them inputs (`uploads.py`),
and settles futures. It never waits: names are given on this side, so whatever follows a call can be
sent at once.

A host that is lost is no event for the user. What was asked of it stays open and is asked again when the
controller has brought the arrays back; what was sent to it is sent again when the controller asks. Nor is the
loss of the controller, if another one takes its place in time: that is told all it has to know
(`pw.client.session.link`). Only the end of this client in the eyes of its controller ends a session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pw.client.session.hosts import Hosts
from pw.client.session.link import ControllerLink
from pw.client.session.notes import (
    Allocate,
    Ask,
    Await,
    AwaitHosts,
    Close,
    Forget,
    Get,
    Listen,
    Look,
    Open,
    Put,
    Settle,
    Tell,
    reject,
    resolve,
)
from pw.client.session.requests import AskAgain, Requests
from pw.client.session.uploads import Uploads
from pw.core.actor import Actor, Env, handles
from pw.core.errors import ConnectionFailed, Disconnected, Error, ErrorReport, HostLost
from pw.core.ids import CONTROL, CONTROLLER, Address, arrays_in
from pw.core.landing import Bulk
from pw.core.messages import (
    Answered,
    Attach,
    Attached,
    Delete,
    Described,
    Directory,
    Evicted,
    Explanation,
    Fetched,
    ForgetInputs,
    ForgetRuns,
    Line,
    LinkLost,
    PeerLost,
    PeerRefused,
    Printed,
    Ready,
    RegisterProgram,
    ReleaseProgram,
    ReleaseSlice,
    RequestFailed,
    Run,
    RunFailed,
    RunsSettled,
    SliceBound,
    SliceLost,
    SliceRefused,
    Stats,
    Status,
    UploadAgain,
    UploadLanding,
)

REDIAL_S = 0.5
"""How often to look for another controller."""


@dataclass(frozen=True, slots=True)
class _Redial:
    """Note to oneself: another controller may be there by now."""

    outage: int


@dataclass(frozen=True, slots=True)
class _GiveUp:
    """Note to oneself: another controller should be there by now."""

    outage: int
    reason: str


class ClientSession(Actor):
    """One client's conversation with a cluster."""

    def __init__(
        self,
        env: Env,
        bulk: Bulk,
        on_credits: Callable[[int], None],
        on_end: Callable[[Error], None] = lambda error: None,
    ) -> None:
        link = self._link = ControllerLink(env)
        super().__init__(link)
        self._on_credits = on_credits
        self._on_end = on_end
        self.closed: Error | None = None
        self._attaching: Settle | None = None
        self._attached = False
        self._attach = Attach("", 1.0, 0)
        self._output: Callable[[str, tuple[Line, ...]], None] | None = None
        self._reconnect_s = 0.0
        self._outages = 0
        self._is_calling = False
        """Whoever may be the controller by now has been called, and has not been lost."""
        self._allocating: dict[int, Settle] = {}
        self._awaiting_hosts: list[AwaitHosts] = []
        self._donating: dict[int, tuple[int, ...]] = {}
        """Positions of the arguments that a program takes away, of programs that do."""
        self._hosts = Hosts(link)
        self._uploads = Uploads(link, bulk, self._hosts)
        self._requests = Requests(link, bulk, self._hosts)

    @property
    def hosts_ready(self) -> int:
        """Hosts of formed islands; to be read by any thread."""
        return len(self._hosts.names)

    # --- the connection ------------------------------------------------------------------------------

    @handles(Open)
    def _on_open(self, sender: Address, note: Open) -> None:
        self._attaching = note.attached
        self._uploads.keep_bytes = note.keep_bytes
        self._attach = Attach(note.name, note.share, note.priority)
        self._reconnect_s = note.reconnect_s
        self._output = note.output
        self._link.keeps = note.reconnect_s > 0
        self._link.call(self._attach)

    @handles(Attached)
    def _on_attached(self, sender: Address, message: Attached) -> None:
        self._attached = True
        self._attach = msgspec.structs.replace(self._attach, resume=message.client)
        self._hosts.attached(message, self._output is not None)
        if not self._link.is_open:
            self.env.log("info", "attached to the controller again")
            self._hosts.forget_slices(self._link.journal.slices)
            self._on_credits(self._link.resume())
        if self._attaching is not None:
            resolve(self._attaching, message)
            self._attaching = None

    @handles(Directory)
    def _on_directory(self, sender: Address, message: Directory) -> None:
        self._hosts.listed(message.peers)
        self._check_hosts()

    @handles(AwaitHosts)
    def _on_await_hosts(self, sender: Address, note: AwaitHosts) -> None:
        self._awaiting_hosts.append(note)
        self._check_hosts()

    def _check_hosts(self) -> None:
        count = len(self._hosts.names)
        for note in [note for note in self._awaiting_hosts if note.count <= count]:
            self._awaiting_hosts.remove(note)
            resolve(note.ready, None)

    @handles(PeerRefused)
    def _on_refused(self, sender: Address, message: PeerRefused) -> None:
        if message.node == CONTROLLER:
            self._die(message.error.exception())
        else:
            self._host_lost(message.node, message.error)

    @handles(Evicted)
    def _on_evicted(self, sender: Address, message: Evicted) -> None:
        if message.may_attach and not self._link.is_open:
            return  # it was said to another controller before the loss of the last one was heard of
        self._die(Disconnected(f"the controller closed this session: {message.reason}"))

    @handles(PeerLost)
    def _on_peer_lost(self, sender: Address, message: PeerLost) -> None:
        if message.node == CONTROLLER:
            self._controller_lost(message)
        else:
            error = HostLost(f"host {message.node} was lost: {message.words}")
            self._host_lost(message.node, ErrorReport.of(error))

    def _controller_lost(self, message: PeerLost) -> None:
        words = f"the controller was lost: {message.words}"
        if self.closed is not None:
            return
        if not self._attached:
            words = f"no controller answers: {message.words}; is pw-controller running there?"
        if not self._attached or not self._link.keeps:
            self._die(ConnectionFailed(words))
        elif self._link.is_open:
            self._outages += 1
            self._link.lost(self._requests)
            self.env.log("warning", "controller lost", reason=message.reason)
            self.env.call_later(self._reconnect_s, _GiveUp(self._outages, words))
            self._call()
        else:
            self._is_calling = False
            self.env.call_later(REDIAL_S, _Redial(self._outages))

    def _call(self) -> None:
        self._is_calling = True
        self._link.call(self._attach)

    @handles(_Redial)
    def _on_redial(self, sender: Address, note: _Redial) -> None:
        is_over = self._link.is_open or note.outage != self._outages or self.closed is not None
        if not is_over and not self._is_calling:
            self._call()

    @handles(_GiveUp)
    def _on_give_up(self, sender: Address, note: _GiveUp) -> None:
        if not self._link.is_open and note.outage == self._outages:
            words = f"{note.reason}, and has not come back within {self._reconnect_s:g} s"
            self._die(ConnectionFailed(words))

    def _host_lost(self, node: str, error: ErrorReport) -> None:
        if not self._link.is_open:
            self._hosts.unbind_from(node)
        if self._attached and self.closed is None:
            self.env.send(CONTROL, LinkLost(node))
        self._hosts.lost(node)
        self._uploads.host_lost(node)
        self._requests.host_lost(node, error)

    @handles(Close)
    def _on_close(self, sender: Address, note: Close) -> None:
        self._die(note.error)
        resolve(note.closed, None)

    def _die(self, error: Error) -> None:
        if self.closed is not None:
            return
        self.closed = error
        # First: who hears of it otherwise finds that nothing can be asked any more.
        self._on_end(error)
        if self._attaching is not None:
            reject(self._attaching, error)
        for future in self._allocating.values():
            reject(future, error)
        for note in self._awaiting_hosts:
            reject(note.ready, error)
        self._allocating.clear()
        self._awaiting_hosts.clear()
        self._uploads.close()
        self._requests.close(error)
        self._on_credits(1 << 30)
        self.env.forget(CONTROLLER)  # it may not know yet

    # --- slices --------------------------------------------------------------------------------------

    @handles(Allocate)
    def _on_allocate(self, sender: Address, note: Allocate) -> None:
        if self.closed is not None:
            reject(note.bound, self.closed)
            return
        self._allocating[note.request.slice] = note.bound
        self.env.send(CONTROL, note.request)

    @handles(SliceBound)
    def _on_bound(self, sender: Address, message: SliceBound) -> None:
        self._link.journal.slice_bound(message)
        if self._hosts.bind(message):
            self._slice_moved(message.slice)
        future = self._allocating.pop(message.slice, None)
        if future is not None:
            resolve(future, message)

    @handles(SliceRefused)
    def _on_slice_refused(self, sender: Address, message: SliceRefused) -> None:
        self._link.journal.slice_refused(message.slice)
        self._hosts.forget(message.slice)
        future = self._allocating.pop(message.slice, None)
        if future is not None:
            reject(future, message.error.exception())

    @handles(SliceLost)
    def _on_slice_lost(self, sender: Address, message: SliceLost) -> None:
        self._hosts.unbind(message.slice)
        self._slice_moved(message.slice)

    @handles(ReleaseSlice)
    def _on_slice_released(self, sender: Address, message: ReleaseSlice) -> None:
        """What was said before has been dealt with: until then it could still be bound to other hosts."""
        self._hosts.forget(message.slice)

    def _slice_moved(self, slice: int) -> None:
        self._uploads.slice_moved(slice)
        self._requests.slice_moved(slice)

    # --- runs and arrays -----------------------------------------------------------------------------

    @handles(Tell)
    def _on_tell(self, sender: Address, note: Tell) -> None:
        if self.closed is not None:
            return
        message = note.message
        if isinstance(message, Run):
            if (donated := self._donating.get(message.program)) is not None:
                args = message.args
                self._requests.forget(arrays_in(args[position] for position in donated))
        elif isinstance(message, RegisterProgram):
            if donated := message.body.held.donated:
                self._donating[message.program] = donated
        elif isinstance(message, ReleaseProgram):
            self._donating.pop(message.program, None)
        self.env.send(CONTROL, message)

    @handles(Forget)
    def _on_forget(self, sender: Address, note: Forget) -> None:
        if self.closed is None:
            self._requests.forget(note.arrays)
            self.env.send(CONTROL, Delete(note.arrays))

    @handles(RunsSettled)
    def _on_settled(self, sender: Address, message: RunsSettled) -> None:
        self._link.journal.settled(message.count)
        self._on_credits(message.count)

    @handles(ForgetRuns)
    def _on_forget_runs(self, sender: Address, message: ForgetRuns) -> None:
        self._link.journal.forget_runs(message.runs)

    @handles(RunFailed)
    def _on_run_failed(self, sender: Address, message: RunFailed) -> None:
        self._link.journal.failed(message.run, message.results, message.error)
        self._uploads.forget(message.results)
        self._requests.arrays_failed(message.results, message.error)
        self._requests.forget([a for a in message.results if not self._link.may_have(a)])

    # --- what programs write -------------------------------------------------------------------------

    @handles(Listen)
    def _on_listen(self, sender: Address, note: Listen) -> None:
        for slice in note.slices:
            self._hosts.listen(slice)

    @handles(Printed)
    def _on_printed(self, sender: Address, message: Printed) -> None:
        if self._output is not None and self._hosts.knows(sender.node):
            self._output(sender.node, message.lines)

    # --- uploads -------------------------------------------------------------------------------------

    @handles(Put)
    def _on_put(self, sender: Address, note: Put) -> None:
        if self.closed is None:
            self._uploads.put(note)

    @handles(UploadLanding)
    def _on_landing(self, sender: Address, message: UploadLanding) -> None:
        if self.closed is None:
            self._uploads.landing(sender.node, message)

    @handles(UploadAgain)
    def _on_upload_again(self, sender: Address, message: UploadAgain) -> None:
        if self.closed is None:
            self._uploads.again(message.array, message.name)

    @handles(ForgetInputs)
    def _on_forget_inputs(self, sender: Address, message: ForgetInputs) -> None:
        self._link.journal.forget_inputs(message.arrays)
        self._uploads.forget(message.arrays)

    # --- requests ------------------------------------------------------------------------------------

    @handles(Get)
    def _on_get(self, sender: Address, note: Get) -> None:
        self._requests.get(note)

    @handles(Await)
    def _on_await(self, sender: Address, note: Await) -> None:
        self._requests.wait(note)

    @handles(Ask)
    def _on_ask(self, sender: Address, note: Ask) -> None:
        self._requests.ask(note)

    @handles(Fetched)
    def _on_fetched(self, sender: Address, message: Fetched) -> None:
        self._requests.fetched(message.request, message.data)

    @handles(Ready)
    def _on_ready(self, sender: Address, message: Ready) -> None:
        self._requests.ready(message.request)

    @handles(Look)
    def _on_look(self, sender: Address, note: Look) -> None:
        self._requests.look(note)

    @handles(Described)
    def _on_described(self, sender: Address, message: Described) -> None:
        self._requests.report(message.request, message)

    @handles(Status)
    def _on_status(self, sender: Address, message: Status) -> None:
        self._link.journal.answered(message.request, None)
        self._requests.report(message.request, message)

    @handles(Explanation)
    def _on_explanation(self, sender: Address, message: Explanation) -> None:
        self._link.journal.answered(message.request, None)
        self._requests.report(message.request, message)

    @handles(Stats)
    def _on_stats(self, sender: Address, message: Stats) -> None:
        if sender.node == CONTROLLER:
            self._link.journal.answered(message.request, None)
        self._requests.counters(message.request, message.node, message.counters)

    @handles(AskAgain)
    def _on_ask_again(self, sender: Address, note: AskAgain) -> None:
        self._requests.ask_again(note.request)

    @handles(Answered)
    def _on_answered(self, sender: Address, message: Answered) -> None:
        self._link.journal.answered(message.request, message.error)
        self._link.journal.prune_requests(self._requests.is_open)
        self._requests.answered(message.request, message.error)

    @handles(RequestFailed)
    def _on_request_failed(self, sender: Address, message: RequestFailed) -> None:
        self._requests.failed(message.request, message.error)
