"""Finds the slow hosts of an island, and what makes them slow.

Theory of operation. Each host notes some launches of its gangs, and reports once a second how long they took
there (`pw.devices.host.pace`). The scheduler answers, so a report also says how long the way there and back is,
and with that how far the clock of the host is ahead. When all hosts have had the time to report a launch, each
is compared with the median of the other hosts. Where computations have collectives, all wait in them for the
slowest, so durations alone do not show it:

| the host | what it adds to the gang's time |
|---|---|
| has longer computations, and ends later | the difference: nothing holds the others up |
| ends the launch before later, and so begins later | that delay: what is behind the last collective |
| has idle devices, while the launch and its inputs are here | that time: it prepares computations late |
| is further away, or its loop lags, when its devices are idle | that delay of messages |
| waits longer for values, when its devices are idle | that time, unless another host makes the values late |

The *factor* of a host is the time with what it adds, divided by the time without. A process that does not run
for a part of the time, as one that is stopped or has no processor, adds to all of these at random; it measures
itself, and is compared with the other hosts. Each second has a factor. A host is slow if that is `SLOW` in most
seconds, until it is below `AGAIN_FAST` in most. Reports come once a second, or less often in a large island, so
nothing of this is on the way of a launch. A host that stays above the factor of `--replace-stragglers` is
drained if a spare can take its place.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean, median
from typing import NamedTuple

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import RESOURCES, Address, executor_of
from pw.core.messages import SlowCause
from pw.sched.island.members import Members
from pw.sched.island.programs import IslandPrograms

SECONDS = 6
"""Number of the newest seconds with comparisons that count."""
REMEMBERED_S = 300.0
"""Seconds for which a comparison counts, if there are few."""
STALE_S = 60.0
"""Seconds after its last report for which a host counts as slow."""
SLOW = 1.2
"""Least factor of a slow host."""
AGAIN_FAST = 1.1
"""Factor below which a slow host counts as fast again."""
LEAST_US = 1000.0
"""Microseconds that a slow host adds to a launch, at least."""
LEAST_SECONDS = 4
"""Different seconds with comparisons that are needed to call a host slow."""
MOST = 0.75
"""Part of these seconds in which it must be slow: one long stop makes no host slow."""
COMPARE_AFTER = 1.5
"""Periods of reports after the first report of a launch, for which other hosts may report it."""
LAUNCHES = 1024
"""Number of launches that wait for the reports of other hosts, at most."""
CLOCKS_KEPT = 8
"""Newest readings of a clock, of which that with the shortest way counts."""
WAYS = 3
"""Newest readings of the way to a host, of which the shortest counts."""
REPLACED_AFTER_S = 10.0
"""Seconds for which a host is slower than it may be before it is replaced."""
REPLACED_AFTER = 50
"""Least number of launches that are compared in these seconds."""
AGAIN_S = 60.0
"""Seconds until a spare is asked for again, if there was none."""
ITS_OWN = frozenset((SlowCause.DEVICE, SlowCause.PROCESSOR, SlowCause.NETWORK, SlowCause.PAUSED))
"""Causes that another host in its place would not have."""
LONGER = 0.1
"""Part of the others' time by which computations take longer, if that alone explains a host."""


@dataclass(slots=True)
class _Second:
    """Sums over the launches of one host that were compared in one second, in microseconds."""

    time_s: float
    launches: int = 0
    took: float = 0.0
    gang: float = 0.0
    """Time that the launches took on the median of the other hosts; `took` is that on this one."""
    ended: float = 0.0
    """Delay of the end beyond the median of the other hosts and the error of the clocks; the sums below are
    such differences, too."""
    idle: float = 0.0
    """Idle time of devices with work at hand."""
    began_busy: float = 0.0
    """Delay of the begin of launches behind earlier work, without idle time, beyond the error of the clocks."""
    late: float = 0.0
    """Delay of timers, for each launch for which the devices were free; messages wait as long for the loop."""
    way: float = 0.0
    """Time of the way to the host, for each of these launches."""
    inputs: float = 0.0
    """Time for which these launches waited for values that come late to this host alone."""
    early: float = 0.0
    """Time by which these launches waited less for values; it is negative."""
    streams: int = 0
    peers: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class _Reading:
    """What one report says of the process as a whole."""

    time_s: float
    paused: float
    late_us: float


class _Slow(NamedTuple):
    """How slow a host is."""

    factor: float
    cause: SlowCause
    peer: str
    since_s: float
    is_slow: bool = True
    """True if it is slow by this alone."""


@dataclass(slots=True)
class _HostPace:
    """What is known of a host."""

    clocks: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=CLOCKS_KEPT))
    """Readings of its clock: microseconds to the host and back, and by which its clock is behind the own."""
    seconds: deque[_Second] = field(default_factory=lambda: deque(maxlen=SECONDS))
    readings: deque[_Reading] = field(default_factory=lambda: deque(maxlen=SECONDS))
    slow: _Slow | None = None
    """None if the host is not slow."""
    compared: int = 0
    """Number of launches that were compared."""
    beyond: tuple[float, int] | None = None
    """Since when the host is slower than it may be, in seconds, and the launches compared before; None if it is
    not."""

    @property
    def way_us(self) -> float:
        """Microseconds to the host and back, without the delays of a moment."""
        return min(way_us for way_us, _ in islice(reversed(self.clocks), WAYS))


@dataclass(slots=True)
class _Compared:
    """Times of one launch by host, on the clock of this process."""

    first_s: float
    hosts: dict[str, tuple[msg.LaunchTimes, float]] = field(default_factory=dict)
    """Times of each host, and the microseconds by which its clock is behind."""
    errors: dict[str, float] = field(default_factory=dict)
    """Microseconds by which that may be wrong: half of the way to the host and back."""


@dataclass(eq=False, repr=False)
class Stragglers(Part):
    """Compares the hosts of an island's gangs."""

    env: Env
    island: str
    members: Members
    programs: IslandPrograms
    replace_factor: float = math.inf
    """Factor from which on a host is replaced by a spare."""
    _hosts: dict[str, _HostPace] = field(default_factory=dict, init=False)
    _newest_launches: dict[tuple[int, int], _Compared] = field(default_factory=dict, init=False)
    """Reported launches by run and segment, the oldest first."""

    def slow(self) -> list[msg.SlowHost]:
        """Return the slow hosts, the slowest first."""
        now_s = self.env.now_s()
        slow = [
            self._report_of(name, host.slow, now_s)
            for name, host in self._hosts.items()
            if host.slow is not None and host.readings[-1].time_s > now_s - STALE_S
        ]
        return sorted(slow, key=lambda one: -one.factor)

    def _report_of(self, name: str, slow: _Slow, now_s: float) -> msg.SlowHost:
        for_s = now_s - slow.since_s
        return msg.SlowHost(name, self.island, slow.factor, for_s, slow.cause, slow.peer)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        self._hosts.clear()
        self._newest_launches.clear()

    @handles(msg.PaceReport)
    def _reported(self, sender: Address, message: msg.PaceReport) -> None:
        if not self.members.is_current(message.epoch, sender):
            return
        now_s, name = self.env.now_s(), sender.node
        now_us = now_s * 1e6
        self.env.send(executor_of(name), msg.PaceHeard(message.epoch, round(now_us)))
        host = self._hosts.setdefault(name, _HostPace())
        if message.heard_us:
            way_us = max(0.0, now_us - message.heard_us - message.held_us)
            host.clocks.append((way_us, now_us - message.sent_us - way_us / 2))
        host.readings.append(_Reading(now_s, message.paused, message.late_us))
        for newest in (host.readings, host.seconds):
            while newest and newest[0].time_s < now_s - REMEMBERED_S:
                newest.popleft()
        if host.clocks:  # else the next report can be compared
            way_us, behind_us = min(host.clocks)
            for times in message.times:
                key = times.run, times.segment
                launch = self._newest_launches.setdefault(key, _Compared(now_s))
                launch.hosts[name] = times, behind_us
                launch.errors[name] = way_us / 2
        self._compare_until(now_s - COMPARE_AFTER * msg.report_period_s(len(self.members.hosts)))
        self._judge(name, host, now_s)

    # --- comparing -------------------------------------------------------------------------------

    def _compare_until(self, until_s: float) -> None:
        """Compare the hosts of the launches that were reported first before a moment, in seconds."""
        launches = self._newest_launches
        while launches and (
            (first := next(iter(launches.values()))).first_s < until_s or len(launches) > LAUNCHES
        ):
            del launches[next(iter(launches))]
            if len(first.hosts) > 1:
                self._compare(first)

    def _compare(self, launch: _Compared) -> None:
        hosts = launch.hosts
        late = _beyond({name: self._hosts[name].readings[-1].late_us for name in hosts})

        def beyond(of: Callable[[msg.LaunchTimes, float], float]) -> dict[str, float]:
            return _beyond({name: of(*times) for name, times in hosts.items()})

        took = {name: float(times.ended_us - times.began_us) for name, (times, _) in hosts.items()}
        longer, errors = _beyond(took), _beyond(launch.errors)
        ways = _beyond({name: self._hosts[name].way_us for name in hosts})
        began = beyond(lambda times, behind_us: times.began_us + behind_us)
        ended = beyond(lambda times, behind_us: times.ended_us + behind_us)
        idle = beyond(lambda times, _: float(times.idle_us))
        inputs = beyond(lambda times, _: float(times.inputs_us))
        for name, (times, _) in hosts.items():
            # Two clocks are compared, and each may be wrong.
            error = 2 * launch.errors[name] - errors[name]
            self._hosts[name].compared += 1
            sums = self._second(self._hosts[name], launch.first_s)
            sums.launches += 1
            sums.took += took[name]
            sums.gang += took[name] - longer[name]
            sums.ended += ended[name] - error
            sums.idle += idle[name]
            if not times.was_idle:
                sums.began_busy += began[name] - idle[name] - error
                continue
            sums.late += late[name]
            sums.way += max(0.0, ways[name] - max(0.0, late[name])) / 2
            if inputs[name] < 0:
                sums.early += inputs[name]
            elif times.has_stream:
                sums.streams += 1
                sums.inputs += inputs[name]
            elif times.peer and any(
                other.peer == times.peer for at, (other, _) in hosts.items() if at != name
            ):
                # Values of that host reach other hosts in time.
                sums.peers[times.peer] += 1
                sums.inputs += inputs[name]

    @staticmethod
    def _second(host: _HostPace, time_s: float) -> _Second:
        """Return the sums of a host for the second of a moment."""
        second_s = float(int(time_s))
        if not host.seconds or host.seconds[-1].time_s < second_s:
            host.seconds.append(_Second(second_s))
        return host.seconds[-1]

    # --- judging ---------------------------------------------------------------------------------

    def _judge(self, name: str, host: _HostPace, now_s: float) -> None:
        """Decide whether a host is slow, and write to the log what has changed."""
        slowest, pauses = self._by_launches(name, host), self._by_pauses(name, host)
        if pauses is not None and (slowest is not None or pauses.is_slow):
            # A process that does not run is late with all that it does.
            factor = pauses.factor if slowest is None else max(pauses.factor, slowest.factor)
            slowest = pauses._replace(factor=factor)
        is_new, host.slow = host.slow is None, slowest
        if slowest is not None and is_new:
            self.env.count("slow_hosts")
            self.env.log("warning", "slow host", why=self._report_of(name, slowest, now_s).words)
        elif slowest is None and not is_new:
            self.env.log("info", "a host is as fast as its gangs again", host=name)
        if self.replace_factor != math.inf:
            self._replace(name, host, now_s)

    def _replace(self, name: str, host: _HostPace, now_s: float) -> None:
        """Ask for a spare in the place of a host that is too slow for long."""
        slow = host.slow
        if slow is None or slow.factor < self.replace_factor or slow.cause not in ITS_OWN:
            host.beyond = None
        elif host.beyond is None:
            host.beyond = now_s, host.compared
        else:
            since_s, before = host.beyond
            if now_s - since_s >= REPLACED_AFTER_S and host.compared - before >= REPLACED_AFTER:
                host.beyond = now_s + AGAIN_S - REPLACED_AFTER_S, host.compared
                words = f"has made its gangs {slow.factor:.2f} x slower for {now_s - since_s:.0f} s"
                self.env.send(RESOURCES, msg.ReplaceHost(name, words))

    def _by_launches(self, name: str, host: _HostPace) -> _Slow | None:
        """Return how slow a host is by its launches; None if it is not, or not steadily."""
        adds = [_adds([one]) for one in host.seconds]
        factors = [
            1.0 + total_us / base_us if total_us >= LEAST_US * one.launches else 1.0
            for one, (of_causes, base_us) in zip(host.seconds, adds, strict=True)
            for total_us in (sum(of_causes.values()),)
        ]
        if not _is_steady(factors, was_slow=host.slow is not None):
            return None
        slow = [at for at, factor in enumerate(factors) if factor >= AGAIN_FAST]
        causes = Counter(max(adds[at][0].items(), key=lambda one: one[1])[0] for at in slow)
        # One long stop is the cause of some seconds, and of no more than those.
        (cause, count), *further = causes.most_common()
        is_equal = any(seconds == count for _, seconds in further)
        if host.slow is not None and causes[host.slow.cause] == count:
            cause = host.slow.cause
        elif host.slow is None and is_equal and len(factors) < SECONDS:
            return None  # the next seconds will tell
        peer = ""
        if cause is SlowCause.PEER:
            peers = sum((host.seconds[at].peers for at in slow), Counter[str]())
            ((peer, _),) = peers.most_common(1)
        elif cause is SlowCause.PROCESSOR and self._compiles(name):
            cause = SlowCause.COMPILATION
        since_s = host.seconds[slow[0]].time_s if host.slow is None else host.slow.since_s
        return _Slow(median(factors), cause, peer, since_s)

    def _by_pauses(self, name: str, host: _HostPace) -> _Slow | None:
        """Return how slow a host is whose process does not run for a part of the time; None if it does.

        If it is not slow enough for that alone, this may still be the cause of what its launches show.
        """
        rest = [
            fmean(reading.paused for reading in other.readings)
            for at, other in self._hosts.items()
            if at != name
        ]
        if not rest:
            return None
        usual = median(rest)
        factors = [(1.0 - usual) / max(0.05, 1.0 - one.paused) for one in host.readings]
        if not _is_steady(factors, was_slow=True):
            return None
        is_slow = _is_steady(factors, was_slow=host.slow is not None)
        cause = SlowCause.COMPILATION if self._compiles(name) else SlowCause.PAUSED
        since_s = host.readings[0].time_s if host.slow is None else host.slow.since_s
        return _Slow(median(factors), cause, "", since_s, is_slow)

    def _compiles(self, name: str) -> bool:
        """Whether a host, and not its whole island, compiles a program."""
        return any(
            name in program.compiling and len(program.compiling) < len(self.members.hosts)
            for _, program in self.programs.compiling()
        )


def _adds(seconds: Sequence[_Second]) -> tuple[dict[SlowCause, float], float]:
    """Return what a host adds to the time of its gangs, by cause, and the time without, in microseconds."""
    gang = sum(one.gang for one in seconds)
    took = sum(one.took for one in seconds)
    # A host that waits for another one in a collective takes longer, too, but does not end later.
    longer, tail = max(0.0, min(took - gang, sum(one.ended for one in seconds))), 0.0
    if longer < LONGER * gang:
        # The others wait for it in a collective. A delay beyond a whole computation is one of long ago.
        longer = tail = min(max(0.0, sum(one.began_busy for one in seconds)), 0.95 * gang)
    idle = max(0.0, sum(one.idle for one in seconds))
    late = max(0.0, sum(one.late for one in seconds))
    way = sum(one.way for one in seconds)
    early = sum(one.early for one in seconds)
    inputs = sum(one.inputs for one in seconds)
    # A launch that comes late does no harm while its inputs are later.
    lag = max(0.0, late + early)
    way = max(0.0, way + min(0.0, late + early))
    of_values = SlowCause.STREAM if any(one.streams for one in seconds) else SlowCause.PEER
    base = max(min(took, gang) - tail, 0.05 * gang, 1.0)
    adds = {
        SlowCause.DEVICE: longer,
        SlowCause.PROCESSOR: idle + lag,
        SlowCause.NETWORK: way,
        of_values: inputs,
    }
    return adds, base


def _beyond(of_hosts: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each host's value is above the median of the other hosts."""
    if len(of_hosts) > _FEW:
        middle = median(of_hosts.values())
        return {name: value - middle for name, value in of_hosts.items()}
    return {
        name: value - median([other for at, other in of_hosts.items() if at != name])
        for name, value in of_hosts.items()
    }


_FEW = 8
"""Number of hosts up to which the median leaves out the host itself."""


def _is_steady(factors: Sequence[float], *, was_slow: bool) -> bool:
    """Whether a host is slow in most seconds; once it is, until it is fast in most."""
    if len(factors) < LEAST_SECONDS:
        return False
    if was_slow:
        return 2 * sum(one >= AGAIN_FAST for one in factors) > len(factors)
    return sum(one >= SLOW for one in factors) >= MOST * len(factors)
