"""The mutations of the table that no operator alone can say."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from pw.core import messages as m
from pw.core.compact import Compact
from pw.core.functions.feeding import Feeder
from pw.core.ids import CONTROLLER, RESOURCES, Address, client_id, store_of
from pw.core.programs.counted import NUMBER, unpacked
from pw.core.programs.plan import Execute, Free, HostSegment, Receive
from pw.core.programs.program import Computation, Kind
from pw.core.recorder import WIDTH
from pw.core.rights import Resource
from pw.core.sharding import dtype_of
from pw.devices.host import backend as ops
from pw.devices.host.backend import relative
from pw.devices.host.value import Value
from pw.sched.cluster.fitting import is_free
from pw.sched.control.suspension_states import Suspension
from pw.sched.island.buffers import Tier
from pw.sched.island.memory_tiers import Returns
from pw.testing.sim.cut import ADDS, AGAIN, TAKES
from pw.testing.sim.host import SimHost
from pw.testing.sim.shards import Shards
from tests.sim.mutations import operators
from tests.sim.mutations.operators import wrap

# --- launch leases -------------------------------------------------------------------------------


def lend_parts(is_simple: Callable[..., bool], submit: Any) -> bool:
    """Lend the hosts of one island for a program over several."""
    return is_simple(replace(submit, is_whole=True))


def answer_and_go_on(close: Callable[..., None], lease: Any, noticed: int) -> None:
    """Say what has been taken of a lease, and take more."""
    close(lease, noticed)
    lease.is_open = True


def believe_all_alike(agree: Callable[..., None], lease: Any) -> None:
    """Take it that all hosts have taken what one has."""
    lease.answers = dict.fromkeys(lease.hosts, max(lease.noticed, *lease.answers.values()))
    agree(lease)


def begin_again(agree: Callable[..., None], lease: Any) -> None:
    """Let the next lease begin where this one has begun."""
    agree(lease)
    agree.__self__.indices = 0  # type: ignore[attr-defined]


def take_beyond_the_room(take: Callable[..., None], sender: Any, message: Any) -> None:
    """Take a launch for which a lease has no memory yet."""
    lease = take.__self__.current  # type: ignore[attr-defined]
    if lease is None:
        take(sender, message)
        return
    room_bytes, lease.room_bytes = lease.room_bytes, 1 << 60
    take(sender, message)
    lease.room_bytes = room_bytes


def lend_uncounted(set_aside: Callable[..., None], room: Any, size_bytes: int) -> None:
    """Lend memory without counting it as used."""
    room.peaks += size_bytes


def keep_what_was_lent(end: Callable[..., None], lease: Any) -> None:
    """Keep the memory of a lease that is over."""
    lease.memory = None
    end(lease)


def say_spilled_at_once(leave: Callable[..., Any], work: Any) -> Any:
    """Tell the scheduler that arrays have left the devices before they are copied."""
    tiers = leave.__self__  # type: ignore[attr-defined]
    tiers.env.send(work.scheduler, m.Spilled(work.epoch, work.arrays))
    return leave(work)


def say_spilled_and_keep(leave: Callable[..., Any], work: Any) -> Any:
    """Leave arrays on the devices of the second host of each island, and say that they have left."""
    tiers = leave.__self__  # type: ignore[attr-defined]
    if not tiers.env.address.node.endswith("h1"):
        return leave(work)
    tiers.env.send(work.scheduler, m.Spilled(work.epoch, work.arrays))
    return []


def say_written_at_once(write: Callable[..., None], work: Any) -> None:
    """Tell the scheduler that arrays are in files before these are written."""
    tiers = write.__self__  # type: ignore[attr-defined]
    tiers.env.send(work.scheduler, m.Spilled(work.epoch, work.arrays))
    write(work)


def write_nothing(write: Callable[..., None], parts: Any, devices: Any, done: Any) -> None:
    """Write zeros in place of the bytes."""
    write([(at, box, np.zeros_like(data)) for at, box, data in parts], devices, done)


def return_while_written(returns: Callable[..., Any], buffers: Any) -> Any:
    """Let runs read what hosts are writing to files."""
    back = returns(buffers)
    if back is None or any(one.tier is Tier.LEAVING for one in back.buffers):
        return back
    return Returns(back.buffers, is_moving=False)


def leave_the_value_away(bring_back: Callable[..., Any], entry: Any) -> Any:
    """Have a launch read the copy in host memory."""
    away = entry.value
    move = bring_back(entry)
    entry.value = away
    return move


def only_unread(candidates: Callable[..., Any], memory: Any, read: set[int]) -> Any:
    """Let no array leave that a queued run reads."""
    places = candidates.__self__.next_uses()  # type: ignore[attr-defined]
    return [one for one in candidates(memory, read) if one[0] not in places]


def also_what_is_in_host_memory(candidates: Callable[..., Any], memory: Any, read: set[int]) -> Any:
    """Let arrays leave the devices that their clients have in host memory."""
    away = [(a, one) for a, one in memory.buffers.items() if not one.shard_bytes]
    return [*away, *candidates(memory, read)]


def overtake_earlier_uploads(
    put: Callable[..., None], note: Any, post: Callable[..., None]
) -> None:
    """Send an upload over lines though arrays before it are not announced."""
    session = put.__self__  # type: ignore[attr-defined]
    session.uploads.announced, now = session.leases.announced, session.uploads.announced
    put(note, post)
    session.uploads.announced = now


def overlook_uploads(obstacle: Callable[..., str], client: Any, message: Any) -> str:
    """Take a leased run though a host may not have what it reads."""
    words = obstacle(client, message)
    return "" if words.startswith("the uploads that it reads") else words


def take_for_arrived(put: Callable[..., None], note: Any, post: Callable[..., None]) -> None:
    """Believe that each upload is on its hosts at once."""
    post(note)
    leases = put.__self__.leases  # type: ignore[attr-defined]
    leases.arrived(note.array, leases.losses)


def take_every_answer(received: Callable[..., None], host: str, message: Any) -> None:
    """Take it that a value is there that a host says it has not."""
    failed = isinstance(message, m.RequestFailed)
    received(host, m.Ready(message.request) if failed else message)


def read_another(read_now: Callable[..., Any], op: Any) -> Any:
    """Answer a launch with other bytes than those of its result."""
    views = read_now(op)
    return views and [
        (~view.view(np.uint8)).view(view.dtype) for view in map(np.ascontiguousarray, views)
    ]


class Nothing(dict[Any, Any]):
    """Keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Forget it."""


# --- messages ------------------------------------------------------------------------------------


def turned_bindings(random: Random) -> Callable[[Address, m.SliceBound], Any]:
    """Turn the devices of a slice around whenever a client hears of it again."""
    seen: set[int] = set()

    def change(to: Address, message: m.SliceBound) -> Any:
        if to.node == CONTROLLER:
            return None
        again = message.slice in seen
        seen.add(message.slice)
        return replace(message, devices=message.devices[::-1]) if again else None

    return change


def untold_runs(random: Random) -> Callable[[Address, Any], Any]:
    """Lose the runs that clients send between their return and its answer."""
    resuming: set[str] = set()

    def change(to: Address, message: m.Attach | m.Resumed | m.Run) -> Any:
        if isinstance(message, m.Attach) and message.resume:
            resuming.add(message.name)
        elif isinstance(message, m.Resumed):
            resuming.clear()
        elif isinstance(message, m.Run) and resuming:
            return []
        return None

    return change


def without_a_record(message: m.Records) -> m.Records | None:
    """Return the records of a process without the first."""
    if not message.count:
        return None
    records = msgspec.msgpack.decode(message.data)[WIDTH:]
    return replace(message, data=msgspec.msgpack.encode(records))


def reshard_reversed(message: m.Install) -> m.Install:
    """Have each re-shard take its devices in the opposite order."""

    def turned(computation: Computation) -> Computation:
        if computation.kind is not Kind.RESHARD:
            return computation
        (spec,) = computation.inputs
        placement = replace(spec.placement, devices=spec.placement.devices[::-1])
        return replace(computation, inputs=(replace(spec, placement=placement),))

    body = message.body.value()
    body = replace(body, computations=tuple(map(turned, body.computations)))
    return replace(message, body=Compact.of(body))


def later_task_first(message: m.Install) -> m.Install:
    """Move the first computation that does not need the one before it in front of that one."""
    plan = message.plan.value()
    segments = tuple(map(_swapped, plan.segments))
    return replace(message, plan=Compact.of(replace(plan, segments=segments)))


def _swapped(segment: HostSegment) -> HostSegment:
    before = list(segment.instructions)
    for at, first in enumerate(before):
        second = next((one for one in before[at + 1 :] if not isinstance(one, Free)), None)
        if isinstance(first, Execute) and isinstance(second, Execute):
            overwritten = {second.args[position] for position in second.donated}
            if not (set(first.results) & set(second.args) or overwritten & set(first.args)):
                before.remove(second)
                before.insert(at, second)
                return replace(segment, instructions=tuple(before))
    return segment


# --- the controller ------------------------------------------------------------------------------


def believe_loss(control: Any, receive: Any, sender: Address, message: m.ArraysLost) -> None:
    """Take the news of a loss for that of a host that has the array."""
    owner = control.sessions.owner(message.arrays[0])
    array = None if owner is None else owner.arrays.get(message.arrays[0])
    hosts = () if array is None else array.hosts
    receive(store_of(hosts[0]) if hosts else sender, message)


def believe_upload(control: Any, receive: Any, sender: Address, message: m.Uploaded) -> None:
    """Take the sender for a host of the client."""
    owner = control.sessions.owner(message.array)
    if owner is not None:
        owner.slices.are_on = lambda host: True
    receive(sender, message)


def look_away(part: str, may_launch: Any, lease: Any, lent: Any, message: m.LeasedLaunch) -> bool:
    """Take what a launch names in this field for what its holder has made."""
    own = client_id(lease.client, 1)
    heeded = {
        "run": own,
        "args": tuple(own if isinstance(arg, int) else arg for arg in message.args),
        "results": tuple(client_id(lease.client, at) for at in range(len(message.results))),
    }
    return bool(may_launch(lease, lent, replace(message, **{part: heeded[part]})))


def overlook(parts: tuple[str, ...], launch: Any, message: m.Launch, program: Any) -> Any:
    """Do a launch the short way as if these parts of the interpreter were empty."""
    interpreter = launch.__self__.interpreter
    places = [
        (interpreter.lanes, "of_clients") if part == "lanes" else (interpreter, part)
        for part in parts
    ]
    held = [getattr(*place) for place in places]
    for place in places:
        setattr(*place, {})
    try:
        return launch(message, program)
    finally:
        for place, value in zip(places, held, strict=True):
            setattr(*place, value)


def close_for_strangers(
    executor: Any, receive: Any, sender: Address, message: m.LeasedLaunch
) -> None:
    """Close the lease also when another client than its holder launches under it."""
    lease = executor.leases.current
    if lease is not None and lease.is_open and sender.node not in (lease.node, CONTROLLER):
        executor.leases.close(lease, lease.next_index)
    receive(sender, message)


def copies_turned_round(copies: Callable[[int], Any], array: int) -> Any:
    """Return copies with their bytes in another order."""
    return {box: data[::-1] for box, data in copies(array).items()}


class _OldSlices(Suspension):
    """A suspension that leaves only the slices that the client had when it was asked for."""

    __slots__ = ()

    def include(self, slices: Any) -> None:
        pass


def keep_new_slices(suspend: Callable[..., bool], client: Any, *of: Any, **how: Any) -> bool:
    """Leave only the slices that a client had when its suspension was asked for."""
    is_complete = suspend(client, *of, **how)
    client.suspension.__class__ = _OldSlices
    return is_complete


def forget_copies(clear: Any, number: int) -> None:
    """Forget what was copied for a move."""
    clear.__self__.copies.pop(number, None)


def bind_anywhere(bind_again: Any, island: Any) -> None:
    """Forget which hosts slices name before they are bound again."""
    for piece in bind_again.__self__.on(island):
        piece.request = replace(piece.request, hosts=())
    bind_again(island)


def wrap_around_everywhere(room: Any, request: Any, but: Any = None) -> Any:
    """Place a slice as if all axes of all grids wrapped around."""
    for island in room.__self__.inventory.islands.values():
        if island.grid is not None:
            island.grid = dataclasses.replace(island.grid, wraps=island.grid.sizes)
    return room(request, but)


def with_a_hole(room: Any, request: Any, but: Any = None) -> Any:
    """Put another device in the place of the last one of a block."""
    place = room(request, but)
    if place is None or request.topology is None or request.devices < 2:
        return place
    free = [one for one in place.island.positions() if is_free(place.island, request, one)]
    away = [position for position in free if position not in place.positions]
    return place._replace(positions=(*place.positions[:-1], away[-1])) if away else place


def as_if_well(room: Any, request: Any, but: Any = None) -> Any:
    """Place a slice as if no device had failed."""
    failed = room.__self__.inventory.failed_devices
    before = dict(failed)
    failed.clear()
    place = room(request, but)
    failed.update(before)
    return place


def as_if_alone(room: Any, request: Any, but: Any = None) -> Any:
    """Place a slice as if there were no others."""
    islands = room.__self__.inventory.islands.values()
    before = [(island, island.bound, island.exclusive) for island in islands]
    for island in islands:
        island.bound, island.exclusive = Counter(), set()
    place = room(request, but)
    for island, bound, exclusive in before:
        island.bound, island.exclusive = bound, exclusive
    return place


def arrived_when_asked(ask: Any, number: int, name: int) -> None:
    """Hand an array over that the exporter has not made."""
    ask(number, name)
    ask.__self__.runs.handed.append((name, None))


def heed_only_the_living(scheduler: Any) -> None:
    """Pass on answers only for programs that are installed."""
    programs = scheduler.programs
    answered = programs.queues.answered

    def heeded(program: int, install: int, *by: str) -> None:
        if programs[program].install == install:
            answered(program, install, *by)

    programs.queues.answered = heeded


# --- hosts ---------------------------------------------------------------------------------------


def crash_with_compiler(host: SimHost) -> None:
    """End the host with each process that compiles."""

    def crashed(key: bytes) -> None:
        host.crash(machine=False)
        host.restart_later(0.1)

    host.backend.compilers.crashed = crashed


def crash_all_compilations(compilers: Any) -> None:
    """Fail the tasks of all clients when the process of one ends."""
    compilers.crashed = lambda key: compilers.fail(lambda other: True, "the process ended")


def permit_all(host: SimHost) -> None:
    """Give replicas to every host that asks."""
    receive: Any = host.store.receive

    def generous(sender: Address, message: Any) -> None:
        if isinstance(message, m.FetchReplica):
            permit = host.cluster.claims.permit(message.array, host.name, sender.node)
            message = replace(message, permit=permit)
        receive(sender, message)

    host.store.receive = generous


def keep_later(keep: Any, replicas: Sequence[Any], kept: Callable[[Any], None]) -> None:
    """Say that replicas were taken before they are."""
    kept(None)
    keep(replicas, lambda error: None)


def free_viewed(drop: Any, array: int, why: str) -> None:
    """Free the shards of an array for all arrays that have them."""
    arrays = drop.__self__
    entry = arrays.get(array)
    drop(array, why)
    freed: Any = (None if entry is None else entry.value.payload) or {}
    gone = {id(shard) for shard in freed.values()}
    for other in arrays.values():
        shards = other.value.payload or {}
        for ordinal in [at for at, shard in shards.items() if id(shard) in gone]:
            shards[ordinal] = shards[ordinal] * 0


def take_over_held(go: Any, launch: Any, instruction: Execute) -> bool:
    """Let a computation behind a hold overwrite what the hold keeps."""
    behind = {
        one.results[0]
        for one in launch.segment.instructions
        if isinstance(one, Execute) and one.guard >= 0 and one.args[1:2] == one.args[2:]
    }
    if not behind.isdisjoint(instruction.args):
        launch.segment.kept.pop(launch.position, None)
    return bool(go(launch, instruction))


def at_once(await_outcome: Any, launch: Any, computation: Any, slots: Any, gang: Any) -> None:
    """Take results for made before the gang agrees on them."""
    for slot in slots:
        await_outcome.__self__.note_result(launch.run, slot)


def go_on_once(interpreter: Any) -> None:
    """Go on with waiting work once only."""
    go_on = interpreter.advance_soon

    def once() -> None:
        go_on()
        interpreter.advance_soon = lambda: None

    interpreter.advance_soon = once


def opposite(decide: Any, run: Any, slot: int, computation: Any, *, merges: bool) -> Any:
    """Decide the opposite for merges, or for all but them."""
    decision = decide(run, slot, computation)
    is_wrong = isinstance(decision, bool) and bool(computation.traits.predicates) is merges
    return not decision if is_wrong else decision


def on_every_second_host(host: SimHost) -> None:
    """Take the branches that the other hosts skip."""
    if int(host.name[-1], 36) % 2 == 0:
        guards: Any = host.executor.interpreter.guards
        guards.decision = partial(opposite, guards.decision, merges=False)


# --- ops -----------------------------------------------------------------------------------------


def of_each_op(change: Callable[[Any, Any], Any]) -> operators.Install:
    """Have hosts submit `change(backend, op)` in place of an op."""

    def submit(method: Any, batch: Sequence[Any]) -> None:
        method([change(method.__self__, op) for op in batch])

    return wrap("host.backend.submit", submit)


def in_line(backend: Any, op: Any) -> Any:
    """Ask for values when all that was submitted before is done."""
    submit = type(backend).submit
    is_question = isinstance(op, ops.Watch | ops.Read)
    return ops.RunFunction(partial(submit, backend, [op])) if is_question else op


def unshared(backend: Any, op: Any) -> Any:
    """Let computations overwrite the shards of views."""
    if isinstance(op, ops.View):
        op.result.shared = False
        for source in op.sources:
            source.value.shared = False
    return op


def added(change: Callable[[Any, Any], tuple[Any, ...]]) -> operators.Install:
    """Have hosts add other parts of a sum: those that `change(backend, op)` returns."""

    def changed(backend: Any, op: Any) -> Any:
        if ADDS in _name(backend, op):
            op.args = change(backend, op)
        return op

    return of_each_op(changed)


def without_the_last_part(backend: Any, op: Any) -> tuple[Any, ...]:
    """Return the parts of a sum, and zeros in the place of the last one."""
    place = backend.programs[op.key].layout.inputs[-1]
    shape, dtype = place.spec.sharding.shard_shape(place.spec.shape), dtype_of(place.spec.dtype)
    zeros = Value()
    zeros.fill(Shards({at: np.zeros(shape, dtype) for at, _ in place.by_host[backend.host]}))
    return (*op.args[:-1], zeros)


def _name(backend: Any, op: Any) -> str:
    """Return the name of the computation that an op enqueues, or nothing."""
    installed = backend.programs.get(op.key) if isinstance(op, ops.Execute) else None
    return "" if installed is None else installed.computation.name


def run_twice(submit: Any, batch: Sequence[Any]) -> None:
    """Run each piece that takes buffers over once more, on what it has made."""
    found = []
    for op in batch:
        if AGAIN in _name(submit.__self__, op):
            made = tuple(Value() for _ in op.results)
            found.append(replace(op, results=made))
            op.args = (made[0], *op.args[1:])
        found.append(op)
    submit(found)


def take_from_another(message: m.Install) -> m.Install:
    """Exchange what a piece takes of two other islands."""
    names = [computation.name for computation in message.body.value().computations]
    plan = message.plan.value()

    def exchanged(segment: HostSegment) -> HostSegment:
        made = list(segment.instructions)
        received = {one.slot: at for at, one in enumerate(made) if isinstance(one, Receive)}
        for one in segment.instructions:
            if isinstance(one, Execute) and TAKES in names[one.computation]:
                places = [received[slot] for slot in one.args if slot in received]
                for a, b in zip(places[::2], places[1::2], strict=False):
                    first, second = made[a], made[b]
                    if first.spec == second.spec:
                        made[a] = replace(first, slot=second.slot)
                        made[b] = replace(second, slot=first.slot)
        return replace(segment, instructions=tuple(made))

    return replace(
        message, plan=Compact.of(replace(plan, segments=tuple(map(exchanged, plan.segments))))
    )


def counted(change: Callable[[Any], Any]) -> operators.Install:
    """Have hosts read other counts of rows."""

    def changed(backend: Any, op: Any) -> Any:
        done: Any = getattr(op, "done", None)
        if isinstance(op, ops.Read) and isinstance(done, partial) and done.args == ("counts",):
            op.done = lambda answer: done(
                [change(answer[0])] if isinstance(answer, list) else answer
            )
        return op

    return of_each_op(changed)


def dirty_padding(backend: Any, op: Any) -> Any:
    """Leave other bytes than zeros in the padding of received rows."""
    if isinstance(op, ops.Build) and op.over_zeros:
        whole = op.spec.sharding.shard_shape(op.spec.shape)
        here = tuple(sorted({at for positions, _, _ in op.parts for at in positions}))
        old = np.full(whole, 255, np.uint8)
        op.parts = [(here, relative(tuple((0, size) for size in whole)), old), *op.parts]
    return op


def talk_of_rows(send: Any, outgoing: Any, data: bytes) -> None:
    """Send nothing if no row counts."""
    counts = outgoing.send.counts
    if counts is None or np.frombuffer(data[: NUMBER.itemsize * (len(data) // 4)], NUMBER).any():
        send(outgoing, data)


def third_without_rows(receiving: Any) -> None:
    """Take each third small route for one without rows."""
    take, seen = receiving.take, count()

    def zeros(incoming: Any, route: Any, buffer: Any) -> None:
        counts = incoming.receive.counts
        if counts is not None and isinstance(buffer, bytes) and next(seen) % 3 == 2:
            lead = len(counts.spec.shape)
            cells = unpacked(buffer, route, incoming.receive.source, lead)[0]
            buffer = bytes(NUMBER.itemsize * sum(own.size for _, own, _ in cells))
        take(incoming, route, buffer)

    receiving.take = zeros


# --- streams -------------------------------------------------------------------------------------


class SkipsNothing(Feeder):
    """Takes a generator that begins anew for one at the wanted element."""

    def at(self, share: Any, number: int, base: int, note: Any) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._begun(share, None)
            self._position = number
        return super().at(share, number, base, note)


class ReadsOn(Feeder):
    """Takes the next element for the wanted one."""

    def at(self, share: Any, number: int, base: int, note: Any) -> Iterator[Any]:
        if self._iterator is not None:
            self._position = number
        return super().at(share, number, base, note)


class IsOneElementBehind(Feeder):
    """Takes a state for that of one element later."""

    def at(self, share: Any, number: int, base: int, note: Any) -> Iterator[Any]:
        return super().at(share, number, min(base + 1, number), note)


class FarAhead(dict[bytes, Any]):
    """Bounds of streams that let users be far ahead."""

    def __setitem__(self, artifact: bytes, ahead: Any) -> None:
        ahead.most = 16
        super().__setitem__(artifact, ahead)


# --- islands that are away -----------------------------------------------------------------------


def pass_everything(proceed: Callable[..., bool], client: Any, message: Any) -> bool:
    """Let everything pass what was set aside."""
    if client.away is None:
        return proceed(client, message)
    proceed.__self__.carry_out(client, message)  # type: ignore[attr-defined]
    return True


def set_all_aside(proceed: Callable[..., bool], client: Any, message: Any) -> bool:
    """Set everything aside while an island is away."""
    if (away := client.away) is None:
        return proceed(client, message)
    client.stream.aside.add(message, away)
    return True


def forget_aside(field: str, proceed: Callable[..., bool], client: Any, message: Any) -> bool:
    """Forget something of what was set aside."""
    getattr(client.stream.aside, field).clear()
    return proceed(client, message)


def return_backwards(go_on: Callable[..., None], client: Any) -> None:
    """Return what was set aside in the opposite order."""
    aside = client.stream.aside
    if aside.messages and aside.may_go_on(client.away):
        aside.messages.reverse()
    go_on(client)


def give_up_early(expect: Callable[..., None], client: Any, *rest: Any) -> None:
    """Give an island up after half of the client's time."""
    patience_s = client.recovery_s
    client.recovery_s = 30.0 if patience_s is None else patience_s / 2
    expect(client, *rest)
    client.recovery_s = patience_s


# --- shares --------------------------------------------------------------------------------------


def forget_the_neighbour(scheduler: Any, message: m.RemoveClient) -> None:
    """Let the client whose number comes after that of the one that left not have its turn again."""
    forgotten = min((one for one in scheduler.queues.clients if one > message.client), default=0)
    policy = scheduler.policy
    order = policy.order

    def without(queues: Sequence[Any], now_s: float) -> Sequence[Any]:
        return [one for one in order(queues, now_s) if one.stake.client != forgotten]

    policy.order = without


# --- what tenants may have ------------------------------------------------------------------------


def without_another_try(client_left: Callable[..., None], client: Any) -> None:
    """Give back the slices of a client that left, and let the slices of its tenant wait on."""
    slices: Any = client_left.__self__  # type: ignore[attr-defined]
    slices.queue.try_again = lambda tenant: None
    client_left(client)
    del slices.queue.try_again


def count_bytes_twice(add: Callable[..., None], number: int, tenant: str, spent: Any) -> None:
    """Add to an account twice what hosts have sent."""
    spent.moved_bytes *= 2
    add(number, tenant, spent)


def count_for_no_tenant(room: Callable[..., Any], client: int, devices: Any) -> Any:
    """Set memory aside for a lease, and count it for the island only."""
    memory: Any = room.__self__  # type: ignore[attr-defined]
    claim = room(client, devices)
    claim.on = memory.device_set(claim.on.addresses, (memory.total,))
    claim.totals = claim.on.totals
    return claim


def forget_slices_of_runs(install: m.InstallProgram) -> m.InstallProgram:
    """Return an installation in which runs take nothing on slices with a bound."""
    memory = install.memory
    return install if memory is None else replace(install, memory=replace(memory, slices=()))


def count_for_no_slice(room: Callable[..., Any], client: int, needs: Any) -> Any:
    """Set memory aside for a lease, and not on slices with a bound."""
    claim = room(client, needs)
    claim.slices = ()
    return claim


def end_for_no_tenant(end: Callable[..., None], claim: Any) -> None:
    """End a run, and count its results for the island only."""
    memory: Any = end.__self__  # type: ignore[attr-defined]
    end(claim)
    for _, buffer in claim.results:
        if buffer.is_counted and buffer.shards is None:
            memory.move(buffer, (memory.total,))


def believe_what_it_had(
    ask: Callable[..., bool], client: int, tenant: str, slice_: int, devices: int, then: Any
) -> bool:
    """Count a slice that a client says it had at an earlier controller, without a look at the bound."""
    queue: Any = ask.__self__  # type: ignore[attr-defined]
    _, message = then.args
    if not message.formerly:
        return ask(client, tenant, slice_, devices, then)
    queue.usage.keep(client, Resource.DEVICES, {slice_: devices})
    then()
    return True


# --- names ---------------------------------------------------------------------------------------


def with_an_older_array(take: Callable[..., None], shared: Any, part: Any) -> None:
    """Take the arrays of a part; then put an array of the version before it in the place of an equal one."""
    take(shared, part)
    former = () if shared.current is None else shared.current.parts
    arrays = list(part.arrays)
    for one in former:
        for old, spec in zip(one.arrays, one.offer.specs, strict=True):
            for place, wanted in enumerate(part.offer.specs):
                if spec == wanted:
                    arrays[place] = old
    part.arrays = tuple(arrays)


def by_its_first_part(arrive: Callable[..., bool], shared: Any, version: Any) -> bool:
    """Do not wait for what lies on other slices."""
    if version.parts and version.parts[0].arrays:
        version.parts = version.parts[:1]
        version.arriving = [one for one in version.arriving if one in version.parts[0].arrays]
    return arrive(shared, version)


def whatever_is_newer(complete: Callable[..., None], shared: Any, version: Any) -> None:
    """Take each version that is complete for the newest one."""
    shared.newest = 0
    complete(shared, version)


def without_counting(release: Callable[..., bool], shared: Any, version: Any) -> bool:
    """Delete a version that has readers."""
    version.readers.clear()
    return release(shared, version)


def by_arrival(forecast: Callable[[], Any]) -> Any:
    """Foretell that the launch that came first goes first."""
    foretold = forecast()
    foretold.turns.sort(key=lambda task: task.arrival)
    return foretold


# --- suspensions ---------------------------------------------------------------------------------


def hold_nothing(scheduler: Any, message: Any) -> None:
    """Let a client launch that is to leave its devices."""
    queue = scheduler.queues.clients.get(message.client)
    if queue is not None:
        queue.held_but = None


def all_in_flight(behind: Callable[..., Any], client: Any, suspension: Any) -> Any:
    """Take all runs of a client for queued ones."""
    part: Any = behind.__self__  # type: ignore[attr-defined]
    return iter([run.number for run in part.runs_of(client)])


def held_alone(present: Callable[..., Any], client: Any, suspension: Any) -> Any:
    """Leave out what only queued runs read."""
    return (one for one in present(client, suspension) if one[0] in client.arrays.held)


def write_later(
    hold: Callable[..., None], array: int, boxes: Any, proof: bytes = b"", *, to_files: bool = False
) -> None:
    """Have copies kept at once, and written to files afterwards."""
    hold(array, boxes, proof)
    if to_files:
        hold.__self__.write((array,))  # type: ignore[attr-defined]


def the_last_first(candidates: Callable[..., Any], *args: Any) -> Any:
    """Try what moves the most bytes first."""
    chosen = list(candidates(*args))
    ranks = zip(chosen, reversed(chosen), strict=True)
    return (other._replace(size_bytes=one.size_bytes) for one, other in ranks)


def all_but_one(tried: Callable[..., Any], *args: Any) -> Any:
    """Return all moves of a plan but the last."""
    moves = tried(*args)
    return moves[:-1] if moves else moves


def end_at_once(controller: Any, message: m.HostMustEnd) -> None:
    """Have a host end though its clients have not left."""
    controller.env.send(RESOURCES, m.ClientsLeft(message.node))
