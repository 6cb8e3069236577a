"""Computations over several hosts: they start when all hosts have reached them, and hang or fail without one.

Two hosts that wait for each other in different computations have enqueued them in different orders;
that is what gang scheduling must prevent (G1), and is reported at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pw.core.errors import ComputationFailed, ErrorReport, HostLost
from pw.core.programs.program import Computation
from pw.core.sharding import DeviceAddress, dtype_of
from pw.devices.host import backend as ops
from pw.testing.sim.devices import COMPUTE_S, SimBackend
from pw.testing.sim.digests import RAISES, compute
from pw.testing.sim.shards import Shards, SimInstalled, SimLayout, cut
from pw.testing.sim.sick import Sickness
from pw.testing.sim.world import Violation, World

JITTER = 0.2
"""Part by which computations take longer by chance, where hosts are compared."""


@dataclass(slots=True)
class _Member:
    backend: SimBackend
    installed: SimInstalled
    op: ops.Execute


class Gangs:
    """Brings the hosts of a computation together."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups: dict[tuple[str, int], SimBackend] = {}
        """Members of groups by host and epoch; epochs of different islands do not mix."""
        self._waiting: dict[tuple[str, int], _Member] = {}
        self._layouts: dict[
            tuple[int, tuple[DeviceAddress, ...]], tuple[Computation, SimLayout]
        ] = {}
        self._random = world.streams("gangs")
        self.sickness: Sickness | None = None
        """Devices that are sick; None if no device falls ill."""

    def layout(self, computation: Computation, devices: tuple[DeviceAddress, ...]) -> SimLayout:
        """The layout of a computation on these devices."""
        key = (id(computation), devices)
        entry = self._layouts.get(key)
        if entry is None:  # the computation is kept as well, so that its id stays its own
            entry = self._layouts[key] = (computation, SimLayout(computation, devices))
        return entry[1]

    # --- members -------------------------------------------------------------------------------------

    def joined(self, backend: SimBackend, epoch: int) -> None:
        """Add a host to the group of its epoch."""
        backend.epoch = epoch
        self._groups[backend.host, epoch] = backend

    def left(self, backend: SimBackend) -> None:
        """Remove a host from its group: hosts that wait for it hang, or fail."""
        key = (backend.host, backend.epoch)
        if self._groups.get(key) is not backend:
            return
        del self._groups[key]
        self._waiting.pop(key, None)
        for member in list(self._waiting.values()):
            same = member.backend.epoch == backend.epoch
            if same and backend.host in member.installed.layout.hosts:
                self._bereaved(member, backend.host)

    def _bereaved(self, member: _Member, lost: str) -> None:
        """Let a member whose peer is lost hang, or fail after a while."""
        world = self._world
        if self._random.random() < 0.5:
            world.ledger.injected["collective hangs"] += 1
            return
        world.ledger.injected["collective fails"] += 1
        name = member.installed.name
        words = f"the computation {name!r} failed: the connection to {lost} was closed by the peer"
        report = ErrorReport.of(HostLost(words), member.backend.host)
        world.after(self._random.uniform(1e-3, 2.0), self._give_up, member, report)

    def _give_up(self, member: _Member, report: ErrorReport) -> None:
        key = (member.backend.host, member.backend.epoch)
        if self._waiting.get(key) is member:
            del self._waiting[key]
            member.backend.meeting = None
            member.backend.broken = report
            self._fail(member, report)

    def _fail(self, member: _Member, report: ErrorReport) -> None:
        """Fail a computation on this host, and report it to the executor."""
        member.backend.executed(member.op, report, [])
        if (failed := member.op.failed) is not None:
            member.backend.answer(lambda: failed(report))

    # --- meetings ------------------------------------------------------------------------------------

    def reach(self, backend: SimBackend, installed: SimInstalled, op: ops.Execute) -> None:
        """Start a computation if all its hosts have reached it."""
        member = _Member(backend, installed, op)
        hosts = installed.layout.hosts
        failure = backend.poison(op)
        if failure is not None:
            # This host enqueues nothing, so the other hosts must hear of it.
            if len(hosts) > 1 and any(value.alone for value in op.args if value.error):
                backend.broken = failure
                self._fail(member, failure)
            else:
                backend.executed(op, failure, [])
            return
        if len(hosts) > 1 and backend.broken is not None:
            backend.executed(op, backend.broken, [])  # its connections to the others are closed
            return
        if len(hosts) == 1:
            self._start([member])
            return
        backend.meeting = installed
        epoch = backend.epoch
        self._waiting[backend.host, epoch] = member
        here = []
        self._world.checked["G1"] += 1
        for host in hosts:
            if (host, epoch) not in self._groups:
                self._bereaved(member, host)
                return
            other = self._waiting.get((host, epoch))
            if other is None:
                continue
            if other.op.key != op.key:
                if backend.host in other.installed.layout.hosts:
                    raise Violation(
                        "G1", f"{backend.host} waits in {op.key!r} and {host} in {other.op.key!r}"
                    )
                continue
            here.append(other)
        if len(here) == len(hosts):
            for other in here:
                del self._waiting[other.backend.host, epoch]
                other.backend.meeting = None
            self._start(here)

    def _start(self, members: list[_Member]) -> None:
        """Take the inputs of all members, and compute."""
        world = self._world
        first = members[0].installed
        failure: ErrorReport | None = None
        held = [member.backend.arguments(member.installed, member.op) for member in members]
        host = members[0].backend.host
        if first.artifact.startswith(RAISES):
            words = f"the computation {first.name!r} failed: it always does"
            failure = ErrorReport.of(ComputationFailed(words), host)
        is_ours = not first.computation.traits.has_artifact
        if self.sickness is not None:
            self.sickness.check_left_out(first.layout, members[0].backend.epoch)
        rate = 0.0 if world.calm or is_ours else world.profile.computation_failure
        if failure is None and rate and self._random.random() < rate:
            words = world.ledger.failure(first.name)
            failure = ErrorReport.of(ComputationFailed(words), host)
        if failure is None and not is_ours and self.sickness is not None:
            backends = [member.backend for member in members]
            if self.sickness.errs(first.layout, backends):
                words = world.ledger.failure(first.name)
                failure = ErrorReport.of(ComputationFailed(words), host)
        slowness = max(member.backend.node.device_slowness for member in members)
        in_turn = members[0].backend.in_turn and len(members) == 1
        if in_turn:
            delay_s = 0.0
        elif first.lasts_s is not None:
            delay_s = first.lasts_s * slowness
        else:
            delay_s = COMPUTE_S * slowness * self._random.expovariate(1.0)
        for watch in world.computing:
            watch(first.name, delay_s)
        shared: list[np.ndarray[Any, Any]] = []
        if failure is None:
            inputs = self._inputs(first, members, held)
            if is_ours:
                (spec,) = first.computation.outputs
                shared = [np.frombuffer(inputs[0], dtype_of(spec.dtype)).reshape(spec.shape)]
            else:
                shared = compute(first.artifact, inputs, first.computation.outputs)
            world.checked["executions"] += 1
        for member in members:
            results = [
                cut(array, place, member.backend.host)
                for array, place in zip(shared, first.layout.outputs, strict=False)
            ]
            if in_turn:
                member.backend.executed(member.op, failure, results)
                continue
            spread_s = 1e-5 * self._random.random() * member.backend.node.device_slowness
            if world.profile.stragglers and first.lasts_s is not None:
                # All wait for each other first, and then each computes as long as it needs.
                delay_s = first.lasts_s * member.backend.node.device_slowness
                spread_s = delay_s * JITTER * self._random.random()
            world.after(delay_s + spread_s, member.backend.executed, member.op, failure, results)

    def _inputs(
        self, first: SimInstalled, members: list[_Member], held: list[list[Shards]]
    ) -> list[bytes]:
        """The bytes of each whole argument, put together from the shards on all hosts."""
        by_host = {m.backend.host: args for m, args in zip(members, held, strict=True)}
        inputs = []
        for index, place in enumerate(first.layout.inputs):
            if place.holder is not None and not place.replicated:
                host, ordinal = place.holder
                inputs.append(by_host[host][index][ordinal].tobytes())
                continue
            spec = place.spec
            array = np.empty(spec.shape, dtype_of(spec.dtype))
            seen: dict[str, bytes] = {}
            for host, shards in place.by_host.items():
                payload = by_host[host][index]
                for ordinal, box in shards:
                    shard = payload[ordinal]
                    array[box] = shard
                    if place.replicated:
                        data = shard.tobytes()
                        if seen.setdefault(str(box), data) != data:
                            what = f"argument {index} of {first.name!r} on {host}"
                            raise Violation("replicas are equal", what)
            inputs.append(array.tobytes())
        return inputs
