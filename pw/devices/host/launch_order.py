"""The order of launches on a host: which epoch it is in, and which launch is next.

A scheduler numbers the launches of a host without gaps. A host that misses a number, or that cannot
do its part of a gang, stops: it does nothing more in this epoch, and the scheduler ends the epoch.
"""

from __future__ import annotations

from pw.core.actors.actor import Env
from pw.core.errors import INFRASTRUCTURE, ErrorReport
from pw.core.ids import Address
from pw.core.messages import GangBroken, LaunchGap
from pw.devices.host.work import HostRun


class LaunchOrder:
    """The epoch of a host, and its place in the order of launches."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self.host = env.address.node
        self.epoch = 0
        """0 until the host joins an island."""
        self.expected = 0
        """The number of the next launch."""
        self.is_broken = False
        """The host does nothing more in this epoch."""
        self.scheduler: Address | None = None

    def take(self, epoch: int, sequence: int, sender: Address) -> bool:
        """Return whether the host may do the launch with this number, and expect the next one."""
        if epoch != self.epoch or self.is_broken:
            self._env.count("messages_stale")
            return False
        if sequence != self.expected:
            self._env.log("error", "launch gap", expected=self.expected, got=sequence)
            self.scheduler = sender
            self.stop_at_gap(self.expected, sequence)
            return False
        self.expected += 1
        self.scheduler = sender
        return True

    def stop_at_gap(self, expected: int, got: int) -> None:
        """Stop, because a launch is missing."""
        self.is_broken = True
        if self.scheduler is not None:
            self._env.send(self.scheduler, LaunchGap(self.epoch, expected, got))

    def break_gang(self, run: HostRun, error: ErrorReport) -> None:
        """Stop, because other hosts of the gang may have a value that failed here."""
        if self.is_broken:
            return
        self.is_broken = True
        name = run.program.body.name
        broken = GangBroken(
            self.epoch, f"an input of {name!r} was lost on host {self.host}: {error.message}"
        )
        if error.kind not in INFRASTRUCTURE:
            reason = f"{name!r} failed on host {self.host}, and perhaps only there: {error.message}"
            broken = GangBroken(self.epoch, reason, run.run, error, run.results)
        self._env.log("error", "gang broken", reason=broken.reason)
        if self.scheduler is not None:
            self._env.send(self.scheduler, broken)
