"""All targets by name, and how many inputs each gets."""

from __future__ import annotations

from tests.fuzz.target import Target
from tests.fuzz.targets import bulk, checkpoints, compiling, frames, grpc, handlers, trust, zmtp

INPUTS = 80_000
"""Of all targets together, in `make test`."""

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (frames, zmtp, bulk, trust, checkpoints, compiling, grpc, handlers)
    for target in module.TARGETS
}

_WEIGHTS = sum(target.weight for target in TARGETS.values())


def share_of(target: Target, inputs: int = INPUTS) -> int:
    """Return how many of all inputs a target gets."""
    return round(inputs * target.weight / _WEIGHTS)
