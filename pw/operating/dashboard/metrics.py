"""The metrics of a cluster for Prometheus, from the reader's snapshots (docs/metrics.md has the list).

A scrape asks the cluster nothing: it writes the newest snapshot. Counters only grow, also when hosts
are started again and clients leave.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from pw.operating.dashboard.reader import Reader
from pw.operating.dashboard.sampling import Sample
from pw.operating.dashboard.snapshot import Snapshot

SECONDS = tuple(
    float(f"{step}e{power}") for power in range(-4, 3) for step in (1, 1.6, 2.5, 4, 6.3)
)
"""The bounds of all histograms, 0.1 ms to 630 s: five for each power of ten, a factor of 1.6 apart."""
HOST_STATES = ("ready", "joining", "spare", "draining")

COUNTERS = {
    "pw_runs": ("controller_runs", "Runs that were submitted."),
    "pw_runs_failed": ("controller_runs_failed", "Runs that were refused or have failed."),
    "pw_runs_cancelled": ("controller_runs_cancelled", "Runs that were cancelled."),
    "pw_runs_overdue": ("controller_runs_overdue", "Runs that took longer than their timeout."),
    "pw_runs_repeated": ("controller_runs_repeated", "Runs that recoveries have repeated."),
    "pw_arrays_restored": ("controller_arrays_restored", "Arrays restored from replicas."),
    "pw_launches": ("controller_launches", "Launches of all schedulers."),
    "pw_stalls": ("controller_stalls", "Times that work made no progress for long."),
    "pw_peers_lost": ("controller_peers_lost", "Processes that the controller has lost."),
    "pw_host_launches": ("launches", "Launches that hosts have taken; a gang of n hosts counts n."),
    "pw_computations": ("computations", "Computations that hosts have enqueued."),
    "pw_compilations": ("compilations", "Executables that hosts have compiled."),
    "pw_executables_loaded": ("executables_loaded", "Executables that came from a cache."),
    "pw_spilled_bytes": ("bytes_spilled", "Bytes that have left devices for host memory."),
    "pw_returned_bytes": ("bytes_returned", "Bytes that have come back to devices."),
    "pw_file_written_bytes": ("file_bytes_written", "Bytes that have left host memory for files."),
    "pw_file_read_bytes": ("file_bytes_read", "Bytes that have come back to devices from files."),
    "pw_device_tests": ("device_tests", "Tests of all devices of a host."),
    "pw_device_tests_failed": ("device_tests_failed", "Devices that failed in these tests."),
    "pw_devices_suspected": ("devices_suspected", "Devices that an error has named."),
    "pw_timelines_ended": ("timelines_ended", "Timelines whose client has not read them."),
}
"""Counters of Prometheus, without their ending `_total`, by the counter of `pw.stats()` and its help."""
BYTES = {
    "array_data": ("bulk_sent_bytes",),
    "control_of_hosts": ("control_bytes_sent",),
    "control_of_controller": ("controller_control_bytes_sent",),
}
"""The kinds of `pw_sent_bytes_total`, by the counters that they sum up."""


class Metrics(Collector):
    """Prometheus text of what a reader knows."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._registry = CollectorRegistry()
        self._tenants: dict[int, str] = {}

        def histogram(name: str, words: str) -> Histogram:
            return Histogram(name, words, ["tenant"], buckets=SECONDS, registry=self._registry)

        self._run_s = histogram("pw_run_seconds", "From a run's call to its end; needs events.")
        self._wait_s = histogram(
            "pw_launch_wait_seconds", "From a launch's arrival to its launch; of samples."
        )
        self._launch_s = histogram(
            "pw_launch_seconds", "From a launch to its end on all hosts; of samples."
        )
        self._registry.register(self)
        reader.runs.append(self._run_ended)
        reader.samplers.append(self._sampled)
        reader.listeners.append(self._listen)

    def text(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self._registry)

    # --- histograms ----------------------------------------------------------------------------------

    def _listen(self, snapshot: Snapshot) -> None:
        self._tenants.update({client.number: client.tenant for client in snapshot.clients})
        if len(self._tenants) > 2 * len(snapshot.clients) + 1000:
            self._tenants = {client.number: client.tenant for client in snapshot.clients}

    def _tenant(self, client: int) -> str:
        return self._tenants.get(client, "")

    def _run_ended(self, client: int, event: dict[str, Any]) -> None:
        self._run_s.labels(self._tenant(client)).observe(event["seconds"])

    def _sampled(self, sample: Sample) -> None:
        for histogram, ones in ((self._wait_s, sample.waits), (self._launch_s, sample.launched)):
            for client, seconds in ones:
                histogram.labels(self._tenant(client)).observe(max(0.0, seconds))

    # --- snapshots -----------------------------------------------------------------------------------

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the families of metrics; called for each scrape."""
        now = self._reader.newest
        is_up = now is not None and not now.trouble
        yield gauge("pw_up", "Whether the controller answers.", (), [((), float(is_up))])
        if now is None:
            return
        counted = now.counters
        for name, (counter, words) in COUNTERS.items():
            yield _counter(name, words, (), [((), counted.get(counter, 0))])
        sent = [((kind,), sum(counted.get(c, 0) for c in of)) for kind, of in BYTES.items()]
        yield _counter("pw_sent_bytes", "Bytes that processes have sent.", ("kind",), sent)
        compile_s = counted.get("compile_us", 0) * 1e-6
        yield _counter("pw_compile_seconds", "Time of compilations.", (), [((), compile_s)])
        yield from self._of_tenants(now)
        yield from _of_islands(now, self._reader.totals.of)
        yield from of_hosts(now)

    def _of_tenants(self, now: Snapshot) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        labels = ("tenant",)
        for name, words, value in (
            ("pw_clients", "Connected clients.", "clients"),
            ("pw_runs_in_flight", "Runs that have not ended.", "runs"),
            ("pw_queued_launches", "Launches that wait in queues.", "queued"),
            ("pw_queue_waiting_seconds", "How long the longest waits already.", "waiting_s"),
            ("pw_tenant_share", "The share under --policy share.", "share"),
            ("pw_arrays", "Arrays that clients have.", "arrays"),
            ("pw_tenant_memory_bytes", "Bytes of the arrays on all devices.", "arrays_bytes"),
        ):
            rows = [((one.name,), float(getattr(one, value))) for one in now.tenants]
            yield gauge(name, words, labels, rows)
        had = {name: self._reader.totals.of(("tenant", name)) for name in self._reader.tenants}
        for name, words, value in (
            ("pw_ended_launches", "Launches that have ended.", "launches"),
            ("pw_queue_seconds", "How long these were queued.", "waited_s"),
            ("pw_device_seconds", "Their device time, of each device.", "device_s"),
            ("pw_moved_bytes", "Bytes that programs have sent from host to host.", "moved_bytes"),
        ):
            rows = [((tenant,), sums.get(value, 0.0)) for tenant, sums in had.items()]
            yield _counter(name, words, labels, rows)


def _of_islands(now: Snapshot, of: Any) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
    labels = ("island",)
    ready = [((one.name,), float(one.state == "ready")) for one in now.islands]
    yield gauge("pw_island_ready", "Whether the island is ready.", labels, ready)
    for name, words, value in (
        ("pw_island_expected_hosts", "Hosts that it needs.", "expected_hosts"),
        ("pw_island_devices", "Devices of its connected hosts.", "devices"),
        ("pw_island_queued_launches", "Launches that wait for the island.", "queued"),
        ("pw_island_launches_in_flight", "Launches that have not ended.", "launched"),
    ):
        yield gauge(name, words, labels, [((i.name,), getattr(i, value)) for i in now.islands])
    for name, words, value in (
        ("pw_island_formed", "How often the island was formed.", "formed"),
        ("pw_island_device_seconds", "Device time of ended launches.", "device_s"),
    ):
        rows = [((i.name,), of(("island", i.name)).get(value, 0.0)) for i in now.islands]
        yield _counter(name, words, labels, rows)
    yield gauge("pw_recoveries_in_progress", "Clients that recover.", (), [((), now.recoveries)])
    hidden = [((), now.hidden_clients)]
    yield gauge("pw_hidden_clients", "Clients that the reader may not see.", (), hidden)


def of_hosts(now: Snapshot) -> Iterator[GaugeMetricFamily]:
    """Yield the metrics that each host has."""
    hosts = [(i.name, host) for i in now.islands for host in i.hosts]
    hosts += [("", host) for host in now.waiting_hosts]
    labels = ("island", "host")
    named = [(island, host.name, host.state) for island, host in hosts]
    named += [(island.name, host, "") for island in now.islands for host in island.missing]
    states = [
        ((island, host, state), float(state == present))
        for island, host, present in named
        for state in HOST_STATES
    ]
    words = "1 in the state of a host; a host that its island waits for is in none."
    yield gauge("pw_host", words, (*labels, "state"), states)
    slow = {one.host for one in now.slow}
    for name, words, value in (
        ("pw_device_use_ratio", "Busy part of its devices' time; of samples.", "use"),
        ("pw_memory_bytes", "Bytes of arrays on its devices.", "used_bytes"),
        ("pw_memory_limit_bytes", "Memory of its devices.", "limit_bytes"),
        ("pw_host_slow_factor", "How slow it is beside its gangs; 1 if not.", "slow_factor"),
        (
            "pw_host_suspect_devices",
            "Devices named by an error, and not tested.",
            "suspect_devices",
        ),
        ("pw_host_failed_devices", "Devices that have failed their test.", "failed_devices"),
    ):
        rows = [
            ((island, host.name), float(number))
            for island, host in hosts
            if (number := getattr(host, value)) is not None
        ]
        yield gauge(name, words, labels, rows)
    rows = [((island, host.name), float(host.name in slow)) for island, host in hosts]
    yield gauge("pw_host_slow", "Whether other hosts wait for it.", labels, rows)


Rows = Sequence[tuple[tuple[str, ...], float]]


def gauge(name: str, words: str, labels: Sequence[str], rows: Rows) -> GaugeMetricFamily:
    """Return a gauge with a value for each row of labels."""
    family = GaugeMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _counter(name: str, words: str, labels: Sequence[str], rows: Rows) -> CounterMetricFamily:
    family = CounterMetricFamily(name, words, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family
