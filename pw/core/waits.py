"""How long parts of the runtime wait for a lost one, unless they are told otherwise."""

from __future__ import annotations

RECOVERY_S = 60.0
"""How long what needs a lost island waits for it, before it fails."""
RECONNECT_S = 60.0
"""How long a host looks for another controller."""
