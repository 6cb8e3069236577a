"""The end of a launch: from its last instruction to the report to the scheduler.

1. `watch_results`: when the last computation on a device is enqueued, its last result is watched.
   This happens at once, so that no memory is held until the rest of the launch is enqueued.
2. `enqueued`: all instructions have become ops. Results that come from other hosts are awaited.
3. `_all_here`: these results are watched, too. From now on the launch uses its devices.
4. `_watched_ended`: one watch has ended. After the last of them, the launch is charged with its
   device time and reported.
5. `_report`: reports are sent together. A report may wait for others while the scheduler has many
   launches in flight here.

A device computes one launch after the other, so its time is divided among them: a launch is charged
with the time from its start, or the end of the launch before, to its own end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.errors import INFRASTRUCTURE, ErrorReport
from pw.core.ids import Address
from pw.core.messages import Finished, Progress
from pw.devices.host.backend import Watch
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.pace import Pace
from pw.devices.host.value import Value
from pw.devices.host.work import Arriving, HostLaunch, OpQueue

PROGRESS_S = 0.005
"""Seconds that a report may wait for others."""

PROGRESS_SHARE = 4
"""Reports go at once if one in so many of the launches in flight has ended."""


@dataclass(frozen=True, slots=True)
class _SendProgress:
    """The end of this turn: send the reports."""


@dataclass(eq=False, repr=False)
class LaunchEnds(Part):
    """Watches launches until they have ended, and tells the scheduler."""

    env: Env
    order: LaunchOrder
    queue: OpQueue
    arriving: Arriving
    pace: Pace
    _in_flight: int = 0
    """Enqueued launches that are not reported yet."""
    _on_device: dict[int, dict[int, HostLaunch]] = field(default_factory=dict)
    """Launches on each device by their numbers, in the order in which they were enqueued."""
    _busy_until_s: dict[int, float] = field(default_factory=dict)
    """Time up to which launches are charged with each device, in seconds of the clock."""
    _finished: list[Finished] = field(default_factory=list)
    _is_sending: bool = False

    def __post_init__(self) -> None:
        self._late = Ticker(self.env, PROGRESS_S, self._send)

    @property
    def is_busy(self) -> bool:
        """Whether a launch is enqueued that has not ended."""
        return self._in_flight > 0

    def watch_results(self, launch: HostLaunch) -> None:
        """Watch the last result of a computation, as soon as it may be used, or all results of a view."""
        values, launch.to_watch = launch.to_watch, ()
        launch.pending += 1
        is_computed = not launch.run.program.views
        self.arriving.when_here(values, partial(self._watch, launch, values, is_computed))

    def enqueued(self, launch: HostLaunch, awaited: Sequence[Value]) -> None:
        """All instructions are ops; `awaited` are the results that are not made on this host."""
        if awaited:
            self.arriving.when_here(awaited, partial(self._all_here, launch, tuple(awaited)))
        else:
            self._all_here(launch, ())

    def follow(self, launch: HostLaunch, result: Value, is_ready: bool) -> None:
        """Watch a launch that is one computation, which is an op now; its last result may be ready."""
        devices = launch.segment.devices
        if launch.noted is not None:
            self.pace.enqueued(launch.noted, self.env.now_s())
        elif is_ready and self._on_device.keys().isdisjoint(devices):  # they were idle
            self._busy_until_s.update(dict.fromkeys(devices, self.env.now_s()))
            self._report(Finished(launch.message.sequence, 0, None))
            return
        if not is_ready:
            self._watch(launch, (result,), True)
        self._begin(launch)
        if is_ready:
            self._watched_ended(launch)

    def _begin(self, launch: HostLaunch) -> None:
        launch.enqueued_s = self.env.now_s()
        self._in_flight += 1
        for device in launch.segment.devices:
            self._on_device.setdefault(device, {})[launch.message.sequence] = launch

    def _all_here(self, launch: HostLaunch, awaited: tuple[Value, ...]) -> None:
        # One of `pending` is the enqueueing itself.
        if launch.noted is not None:
            self.pace.enqueued(launch.noted, self.env.now_s())
        has_watches = not awaited and launch.pending > 1
        if not has_watches:  # a watch without values waits for all that was submitted
            self._watch(launch, awaited, False)
        self._begin(launch)
        if has_watches:
            self._watched_ended(launch)

    def _watch(self, launch: HostLaunch, values: tuple[Value, ...], is_computed: bool) -> None:
        """Wait until these values are ready, or one has failed."""

        def done(error: ErrorReport | None) -> None:
            if error is not None and is_computed and any(value.alone for value in values):
                self.order.break_gang(launch.run, error)
            if error is not None and error.kind in INFRASTRUCTURE:
                launch.lost = launch.lost or error
            self._watched_ended(launch)

        is_leased = launch.message.sequence < 0  # then nothing waits for the report
        hurried = (self._in_flight < PROGRESS_SHARE and not is_leased) or launch.noted is not None
        self.queue.ops.append(Watch(values, done, hurried))

    def _watched_ended(self, launch: HostLaunch) -> None:
        launch.pending -= 1
        if launch.pending:
            return
        now_s = self.env.now_s()
        for device in launch.segment.devices:
            launches = self._on_device[device]
            first = next(iter(launches.values()))
            if first is not launch:
                # News comes in any order; the time until now belongs to the oldest launch.
                self._charge(first, now_s)
            del launches[launch.message.sequence]
            if not launches:
                del self._on_device[device]
        self._charge(launch, now_s)
        self._in_flight -= 1
        if launch.noted is not None:
            self.pace.ended(launch, launch.noted, now_s)
        if launch.message.report:
            self._report(Finished(launch.message.sequence, int(launch.busy_s * 1e6), launch.lost))

    def _charge(self, launch: HostLaunch, now_s: float) -> None:
        """Charge a launch with the time of its devices that no other launch is charged with."""
        started_s = launch.enqueued_s if launch.began_s is None else launch.began_s
        busy = self._busy_until_s
        if launch.noted is not None and launch.noted.free_s is None:
            launch.noted.free_s = max(
                [busy.get(one, 0.0) for one in launch.segment.devices], default=0.0
            )
        for device in launch.segment.devices:
            started_s = max(started_s, busy.get(device, 0.0))
            busy[device] = now_s
        launch.busy_s += now_s - started_s

    def _report(self, finished: Finished) -> None:
        self._finished.append(finished)
        may_wait = finished.sequence < 0 or len(self._finished) * PROGRESS_SHARE < self._in_flight
        if may_wait and finished.lost is None:
            if not self._late.is_running:
                self._late.start()
        elif not self._is_sending:  # together with the launches that end in this turn
            self._is_sending = True
            self.env.send(self.env.address, _SendProgress())

    @handles(_SendProgress)
    def _send_together(self, sender: Address, note: _SendProgress) -> None:
        self._is_sending = False
        self._send()

    def _send(self) -> bool:
        finished, self._finished = tuple(self._finished), []
        if self.order.scheduler is not None and finished:
            self.env.send(self.order.scheduler, Progress(self.order.epoch, finished))
        return False
