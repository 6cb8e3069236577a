"""Profiles: the size of a simulated cluster, and its faults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SimProfile:
    """Rates are probabilities for each frame or transfer, or expected counts for a whole run."""

    name: str
    hosts: int = 6
    clients: int = 3
    runs: int = 40
    """Number of runs of all clients together."""
    span_s: float = 8.0
    """Seconds of virtual time in which clients work and faults happen."""
    frame_loss: float = 0.0
    line_loss: float = 0.0
    """Probability that a frame is lost which a client sends over one of its lines, beside `frame_loss`."""
    frame_duplicate: float = 0.0
    latency_spike: float = 0.0
    """Probability that a frame is late by up to 0.3 s, and all that come after it on its link."""
    bulk_failure: float = 0.0
    landing_refused: float = 0.0
    computation_failure: float = 0.0
    """Probability that an execution fails."""
    read_failure: float = 0.0
    """Probability that a read of a value by one host fails."""
    partitions: float = 0.0
    pauses: float = 0.0
    silences: float = 0.3
    """Number of times that a client or the controller stops for up to 90 s, or a host for less than it may:
    nothing is lost."""
    crashes: float = 0.0
    restarts: float = 0.0
    """Number of times that the controller dies, and another one is started at its address."""
    machine_crashes: float = 0.0
    """Number of crashes of machines: peers do not see the connections end, and the supervisor dies as well."""
    supervisor_stops: float = 0.0
    """Number of times that a supervisor stops for a while, and takes nothing from its runtime."""
    island_losses: float = 0.0
    """Number of times that all machines of an island die, and come back much later, if at all. Then clients
    say how long they wait for islands."""
    client_deaths: float = 0.0
    intrusions: float = 0.0
    """Number of messages of clients that only hosts and the controller may send."""
    trespasses: float = 0.0
    """Number of requests for what clients of another tenant have; there are two tenants."""
    quotas: bool = False
    """True if users are of two tenants that have bounds."""
    late_leases: float = 0.0
    """Probability, for each lease and host, that launches of the holder may reach the host before the lease."""
    floods: float = 0.0
    """Number of times that a client sends thousands of requests at once."""
    slow_hosts: float = 0.0
    """Share of hosts that are 3 to 30 times slower."""
    clock_skew: float = 0.0
    """Part by which a node's clock may run faster or slower."""
    spares: float = 0.0
    """Probability, for each island, that a spare host waits for a place in it."""
    notices: float = 0.0
    """Number of times that a host, or all of an island, is told to end, and comes back later."""
    drains: float = 0.0
    """Probability that a client has one host drained."""
    join_failures: float = 0.0
    """Probability that a group cannot be joined."""
    sick: float = 0.0
    """Number of times that a device falls ill, is replaced, or is named by an error though it is well."""
    device_tests: float = 0.0
    """Probability, for each act of a client, that it has all devices tested."""
    suspensions: float = 0.0
    """Probability, for each act of a client, that it has a client suspended."""
    rebalances: float = 0.0
    """Probability, for each act of a client, that it asks which slices should move, and moves them."""
    slices_given_back: float = 0.0
    """Probability, for each act of a client, that it gives a slice back, and asks for another."""
    named_hosts: float = 0.0
    """Probability, for each slice that a client asks for, that it names the hosts."""
    shapes: float = 0.0
    """Probability, for each slice that a client asks for, that it has a shape or is exclusive. Then hosts have
    coordinates."""
    slice_memory: float = 0.0
    """Probability, for each slice that a client asks for, that it has a bound of memory."""
    device_memory_bytes: int = 0
    """Bytes of memory of each device; 0 where nothing limits it."""
    spill_bytes: int = 0
    """Bytes of memory of each host for arrays that leave the devices; some hosts have less."""
    spill_files: float = 0.0
    """Probability, for each island, that its hosts have files for arrays that leave their memory."""
    host_memory: float = 0.0
    """Probability that a kind of arrays of a client lies in host memory."""
    broken_programs: bool = True
    """True if clients also bring programs that do not compile, or raise."""
    views: float = 0.0
    """Probability, for each act of a client, that it makes views of its arrays."""
    handovers: float = 0.0
    """Probability, for each act of a client, that it hands arrays to another one."""
    names: float = 0.0
    """Probability, for each act of a client, that it publishes arrays under a name, or looks one up."""
    events: bool = False
    """True if the controller publishes events, and the monitor follows them."""
    pipelines: float = 0.0
    """Probability, for each program that a client registers, that it is a step of a pipeline."""
    steps: float = 0.0
    """Probability, for each program that a client registers, that it is one computation."""
    moves: float = 0.0
    """Probability, for each program that a client registers, that it moves a value around. Then clients have
    more slices."""
    checkpoints: float = 0.0
    """Probability, for each act of a client, that it checkpoints arrays, beyond the few of every profile."""
    streams: float = 0.0
    """Probability, for each act of a client, that it turns to a stream that feeds it."""
    cuts: float = 0.0
    """Probability, for each act of a client, that it runs a function that is cut over its slices. Then clients
    have more slices."""
    ragged: float = 0.03
    """Probability, for each act of a client, that it runs a program of which only some rows travel."""
    loops: float = 0.06
    """Probability, for each act of a client, that it begins a loop that waits for each result."""
    fed: float = 0.0
    """Probability, for each loop, that each of its calls reads a value that the client has put just before."""
    quick: float = 0.0
    """Probability, for each computation on one host with nothing before it, that its host computes it in the
    turn in which it is launched."""
    watchers: int = 0
    """Number of further users, who only watch islands."""
    timelines: float = 0.0
    """Probability, for each act of a client, that it records a timeline."""
    branches: float = 0.15
    """Probability, for each program that a client registers, that it has branches."""
    embedded: bool = False
    """True if the session of one client is on the controller's node, as in a cluster that a script starts."""
    tenants: bool = False
    """True if clients share one island for good; the monitor checks the share of each."""
    divided: bool = False
    """True if those clients are of several tenants, among which the island is divided first."""

    parts: bool = False
    """True if all of those clients but one work on parts of the island, and do not wait for their results."""
    replace_stragglers: float = 0.0
    """Factor from which on slow hosts are replaced by spares; 0 for never."""
    stragglers: float = 0.0
    """Probability that a host of the largest island is slow from some time on, in its devices, its processor or
    its links; the monitor checks which hosts are named slow."""
    many: bool = False
    """True if those clients train, serve with deadlines, or are notebooks; the policy is `share`."""

    def sized(self, hosts: int | None, clients: int | None, runs: int | None) -> SimProfile:
        """The same faults in a cluster of another size."""
        return dataclasses.replace(
            self, hosts=hosts or self.hosts, clients=clients or self.clients, runs=runs or self.runs
        )

    def without(self, *faults: str) -> SimProfile:
        """The same cluster with these kinds of faults left out."""
        nothing: dict[str, Any] = dict.fromkeys(faults, 0.0)
        return dataclasses.replace(self, **nothing)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The faults of the profile of this name that this one does not have."""
        full = PROFILES.get(self.name, self)
        return tuple(f for f in FAULTS if getattr(full, f) and not getattr(self, f))


_NO_FAULTS = (
    "span_s",
    "named_hosts",
    "spill_files",
    "shapes",
    "slice_memory",
    "views",
    "handovers",
    "names",
    "suspensions",
    "rebalances",
    "device_tests",
    "pipelines",
    "moves",
    "checkpoints",
    "streams",
    "cuts",
    "loops",
    "fed",
    "quick",
    "timelines",
    "branches",
    "ragged",
)
"""Numbers of a profile that say how clients work."""
FAULTS = tuple(
    field.name
    for field in dataclasses.fields(SimProfile)
    if field.type == "float" and field.name not in _NO_FAULTS
)
"""Names of the fields of a profile that are rates of faults."""

_NETWORK: dict[str, Any] = {
    "frame_loss": 0.001,
    "frame_duplicate": 0.001,
    "latency_spike": 0.003,
    "partitions": 2.0,
    "clock_skew": 0.02,
}
_CRASHES: dict[str, Any] = {
    "crashes": 2.0,
    "machine_crashes": 0.5,
    "pauses": 0.7,
    "supervisor_stops": 1.0,
    "join_failures": 0.03,
    "spares": 0.3,
}
_RESTARTS: dict[str, Any] = {"restarts": 0.7}
_CLIENTS: dict[str, Any] = {"client_deaths": 2.0, "intrusions": 1.0}
_DEVICES: dict[str, Any] = {
    "bulk_failure": 0.01,
    "landing_refused": 0.01,
    "computation_failure": 0.01,
    "slow_hosts": 0.2,
}
_LOSSES = _CRASHES | _RESTARTS | _CLIENTS | _DEVICES

_STRAGGLERS: dict[str, Any] = {
    "hosts": 4,
    "clients": 1,
    "runs": 200,
    "silences": 0.0,
    "clock_skew": 2e-5,
    "tenants": True,
    "stragglers": 0.75,
}

_LITTLE_MEMORY: dict[str, Any] = {"device_memory_bytes": 256 << 10}
_TIERS: dict[str, Any] = {
    "device_memory_bytes": 96 << 10,
    "spill_bytes": 1 << 24,
    "spill_files": 0.6,
}
"""Memory for three large arrays on each device, and for all on most hosts."""


def _lossy(name: str, **more: Any) -> SimProfile:
    """Return a profile with losses of each kind."""
    return SimProfile(name, **({"span_s": 20.0} | _LOSSES | more))


PROFILES = {
    profile.name: profile
    for profile in (
        SimProfile("calm"),
        SimProfile("tenants", hosts=3, clients=4, span_s=4.0, silences=0.0, tenants=True),
        SimProfile(
            "divided", hosts=3, clients=5, span_s=4.0, silences=0.0, tenants=True, divided=True
        ),
        SimProfile("parts", hosts=4, clients=6, span_s=4.0, silences=0.0, tenants=True, parts=True),
        SimProfile(
            "many",
            hosts=3,
            clients=16,
            runs=80,
            span_s=4.5,
            silences=0.0,
            client_deaths=3.0,
            tenants=True,
            many=True,
        ),
        SimProfile("stragglers", span_s=18.0, **_STRAGGLERS),
        SimProfile(
            "stragglers-replaced", span_s=40.0, spares=0.8, replace_stragglers=1.3, **_STRAGGLERS
        ),
        SimProfile("slow", slow_hosts=0.4, latency_spike=0.02, clock_skew=0.02),
        SimProfile("clients", **_CLIENTS),
        SimProfile("intruders", intrusions=20.0),
        SimProfile(
            "trespasses", span_s=12.0, clients=4, trespasses=20.0, restarts=1.5, handovers=0.1
        ),
        SimProfile(
            "quotas",
            clients=6,
            runs=60,
            span_s=12.0,
            quotas=True,
            checkpoints=0.1,
            slices_given_back=0.15,
            client_deaths=6.0,
            restarts=0.3,
            crashes=0.3,
        ),
        SimProfile(
            "quotas-leases",
            clients=3,
            runs=60,
            quotas=True,
            views=0.1,
            loops=0.3,
            fed=0.7,
            quick=0.3,
            client_deaths=1.0,
        ),
        SimProfile("floods", floods=4.0, slow_hosts=0.2),
        SimProfile("memory", **_LITTLE_MEMORY, **_CLIENTS),
        SimProfile(
            "tiers",
            runs=60,
            views=0.1,
            checkpoints=0.05,
            loops=0.2,
            fed=0.3,
            host_memory=0.2,
            **_TIERS,
        ),
        SimProfile(
            "bounds",
            runs=60,
            slice_memory=0.8,
            views=0.1,
            handovers=0.1,
            loops=0.2,
            fed=0.3,
            quick=0.3,
            slices_given_back=0.05,
            client_deaths=1.0,
            **_TIERS,
        ),
        _lossy("tiers-lost", runs=60, views=0.1, loops=0.1, handovers=0.05, **_TIERS),
        SimProfile("devices", **_DEVICES),
        SimProfile("network", span_s=20.0, **_NETWORK),
        SimProfile("drains", span_s=10.0, spares=0.8, drains=0.7, crashes=0.3, named_hosts=0.1),
        SimProfile("notices", span_s=15.0, notices=1.5, spares=0.2),
        SimProfile("crashes", span_s=20.0, **_CRASHES),
        SimProfile(
            "slices",
            span_s=20.0,
            slices_given_back=0.1,
            named_hosts=0.3,
            slice_memory=0.3,
            **(_CRASHES | _RESTARTS),
        ),
        SimProfile(
            "shapes",
            span_s=20.0,
            shapes=0.8,
            slice_memory=0.4,
            slices_given_back=0.15,
            drains=0.3,
            **(_CRASHES | {"restarts": 0.3, "spares": 0.7} | _LITTLE_MEMORY),
        ),
        SimProfile(
            "rebalanced", rebalances=0.06, shapes=0.8, slices_given_back=0.15, suspensions=0.04
        ),
        SimProfile(
            "restarts", span_s=20.0, restarts=2.0, crashes=0.5, client_deaths=0.5, spares=0.3
        ),
        SimProfile(
            "checkpoints",
            span_s=20.0,
            checkpoints=0.3,
            restarts=2.0,
            crashes=1.0,
            machine_crashes=1.5,
            spares=0.3,
        ),
        _lossy("events", events=True),
        SimProfile(
            "watchers",
            span_s=30.0,
            watchers=2,
            crashes=3.0,
            machine_crashes=0.5,
            restarts=1.5,
            spares=0.3,
            **_NETWORK,
        ),
        SimProfile("watchers-left", span_s=30.0, watchers=2, crashes=1.0, drains=1.0),
        SimProfile("views", runs=80, views=0.4),
        _lossy("views-lost", runs=60, views=0.4, **_LITTLE_MEMORY),
        SimProfile("islands", hosts=8, runs=60, cuts=0.4),
        _lossy("islands-lost", hosts=8, runs=60, cuts=0.4, **_NETWORK),
        SimProfile("away", hosts=8, runs=80, span_s=60.0, cuts=0.2, moves=0.4, island_losses=2.0),
        _lossy("away-lost", hosts=8, runs=80, cuts=0.2, moves=0.4, island_losses=1.0, **_NETWORK),
        SimProfile("ragged", runs=60, ragged=0.5),
        _lossy("ragged-lost", runs=60, ragged=0.5, **_NETWORK),
        SimProfile("shares", runs=60, handovers=0.3, views=0.1),
        _lossy("shares-lost", runs=60, handovers=0.3, views=0.1, **_LITTLE_MEMORY),
        SimProfile("names", runs=60, names=0.4, views=0.05),
        _lossy("names-lost", runs=60, names=0.4, views=0.05, **_LITTLE_MEMORY),
        SimProfile(
            "suspended",
            runs=80,
            suspensions=0.06,
            loops=0.1,
            quick=0.2,
            checkpoints=0.03,
            slow_hosts=0.5,
        ),
        SimProfile(
            "suspended-tiers",
            runs=80,
            suspensions=0.06,
            loops=0.1,
            checkpoints=0.03,
            slow_hosts=0.5,
            **_TIERS,
        ),
        SimProfile(
            "suspended-restarted",
            runs=80,
            span_s=15.0,
            suspensions=0.06,
            loops=0.1,
            quick=0.2,
            checkpoints=0.03,
            restarts=1.0,
        ),
        _lossy(
            "suspended-lost",
            runs=80,
            suspensions=0.06,
            loops=0.1,
            quick=0.2,
            handovers=0.05,
            names=0.05,
            **_NETWORK,
        ),
        SimProfile("sick", span_s=20.0, sick=6.0, device_tests=0.05, spares=0.5, silences=0.0),
        _lossy("sick-lost", sick=6.0, device_tests=0.05, **_NETWORK),
        SimProfile("pipelines", runs=30, pipelines=0.7),
        _lossy("pipelines-lost", runs=30, pipelines=0.7, **_LITTLE_MEMORY),
        SimProfile("moves", hosts=8, moves=0.7),
        _lossy("moves-lost", hosts=8, moves=0.7, **_LITTLE_MEMORY),
        SimProfile("streams", runs=80, streams=0.5),
        _lossy("streams-lost", runs=60, streams=0.5, slices_given_back=0.02),
        SimProfile("timelines", timelines=0.2, clock_skew=0.02, **_CLIENTS),
        _lossy("timelines-lost", timelines=0.1, **_NETWORK),
        SimProfile("leases", clients=2, runs=60, loops=0.3, quick=0.3, latency_spike=0.01),
        SimProfile("leases-late", clients=2, runs=60, loops=0.3, quick=0.3, late_leases=0.5),
        _lossy(
            "leases-lost",
            clients=2,
            runs=60,
            loops=0.3,
            fed=0.7,
            quick=0.3,
            line_loss=0.03,
            **_NETWORK,
        ),
        SimProfile(
            "leases-memory",
            clients=2,
            runs=40,
            loops=0.5,
            quick=0.3,
            late_leases=0.5,
            client_deaths=0.5,
            **_LITTLE_MEMORY,
        ),
        _lossy(
            "leases-memory-lost",
            clients=2,
            runs=40,
            loops=0.5,
            quick=0.3,
            **_LITTLE_MEMORY,
            **_NETWORK,
        ),
        SimProfile(
            "embedded",
            hosts=2,
            clients=2,
            span_s=20.0,
            runs=60,
            loops=0.3,
            quick=0.3,
            embedded=True,
            client_deaths=1.0,
            **(_CRASHES | _DEVICES),
        ),
        SimProfile(
            "steps", clients=3, runs=120, steps=0.7, loops=0.2, quick=0.4, slices_given_back=0.02
        ),
        _lossy("steps-lost", clients=3, runs=120, steps=0.7, loops=0.2, quick=0.4, **_NETWORK),
        SimProfile("branches", branches=0.8),
        SimProfile("reads", branches=0.8, read_failure=0.02),
        _lossy("branches-lost", branches=0.8, **_LITTLE_MEMORY, **_NETWORK),
        _lossy("chaos", quick=0.2, **_NETWORK),
        _lossy("chaos-tiers", quick=0.2, **_NETWORK, **_TIERS),
    )
}
