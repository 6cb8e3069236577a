"""The monitor of silent peers: whose process lives is not given up, and who is gone is not kept.

It judges by what the simulated world is, not by what links have noticed.
"""

from __future__ import annotations

from typing import Any

from pw.core.messages.roles import Role, role_of
from pw.testing.sim.world import SimProcess, Violation, World
from pw.transport.links.link import Link

SILENCES = ("silent", "unanswered")
"""Beginnings of the reasons for which a link ends because nothing comes."""
KEPT_S = 20.0
"""Seconds within which a peer that is gone is lost: twice the lease."""
HOST_KEPT_S = 6.0
"""Seconds within which a host is lost whose machine is gone: twice three heartbeats."""
_SLACK_S = 3.0
"""Seconds of slack: probes and ticks are a heartbeat apart, and a peer is looked at twice."""


def is_cut_off(world: World, here: str, connection: Any) -> bool:
    """Whether the machine at the other end of a connection answers nothing: it is dead, or not reached."""
    there, other = connection.node, connection.other
    blocked = world.blocked_until(here, there) or world.blocked_until(there, here)
    return bool(blocked) or (other is not None and not other.network.process.alive)


def check_loss(here: SimProcess, link: Link, reason: str) -> None:
    """Raise Violation if a link is lost for the silence of a process that lives and is not cut off.

    A host says itself how long it may be silent.
    """
    if not reason.startswith(SILENCES) or role_of(link.node) is Role.WORKER:
        return
    world = here.world
    world.checked["alive and given up"] += 1
    if not is_cut_off(world, here.name, link.out):
        words = f"{here.name} has lost {link.node} ({reason}), which lives and is not cut off"
        raise Violation("alive and given up", words)


def check_kept(here: SimProcess, link: Link) -> None:
    """Raise Violation if a link to a peer that is gone is older than it may be."""
    world, out = here.world, link.out
    cut_off_s = getattr(out, "cut_off_s", None)
    if cut_off_s is None:
        return
    world.checked["gone and kept"] += 1
    kept_s = HOST_KEPT_S if role_of(link.node) is Role.WORKER else KEPT_S
    # A peer that is heard is not gone, though what is sent to it does not arrive.
    since_s = max(cut_off_s, link.heard_s, here.paused_until_s)
    if world.now_s - since_s > kept_s + _SLACK_S:
        words = f"{here.name} keeps {link.node}, of which it is cut off since {cut_off_s:.1f} s"
        raise Violation("gone and kept", words)
