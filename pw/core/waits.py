"""How long parts of the runtime wait for each other, unless they are told otherwise."""

from __future__ import annotations

RECOVERY_S = 60.0
"""How long what needs a lost island waits for it, before it fails."""
CLUSTER_START_S = 300.0
"""How long requests for devices wait for the islands of a cluster that starts: machines boot, and images are
pulled."""
RECONNECT_S = 60.0
"""How long a host looks for another controller."""

CLIENT_TIMEOUT_S = 600.0
"""How long a client may be silent, as a rule, while its machine answers."""
