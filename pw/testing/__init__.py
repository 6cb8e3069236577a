"""Clusters for tests: one over real devices in this process, and simulated ones on virtual time.

`InProcessCluster` is loaded when first used, so that the simulator (`pw.testing.sim`) does without
JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pw.testing.in_process import InProcessCluster

__all__ = ["InProcessCluster"]


def __getattr__(name: str) -> Any:
    if name == "InProcessCluster":
        from pw.testing.in_process import InProcessCluster

        return InProcessCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
