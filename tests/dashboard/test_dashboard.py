"""The dashboard's reader, its page and its metrics, on a real cluster."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import pw
from pw.client.connection.children import LocalDaemon, options
from pw.dashboard.metrics import Metrics
from pw.dashboard.reader import Busy, Reader, Totals
from pw.dashboard.snapshot import Snapshot, devices_of
from tests.stages.daemons import until
from tests.stages.programs import ROOT

pytestmark = pytest.mark.processes

TOKEN = "sesame"
START_S = 30.0


@pw.jit
def square(x: Any) -> Any:
    return jnp.tanh(x @ x)


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(
        islands=2, hosts_per_island=2, events=True, device_memory="1GiB"
    ) as started:
        yield started


@pytest.fixture(scope="module")
def reader(cluster: pw.LocalCluster) -> Iterator[Reader]:
    one = Reader(cluster.address, wants_runs=True)
    one.metrics = Metrics(one)  # type: ignore[attr-defined]
    with closing(one):
        one.start(START_S)
        yield one


@pytest.fixture(scope="module")
def link(cluster: pw.LocalCluster) -> Iterator[str]:
    variables = {"PW_DASHBOARD_TOKEN": TOKEN}
    daemon = LocalDaemon("pw.cli.dashboard", options(address=cluster.address), variables)
    yield daemon.address(START_S)
    daemon.terminate()
    daemon.stop()
    assert daemon.exit_code() == 0


def work(seconds: float) -> None:
    x = jnp.ones((64, 64))
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(20):
            x = square(x)
        np.asarray(x)


def seen(reader: Reader, fits: Callable[[Snapshot], bool], what: str) -> Snapshot:
    def looks() -> bool:
        work(0.1)
        return reader.newest is not None and fits(reader.newest)

    until(looks, what)
    assert reader.newest is not None
    return reader.newest


def get(url: str, **headers: str) -> tuple[int, str]:
    """Return the status and the text of an answer."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=20
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_snapshot_has_the_cluster_as_it_is(reader: Reader) -> None:
    now = seen(reader, lambda s: bool(s.sample and s.clients and s.clients[0].launches), "a sample")
    assert [island.name for island in now.islands] == ["island-0", "island-1"]
    assert {host.state for host in now.hosts} == {"ready"}
    (client,) = now.clients  # the reader itself is left out
    (tenant,) = now.tenants
    assert tenant.launches == client.launches > 0
    assert tenant.device_s == client.device_s > 0
    assert client.name.startswith("pytest") or "pid" in client.name
    assert now.trouble == ""
    devices = devices_of(reader.known, "island-0-host-0", 1)
    assert 0.0 <= (devices[0].use or 0.0) <= 1.0
    assert reader.picture is not None
    assert "square" in {slice.name for row in reader.picture.rows for slice in row.slices}


def test_why_and_plan_are_asked_at_the_readers_pace(reader: Reader) -> None:
    work(0.1)
    answers = [reader.ask("why") for _ in range(50)]
    assert len(set(map(id, answers))) == 1
    with pytest.raises(Busy):
        for number in range(50):
            reader.ask("plan", f"nothing {number}")
    assert answers[0].result(10.0).text


def test_metrics_have_all_names_of_the_grafana_file(reader: Reader) -> None:
    seen(
        reader,
        lambda s: bool(s.counters.get("computations") and s.hosts[0].used_bytes is not None),
        "all counters",
    )
    text = reader.metrics.text().decode()  # type: ignore[attr-defined]
    families = list(text_string_to_metric_families(text))
    names = {sample.name for family in families for sample in family.samples}
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
    assert values["pw_up",] == 1.0
    assert values["pw_ended_launches_total", "operator"] > 0
    assert values["pw_run_seconds_count", "operator"] > 0
    grafana = (ROOT / "docs" / "grafana.json").read_text()
    used = set(re.findall(r"\bpw_\w+", grafana))
    known_later = {"pw_host_behind_seconds"}  # of gangs
    assert used - names <= known_later
    documented = set(re.findall(r"\bpw_\w+", (ROOT / "docs" / "metrics.md").read_text()))
    base = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in names} | known_later
    assert base == documented


def test_totals_only_grow() -> None:
    totals = Totals()
    for value in (5, 7, 2, 3):
        totals.take("host", "hosts", {"launches": value})
    assert totals.of("hosts") == {"launches": 10}
