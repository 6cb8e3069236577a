"""A whole cluster in one process on virtual time, with faults, from one seed.

    outcome = simulate(seed=7, profile=PROFILES["chaos"])
    assert outcome.violation is None

The actors are those of production, unchanged. Simulated are time (`world`), processes (`node`),
links (`network`), the bulk plane (`bulk`), devices (`devices`, `gangs`), supervisors (`host`) and
users (`life`, `workload`, `programs`). `faults` go wrong; what every array must be says an
`oracle`, what must hold at every step say the `monitors`, what may be left over a `census`.
From the shell: `pw sim`. `tests/sim/mutations` shows that all these see what they should.
"""

from __future__ import annotations

from pw.testing.sim.campaign import Campaign, run_campaign
from pw.testing.sim.profiles import PROFILES, SimProfile
from pw.testing.sim.runner import SeedOutcome, simulate

__all__ = ["PROFILES", "Campaign", "SeedOutcome", "SimProfile", "run_campaign", "simulate"]
