"""Notes how long gangs take on this host, for the scheduler, which compares the hosts of a gang.

Not all launches are noted, and those that are noted on one host must be noted on the others. So the number of
a run decides: now and then one is a *signal*, and the `BURST` launches of gangs that follow it are noted. All
hosts of a gang launch in the same order. The more launches there are in a second, the rarer are signals; a
number that is a signal for rare ones is one for frequent ones, too, so hosts need not agree how rare they are.
Signals become more frequent the longer none has come, so hardly a second of many launches is without one.

A noted launch is watched to its end, also on a host that does not report the end to the scheduler. Other
launches pay for one question. While gangs come, a timer also shows how much the loop of this process lags, and
whether the process runs at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.ids import Address
from pw.core.messages import TIMES_TOLD, LaunchTimes, PaceHeard, PaceReport, report_period_s
from pw.devices.host.backend import NotedLaunch
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.work import HostLaunch

TICK_S = 0.02
"""Seconds between two looks whether timers are late."""
TICKS = 50
"""Number of those looks in a second."""
PAUSED_S = 0.01
"""Seconds by which a timer is late if the process has not run."""
BURST = 3
"""Number of launches that are noted after a signal."""
BURSTS = 5
"""About how many signals there are between two reports."""
QUIET = 3
"""Number of reports without a new launch after which there are no further ones."""


@dataclass(eq=False, repr=False)
class Pace(Part):
    """Notes launches of gangs, and reports them once a second, or less often in a large island."""

    env: Env
    order: LaunchOrder
    _left: int = 0
    """Number of launches that are still noted after the last signal."""
    _mask: int = 1023
    """Bits that are 0 in the checksum of a signal's number."""
    _joined: int = 0
    """Number of launches of gangs since the last report."""
    _unsignalled: int = 0
    """Number of launches of gangs since the last signal."""
    _times: list[LaunchTimes] = field(default_factory=list)
    waiting: HostLaunch | None = None
    """Oldest launch that waits for values."""
    _waits_since_s: float = 0.0
    _waited_s: float = 0.0
    """Seconds for which a launch has waited for values, in all."""
    _stream: bool = False
    """True if the last wait was for values of Python functions of this host."""
    _due_s: float = 0.0
    """Time of the next look, in seconds."""
    _ticks: int = 0
    _quiet: int = 0
    _late_s: float = 0.0
    """Seconds by which timers were late since the last report, in all; `_paused_s` of those of a process that
    did not run."""
    _paused_s: float = 0.0
    _heard: tuple[int, float] = (0, 0.0)
    """Time in the scheduler's last answer, and when it came."""

    def __post_init__(self) -> None:
        self._ticker = Ticker(self.env, TICK_S, self._tick)

    # --- launches --------------------------------------------------------------------------------

    def joins(self, launch: HostLaunch) -> None:
        """A launch of a gang has come: note it if it is a signal, or follows one."""
        self._joined += 1
        mask = self._mask >> self._unsignalled // (self._mask + 1)
        is_signal = not crc32(launch.run.run.to_bytes(8, "little")) & mask
        self._unsignalled = 0 if is_signal else self._unsignalled + 1
        if is_signal and self._joined > 2 * BURSTS * (self._mask + 1):
            self._mask = 4 * self._mask + 3  # there are more launches than before the last report
        if is_signal or self._left:
            now_s = self.env.now_s()
            is_told = self._left > 0
            launch.noted = NotedLaunch(now_s, self._waited(now_s), is_told)
            self._left = BURST if is_signal else self._left - 1
        if not self._ticker.is_running:
            self._begin_ticks()

    def _begin_ticks(self) -> None:
        self._ticks, self._late_s, self._paused_s = 0, 0.0, 0.0
        self._quiet = 0
        self._due_s = self.env.now_s() + TICK_S
        self._ticker.start()

    def _waited(self, now_s: float) -> float:
        """Return for how long work has waited for values until now, in all."""
        return self._waited_s + (now_s - self._waits_since_s if self.waiting is not None else 0.0)

    def waits(self, launch: HostLaunch, *, for_stream: bool) -> None:
        """A launch needs a value that is not here; later work waits behind it."""
        if self.waiting is None:
            self.waiting, self._waits_since_s = launch, self.env.now_s()
            self._stream = for_stream

    def goes_on(self) -> None:
        """The launch that waited goes on."""
        self._waited_s += self.env.now_s() - self._waits_since_s
        self.waiting = None

    def enqueued(self, noted: NotedLaunch, now_s: float) -> None:
        """All instructions of a noted launch are ops, and values from other hosts have come."""
        noted.inputs_s = self._waited(now_s) - noted.waited_s
        noted.has_stream = self._stream and noted.inputs_s > 0

    def ended(self, launch: HostLaunch, noted: NotedLaunch, now_s: float) -> None:
        """A noted launch has ended on the devices."""
        if not noted.is_told or len(self._times) == TIMES_TOLD:
            return
        free_s = noted.free_s or 0.0
        ready_s = noted.came_s + noted.inputs_s
        began_s = max(noted.called_s or launch.enqueued_s, free_s)
        self._times.append(
            LaunchTimes(
                *launch.name,
                _us(began_s),
                _us(now_s),
                _us(noted.inputs_s),
                _us(max(0.0, began_s - max(free_s, ready_s))),
                free_s <= ready_s,
                self._peer(launch),
                noted.has_stream,
            )
        )
        if not self._ticker.is_running:
            self._begin_ticks()

    def _peer(self, launch: HostLaunch) -> str:
        """Return the host whose values a launch reads, if it is one other host."""
        peers = {
            route.source_host
            for receive in launch.segment.receives
            for route in receive.routes
            if route.source_host != self.order.host
        }
        return peers.pop() if len(peers) == 1 else ""

    # --- reports ---------------------------------------------------------------------------------

    def _tick(self) -> bool:
        now_s = self.env.now_s()
        late_s = max(0.0, now_s - self._due_s)
        self._due_s = now_s + TICK_S
        self._late_s += late_s
        if late_s > PAUSED_S:
            # It began some time before the timer should have come.
            self._paused_s += late_s + TICK_S / 2
        self._ticks += 1
        return self._ticks < TICKS * report_period_s(len(self.order.hosts)) or self._report(now_s)

    def _report(self, now_s: float) -> bool:
        """Tell the scheduler, and return whether there will be more to tell."""
        if self._joined or self._times:
            self._quiet = 0
        else:
            self._quiet += 1
        if self.order.scheduler is None or self._quiet > QUIET:
            self._times.clear()
            return False
        passed_s = self._ticks * TICK_S + self._late_s
        heard_us, heard_s = self._heard
        report = PaceReport(
            self.order.epoch,
            _us(now_s),
            heard_us,
            _us(now_s - heard_s) if heard_us else 0,
            _us(self._late_s / self._ticks),
            min(1.0, self._paused_s / passed_s),
            tuple(self._times),
        )
        self.env.send(self.order.scheduler, report)
        self._mask = (1 << (self._joined // BURSTS).bit_length()) - 1
        self._joined, self._ticks, self._late_s, self._paused_s = 0, 0, 0.0, 0.0
        self._times.clear()
        self._heard = (0, 0.0)
        return True

    @handles(PaceHeard)
    def _answered(self, sender: Address, message: PaceHeard) -> None:
        if message.epoch == self.order.epoch:
            self._heard = (message.sent_us, self.env.now_s())


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
