"""The dashboard's reader, its page and its metrics, on a real cluster."""

from __future__ import annotations

import itertools
import json
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

import pw
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import ConnectionFailed
from pw.core.events import RunEvent
from pw.core.messages.roles import Role
from pw.core.tenants import OPERATOR
from pw.operating.dashboard.happenings import words_of
from pw.operating.dashboard.metrics import HOST_STATES, SECONDS, Metrics, of_hosts
from pw.operating.dashboard.reader import Busy, Reader
from pw.operating.dashboard.snapshot import Snapshot, devices_of
from pw.operating.dashboard.sums import Totals
from pw.processes.daemons import LocalDaemon, options, start_dashboard
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.access.security import Security
from tests.stages.daemons import Program, until
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
    one = Reader(cluster.address, period_s=0.1, wants_runs=True)
    one.metrics = Metrics(one)  # type: ignore[attr-defined]
    with closing(one):
        one.start(START_S)
        yield one


@pytest.fixture(scope="module")
def link(cluster: pw.LocalCluster) -> Iterator[str]:
    variables = {"PW_DASHBOARD_TOKEN": TOKEN}
    daemon = start_dashboard(cluster.address, variables)
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
            urllib.request.Request(url, headers=headers), timeout=60
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
    devices = devices_of(reader.readings, "island-0-host-0", 1)
    assert 0.0 <= (devices[0].use or 0.0) <= 1.0
    assert reader.picture is not None
    assert "square" in {slice.name for row in reader.picture.rows for slice in row.slices}


def test_why_and_plan_are_asked_at_the_readers_pace(
    cluster: pw.LocalCluster, reader: Reader
) -> None:
    with closing(Reader(cluster.address)) as waiting:  # it is between two turns: it never starts
        assert len({id(waiting.ask("why")) for _ in range(50)}) == 1
        with pytest.raises(Busy):
            for number in range(50):
                waiting.ask("plan", f"nothing {number}")
    work(0.1)
    assert reader.ask("why").result(60.0).text
    assert reader.ask("queue").result(60.0).policy


def test_metrics_have_all_names_of_the_grafana_file(reader: Reader) -> None:
    seen(
        reader,
        lambda s: bool(s.counters.get("computations") and s.hosts[0].used_bytes is not None),
        "all counters",
    )

    def metrics() -> str:
        work(0.02)
        return str(reader.metrics.text().decode())  # type: ignore[attr-defined]

    until(
        lambda: "pw_launch_wait_seconds_bucket" in metrics(), "a sample with launches that waited"
    )
    text = metrics()
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
    host = "pw_host", "island-0-host-0", "island-0"
    assert [values[(*host, state)] for state in HOST_STATES] == [1.0, 0.0, 0.0, 0.0]
    grafana = (ROOT / "docs" / "grafana.json").read_text()
    used = set(re.findall(r"\bpw_\w+", grafana))
    assert used <= names
    documented = set(re.findall(r"\bpw_\w+", (ROOT / "docs" / "metrics.md").read_text()))
    base = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in names}
    assert base == documented


def test_a_host_that_is_missing_is_in_no_state(reader: Reader) -> None:
    now = seen(reader, lambda s: len(s.islands) == 2, "both islands")
    island = replace(now.islands[0], missing=("gone",))
    states = next(of_hosts(replace(now, islands=(island,), waiting_hosts=())))
    values = {tuple(one.labels.values()): one.value for one in states.samples}
    assert {values[island.name, "gone", state] for state in HOST_STATES} == {0.0}
    assert all(1.55 < after / before < 1.65 for before, after in pairwise(SECONDS))
    assert (SECONDS[0], SECONDS[-1]) == (1e-4, 630)


def test_a_first_time_is_not_counted() -> None:
    event = {"what": "ready", "island": "a", "epoch": 1, "hosts": ["h"], "reason": ""}
    assert words_of("island", event) == "island a is ready with 1 host"
    assert (
        words_of("island", event | {"epoch": 3}) == "island a is ready with 1 host, formed 3 times"
    )


def test_only_the_token_opens_the_page(link: str) -> None:
    page, _, token = link.partition("?token=")
    assert token == TOKEN
    assert get(page)[0] == 403
    assert get(f"{page}?token=wrong")[0] == 403
    assert get(f"{page}events")[0] == 403
    assert (
        get(f"{page}island/island-0", Cookie=f"pw-dashboard-{urlsplit(page).port}=wrong")[0] == 403
    )
    status, text = get(page, Authorization=f"Bearer {TOKEN}")
    assert status == 200
    assert "page.js" in text
    cookies = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with cookies.open(link, timeout=60) as answer:  # the link sets a cookie, and loses its token
        assert answer.url == page
        assert "script-src" not in answer.headers["Content-Security-Policy"]
    with cookies.open(f"{page}island/island-0", timeout=60) as answer:
        assert len(json.load(answer)["island-0-host-0"]) == 1
    with cookies.open(f"{page}queue", timeout=60) as answer:
        told = json.load(answer)
        assert "policy" in told["head"]
        assert "goes on in" in told["tables"][0]["columns"]


def test_the_stream_moves_when_a_run_starts(link: str) -> None:
    page = link.partition("?")[0]
    request = urllib.request.Request(f"{page}events", headers={"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as stream:

        def launches() -> int:
            for line in stream:
                if line.startswith(b"data: {"):
                    return sum(one["launches"] for one in json.loads(line[6:])["clients"])
            raise AssertionError("the stream has ended")

        before = launches()
        work(0.1)
        until(lambda: launches() > before, "the end of the launches on the page")


def test_it_listens_for_others_only_with_credentials(cluster: pw.LocalCluster) -> None:
    daemon = start_dashboard(cluster.address, bind="tcp://0.0.0.0:0")
    with pytest.raises(ConnectionFailed):
        daemon.address(START_S)
    daemon.stop()
    assert daemon.exit_code() == 1


def test_a_tenant_sees_its_own_over_tls(tmp_path: Path) -> None:
    authority = Authority.create()

    def issue(role: Role, name: str, tenant: str = "") -> str:
        file = tmp_path / f"{name}.pem"
        file.touch(0o600)
        file.write_bytes(authority.issue(role, name, tenant))
        return str(file)

    keys = options(bind="tcp://127.0.0.1:0", credentials=issue(Role.CONTROLLER, "main"))
    controller = LocalDaemon("pw.cli.controller", keys)
    address = controller.address(START_S)
    sessions, daemons = [], [controller]
    try:
        for name, tenant in (("ann", "research"), ("bob", "rivals"), ("eve", OPERATOR)):
            security = Security(Credentials.read(issue(Role.CLIENT, name, tenant)))
            sessions.append(Runtime(remote(address, None, security), 1.0, 0, name=f"{name}.py"))
        found = {}
        for name in ("ann", "eve"):
            variables = {"PW_CREDENTIALS": str(tmp_path / f"{name}.pem")}
            page = start_dashboard(address, variables)
            daemons.append(page)
            link = page.address(START_S)
            assert link.startswith("https://127.0.0.1:")
            url, _, token = link.partition("?token=")
            ours = ssl.create_default_context(cadata=authority.certificate.decode())
            ours.check_hostname = False
            request = urllib.request.Request(
                f"{url}events", None, {"Authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(request, timeout=60, context=ours) as stream:
                found[name] = next(json.loads(one[6:]) for one in stream if one[:7] == b"data: {")
    finally:
        for session in sessions:
            session.close()
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.stop()
    ann, eve = found["ann"], found["eve"]
    assert ann["lines"] == []
    assert ann["tenant"] == "research"
    assert {client["tenant"] for client in ann["clients"]} == {"research"}
    assert "bob" not in json.dumps(ann)
    assert ann["hidden_clients"] == 2
    assert {client["tenant"] for client in eve["clients"]} >= {"research", "rivals"}


@pw.jit(timeout=0.3)
def never_ends(x: Any) -> Any:
    return jax.lax.while_loop(lambda x: x[0] < 2, lambda x: jnp.cos(x), x)


def test_warnings_and_device_time_come_to_the_page(cluster: pw.LocalCluster) -> None:
    with closing(Reader(cluster.address, period_s=0.1)) as reader:
        reader.start(START_S)

        def device_time() -> float:
            work(0.05)
            pieces = [one.work for one in list(reader.history) if one.work is not None]
            assert all(a.until_s == b.from_s for a, b in itertools.pairwise(pieces))
            return sum(seconds for piece in pieces for _, seconds in piece.device_s)

        until(lambda: device_time() > 0.0, "device time of clients")
        with pytest.raises(pw.ComputationTimeout):
            never_ends(jnp.ones(4)).block_until_ready()
        now = seen(reader, lambda s: any("run timed out" in one.text for one in s.lines), "a line")
    line = next(one for one in now.lines if "run timed out" in one.text)
    assert (line.process, line.level) == ("controller", "warning")
    assert "program=never_ends" in line.text
    assert abs(line.time_s - time.time()) < 3600  # the clock may jump


NOTEBOOK = """
import urllib.error, urllib.request, pw
from pw.cli import embedded
embedded.is_notebook = lambda: True
shown = pw.connect()._repr_html_()
link = shown.partition('href="')[2].partition('"')[0]
print(urllib.request.build_opener(urllib.request.HTTPCookieProcessor()).open(link).status)
"""


def test_commands_beside_the_page(cluster: pw.LocalCluster, tmp_path: Path) -> None:
    notebook = Program(tmp_path, ["-c", NOTEBOOK], PW_EMBEDDED_DEVICES="1")
    top = Program(tmp_path, ["-m", "pw.cli.main", "top", "--address", cluster.address])
    status = ["status", "--json", "--address", cluster.address]
    compared = Program(tmp_path, ["-m", "pw.cli.main", *status])
    bind = ["--bind", f"ipc://{tmp_path}/c", "--log-format", "json"]
    both = ["--dashboard", "--metrics", "tcp://127.0.0.1:0"]
    tmp_path.chmod(0o700)
    controller = Program(tmp_path, ["-m", "pw.cli.controller", *bind, *both])
    try:
        controller.until_says("pw dashboard: ")
        ((page, file),) = re.findall(r"pw dashboard: (\S+) .* is in ([^,]+),", controller.out)
        link = Path(file).read_text().strip()
        assert link.startswith(f"{page}?token=")
        assert Path(file).stat().st_mode & 0o077 == 0
        assert link.partition("token=")[2] not in controller.out + controller.err
        assert get(page)[0] == 403
        assert get(page, Authorization=f"Bearer {link.partition('token=')[2]}")[0] == 200
        for line in controller.err.splitlines():
            record = json.loads(line)
            assert record["level"] in ("info", "warning")
            assert datetime.fromisoformat(record["time"]).tzinfo is not None
            assert isinstance(record.get("client", 0), int), record
        codes = top.end(), compared.end(), notebook.end()
        assert codes == (0, 0, 0), notebook.err
    finally:
        for one in (top, compared, controller, notebook):
            one.kill()
    assert "island-1" in top.out
    assert notebook.out == "200\n"
    assert json.loads(compared.out)["slow"] == []


def test_a_run_becomes_a_span() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install opentelemetry-sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from pw.operating.dashboard.spans import NS, Spans

    provider, kept = sdk.TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    run = RunEvent("failed", "1.7", "1.9", 1, "step", ("east",), 0.25, "no room")
    Spans(provider).ended(1, to_builtins(run) | {"time_s": 1000.0})
    (span,) = kept.get_finished_spans()
    assert (span.name, span.start_time, span.end_time) == ("step", 999.75 * NS, 1000 * NS)
    assert span.attributes["pw.run"] == "1.7"
    assert span.status.description == "no room"


def test_totals_only_grow() -> None:
    totals = Totals()
    for value in (5, 7, 2, 3):
        totals.take("host", "hosts", {"launches": value})
    assert totals.of("hosts") == {"launches": 10}
