"""Deliberate bugs of streams (see `mutations`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pw.core.functions.feeding import Feeder, Note
from pw.core.functions.parts import Share
from pw.testing.sim.breaking import mutation
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


class _SkipsNothing(Feeder):
    def _at(self, share: Share, number: int, base: int, note: Note | None) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = self._begun(share, None)
            self._position = number
        return super()._at(share, number, base, note)


class _ReadsOn(Feeder):
    def _at(self, share: Share, number: int, base: int, note: Note | None) -> Iterator[Any]:
        if self._iterator is not None:
            self._position = number
        return super()._at(share, number, base, note)


class _IsOneElementBehind(Feeder):
    def _at(self, share: Share, number: int, base: int, note: Note | None) -> Iterator[Any]:
        return super()._at(share, number, min(base + 1, number), note)


def _feed_with(cluster: SimCluster, kind: type[Feeder]) -> None:
    def careless(host: SimHost) -> None:
        host.backend.feeds.make_feeder = kind

    cluster.alterations.append(careless)


@mutation("lose-elements-of-a-stream", "streams-lost", "oracle")
def _forgetful(cluster: SimCluster) -> None:
    """A generator that begins anew skips nothing, so the stream goes on with its first elements."""
    _feed_with(cluster, _SkipsNothing)


@mutation("read-on-in-a-stream", "streams-lost", "oracle")
def _straight(cluster: SimCluster) -> None:
    """A host that is asked for an element again makes the next one in its place."""
    _feed_with(cluster, _ReadsOn)


@mutation("restore-a-stream-one-off", "streams-lost", "oracle")
def _off(cluster: SimCluster) -> None:
    """A host takes the state of an iterator for that of one element later."""
    _feed_with(cluster, _IsOneElementBehind)


@mutation("streams-without-back-pressure", "streams", "back-pressure")
def _eager(cluster: SimCluster) -> None:
    """A client begins more elements of a stream than it may."""
    streams: Any = cluster.streams

    class Greedy(dict[bytes, Any]):
        def __setitem__(self, artifact: bytes, ahead: Any) -> None:
            ahead.most = 16
            super().__setitem__(artifact, ahead)

    cluster.streams = Greedy(streams)
