"""Users record timelines; each is compared with what the processes have recorded themselves.

| monitor | promise |
|---|---|
| timelines | a source has its process's records without a gap, from its start to its end, or says why not |
| timelines | every launch is in the timelines of its time |
| timelines | nothing is recorded when all clients have left |
| clocks | the difference of two clocks is within the told error, and what they drift apart |
"""

from __future__ import annotations

from typing import Any

from pw.client.session.thread_messages import StartTimeline, StopTimeline
from pw.client.session.timelines import RecordedProcess
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import CANCELLED, GangOrder, Launch
from pw.core.recorder import LAUNCHED
from pw.operating.timeline.resolve import records_in
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.life import Life
from pw.testing.sim.recording import LoggedRecorder
from pw.testing.sim.world import Violation, World

LENGTH_S = 0.5
"""Seconds that a timeline lasts, at most."""

ROUNDED_S = 1e-9
"""Seconds that a time may lose on its way to another clock and back: what was recorded in the moment in which a
process began to record may have come before it did."""


def watch_launches(cluster: SimCluster) -> None:
    """Have the cluster remember when which segment was launched."""
    world = cluster.world

    def launched(sender: Address, to: Address, message: Launch | GangOrder) -> None:
        launch = message.order if isinstance(message, GangOrder) else message
        if isinstance(message, GangOrder) and sender.node != CONTROLLER:
            return  # a host passes on what was launched before
        if isinstance(launch, Launch) and launch.segment != CANCELLED:
            cluster.launched.append((world.now_s, launch.run, launch.segment))

    if world.profile.timelines:
        world.watch_sent(Launch, launched)
        world.watch_sent(GangOrder, launched)


def record(user: Life) -> None:
    """Have a user record a timeline for a while."""
    user.serial += 1
    number, world = user.serial, user.world

    def ready(answer: Any, error: BaseException | None) -> None:
        if error is None:
            length_s = user.random.uniform(0.0, LENGTH_S)
            world.after(length_s, _stop, user, user.lives, number, asked_s, world.now_s)

    asked_s = world.now_s
    user._post(StartTimeline(number, user._promise("start a timeline", ready)))


def _stop(user: Life, life: int, number: int, asked_s: float, began_s: float) -> None:
    if user.lives != life or not user.node.alive or user.closing:
        return
    ended_s = user.world.now_s
    could_ask = user.session.link.is_open

    def collected(sources: tuple[RecordedProcess, ...] | None, error: BaseException | None) -> None:
        if sources is None:
            return  # the session has ended; other monitors say whether it may
        for source in sources:
            _check(user, source, began_s, ended_s)
            _check_clock(user, source, asked_s)
        lost = {source.node for source in sources if source.lost}
        if could_ask and CONTROLLER not in {source.node for source in sources} | lost:
            raise Violation("timelines", f"{user.name} has heard nothing of the controller")

    user._post(StopTimeline(number, user._promise("stop a timeline", collected)))


def _check(user: Life, source: RecordedProcess, began_s: float, ended_s: float) -> None:
    world = user.world
    world.checked["timelines"] += 1
    records = [tuple(map(_plain, each)) for part in source.parts for each in records_in(part)]
    if source.lost:
        if not (world.ledger.any or world.ledger.injected["silence"]):  # a client that stood still
            raise Violation("timelines", f"{source.node}: {source.lost}, and nothing was injected")
        return
    if source.dropped or len(records) != source.count:
        raise Violation("timelines", f"{source.node} has dropped some of {len(records)} records")
    node: Any = world.nodes.get(source.node)
    if node is None or node.incarnation_began_s > began_s:
        return  # another process has its name by now
    since_s = (source.since_s - node.clock_offset_s) / node.clock_rate
    began_s = max(began_s, since_s + ROUNDED_S)
    log = [(at_s, tuple(map(_plain, each))) for at_s, each in node.recorder.log]
    wanted = [each for at_s, each in log if began_s < at_s < ended_s]
    if not _is_within(wanted, records):
        words = f"{len(wanted)} records of {source.node}, of which a timeline has {len(records)}"
        raise Violation("timelines", words)
    if source.node == CONTROLLER:
        launches = {
            each[3:5] for each in records if each[0] == LAUNCHED and each[6]
        }  # run, segment; when
        missed = [
            name
            for at_s, *name in user.cluster.launched
            if began_s < at_s < ended_s and tuple(name) not in launches
        ]
        if missed:
            words = f"{len(missed)} launches are not in a timeline of {user.name}"
            raise Violation("timelines", words)
    if not _is_within(records, [each for _, each in log]):
        raise Violation("timelines", f"{source.node} has not recorded what it has sent")


def _check_clock(user: Life, source: RecordedProcess, asked_s: float) -> None:
    own, world = user.node, user.world
    node: Any = world.nodes.get(source.node)
    if node is None or node.incarnation_began_s > asked_s:
        return
    world.checked["clocks"] += 1
    there_s = node.clock_offset_s + node.clock_rate * world.now_s
    here_s = own.clock_offset_s + own.clock_rate * world.now_s
    apart_s = abs(node.clock_rate - own.clock_rate) * (world.now_s - asked_s) + 1e-6
    if abs(there_s - here_s - source.offset_s) > 1.1 * source.error_s + apart_s:
        words = f"{source.node}: {source.offset_s} s instead of {there_s - here_s} s"
        raise Violation("clocks", words)


def check_idle(world: World) -> None:
    """Raise Violation if a process still records, or has kept records."""
    for node in world.nodes.values():
        recorder = getattr(node, "recorder", None)
        if isinstance(recorder, LoggedRecorder) and (recorder.on or recorder.values):
            raise Violation(
                "timelines", f"{node.name} still records, or keeps what it has recorded"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_within(some: list[tuple[Any, ...]], sequence: list[tuple[Any, ...]]) -> bool:
    """Whether `some` stand in `sequence` one after the other."""
    if not some:
        return True
    starts = [at for at, each in enumerate(sequence) if each == some[0]]
    return any(sequence[at : at + len(some)] == some for at in starts)
