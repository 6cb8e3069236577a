"""Mutations of timelines (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from pw.core.ids import Address
from pw.core.messages import ReadRecords, Records
from pw.core.recorder import WIDTH
from pw.testing.sim.breaking import mutation, rehandle, tamper
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


@mutation("record-for-ever", "timelines", "timelines", "census")
def _endless(cluster: SimCluster) -> None:
    """A host goes on recording for a client that has died."""

    def careless(host: SimHost) -> None:
        recordings: Any = host.store.recordings
        recordings.forget_node = lambda node: None
        recordings._leases._act = lambda: False

    cluster.alterations.append(careless)


@mutation("lose-a-record", "timelines", "timelines")
def _incomplete(cluster: SimCluster) -> None:
    """A client does not get one of the records of a process."""

    def alter(random: Random, to: Address, message: Records) -> list[Any] | None:
        if not message.count or random.random() > 0.2:
            return None
        data = msgspec.msgpack.encode(msgspec.msgpack.decode(message.data)[WIDTH:])
        return [replace(message, data=data)]

    tamper(cluster, Records, alter)


@mutation("forget-what-another-reads", "timelines", "timelines")
def _selfish(cluster: SimCluster) -> None:
    """A host forgets what one client has read, although another one has not read it."""

    def careless(host: SimHost) -> None:
        recordings: Any = host.store.recordings
        recorder = recordings._recorder
        settle = recordings._settle

        def settled() -> None:
            settle()
            del recorder.values[:]

        recordings._settle = settled

    cluster.alterations.append(careless)


@mutation("stop-for-all", "timelines", "timelines")
def _hasty(cluster: SimCluster) -> None:
    """The controller stops recording when the first of several clients stops."""
    controller = cluster.controller

    def wrap(handler: Callable[..., None]) -> Any:
        def read(sender: Address, message: ReadRecords) -> None:
            handler(sender, message)
            if message.stop:
                controller.env.recorder.on = False

        return read

    rehandle(controller, ReadRecords, wrap)


@mutation("leave-out-what-is-in-flight", "timelines", "timelines")
def _early(cluster: SimCluster) -> None:
    """The controller's process leaves out the launches that have not ended when a timeline ends."""
    cluster.on_spawn.append(lambda scheduler: scheduler.env.recorder.unfinished.clear())


@mutation("wrong-time", "timelines", "clocks")
def _fast(cluster: SimCluster) -> None:
    """A process tells another time than that of its records."""
    tamper(
        cluster,
        Records,
        lambda random, to, message: [replace(message, now_s=message.now_s + 0.2)],
    )
