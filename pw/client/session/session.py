"""`ClientSession`: a client's actor; it attaches to the controller, allocates slices, and starts runs.

The API's threads reach the session with notes. Its parts fetch values from hosts (`requests.py`),
upload inputs (`uploads.py`), pass on calls of computations (`callbacks.py`), collect timelines
(`timelines.py`), and keep a journal for another controller (`journal.py`). Clients name
what they create, so the session sends each call at once and never waits.

The loss of a host is no event for the user: requests stay open until the controller has restored the arrays,
and the controller asks for inputs again. Nor is the loss of the controller, if it comes back in time. A
session ends only when its controller has given this client up, or does not come back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec

from pw.client.session.callbacks import Callbacks
from pw.client.session.hosts import Hosts
from pw.client.session.island_news import IslandChange, IslandNews
from pw.client.session.journaling import JournalingEnv
from pw.client.session.leases import Leases
from pw.client.session.lines import Lines
from pw.client.session.requests import Requests
from pw.client.session.thread_messages import (
    Allocate,
    Await,
    AwaitHosts,
    Called,
    Close,
    Forget,
    Get,
    LineLost,
    Open,
    Put,
    Settle,
    Tell,
    TellLaunched,
    reject,
    resolve,
)
from pw.client.session.timelines import Timelines
from pw.client.session.uploads import Uploads
from pw.core import messages as msg
from pw.core.actors.actor import Actor, Env, handles
from pw.core.errors import ConnectionFailed, Disconnected, Error, ErrorReport, HostLost
from pw.core.ids import CONTROL, CONTROLLER, Address, arrays_in, store_of
from pw.core.landing import Bulk
from pw.core.waits import REDIAL_S


def with_advice(trouble: str) -> str:
    """Add what the user can do to reach a controller, unless it is in the words: give credentials."""
    if "--credentials" in trouble:
        return trouble
    return f"{trouble}; check the address, and that pw-controller is running there"


class ClientSession(Actor):
    """One client's session with a cluster."""

    def __init__(
        self,
        env: Env,
        bulk: Bulk,
        on_credits: Callable[[int], None],
        on_end: Callable[[Error], None] = lambda error: None,
        on_call: Callable[[Called], None] = lambda call: None,
        post: Callable[[object], None] | None = None,
        on_island: Callable[[IslandChange], None] = lambda change: None,
    ) -> None:
        link = self.link = JournalingEnv(env)
        super().__init__(link)
        self._on_credits = on_credits
        self._on_end = on_end
        self.closed: Error | None = None
        self._attaching: Settle | None = None
        self._attached = False
        self._attach = msg.Attach("", 1.0, 0)
        self._output: Callable[[str, tuple[msg.OutputLine, ...]], None] | None = None
        self._reconnect_s = 0.0
        self._outages = 0
        self._is_calling = False
        """An `Attach` is on its way to the process at the controller's address."""
        self._allocating: dict[int, Settle] = {}
        self._awaiting_hosts: list[AwaitHosts] = []
        self._donating: dict[int, tuple[int, ...]] = {}
        """Positions of donated arguments, of programs that have some."""
        self.hosts = Hosts(link)
        self.uploads = Uploads(link, bulk, self.hosts)
        self.requests = Requests(link, bulk, self.hosts)
        self.callbacks = Callbacks(link, bulk, self.hosts, on_call)
        self.timelines = Timelines(link, self.hosts)
        self.islands = IslandNews(link, on_island)
        to_itself = partial(env.send, env.address)
        failed = self.requests.failed.__contains__
        self.lines = Lines(link, self.hosts, post or to_itself, failed)
        self.lines.ask_at_once = self._ask_at_once
        self.leases = Leases(link, self.hosts, self.lines)
        link.on_order = self.leases.stop
        self.lines.on_loss = self.leases.lost
        self.lines.on_over = self.leases.over
        link.on_launched = self._launched
        self.requests.asked_hosts = lambda: self.lines.asked_hosts
        self.compose(link.journal, self.hosts, self.uploads, self.callbacks, self.timelines)
        self.requests.withdraw_from_lines = self.lines.withdraw
        self.compose(self.requests, self.lines, self.leases, self.islands)

    def put(self, note: Put, post: Callable[[object], None]) -> None:
        """Post a note that uploads a value; a small one goes over lines, so launches may read it.

        From any thread with the lock. An interrupt in the midst of it costs the lines, and thus another upload.
        """
        wires = self.lines.wires
        # The controller hears of arrays in their order.
        is_next = self.uploads.announced >= self.leases.announced
        if wires is None or not is_next or not self.lines.holders(note.spec):
            post(note)
            return
        self.leases.sent(note.array)  # first: a loss from now on takes it back
        messages = self.uploads.over_lines(note)
        post(note)
        if messages:
            self.link.launched(msg.CreateArray(note.array, note.spec, note.bound))
        else:
            self.leases.forget((note.array,))
        for host, message in messages:
            wires.tell((store_of(host),), message)

    def _ask_at_once(self, note: Await | Get) -> None:
        if isinstance(note, Await):
            self.requests.on_await(self.env.address, note)
        else:
            self.requests.on_get(self.env.address, note)

    # --- the connection ------------------------------------------------------------------------------

    @handles(Open)
    def _on_open(self, sender: Address, note: Open) -> None:
        self._attaching = note.attached
        self.uploads.keep_bytes = note.keep_bytes
        self._attach = msg.Attach(
            note.name, note.share, note.priority, line=self.lines.name, recovery_s=note.recovery_s
        )
        self._reconnect_s = note.reconnect_s
        self._output = self.lines.on_output = note.output
        self.link.keeps = note.reconnect_s > 0
        self.link.call(self._attach)

    @handles(msg.Attached)
    def _on_attached(self, sender: Address, message: msg.Attached) -> None:
        self._attached = True
        self._attach = msgspec.structs.replace(
            self._attach, resume=message.client, claim=message.claim
        )
        self.hosts.attached(message, self._output is not None)
        self.lines.attached(message)
        if not self.link.is_open:
            self.env.log("info", "attached to the controller again")
            self.hosts.forget_slices(self.link.journal.slices.keys())
            self._on_credits(self.link.resume())
            self.islands.attached_again()
        if self._attaching is not None:
            resolve(self._attaching, message)
            self._attaching = None

    @handles(msg.Directory)
    def _on_directory(self, sender: Address, message: msg.Directory) -> None:
        self.hosts.listed(message.peers)
        self._check_hosts()

    @handles(AwaitHosts)
    def _on_await_hosts(self, sender: Address, note: AwaitHosts) -> None:
        self._awaiting_hosts.append(note)
        self._check_hosts()

    def _check_hosts(self) -> None:
        count = len(self.hosts.names)
        for note in [note for note in self._awaiting_hosts if note.count <= count]:
            self._awaiting_hosts.remove(note)
            resolve(note.ready, None)

    @handles(msg.PeerRefused)
    def _on_refused(self, sender: Address, message: msg.PeerRefused) -> None:
        if message.node == CONTROLLER:
            self._die(message.error.exception())
        else:
            self._host_lost(message.node, message.error)

    @handles(msg.Evicted)
    def _on_evicted(self, sender: Address, message: msg.Evicted) -> None:
        if message.may_attach and not self.link.is_open:
            return  # the next controller answers a message that was meant for the last one
        words = f"the controller closed this session: {message.reason}"
        self._die(Disconnected(words) if message.error is None else message.error.exception())

    @handles(msg.PeerLost)
    def _on_peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        if message.node == CONTROLLER:
            self._controller_lost(message)
        else:
            error = HostLost(f"host {message.node} was lost: {message.words}")
            self._host_lost(message.node, ErrorReport.of(error))

    def _controller_lost(self, message: msg.PeerLost) -> None:
        words = f"the controller was lost: {message.words}"
        if self.closed is not None:
            return
        self.leases.lost()
        if not self._attached:
            words = f"no controller answers: {with_advice(message.words)}"
        if not self._attached or not self.link.keeps:
            self._die(ConnectionFailed(words))
        elif self.link.is_open:
            self._outages += 1
            self.timelines.lost(CONTROLLER, words)
            self.link.lost(self.requests.is_open)
            self.env.log("warning", "controller lost", reason=message.reason)
            self.env.call_later(self._reconnect_s, partial(self._give_up, self._outages, words))
            self._call()
        else:
            self._is_calling = False
            self.env.call_later(REDIAL_S, partial(self._redial, self._outages))

    def _call(self) -> None:
        self._is_calling = True
        suspended_by = self.hosts.suspended_by
        self.link.call(msgspec.structs.replace(self._attach, suspended_by=suspended_by))

    def _redial(self, outage: int) -> None:
        """Look for another controller."""
        is_over = self.link.is_open or outage != self._outages or self.closed is not None
        if not is_over and not self._is_calling:
            self._call()

    def _give_up(self, outage: int, reason: str) -> None:
        """End the session unless another controller has been found."""
        if not self.link.is_open and outage == self._outages:
            words = f"{reason}, and has not come back within {self._reconnect_s:g} s"
            self._die(ConnectionFailed(words))

    def _host_lost(self, node: str, error: ErrorReport) -> None:
        self.leases.lost()
        if not self.link.is_open:
            self.hosts.unbind_from(node)
        if self._attached and self.closed is None:
            self.env.send(CONTROL, msg.LinkLost(node))
        self.hosts.lost(node)
        self.lines.host_lost(node)
        self.uploads.host_lost(node)
        self.requests.host_lost(node, error)
        self.callbacks.host_lost(node)
        self.timelines.lost(node, error.message)

    @handles(Close)
    def _on_close(self, sender: Address, note: Close) -> None:
        self._die(note.error)
        resolve(note.closed, tuple(self.requests.unraised.values()))

    def _die(self, error: Error) -> None:
        if self.closed is not None:
            return
        self.closed = error
        # First: threads that see a failed future must find that the session has ended.
        self._on_end(error)
        if self._attaching is not None:
            reject(self._attaching, error)
        for future in self._allocating.values():
            reject(future, error)
        for note in self._awaiting_hosts:
            reject(note.ready, error)
        self._allocating.clear()
        self._awaiting_hosts.clear()
        self.uploads.close()
        self.requests.close(error)
        self.lines.close(error)
        self.callbacks.close()
        self.timelines.close(error)
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

    @handles(msg.SliceBound)
    def _on_bound(self, sender: Address, message: msg.SliceBound) -> None:
        if self.hosts.bind(message):
            self.uploads.slice_moved(message.slice)
        self.requests.slice_moved(message.slice)
        self.lines.bound(message)
        future = self._allocating.pop(message.slice, None)
        if future is not None:
            resolve(future, message)

    @handles(msg.SliceRefused)
    def _on_slice_refused(self, sender: Address, message: msg.SliceRefused) -> None:
        self.hosts.forget(message.slice)
        future = self._allocating.pop(message.slice, None)
        if future is not None:
            reject(future, message.error.exception())

    # --- runs and arrays -----------------------------------------------------------------------------

    @handles(Tell)
    def _on_tell(self, sender: Address, note: Tell) -> None:
        if self.closed is not None:
            return
        message = note.message
        if isinstance(message, msg.Run):
            self._launched(message)
        elif isinstance(message, msg.RegisterProgram):
            if donated := message.body.held.donated:
                self._donating[message.program] = donated
        elif isinstance(message, msg.ReleaseProgram):
            self._donating.pop(message.program, None)
        elif isinstance(message, msg.CreateArray):
            self.uploads.announced = message.array
        self.env.send(CONTROL, message)

    def _launched(self, run: msg.Run) -> None:
        """A run takes the arguments that are donated to it."""
        donated = self._donating.get(run.program, ())
        if donated:
            self.requests.forget(arrays_in(run.args[position] for position in donated))

    @handles(TellLaunched)
    def _on_tell_launched(self, sender: Address, note: TellLaunched) -> None:
        if self.closed is None:
            self.link.tell_launched()

    @handles(LineLost)
    def _on_line_lost(self, sender: Address, note: LineLost) -> None:
        """Launches may be lost, and the host may not know that there was a line."""
        if self._attached and self.closed is None:
            self.env.send(CONTROL, msg.LinkLost(note.host))

    @handles(Forget)
    def _on_forget(self, sender: Address, note: Forget) -> None:
        if self.closed is None:
            self.requests.forget(note.arrays)
            self.env.send(CONTROL, msg.Delete(note.arrays))

    @handles(msg.RunsSettled)
    def _on_settled(self, sender: Address, message: msg.RunsSettled) -> None:
        self._on_credits(message.count)

    @handles(msg.Printed)
    def _on_printed(self, sender: Address, message: msg.Printed) -> None:
        if self._output is not None and self.hosts.knows(sender.node):
            self._output(sender.node, message.lines)
