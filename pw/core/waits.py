"""How long parts of the runtime wait for each other, unless they are told otherwise."""

from __future__ import annotations

RECOVERY_S = 60.0
"""Seconds for which what needs a lost island waits for it, before it fails."""
MOVE_S = 30.0
"""Seconds after which the slices of a lost island move to one that has room."""
PREEMPT_S = 30.0
"""Seconds for which a slice waits before a client of a lower priority leaves its devices for it."""
CLUSTER_START_S = 300.0
"""Seconds for which requests for devices wait for the islands of a cluster that starts: machines boot, and
images are pulled."""
RECONNECT_S = 60.0
"""How long a host or a client looks for another controller."""
REDIAL_S = 0.5
"""Time between two attempts to reach another controller."""
LOOKING_S = 10.0
"""How long a script waits for what it asks about its cluster."""

CLIENT_TIMEOUT_S = 600.0
"""Seconds for which a client may be silent, as a rule, while its machine answers."""
