"""`pw.status()` and what a notebook shows: plain attributes, tables, HTML; nothing of it waits for a value."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rich.console import Console

import pw
from pw.cli.requests import status_document
from pw.client.connection import current
from pw.client.connection.script import process_name, script_name
from pw.client.display import tables
from pw.client.looking.status import ClusterStatus
from pw.core import messages as msg
from pw.core.accounts import Spent
from pw.core.messages import SlowCause, SlowHost, TenantInfo
from pw.core.rights import Resource
from pw.testing import InProcessCluster
from tests.stages.daemons import BOUND_S, until
from tests.stages.inside import is_fetched
from tests.stages.stage import held, mesh_on, numbers, split

NASTY = "<script>alert('&')</script>"

TOLD = msg.Status(
    1,
    "0.1",
    "0.10",
    "share",
    (
        msg.IslandInfo(
            NASTY,
            "waiting",
            "cpu",
            "fake",
            (msg.HostInfo("east-0", NASTY, "joining", 17, 4, "tcp://e:1", True),),
            2,
            ("east-1",),
            3,
            1,
            5,
            6,
        ),
    ),
    (msg.HostInfo("s", "", "spare", 18, 4, "tcp://s:1", False),),
    (
        msg.ClientInfo(1, "pid 7", 0.5, 9, 2, 3, 1, 4, True, ()),
        msg.ClientInfo(2, NASTY, 1.0, 0, 0, 0, 0, 0, False, ("east-1",)),
    ),
    (msg.RunInfo("1.8", 1, "step", ("east",), 61.25, 2),),
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2, policy="priority") as cluster:
        yield cluster


class Tables(HTMLParser):
    """The texts in a piece of HTML, which has to be well formed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag in ("div", "table", "tr", "th", "td", "span")
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def html_of(thing: Any) -> list[str]:
    return Tables(thing._repr_html_()).texts


# --- pw.status ----------------------------------------------------------------------------------------


def test_slow_hosts_are_named() -> None:
    change = msgspec.structs.replace
    slow = SlowHost("b", "east", 1.62, 12.3, SlowCause.DEVICE)
    host = change(TOLD.islands[0].hosts[0], slow=slow)
    status = ClusterStatus.of(change(TOLD, islands=(change(TOLD.islands[0], hosts=(host,)),)), None)
    words = (
        "host b of island east is 1.6 × as slow as the median of its gangs for 12 s: "
        "its device computes longer"
    )
    assert repr(status).endswith(words)
    assert words in html_of(status)
    assert "as slow as" not in repr(ClusterStatus.of(TOLD, None))


def test_islands_that_are_still_to_come_are_said() -> None:
    assert "to come" not in ClusterStatus.of(TOLD, None).head
    starts = msgspec.structs.replace(TOLD, awaited_islands=2)
    assert ClusterStatus.of(starts, None).head.endswith("; 2 of its islands are still to come")


def test_the_status_has_plain_attributes() -> None:
    status = ClusterStatus.of(TOLD, "tcp://c:7777")
    assert (status.address, status.policy, status.devices) == ("tcp://c:7777", "share", 4)
    (island,) = status.islands
    assert (island.expected_hosts, island.missing, island.formed) == (2, ("east-1",), 3)
    assert [(host.name, host.state) for host in status.hosts] == [
        ("east-0", "joining"),
        ("s", "spare"),
    ]
    mine, other = status.clients
    assert (mine.share, mine.priority, mine.runs, mine.is_me) == (0.5, 9, 4, True)
    assert (other.share, other.priority, other.is_me) == (1.0, 0, False)
    (run,) = status.runs
    assert (run.run, run.client, run.function, run.islands) == ("1.8", 1, "step", ("east",))


def test_tenants_are_shown_where_there_are_several() -> None:
    one, other = TOLD.clients
    names = lambda told: ClusterStatus.of(told, None).tables()[2].columns  # noqa: E731
    assert "tenant" not in names(TOLD)
    both = (msgspec.structs.replace(one, tenant="a"), msgspec.structs.replace(other, tenant="b"))
    assert names(msgspec.structs.replace(TOLD, clients=both))[2] == "tenant"
    hiding = msgspec.structs.replace(TOLD, hidden_clients=3, hidden_runs=2)
    assert "tenant" in names(hiding)
    assert (
        "not shown: 3 clients of other tenants, with 2 runs" in ClusterStatus.of(hiding, None).head
    )


def test_each_resource_has_a_column() -> None:
    amounts = {resource.value: 7 for resource in Resource} | {"runs": 1}
    one = TenantInfo("red", 1.0, amounts, {"names": 9}, msgspec.structs.asdict(Spent()))
    told = msgspec.structs.replace(TOLD, tenants=(one,))
    table, _ = ClusterStatus.of(told, None).by_tenant.tables()
    assert {resource.value for resource in Resource} < set(table.columns)
    (row,) = table.rows
    assert dict(zip(table.columns, row, strict=True))["names"] == "7 of 9"


def test_the_names_in_json_documents_stay() -> None:
    told = status_document("tcp://c:7777", TOLD)
    (island,), (spare,), (run,) = told["islands"], told["waiting_hosts"], told["runs"]
    assert (island["island"], island["epoch"], island["missing"]) == (NASTY, 3, ("east-1",))
    (host,) = island["hosts"]
    assert (host["node"], host["process"], host["joined"]) == ("east-0", 17, False)
    assert (spare["node"], spare["state"], spare["island"]) == ("s", "spare", "")
    assert [(c["client"], c["runs_in_flight"]) for c in told["clients"]] == [(1, 4), (2, 0)]
    assert (run["run"], run["program"], run["segments_left"]) == ("1.8", "step", 2)


def test_it_prints_as_the_same_tables_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    status = ClusterStatus.of(TOLD, "tcp://c:7777")
    printed = repr(status)
    for words in (
        "controller tcp://c:7777",
        NASTY,
        "1/2",
        "east-0",
        "0.5",
        "pid 7 (this one)",
        "61.2",
    ):
        assert words in printed
    assert "\x1b" not in printed
    console = Console(width=tables.WIDTH_WITHOUT_TERMINAL, highlight=False)
    with console.capture() as capture:
        console.print(status)
    assert [line.rstrip() for line in capture.get().splitlines()] == printed.splitlines()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, repr(status).splitlines())) <= 60


def test_it_is_html_in_which_nothing_is_code() -> None:
    html = ClusterStatus.of(TOLD, None)._repr_html_()
    assert "<script" not in html
    texts = Tables(html).texts
    assert NASTY in texts
    assert any("controller in this process" in text for text in texts)
    quiet = msgspec.structs.replace(TOLD, runs=())
    assert "no runs" in html_of(ClusterStatus.of(quiet, None))


@pytest.mark.parametrize(
    ("program", "module", "name"),
    [
        ("/home/ann/train.py", "", "train.py"),
        ("/venv/examples/train_lm.py", "examples.train_lm", "examples.train_lm"),
        ("/venv/pytest/__main__.py", "pytest.__main__", "pytest"),
        ("-c", "", "python -c"),
        ("", "", "python"),
        ("/venv/ipykernel_launcher.py", "ipykernel_launcher", "Study.ipynb"),
        ("/home/ann/a\nb\udc80.py", "", "a?b?.py"),
    ],
)
def test_clients_are_called_after_their_scripts(
    program: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = types.ModuleType("__main__")
    main.__spec__ = importlib.machinery.ModuleSpec(module, None) if module else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr("sys.argv", [program])
    monkeypatch.setenv("JPY_SESSION_NAME", "/home/ann/Study.ipynb")
    assert script_name() == name
    if name.endswith(".ipynb"):
        monkeypatch.delenv("JPY_SESSION_NAME")
        assert script_name() == "notebook"


def test_the_status_of_a_cluster(cluster: InProcessCluster) -> None:
    other = cluster.client(share=2.5, priority=7)
    status = pw.status()
    assert [island.name for island in status.islands] == ["island-0", "island-1"]
    assert {host.state for host in status.hosts} == {"ready"}
    assert status.devices == 4
    me = next(client for client in status.clients if client.is_me)
    assert (me.number, me.name) == (current.runtime().client, process_name())
    asked = next(client for client in status.clients if client.number == other.client)
    assert (asked.share, asked.priority, asked.is_me) == (2.5, 7, False)
    other.close()
    until(lambda: len(pw.status().clients) == 1, "the other client has left")
    mesh = mesh_on(0)
    with held(cluster):
        x = pw.jit(lambda x: x + 1, mesh=mesh)(numbers(2))
        until(lambda: pw.status().runs, "a run is in flight")
        (run,) = pw.status().runs
        assert (run.function, run.islands) == ("<lambda>", ("island-0",))
    x.block_until_ready()


def test_a_controller_that_does_not_answer(cluster: InProcessCluster) -> None:
    gate = threading.Event()
    cluster.thread.loop.call_soon_threadsafe(gate.wait, BOUND_S)
    with pytest.raises(pw.ConnectionFailed, match=r"controller .* has not answered within 0\.05 s"):
        pw.status(timeout_s=0.05)
    with ThreadPoolExecutor(1) as other:
        later = other.submit(pw.status, timeout_s=BOUND_S)
        assert not gate.is_set()
        gate.set()
        assert later.result(BOUND_S).devices == 4, "it answers when it can"


# --- what a notebook shows ----------------------------------------------------------------------------


class Kernel:
    """What stands for IPython in the kernel of a notebook."""

    kernel = object()


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython: Any = types.ModuleType("IPython")
    ipython.get_ipython = Kernel
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def test_a_small_array_shows_its_value(cluster: InProcessCluster) -> None:
    mesh = mesh_on(0)
    x = pw.put(numbers(4), sharding=split(mesh))
    x.block_until_ready()
    np.asarray(x)
    texts = html_of(x)
    for shown in ("(4,)", "float32", f"{P('x')}", "ready", "[0., 1., 2., 3.]"):
        assert shown in texts
    assert "2 devices of island island-0 (cpu)" in texts


def test_a_large_array_is_never_fetched(cluster: InProcessCluster) -> None:
    x = pw.put(numbers(5000), sharding=split(mesh_on(0)))
    x.block_until_ready()
    until(lambda: "ready" in html_of(x), "it is known to exist")
    assert "value" not in html_of(x)
    assert not is_fetched(x)


def test_an_array_that_is_not_there_yet(cluster: InProcessCluster, notebook: None) -> None:
    mesh = mesh_on(0)
    with held(cluster):
        small = pw.jit(lambda x: x + 1, mesh=mesh)(numbers(2))
        large = pw.jit(lambda x: x + 1, mesh=mesh)(numbers(5000))
        for x in (small, large):
            assert any("not known yet" in text for text in html_of(x))
            shown = x._repr_mimebundle_()
            assert "not known yet" in shown["text/plain"]
            assert Tables(shown["text/html"]).texts == html_of(x)
    small.block_until_ready()


def test_arrays_that_are_gone_or_failed(cluster: InProcessCluster) -> None:
    mesh = mesh_on(0)
    x = pw.put(numbers(4), sharding=split(mesh))
    x.delete()
    assert any(text.startswith("gone: ") and "delete()" in text for text in html_of(x))
    nan = pw.jit(jax.numpy.log, mesh=mesh, check_nans=True)(np.float32(-1))
    with pytest.raises(pw.NaNFound):
        nan.block_until_ready()
    until(lambda: any("failed: NaNFound" in text for text in html_of(nan)), "it shows the error")


def test_outside_of_notebooks_the_text_of_an_array_is_its_value(cluster: InProcessCluster) -> None:
    x = pw.put(numbers(2), sharding=split(mesh_on(0)))
    assert x._repr_mimebundle_() == {}


def test_devices_and_what_they_are_arranged_in(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    part = devices.add_slice(devices=2, island="island-1")
    assert html_of(part)[:4] == ["Slice", "island", "island-1", "devices"]
    assert "0 of 2" in html_of(part.devices[0])
    assert "island-1" in html_of(devices)


def test_in_a_notebook_its_text_is_text_and_is_not_displayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rich takes a console there for one that displays."""
    from rich import console

    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    text = tables.plain("a cluster", [tables.Table("Hosts", ("host", "pid"), (("a", 1),))])
    assert text.startswith("a cluster")
    assert "host" in text
