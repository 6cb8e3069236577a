"""Profiles: the size of a simulated cluster, and its faults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Profile:
    """Rates are probabilities for each frame or transfer, or expected counts for a whole run."""

    name: str
    hosts: int = 6
    clients: int = 3
    runs: int = 40
    """Runs of all clients together."""
    span_s: float = 8.0
    """Virtual time in which clients work and faults happen."""
    frame_loss: float = 0.0
    frame_duplicate: float = 0.0
    latency_spike: float = 0.0
    """Frames that are late by up to 0.3 s, and all that come after them on their link."""
    bulk_failure: float = 0.0
    landing_refused: float = 0.0
    computation_failure: float = 0.0
    """For each execution."""
    read_failure: float = 0.0
    """For each read of a value by one host."""
    partitions: float = 0.0
    pauses: float = 0.0
    silences: float = 0.3
    """A client or the controller stops for up to 90 s, or a host for less than it may: nothing is lost."""
    crashes: float = 0.0
    restarts: float = 0.0
    """The controller dies, and another one is started at its address."""
    machine_crashes: float = 0.0
    """Peers do not see the connections end, and the supervisor dies as well."""
    supervisor_stops: float = 0.0
    """A supervisor stops for a while, and takes nothing from its runtime."""
    client_deaths: float = 0.0
    intrusions: float = 0.0
    """A client sends what only hosts and the controller may send."""
    trespasses: float = 0.0
    """Clients are of two tenants, and one asks for what clients of the other have."""
    late_leases: float = 0.0
    """For each lease and host, the probability that launches of the holder may reach the host before it."""
    floods: float = 0.0
    """A client sends thousands of requests at once."""
    slow_hosts: float = 0.0
    """Share of hosts that are 3 to 30 times slower."""
    clock_skew: float = 0.0
    """How much faster or slower a node's clock may run."""
    spares: float = 0.0
    """For each island, the probability that a spare host waits for a place in it."""
    drains: float = 0.0
    """Probability that a client has one host drained."""
    join_failures: float = 0.0
    """Probability that a group cannot be joined."""
    slices_given_back: float = 0.0
    """For each act of a client, the probability that it gives a slice back, and asks for another."""
    named_hosts: float = 0.0
    """For each slice that a client asks for, the probability that it names the hosts."""
    device_memory_bytes: int = 0
    """Memory of each device; 0 where nothing limits it."""
    broken_programs: bool = True
    """Clients also bring programs that do not compile, or raise."""
    views: float = 0.0
    """For each act of a client, the probability that it makes views of its arrays."""
    shares: float = 0.0
    """For each act of a client, the probability that it hands arrays to another one."""
    events: bool = False
    """The controller publishes events, and the monitor follows them."""
    pipelines: float = 0.0
    """For each program that a client registers, the probability that it is a step of a pipeline."""
    steps: float = 0.0
    """For each program that a client registers, the probability that it is one computation."""
    moves: float = 0.0
    """For each program that a client registers, the probability that it moves a value around. Then clients
    have more slices."""
    checkpoints: float = 0.0
    """For each act of a client, the probability that it checkpoints arrays, beyond the few of every profile."""
    streams: float = 0.0
    """For each act of a client, the probability that it turns to a stream that feeds it."""
    cuts: float = 0.0
    """For each act of a client, the probability that it runs a function that is cut over its slices. Then
    clients have more slices."""
    ragged: float = 0.03
    """For each act of a client, the probability that it runs a program of which only some rows travel."""
    loops: float = 0.06
    """For each act of a client, the probability that it begins a loop that waits for each result."""
    quick: float = 0.0
    """For each computation on one host with nothing before it, the probability that its host computes it in
    the turn in which it is launched."""
    timelines: float = 0.0
    """For each act of a client, the probability that it records a timeline."""
    branches: float = 0.15
    """For each program that a client registers, the probability that it has branches."""
    embedded: bool = False
    """The session of one client is on the controller's node, as in a cluster that a script starts."""
    tenants: bool = False
    """Clients share one island for good; the monitor checks the share of each."""
    divided: bool = False
    """Those clients are of several tenants, among which the island is divided first."""

    parts: bool = False
    """All of those clients but one work on parts of the island, and do not wait for their results."""

    def sized(self, hosts: int | None, clients: int | None, runs: int | None) -> Profile:
        """The same faults in a cluster of another size."""
        return dataclasses.replace(
            self,
            hosts=hosts or self.hosts,
            clients=clients or self.clients,
            runs=runs or self.runs,
        )

    def without(self, *faults: str) -> Profile:
        """The same cluster with these kinds of faults left out."""
        nothing: dict[str, Any] = dict.fromkeys(faults, 0.0)
        return dataclasses.replace(self, **nothing)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The faults of the profile of this name that this one does not have."""
        whole = PROFILES.get(self.name, self)
        return tuple(f for f in FAULTS if getattr(whole, f) and not getattr(self, f))


_NO_FAULTS = (
    "span_s",
    "named_hosts",
    "views",
    "shares",
    "pipelines",
    "moves",
    "checkpoints",
    "streams",
    "cuts",
    "loops",
    "quick",
    "timelines",
    "branches",
    "ragged",
)
"""Numbers of a profile that say how clients work."""
FAULTS = tuple(
    field.name
    for field in dataclasses.fields(Profile)
    if field.type == "float" and field.name not in _NO_FAULTS
)
"""The fields of a profile that are rates of faults."""

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

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("calm"),
        Profile("tenants", hosts=3, clients=4, span_s=4.0, silences=0.0, tenants=True),
        Profile(
            "divided", hosts=3, clients=5, span_s=4.0, silences=0.0, tenants=True, divided=True
        ),
        Profile("parts", hosts=4, clients=6, span_s=4.0, silences=0.0, tenants=True, parts=True),
        Profile("slow", slow_hosts=0.4, latency_spike=0.02, clock_skew=0.02),
        Profile("clients", **_CLIENTS),
        Profile("intruders", intrusions=20.0),
        Profile("trespasses", span_s=12.0, clients=4, trespasses=20.0, restarts=1.5, shares=0.1),
        Profile("floods", floods=4.0, slow_hosts=0.2),
        Profile("memory", device_memory_bytes=256 << 10, **_CLIENTS),
        Profile("devices", **_DEVICES),
        Profile("network", span_s=20.0, **_NETWORK),
        Profile("drains", span_s=10.0, spares=0.8, drains=0.7, crashes=0.3, named_hosts=0.1),
        Profile("crashes", span_s=20.0, **_CRASHES),
        Profile(
            "slices",
            span_s=20.0,
            slices_given_back=0.1,
            named_hosts=0.3,
            **(_CRASHES | _RESTARTS),
        ),
        Profile("restarts", span_s=20.0, restarts=2.0, crashes=0.5, client_deaths=0.5, spares=0.3),
        Profile(
            "checkpoints",
            span_s=20.0,
            checkpoints=0.3,
            restarts=2.0,
            crashes=1.0,
            machine_crashes=1.5,
            spares=0.3,
        ),
        Profile("events", span_s=20.0, events=True, **_LOSSES),
        Profile("views", runs=80, views=0.4),
        Profile(
            "views-lost",
            span_s=20.0,
            runs=60,
            views=0.4,
            device_memory_bytes=256 << 10,
            **_LOSSES,
        ),
        Profile("islands", hosts=8, runs=60, cuts=0.4),
        Profile(
            "islands-lost",
            hosts=8,
            span_s=20.0,
            runs=60,
            cuts=0.4,
            **(_NETWORK | _LOSSES),
        ),
        Profile("ragged", runs=60, ragged=0.5),
        Profile("ragged-lost", span_s=20.0, runs=60, ragged=0.5, **(_NETWORK | _LOSSES)),
        Profile("shares", runs=60, shares=0.3, views=0.1),
        Profile(
            "shares-lost",
            span_s=20.0,
            runs=60,
            shares=0.3,
            views=0.1,
            device_memory_bytes=256 << 10,
            **_LOSSES,
        ),
        Profile("pipelines", runs=30, pipelines=0.7),
        Profile(
            "pipelines-lost",
            span_s=20.0,
            runs=30,
            pipelines=0.7,
            device_memory_bytes=256 << 10,
            **_LOSSES,
        ),
        Profile("moves", hosts=8, moves=0.7),
        Profile(
            "moves-lost",
            hosts=8,
            span_s=20.0,
            moves=0.7,
            device_memory_bytes=256 << 10,
            **_LOSSES,
        ),
        Profile("streams", runs=80, streams=0.5),
        Profile(
            "streams-lost",
            span_s=20.0,
            runs=60,
            streams=0.5,
            slices_given_back=0.02,
            **_LOSSES,
        ),
        Profile("timelines", timelines=0.2, clock_skew=0.02, **_CLIENTS),
        Profile(
            "timelines-lost",
            span_s=20.0,
            timelines=0.1,
            **(_NETWORK | _LOSSES),
        ),
        Profile("leases", clients=2, runs=60, loops=0.3, quick=0.3, latency_spike=0.01),
        Profile("leases-late", clients=2, runs=60, loops=0.3, quick=0.3, late_leases=0.5),
        Profile(
            "leases-lost",
            span_s=20.0,
            clients=2,
            runs=60,
            loops=0.3,
            quick=0.3,
            **(_NETWORK | _LOSSES),
        ),
        Profile(
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
        Profile(
            "steps", clients=3, runs=120, steps=0.7, loops=0.2, quick=0.4, slices_given_back=0.02
        ),
        Profile(
            "steps-lost",
            span_s=20.0,
            clients=3,
            runs=120,
            steps=0.7,
            loops=0.2,
            quick=0.4,
            **(_NETWORK | _LOSSES),
        ),
        Profile("branches", branches=0.8),
        Profile("reads", branches=0.8, read_failure=0.02),
        Profile(
            "branches-lost",
            span_s=20.0,
            branches=0.8,
            device_memory_bytes=256 << 10,
            **(_NETWORK | _LOSSES),
        ),
        Profile("chaos", span_s=20.0, quick=0.2, **(_NETWORK | _LOSSES)),
    )
}
