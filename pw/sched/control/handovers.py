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

An array that is still to be handed to the exporter may be offered on. The exporter's stream does not wait for
that, as it would for a run: the other client may need a later offer of the same exporter first. Only a slice
is not given back before.

Until the first of these runs is submitted, offered arrays that the exporter deletes stay, and its runs that
donate one wait (`pw.sched.control.client_order`), but not for long. A handover of which
only one side has come ends after a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core.actors.ticker import Ticker
from pw.core.errors import Error, ErrorReport
from pw.core.ids import client_of
from pw.core.messages import OFFER_TOKEN_BYTES, Delete, Offer, OfferSource
from pw.core.programs.spec_checks import check_spec
from pw.core.sharding import ArraySpec
from pw.sched.control.array_states import ArrayEntry
from pw.sched.control.clients import Client
from pw.sched.control.lineage import Record
from pw.sched.control.offers import ALONE, ALONE_S, ENDED, REUSED, Handover, view_of, why_not
from pw.sched.control.registry import ProgramRegistry
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart

GUARDED_S = 30.0
"""Seconds for which an offer keeps its arrays from being donated and deleted."""
LOOK_S = 1.0
"""How often to look for those that have waited too long."""
VIEWS_KEPT = 64
"""Number of programs of each exporter that stay installed."""


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
        self._behind: dict[int, dict[bytes, Handover]] = {}
        """Handovers by an array that is still to be handed to their exporter."""
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
        error = why_not(client, message)
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
            error = REUSED
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
            self._end(handover, ENDED)

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
            self.runs.handed.append((name, REUSED if name == number else ENDED))
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

    def is_taken(self, number: int) -> bool:
        """Return whether another client makes an array."""
        return number in self._of

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
            self._fail(handover, number, ENDED)
            if handover.record is not None and handover.exporter is not None:
                handover.exporter.lineage.release((number,))
            self._match(handover)

    # --- both sides have come -------------------------------------------------------------------------

    def _match(self, handover: Handover) -> None:
        exporter = handover.exporter
        if exporter is None or not handover.is_complete:
            return
        if not any(self._of.get(number) is handover for number, _ in handover.imports.values()):
            self._end(handover, ENDED)
        elif handover.asked and not self.is_behind(exporter, handover):
            exporter.wanted.update(handover.asked)
            handover.asked.clear()
            self._with_news[exporter.number] = None

    def is_behind(self, exporter: Client, handover: Handover) -> bool:
        """Whether an offered array is still to be handed to the exporter; the handover goes on after that."""
        arrays = () if handover.offer is None else handover.offer.arrays
        number = next((number for number in arrays if number in exporter.asking), None)
        if number is not None:
            self._behind.setdefault(number, {})[handover.token] = handover
        return number is not None

    def needs_slice(self, client: Client, slice: int) -> bool:
        """Whether a client offers arrays on a slice that are still to be handed to it."""
        behind = (one for each in self._behind.values() for one in each.values())
        return any(
            one.exporter is client
            and one.offer is not None
            and one.offer.specs[0].placement.slice == slice
            for one in behind
            if one.asked
        )

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
        program = self.registry.own(
            exporter, view_of(handover, offer, self._islands.bindings), VIEWS_KEPT
        )
        results = tuple([handover.imports[index][0] for index in range(len(offer.arrays))])
        handover.record = exporter.lineage.add_run(offer.run, program, offer.arrays, results)
        exporter.lineage.let_go(offer.arrays)
        gone = [number for number in results if self._of.get(number) is not handover]
        exporter.lineage.release(gone)

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
                self._refused(number, name, ENDED)
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
        for handover in self._behind.pop(number, {}).values():
            if self._handovers.get(handover.token) is handover:
                self._match(handover)
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
                self._end(handover, ALONE)
            elif handover.guarded and handover.guarded_until_s <= now_s:
                self._env.count("offers_unguarded")
                self._unguard(handover)
        return any(handover.until_s > now_s for handover in alone)

    def client_left(self, client: Client) -> None:
        """End the offers of a client, also those that wait, and forget the arrays that it has taken."""
        for message in client.stream:
            if isinstance(message, Offer):
                self._offered(client, message, ENDED)
        for handover in list(self._handovers.values()):
            if handover.exporter is client:
                handover.guarded = {}  # the client's arrays leave with it
                self._end(handover, ENDED)
            elif handover.importer == client.number:
                self.forgotten([number for number, _ in handover.imports.values()])
