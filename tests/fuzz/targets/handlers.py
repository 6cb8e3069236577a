"""Messages of a client, of the right types with wrong values, at the real actors of a controller and two hosts.

No actor may raise, every answer must fit into a frame, the hosts stay in their epoch, and another client still
works. The transport and the devices are those of `tests.stages.actors`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import CheckpointFailed, ErrorReport
from pw.core.ids import CONTROL, Address, client_id, store_of
from pw.core.landing import Landing
from pw.core.messages.routes import permits
from pw.transport.links import codec
from tests.fuzz import mutation
from tests.fuzz.target import Run, Target
from tests.stages import actors
from tests.stages.actors import FakeHost, World
from tests.stages.scripted import SMALL, chain, join, split

X = np.arange(SMALL)
_GOOD_EVERY, _STAGE_INPUTS = 25, 200
"""The other client works after so many inputs, and a new cluster begins after so many."""
_STEPS = 400
_SEQUENCE = b"frames:"
"""Begins an input of several frames, for a new cluster."""


class _NoDisk:
    """Threads for files, on a host without any."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    def call(self, work: Any, done: Any) -> None:
        error = CheckpointFailed("there is no disk")
        self._world.happenings[self._name].append(lambda: done(error))


class _CodecWorld(World):
    """A world whose messages between nodes must be encoded."""

    def post(self, sender: Address, to: Address, message: object) -> None:
        if to.node != sender.node:
            codec.encode_frame(1, [(to.actor, sender.actor, message)])  # type: ignore[list-item]
        super().post(sender, to, message)


class _Cluster:
    """One island of two hosts, a good client and a bad one; each has a slice of two devices."""

    def __init__(self) -> None:
        self.world = _CodecWorld()
        self.world.controller()
        with mock.patch.object(actors, "FakeAside", _NoDisk):
            self.hosts: list[FakeHost] = [self.world.host(f"h{at}", "i", 2) for at in range(2)]
        self.world.settle()
        self.good = join(self.world, "client-good")
        self.bad = join(self.world, "client-bad")
        self.slices = [client.slice(2) for client in (self.good, self.bad)]
        self.world.settle()
        self.program = self.good.program(chain([split(self.slices[0], 2)]))
        self.taken: list[bytes] = []
        self._script()
        self.bad.receive = lambda sender, message: None  # type: ignore[method-assign]

    def _script(self) -> None:
        """The bad client does everything right at first."""
        bad, spec = self.bad, split(self.slices[1], 2)
        program = bad.program(chain([spec], donated=()))
        self.world.settle()
        array = bad.upload(X, spec)
        late = bad.upload(X, spec, inline=False)
        (result,) = bad.run(program, X)
        (second,) = bad.run(program, array)
        self.world.settle()
        bad.value(result)
        devices = bad.devices(spec)
        for message in (
            msg.GetStatus(1),
            msg.GetStats(2),
            msg.Explain(3, (str(result),)),
            msg.GetMemory(4),
            msg.TestDevices(4, "i"),
            msg.GetPlan(5, "chain", program),
            msg.ReadRecords(6, 60),
            msg.Checkpoint(7, (array, second)),
            msg.SaveArrays(8, "0123456789", "/tmp/pw-fuzz/none", False, (array,), ("a",), b"[]"),
            msg.Inquire(9, (array, late)),
            msg.Offer(bad.id(), bytes(16), (array,), (spec,)),
            msg.InputGone(array),
            msg.LinkLost("h0"),
            msg.Cancel((bad.id(),)),
            msg.CancelRuns(10, bad.number),
            msg.ReleaseSlice(bad.id()),
            msg.Resumed((), Compact.of(msg.KnownArrays(())), (), ()),
        ):
            self._say(CONTROL, message)
        for message in (
            msg.Wait(11, (array, second)),
            msg.CancelRequest(11),
            msg.CallReturned(13, (), b"x"),
            msg.Compile(12, b"code", devices, "i", 1, msg.Detail.FACTS),
            msg.CallLanding(13, Landing(77, SMALL, 0, "h0", "", "")),
            msg.GetStats(14),
            msg.Describe(15, "/tmp/pw-fuzz/none"),
            msg.ReadRecords(16, 60),
            msg.UploadAborted(late, 77, ErrorReport("Error", "lost")),
        ):
            self._say(store_of("h0"), message)
        bad.delete(second)
        bad.release(program)

    def _say(self, to: Address, message: Any) -> None:
        self.bad.env.send(to, message)
        self.world.settle()

    def said(self) -> list[bytes]:
        """The frames of the bad client."""
        return [
            codec.encode_frame(1, [(to.actor, sender.actor, message)])
            for sender, to, message in self.world.sent
            if sender == self.bad.env.address and to.node != sender.node
        ]

    def take(self, data: bytes) -> None:
        """Take a frame of the bad client."""
        frame = codec.decode(data)
        self.taken.append(data)
        for to_actor, from_actor, message in frame.envelopes:
            node = "h0" if to_actor == "store" else CONTROL.node
            if permits("client-bad", to_actor, type(message)):
                sender = Address("client-bad", from_actor)
                World.post(self.world, sender, Address(node, to_actor), message)
        self.world.steps(_STEPS)
        self.world.sent.clear()
        if len(self.taken) % _GOOD_EVERY == 0:
            self.check()

    def check(self) -> None:
        """The other client works, and nothing has happened to the hosts."""
        self.world.settle()
        (result,) = self.good.run(self.program, X)
        np.testing.assert_array_equal(self.good.value(result), X + 1)
        self.good.delete(result)
        self.world.wait(1.0)
        assert not any(host.stopped for host in self.hosts), "a host has stopped"


class Sequence(AssertionError):
    """A failure that needs all the inputs before it."""

    def __init__(self, error: BaseException, frames: list[bytes]) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.fuzz_input = _SEQUENCE + msgspec.msgpack.encode(frames)
        self.with_traceback(error.__traceback__)


def _fails(frames: list[bytes]) -> BaseException | None:
    """What a new cluster raises for these frames, and for what the good client does then."""
    cluster = _Cluster()
    try:
        for data in frames:
            cluster.take(data)
        cluster.check()
    except codec.MalformedFrame:
        return None
    except Exception as error:  # noqa: BLE001 - it is what a fuzzer looks for
        return error
    return None


@contextmanager
def _opened() -> Iterator[Run]:
    cluster: _Cluster | None = None

    def run(data: bytes) -> None:
        nonlocal cluster
        if data.startswith(_SEQUENCE):
            if (failed := _fails(msgspec.msgpack.decode(data[len(_SEQUENCE) :]))) is not None:
                raise failed
            return
        if cluster is None or len(cluster.taken) >= _STAGE_INPUTS:
            cluster = _Cluster()
        try:
            cluster.take(data)
        except codec.MalformedFrame:
            raise
        except Exception as error:
            frames, cluster = cluster.taken, None
            raise Sequence(error, _shortest(frames)) from error

    yield run
    if cluster is not None:
        cluster.check()


def _shortest(frames: list[bytes]) -> list[bytes]:
    """Fewer of these frames that still fail."""
    if _fails(frames[-1:]) is not None:
        return frames[-1:]
    kept = list(frames)
    size = len(kept) // 2
    while size:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            if len(fewer) < len(kept) and _fails(fewer) is not None:
                kept = fewer
                break
        else:
            size //= 2
    return kept


def _seeds() -> list[bytes]:
    return _Cluster().said()


_THEIRS = tuple([client_id(1, serial) for serial in range(6)])
"""Numbers that the good client has given."""


def _mutate(rng: random.Random, seeds: list[bytes]) -> Callable[[], bytes]:
    """Change the fields of messages; sometimes their addresses and kinds as well."""
    fields = mutation.of_trees(rng, seeds, lambda tree: tree[1][0][2], 1, _THEIRS)
    anything = mutation.of_trees(rng, seeds)
    return lambda: anything() if rng.random() < 0.1 else fields()


TARGETS = [
    Target(
        "handlers",
        _seeds,
        opened=_opened,
        allowed=(codec.MalformedFrame,),
        weight=1,
        mutate=_mutate,
    )
]
