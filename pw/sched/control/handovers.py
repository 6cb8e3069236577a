"""Handovers: one client gives arrays to another without moving bytes, by an offer that the other takes.

Theory of operation. The *exporter* offers arrays under a token (`Offer`). The *importer* announces an array of
its own for each of them (`CreateArray` with an `OfferSource`). Either may come first. A taken array
*arrives*, like an upload: the exporter runs a view of the offered arrays (`pw.core.programs.views`), in the
order of its stream, and the results of that run are arrays of the importer. So the order with the exporter's
runs and deletes, the memory of shards that several arrays name, and donation are those of every view.

Names are made of handovers (`pw.sched.control.names`): a publisher offers arrays to the holder of a name, and
the holder offers them to each reader. A holder is a client, so all that follows holds for both.

The exporter's lineage keeps a record of that run until the importer needs none of the arrays any more. When the
importer has lost one, its recovery asks for it (`ask`), and the exporter's recovery runs the record again.
If the exporter has left, only replicas bring such an array back.

A run of the importer that reads a taken array waits in its stream until the run that makes it is submitted, and
so do runs that recovery repeats. On an island it could stand before a run of its client that the exporter needs
first.

Until the first of these runs is submitted, offered arrays that the exporter deletes stay, and its runs that
donate one wait (`pw.sched.control.client_order`), but not for long. A handover of which
only one side has come ends after a while.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec.structs import replace

from pw.core.actors.ticker import Ticker
from pw.core.errors import ArrayDeleted, ArrayLost, Error, ErrorReport, NotOwner, PlacementError
from pw.core.ids import client_of
from pw.core.messages import OFFER_TOKEN_BYTES, Delete, Offer, OfferSource
from pw.core.programs.program import Program
from pw.core.programs.spec_checks import check_spec
from pw.core.programs.views import view_program
from pw.core.sharding import ArraySpec, Placement
from pw.sched.control.array_states import ArrayEntry
from pw.sched.control.clients import Client
from pw.sched.control.lineage import Record
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart

ALONE_S = 240.0
"""Seconds for which an offer waits for its importer, and a taken array for its offer: the other client may
have to wait for its runs in flight first."""
GUARDED_S = 30.0
"""Seconds for which an offer keeps its arrays from being donated and deleted."""
LOOK_S = 1.0
"""How often to look for those that have waited too long."""
VIEWS_KEPT = 64
"""Number of programs of each exporter that stay installed."""

_ENDED = ErrorReport.of(
    ArrayLost(
        "the session that handed the array over has ended, and there are no replicas of it; call pw.checkpoint "
        "on the arrays that your program cannot do without"
    )
)
_ALONE = ErrorReport.of(
    ArrayLost(
        f"no session has offered the array within {ALONE_S:.0f} s: the call that hands it over was not made "
        "there, or has failed. Hand it over again"
    )
)
_REUSED = ErrorReport.of(
    NotOwner(
        "the array was taken already, or never offered; each offer can be taken once. Hand it over again"
    )
)


@dataclass(slots=True, eq=False)
class Handover:
    """Arrays that one client hands to another: the offer, the arrays that are taken, or both."""

    token: bytes
    until_s: float
    """Time at which it ends if only one side has come, in seconds."""
    exporter: Client | None = None
    offer: Offer | None = None
    importer: int = 0
    """Number of the importer; 0 while no client has taken an array."""
    imports: dict[int, tuple[int, ArraySpec]] = field(default_factory=dict)
    """Number and spec of each array of the importer, by its place in the offer."""
    asked: dict[int, int] = field(default_factory=dict)
    """Arrays for which the importer waits before the offer has come, with the names under which they arrive."""
    error: ErrorReport | None = None
    """Error of each array that is taken, if there is nothing to take."""
    untaken: int = 0
    """Number of arrays that have still to get that error; negative if it is not known."""
    record: Record | None = None
    """Record of the run that makes the importer's arrays."""
    guarded: dict[int, None] = field(default_factory=dict)
    """Offered arrays that stay until that run is submitted."""
    guarded_until_s: float = 0.0
    """Time until which these arrays stay, in seconds."""
    deleted: list[int] = field(default_factory=list)
    """Guarded arrays that the exporter has deleted."""

    @property
    def is_complete(self) -> bool:
        """Whether both sides have come."""
        return self.offer is not None and len(self.imports) == len(self.offer.arrays)


@dataclass(eq=False)
class HandoverTable(ControlPart):
    """Offers and taken arrays of all clients."""

    registry: ProgramRegistry
    runs: RunsInFlight

    def __post_init__(self) -> None:
        super().__post_init__()
        self._handovers: dict[bytes, Handover] = {}
        self._of: dict[int, Handover] = {}
        """Handovers by the importer's arrays."""
        self.ended: list[bytes] = []
        """Tokens of offers of holders that have ended since the name table looked."""
        self._with_news: dict[int, None] = {}
        """Clients that have something to make, or to repeat, by number."""
        self._timer = Ticker(self._env, LOOK_S, self._end_lonely)

    def __len__(self) -> int:
        return len(self._handovers)

    # --- offered --------------------------------------------------------------------------------------

    def offer(self, client: Client, message: Offer) -> None:
        """A client offers arrays."""
        if client_of(message.run) != client.number or not client.is_new(message.run):
            self._env.count("messages_duplicate")
            return
        error = _why_not(client, message)
        handover = self._offered(client, message, error)
        if handover is not None:
            handover.guarded = dict.fromkeys(message.arrays)
            handover.guarded_until_s = self._env.now_s() + GUARDED_S
            client.offered.update(handover.guarded.keys())
            self._match(handover)

    def offered_before(self, client: Client, message: Offer) -> None:
        """A client of an earlier controller had offered arrays."""
        if not all(map(client.owns, (message.run, *message.arrays))):
            self._env.count("messages_refused")
            return
        client.last_run = max(client.last_run, message.run)
        for array, spec in zip(message.arrays, message.specs, strict=False):
            try:
                check_spec(spec, client.slices.devices(spec.placement.slice))
            except Error:
                self._env.count("messages_refused")
                continue
            if client_of(array) == client.number:
                client.lineage.add_known(array, spec)
        handover = self._offered(client, message, None)
        if handover is not None:
            self._match(handover)

    def _offered(
        self, client: Client, message: Offer, error: ErrorReport | None
    ) -> Handover | None:
        handover = self._handover(message.token)
        if (
            handover.exporter is not None
            or handover.error is not None
            or len(message.token) != OFFER_TOKEN_BYTES
        ):
            self._env.count("messages_refused")
            client.lineage.refuse_run(message.run)
            return None
        if error is None and any(index >= len(message.arrays) for index in handover.imports):
            error = _REUSED
        handover.exporter, handover.offer = client, message
        client.lineage.hold(message.arrays)
        if error is not None:
            self._end(handover, error)
            self._refuse(handover, message, error)
            return None
        return handover

    def _refuse(self, handover: Handover, message: Offer, error: ErrorReport) -> None:
        """Fail the arrays of an offer that cannot be made, when the importer takes them."""
        untaken = len(message.arrays) - len(handover.imports) if message.arrays else -1
        if untaken > 0 or (untaken < 0 and not handover.imports):
            self._handovers[handover.token] = refused = Handover(handover.token, handover.until_s)
            refused.error, refused.untaken = error, untaken

    def _handover(self, token: bytes) -> Handover:
        handover = self._handovers.get(token)
        if handover is None:
            handover = Handover(token, self._env.now_s() + ALONE_S)
            self._handovers[token] = handover
            self._timer.start()
        return handover

    def keep(self, client: Client, arrays: tuple[int, ...]) -> tuple[int, ...]:
        """Delete offered arrays later; return those that can be deleted now."""
        if not client.offered:
            return arrays
        if client.offered.keys().isdisjoint(arrays):
            return arrays
        left = dict.fromkeys(arrays)
        for handover in self._handovers.values():
            if handover.exporter is client and handover.guarded and left:
                guarded = left.keys() & handover.guarded.keys()
                handover.deleted += [array for array in left if array in guarded]
                for array in guarded:
                    del left[array]
        return tuple(left)

    def withdraw(self, token: bytes) -> None:
        """End an offer unless a client has taken it."""
        handover = self._handovers.get(token)
        if handover is not None and not handover.imports:
            self._end(handover, _ENDED)

    def is_untaken(self, token: bytes) -> bool:
        """Whether an offer waits for a client to take an array of it."""
        handover = self._handovers.get(token)
        return handover is not None and not handover.imports

    # --- taken ----------------------------------------------------------------------------------------

    def take(self, client: Client, number: int, spec: ArraySpec, source: OfferSource) -> None:
        """A client takes an array, under this number."""
        self.taken_before(client, number, spec, source)
        self.ask(number, number)

    def taken_before(
        self, client: Client, number: int, spec: ArraySpec, source: OfferSource
    ) -> None:
        """Note which array a client takes; it does not wait for it yet."""
        handover = self._handover(source.token)
        offer = handover.offer
        if (
            len(source.token) != OFFER_TOKEN_BYTES
            or handover.importer not in (0, client.number)
            or handover.exporter is client
            or source.index < 0
            or source.index in handover.imports
            or (offer is not None and source.index >= len(offer.arrays))
        ):
            if handover.offer is None and not handover.imports:
                del self._handovers[source.token]
            return
        handover.importer = client.number
        handover.imports[source.index] = number, spec
        self._of[number] = handover

    def ask(self, number: int, name: int) -> None:
        """Have a taken array arrive under this name: its own number, or one that only recovery knows."""
        handover = self._of.get(number)
        if handover is None:
            self.runs.handed.append((name, _REUSED if name == number else _ENDED))
            return
        if handover.error is not None:
            self.runs.handed.append((name, handover.error))
            del self._of[number]
            handover.untaken -= 1
            if not handover.untaken:
                del self._handovers[handover.token]
            return
        handover.asked[number] = name
        importer = self.sessions.owner(number)
        if importer is not None and name == number:
            importer.asking.add(number)
        self._match(handover)

    def is_asked(self, number: int) -> bool:
        """Return whether the run that makes a taken array is still to be submitted."""
        handover = self._of.get(number)
        if handover is None:
            return False
        name = handover.asked.get(number)
        if name is None and handover.exporter is not None:
            name = handover.exporter.wanted.get(number)
        return name is not None and self._is_awaited(name)

    def can_bring(self, number: int) -> bool:
        """Return whether the exporter of a taken array can make it again."""
        handover = self._of.get(number)
        return handover is not None and handover.is_complete

    def forgotten(self, arrays: list[int]) -> None:
        """The importer does not need these arrays any more."""
        for number in arrays:
            handover = self._of.pop(number, None)
            if handover is None:
                continue
            self._fail(handover, number, _ENDED)
            if handover.record is not None and handover.exporter is not None:
                handover.exporter.lineage.release((number,))
            self._match(handover)

    # --- both sides have come -------------------------------------------------------------------------

    def _match(self, handover: Handover) -> None:
        exporter = handover.exporter
        if exporter is None or not handover.is_complete:
            return
        if not any(self._of.get(number) is handover for number, _ in handover.imports.values()):
            self._end(handover, _ENDED)
        elif handover.asked:
            exporter.wanted.update(handover.asked)
            handover.asked.clear()
            self._with_news[exporter.number] = None

    def clients_with_news(self) -> list[Client]:
        """Return the clients that have something to make, or to repeat, once."""
        asked, self._with_news = self._with_news, {}
        clients = [self.sessions.get(number) for number in asked]
        return [client for client in clients if client is not None]

    def prepare(self, exporter: Client) -> None:
        """Write records for what importers ask of an exporter, whose slices are bound."""
        for number, name in list(exporter.wanted.items()):
            handover = self._of.get(number)
            if handover is None or not self._is_awaited(name):
                exporter.wanted.pop(number, None)
                self._answered(number)
            elif handover.record is None and number in exporter.wanted:
                try:
                    self._record(handover, exporter)
                except Error as error:
                    self._end(handover, ErrorReport.of(error))

    def _is_awaited(self, name: int) -> bool:
        return self._awaited(name) is not None

    def _awaited(self, name: int) -> ArrayEntry | None:
        importer = self.sessions.owner(name)
        array = None if importer is None else importer.arrays.find(name)
        return array if array is not None and array.awaited else None

    def _record(self, handover: Handover, exporter: Client) -> None:
        offer = handover.offer
        assert offer is not None
        program = self.registry.own(exporter, self._view(handover, offer), VIEWS_KEPT)
        results = tuple([handover.imports[index][0] for index in range(len(offer.arrays))])
        handover.record = exporter.lineage.add_run(offer.run, program, offer.arrays, results)
        exporter.lineage.let_go(offer.arrays)
        gone = [number for number in results if self._of.get(number) is not handover]
        exporter.lineage.release(gone)

    def _view(self, handover: Handover, offer: Offer) -> Program:
        """Return the program that makes the importer's arrays, in terms of the exporter's slice."""
        bindings = self._islands.bindings
        outputs, shards = [], []
        for index, spec in enumerate(offer.specs):
            _, wanted = handover.imports[index]
            own = bindings.get(spec.placement.slice)
            theirs = bindings.get(wanted.placement.slice)
            if own is None or theirs is None:
                raise PlacementError(
                    f"the array {spec.short} cannot be handed over: its devices have been given back, or "
                    "have not come back after a loss. Put it on other ones first, with pw.put"
                )
            here, there = own.located(spec.placement), theirs.located(wanted.placement)
            if set(here) != set(there):
                raise PlacementError(
                    f"the array {spec.short} cannot be handed over: it lies on other devices than those that "
                    "the other session names for it. Move it there first, with pw.put or jax.device_put"
                )
            on = {device: at for at, device in enumerate(own.devices)}
            placement = Placement(spec.placement.slice, tuple([on[device] for device in there]))
            outputs.append(replace(wanted, placement=placement))
            at = {device: position for position, device in enumerate(here)}
            shards.append([(index, at[device]) for device in there])
        return view_program(offer.specs, outputs, shards)

    def results(self, exporter: Client, record: Record) -> dict[int, int]:
        """Return the names under which importers await results of a record that is about to run."""
        names = {}
        for number, output in zip(record.results, record.program.body.outputs, strict=True):
            name = exporter.wanted.get(number)
            array = None if name is None else self._awaited(name)
            if name is None or array is None:
                continue
            del exporter.wanted[number]
            self._answered(number)
            if (
                self._islands.is_bound(array.spec)
                and self._islands.is_bound(output.spec)
                and self._islands.located(array.spec) == self._islands.located(output.spec)
            ):
                names[number] = name
            else:
                self._refused(number, name, _ENDED)
        return names

    def submitted(self, record: Record) -> None:
        """A record of an exporter runs: its offered arrays need not stay any more."""
        for number in record.results:
            if (handover := self._of.get(number)) is not None:
                self._unguard(handover)

    def failed(self, exporter: Client, number: int, error: ErrorReport) -> None:
        """An exporter cannot make what an importer asks for."""
        if (name := exporter.wanted.pop(number, None)) is not None:
            self._refused(number, name, error)
            if (handover := self._of.get(number)) is not None:
                self._unguard(handover)

    def _refused(self, number: int, name: int, error: ErrorReport) -> None:
        """The importer has to do without an array that it holds, or needs to repeat a run."""
        self.runs.handed.append((name, error))
        importer = self._answered(number)
        origin = None if importer is None else importer.lineage.origins.get(number)
        if origin is not None:
            origin.error = error

    def _answered(self, number: int) -> Client | None:
        """End the wait for an array of the importer, which arrives or has an error: its recovery can go on."""
        importer = self.sessions.owner(number)
        if importer is not None:
            importer.asking.discard(number)
            if importer.recovering:
                self._with_news[importer.number] = None
        return importer

    # --- ends -----------------------------------------------------------------------------------------

    def _fail(self, handover: Handover, number: int, error: ErrorReport) -> None:
        name = handover.asked.pop(number, None)
        if handover.exporter is not None and name is None:
            name = handover.exporter.wanted.pop(number, None)
        if name is not None:
            self.runs.handed.append((name, error))
        self._answered(number)

    def _unguard(self, handover: Handover) -> None:
        """Let the exporter delete and donate the arrays that it offered."""
        exporter, guarded = handover.exporter, handover.guarded
        if exporter is None or not guarded:
            return
        handover.guarded = {}
        exporter.offered.subtract(guarded.keys())
        exporter.offered = +exporter.offered
        if deleted := self.keep(exporter, tuple(handover.deleted)):
            exporter.stream.backlog.appendleft(Delete(deleted))  # in order with recovery
            if exporter.is_holder:
                self.sessions.wake(exporter.number)
        handover.deleted.clear()

    def _end(self, handover: Handover, error: ErrorReport) -> None:
        """Forget a handover; what the importer still waits for fails."""
        self._handovers.pop(handover.token, None)
        if handover.exporter is not None and handover.exporter.is_holder:
            self.ended.append(handover.token)
        for number, _ in handover.imports.values():
            self._fail(handover, number, error)
            if self._of.pop(number, None) is not None and handover.record is not None:
                assert handover.exporter is not None
                handover.exporter.lineage.release((number,))
        if handover.exporter is not None and handover.offer is not None and handover.record is None:
            handover.exporter.lineage.let_go(handover.offer.arrays)
            handover.exporter.lineage.refuse_run(handover.offer.run)
        self._unguard(handover)

    def _end_lonely(self) -> bool:
        """End what has waited alone for too long; return whether something still waits."""
        now_s = self._env.now_s()
        alone = [handover for handover in self._handovers.values() if not handover.is_complete]
        for handover in alone:
            if handover.until_s <= now_s:
                self._end(handover, _ALONE)
            elif handover.guarded and handover.guarded_until_s <= now_s:
                self._env.count("offers_unguarded")
                self._unguard(handover)
        return any(handover.until_s > now_s for handover in alone)

    def client_left(self, client: Client) -> None:
        """End the offers of a client, also those that wait, and forget the arrays that it has taken."""
        for message in client.stream:
            if isinstance(message, Offer):
                self._offered(client, message, _ENDED)
        for handover in list(self._handovers.values()):
            if handover.exporter is client:
                handover.guarded = {}  # the client's arrays leave with it
                self._end(handover, _ENDED)
            elif handover.importer == client.number:
                self.forgotten([number for number, _ in handover.imports.values()])


def _why_not(client: Client, message: Offer) -> ErrorReport | None:
    """Return why these arrays cannot be offered; an array that has failed can."""
    if message.error is not None:
        return message.error
    error: Error | None = None
    slices = {spec.placement.slice for spec in message.specs}
    if len(message.arrays) != len(message.specs) or len(slices) != 1:
        error = PlacementError("arrays of several slices, or none, were offered at once")
    for number, spec in zip(message.arrays, message.specs, strict=False):
        array = client.arrays.get(number)
        if client_of(number) != client.number:
            error = NotOwner(
                f"the array {spec.short} belongs to another session than the one that offers it"
            )
        elif array is None:
            error = ArrayDeleted(
                f"the array {spec.short} was deleted or donated before it was handed over; keep a copy, or do "
                "not donate it"
            )
        elif array.error is None and array.spec != spec:
            error = PlacementError(
                f"the array {spec.short} was offered with another layout than it has"
            )
    return None if error is None else ErrorReport.of(error)
