"""The cluster simulator: seeds under every kind of fault, and that it sees what it should see.

`PW_SIM_SEEDS` sets how many seeds of each profile are run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pw.core.messages import PeerLost
from pw.testing.sim import PROFILES, Outcome, simulate
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.mutations import MUTATIONS, Mutation, replay_launches
from pw.testing.sim.report import failure

SEEDS = int(os.environ.get("PW_SIM_SEEDS", "6"))
BATCH = 15
SEEDS_TO_CATCH = 40
REGRESSIONS = [
    line.split(maxsplit=2)
    for line in (Path(__file__).parent / "seeds" / "regressions.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def check(outcome: Outcome) -> None:
    assert outcome.violation is None, "\n".join(failure(outcome))


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
@pytest.mark.parametrize("profile", PROFILES)
def test_seeds(profile: str, first: int) -> None:
    checked = 0
    for seed in range(first, min(first + BATCH, SEEDS)):
        outcome = simulate(seed, PROFILES[profile])
        check(outcome)
        checked += outcome.checked["oracle"]
    assert checked, "no value was ever looked at"


def test_a_large_cluster() -> None:
    outcome = simulate(1, PROFILES["chaos"].sized(hosts=64, clients=8, runs=200))
    check(outcome)


@pytest.mark.parametrize(("profile", "seed", "what"), REGRESSIONS)
def test_seeds_that_once_found_something(profile: str, seed: str, what: str) -> None:
    check(simulate(int(seed), PROFILES[profile]))


FAULTS = {
    "frame lost",
    "frame doubled",
    "frame late",
    "partition",
    "one-way partition",
    "pause",
    "crash",
    "machine crash",
    "supervisor stopped",
    "client killed",
    "session closed",
    "slow host",
    "computation failed",
    "landing refused",
    "transfer failed",
    "join failed",
    "collective hangs",
    "collective fails",
    "controller killed",
}


def test_every_kind_of_fault_is_injected() -> None:
    missing, seed = set(FAULTS), 0
    while missing and seed < 100:
        missing -= set(simulate(seed, PROFILES["chaos"]).injected)
        seed += 1
    assert not missing


# --- one seed, one trace -----------------------------------------------------------------------------

TRACES = """
import hashlib
from pw.testing.sim import PROFILES, simulate
for profile, seed in (("calm", 1), ("chaos", 2), ("network", 3)):
    lines = simulate(seed, PROFILES[profile], trace=True).trace
    digest = simulate(seed, PROFILES[profile], digest=True).digest
    print(len(lines), hashlib.sha256("\\n".join(lines).encode()).hexdigest(), digest)
"""


def traces(hash_seed: str, before: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + TRACES],
        env=os.environ | {"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout


def test_a_seed_decides_everything() -> None:
    first = traces("0")
    assert len(first.splitlines()) == 3
    # Another order of sets, and another history of the process.
    before = "from pw.testing.sim import *\nsimulate(9, PROFILES['calm'])\n"
    assert traces("12345", before) == first


def test_seeds_differ() -> None:
    outcomes = [simulate(seed, PROFILES["calm"], digest=True) for seed in range(4)]
    assert len({outcome.digest for outcome in outcomes}) == 4


def test_a_digest_sees_what_is_done_and_not_how_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = PROFILES["crashes"]
    first = simulate(2, profile, digest=True).digest
    monkeypatch.setattr(PeerLost, "words", property(lambda message: "some other words"))
    assert simulate(2, profile, digest=True).digest == first
    assert simulate(2, profile, digest=True, mutation="double-credit").digest != first


def test_the_simulator_does_without_jax() -> None:
    program = "import sys, pw.testing.sim, pw.cli.sim; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- deliberate breakages ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutations_are_caught(name: str) -> None:
    mutation = MUTATIONS[name]
    seen = []
    for seed in range(SEEDS_TO_CATCH):
        outcome = simulate(seed, PROFILES[mutation.profile], mutation=name)
        if outcome.violation is not None:
            seen.append(outcome.violation.monitor)
            if outcome.violation.monitor in mutation.caught_by:
                return
    pytest.fail(f"{mutation.what!r} was not noticed in {SEEDS_TO_CATCH} seeds, only {seen}")


def test_old_launches_are_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of the last epoch that comes late is dropped: the breakage alone is not what is caught."""

    def install(cluster: SimCluster) -> None:
        replay_launches(cluster)

    late = Mutation("launches of the last epoch come late", "crashes", frozenset(), install)
    monkeypatch.setitem(MUTATIONS, "late", late)
    for seed in range(8):
        check(simulate(seed, PROFILES["crashes"], mutation="late"))
