"""Hosts that are started again when they end, as `pw-worker` does, in the world of `tests.stages.actors`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pw.core.errors import ErrorReport
from tests.stages.actors import FakeHost, World


class SupervisedHost:
    """One host through all its incarnations."""

    def __init__(
        self,
        world: World,
        name: str,
        island: str,
        hosts: int = 1,
        devices: int = 1,
        *,
        spare: bool = False,
    ) -> None:
        self.world, self.name = world, name
        self._where = (island, hosts, devices)
        self._spare = spare
        self._handed: list[Any] = []
        self.incarnations = 0
        self.finished = ""
        self.waits = False
        """A runtime that has ended by itself is not started again until the test says so."""
        self.start()

    def start(self) -> None:
        """Start the next incarnation."""
        self.incarnations += 1
        self.current = _Incarnation(self, *self._where, self._spare, self._handed)
        self._spare = True  # from the second time on, as the supervisor says

    def crash(self) -> None:
        """SIGKILL to the runtime: whatever it held is gone, and the supervisor starts another one."""
        self.world.kill(self.name)
        self.world.happenings[f"supervisor of {self.name}"].append(self.start)

    def die(self) -> None:
        """The machine is gone for good."""
        self.finished = "dead"
        self.world.kill(self.name)

    def hand_over(self, replicas: Iterable[Any]) -> None:
        """Keep what the runtime gives away."""
        self._handed = list(replicas)

    def ended(self, *, again: bool) -> None:
        """The runtime has ended by itself."""
        self.world.kill(self.name, "closed")
        if not again:
            self.finished = "drained"
        elif not self.waits:
            self.start()


class _Incarnation(FakeHost):
    def __init__(
        self,
        supervisor: SupervisedHost,
        island: str,
        hosts: int,
        devices: int,
        spare: bool,
        replicas: list[Any],
    ) -> None:
        from pw.core.messages import RegisterHost

        self._supervisor = supervisor
        registration = RegisterHost(island, hosts, devices, "cpu", "", 1, spare)
        super().__init__(supervisor.world, supervisor.name, registration, replicas)
        self.executor.register()

    def _soon(self, again: bool) -> None:
        me = self._supervisor

        def end() -> None:
            if me.current is self and not me.finished:
                me.ended(again=again)

        me.world.happenings[f"supervisor of {me.name}"].append(end)

    def hand_over(self, replicas: Iterable[Any]) -> None:
        self._supervisor.hand_over(replicas)

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        super().stop(reason, error)
        self._soon(again=error is None or error.kind == "ConnectionFailed")

    def finish(self, reason: str) -> None:
        self._soon(again=False)
