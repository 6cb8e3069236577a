"""Monitor of islands that are away: who waits for them, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from pw.core import messages as msg
from pw.core.ids import CONTROLLER, Address, arrays_in
from pw.core.waits import RECOVERY_S
from pw.sched.control.clients import Client
from pw.sched.control.slices import GiveUp
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.world import Violation

MARGIN_S = 0.05
"""Seconds by which the controller may be late."""
TURN_S = 1e-3
"""Seconds within which a turn of the controller ends."""


class AwayMonitor:
    """Watches what waits at the controller while islands are away."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._lost_s: dict[int, float] = {}
        """Times at which the clients of slices heard of their last loss, in seconds."""
        self._able: dict[int, tuple[float, Any]] = {}
        """Messages that could go on, by their ids, and since when, in seconds."""
        self._world.watch_sent(msg.Submit, self._submitted)
        self._world.watch_sent(msg.SliceLost, self._slice_lost)
        self._world.watch_handled(msg.Resumed, self._resumed)
        self._world.watch_handled(GiveUp, self._giving_up)
        self._world.watch_handled(msg.Run, self._told_of_run)

    def _could_go_on_before(self, message: Any) -> bool:
        """Whether a message could go on a moment ago: what a turn has made possible is done at its end."""
        now_s = self._world.now_s
        since_s, _ = self._able.setdefault(id(message), (now_s, message))
        return now_s > since_s + TURN_S

    def _submitted(self, sender: Address, to: Address, message: msg.Submit) -> None:
        client = self._cluster.controller.sessions.owner(message.run)
        if client is not None and client.away is not None:
            self._world.checked["others go on"] += 1

    # --- what waits ----------------------------------------------------------------------------------

    def _told_of_run(
        self, sender: Address, to: Address, message: msg.Run
    ) -> Callable[[], None] | None:
        client = self._cluster.controller.sessions.owner(message.run)
        if to.node != CONTROLLER or client is None:
            return None
        return lambda: self._check(client)

    def _check(self, client: Client) -> None:
        """What is set aside needs a slice that is away, or what is not there."""
        if client.away is None or client.suspension is not None:
            return
        for message in client.stream.aside.messages:
            if isinstance(message, msg.Run):
                program = client.programs.get(message.program)
                could_go_on = (
                    program is not None
                    and not program.body.donated
                    and not message.lease
                    and program.slices.isdisjoint(client.slices.unbound)
                    and program.body.is_repeatable
                    and all(map(client.arrays.is_good, arrays_in(message.args)))
                )
            elif isinstance(message, msg.CreateArray):
                could_go_on = message.spec.placement.slice not in client.slices.unbound
            else:
                continue
            if not could_go_on:
                self._able.pop(id(message), None)
            elif self._could_go_on_before(message):
                what = type(message).__name__
                raise Violation(
                    "others go on",
                    f"a {what} of {client.name} waits, and all that it needs is there",
                )

    # --- how long ------------------------------------------------------------------------------------

    def _slice_lost(self, sender: Address, to: Address, message: msg.SliceLost) -> None:
        client = self._cluster.controller.sessions.owner(message.slice)
        if client is not None and client.suspension is None:
            self._await(client, message.slice)

    def _resumed(
        self, sender: Address, to: Address, message: msg.Resumed
    ) -> Callable[[], None] | None:
        client = self._cluster.controller.sessions.at(sender.node)
        if client is None:
            return None
        return lambda: self._await_all(client)

    def _await_all(self, client: Client) -> None:
        for number in client.slices.unbound:
            self._await(client, number, RECOVERY_S)

    def _await(self, client: Client, number: int, least_s: float = 0.0) -> None:
        """A client waits for a slice from now on, for `least_s` or longer."""
        self._lost_s[number] = self._world.now_s
        wait_s = max(_patience_s(client), least_s)
        if wait_s < math.inf:
            loss = client.slices.unbound[number]
            slow = 1.0 + self._world.profile.clock_skew
            self._world.after(wait_s * slow + MARGIN_S, self._check_given_up, client, number, loss)

    def _check_given_up(self, client: Client, number: int, loss: int) -> None:
        node = self._cluster.node
        if node.paused:
            self._world.at(
                node.paused_until_s + MARGIN_S, self._check_given_up, client, number, loss
            )
            return
        self._world.checked["given up"] += 1
        is_here = node.alive and self._cluster.controller.sessions.get(client.number) is client
        if is_here and client.slices.unbound.get(number) == loss:
            raise Violation("given up", f"{client.name} still waits for slice {number}")

    def _giving_up(self, sender: Address, to: Address, timer: GiveUp) -> Callable[[], None] | None:
        client = self._cluster.controller.sessions.get(timer.client)
        if client is None:
            return None
        waited = {n for n, loss in client.slices.unbound.items() if loss == timer.loss}
        return partial(self._gave_up, client, waited)

    def _gave_up(self, client: Client, waited: set[int]) -> None:
        for number in waited - client.slices.unbound.keys():
            self._cluster.given_up.add(number)
            since_s = self._world.now_s - self._lost_s.get(number, -math.inf)
            fast = 1.0 - self._world.profile.clock_skew
            if since_s < _patience_s(client) * fast - MARGIN_S:
                raise Violation(
                    "given up", f"{client.name} gave slice {number} up after {since_s:g} s"
                )


def _patience_s(client: Client) -> float:
    return RECOVERY_S if client.recovery_s is None else client.recovery_s
