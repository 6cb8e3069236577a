"""The cluster simulator: seeds under every kind of fault, and that it sees what it should see.

A profile runs few seeds here; `pw sim --profile all --seeds 0:1000` runs more.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pw.core.messages import PeerLost
from pw.testing.sim import PROFILES, SeedOutcome, simulate
from pw.testing.sim.report import failure
from tests.sim.mutations.operators import replay
from tests.sim.mutations.search import unnoticed
from tests.sim.mutations.table import MUTATIONS
from tests.stages.samples import long, some

REGRESSIONS = [
    line.split(maxsplit=2)
    for line in (Path(__file__).parent / "seeds" / "regressions.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


FOUND_AGAIN = 1
"""Seeds of each profile that once found something and run in `make test`; all others run in `make long`."""


def found_again() -> Iterator[Any]:
    """Yield the seeds that once found something."""
    taken: Counter[str] = Counter()
    for profile, seed, what in REGRESSIONS:
        taken[profile] += 1
        is_one = taken[profile] <= FOUND_AGAIN
        yield (profile, seed, what) if is_one else long(profile, seed, what)


def check(outcome: SeedOutcome) -> None:
    assert outcome.violation is None, "\n".join(failure(outcome))


NEVER_FAILED = PROFILES.keys() - {profile for profile, *_ in REGRESSIONS}


@pytest.mark.parametrize(("seed", "runs"), [(1, 12), long(0, None), long(1, None)])
@pytest.mark.parametrize("profile", [name for name in PROFILES if name in NEVER_FAILED])
def test_seeds(profile: str, seed: int, runs: int | None) -> None:
    """With few runs: CI has new seeds with all runs each time."""
    outcome = simulate(seed, PROFILES[profile].sized(None, None, runs))
    check(outcome)
    assert outcome.checked["oracle"], "no value was ever looked at"


@pytest.mark.parametrize(("hosts", "runs"), [(32, 8), long(64, 200)])
def test_a_large_cluster(hosts: int, runs: int) -> None:
    outcome = simulate(1, PROFILES["chaos"].sized(hosts=hosts, clients=8, runs=runs))
    check(outcome)


@pytest.mark.parametrize(("profile", "seed", "what"), [*found_again()])
def test_seeds_that_once_found_something(profile: str, seed: str, what: str) -> None:
    check(simulate(int(seed), PROFILES[profile]))


SEEDS_WITH_ALL = (33, 152)
"""Seeds of chaos which together inject all `FAULTS`."""
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
    missing = set(FAULTS)
    for seed in (*SEEDS_WITH_ALL, *range(100)):  # the first ones together have all
        if missing:
            missing -= set(simulate(seed, PROFILES["chaos"]).injected)
    assert not missing


# --- one seed, one trace -----------------------------------------------------------------------------

TRACES = """
import hashlib
from pw.testing.sim import PROFILES, simulate
print(simulate(2, PROFILES["chaos"].sized(None, None, 20), digest=True).digest)
print(simulate(17, PROFILES["crashes"], digest=True).digest)  # it offers replicas again
for profile, seed in (("calm", 1), ("network", 3)):
    lines = simulate(seed, PROFILES[profile].sized(None, None, 12), trace=True).trace
    print(len(lines), hashlib.sha256("\\n".join(lines).encode()).hexdigest())
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
    assert len(first.splitlines()) == 4
    # Another order of sets, and another history of the process.
    before = "from pw.testing.sim import *\nsimulate(9, PROFILES['calm'])\n"
    assert traces("12345", before) == first


def test_seeds_differ() -> None:
    few = PROFILES["calm"].sized(None, None, runs=6)
    outcomes = [simulate(seed, few, digest=True) for seed in range(2)]
    assert len({outcome.digest for outcome in outcomes}) == 2


def test_a_digest_sees_what_is_done_and_not_how_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = PROFILES["crashes"].sized(None, None, runs=12)
    first = simulate(2, profile, digest=True).digest
    monkeypatch.setattr(PeerLost, "words", property(lambda message: "some other words"))
    assert simulate(2, profile, digest=True).digest == first
    assert (
        simulate(2, profile, digest=True, alter=MUTATIONS["double-credit"].install).digest != first
    )


def test_the_simulator_does_without_jax() -> None:
    program = "import sys, pw.testing.sim, pw.cli.sim; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# --- deliberate breakages ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", some([*MUTATIONS], 3))
def test_mutations_are_caught(name: str) -> None:
    assert not (seen := unnoticed(name)), f"{name!r} was not noticed in any seed, only {seen}"


def test_old_launches_are_harmless() -> None:
    """A launch of the last epoch that comes late is dropped: the breakage alone is not what is caught."""
    _, seen = MUTATIONS["ignore-an-epoch"]
    for seed in (seen.seed, 0):
        check(simulate(seed, PROFILES[seen.profile], alter=replay))
