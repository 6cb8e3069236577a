"""The page in a real browser: skipped where there is none. `PW_TEST_PICTURES=FOLDER` keeps its pictures."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import pw
from tests.stages.daemons import until
from tests.stages.programs import ROOT

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not BROWSER, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.skipif("CI" in os.environ, reason="CI has no browser"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")

STEP_S = 60.0
WIDE, NARROW = {"width": 1440, "height": 1180}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(3, 2, 2, dashboard=True, connect=False, device_memory="256MiB") as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        one = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield one
        one.close()


@pytest.fixture
def page(browser: Any, cluster: pw.LocalCluster) -> Iterator[Any]:
    context = browser.new_context(viewport=WIDE, color_scheme="dark")
    one = context.new_page()
    complaints: list[str] = []
    one.on("pageerror", lambda error: complaints.append(str(error)))
    one.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    foreign: list[str] = []
    own = urlsplit(cluster.dashboard).netloc
    one.on(
        "request",
        lambda asked: (
            foreign.append(asked.url) if urlsplit(asked.url).netloc not in (own, "") else None
        ),
    )
    one.goto(cluster.dashboard)
    one.wait_for_selector(".island", timeout=STEP_S * 1e3)
    yield one
    assert "token" not in one.url
    assert not complaints
    assert not foreign
    context.close()


@pytest.fixture
def clients(cluster: pw.LocalCluster, tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = os.environ | {"PW_ADDRESS": cluster.address, "PYTHONPATH": str(ROOT)}
    started = []
    for name, *islands in (
        ("encoder", "island-0", "island-1"),
        ("decoder", "island-1", "island-2"),
    ):
        script = shutil.copy(Path(__file__).with_name("workload.py"), tmp_path / f"{name}.py")
        started.append(subprocess.Popen([sys.executable, script, name, *islands], env=environment))
    yield started
    for one in started:
        one.kill()
        one.wait()


def keep(page: Any, name: str, *, whole: bool = False) -> None:
    """Keep a picture, if they are wanted."""
    if folder := os.environ.get("PW_TEST_PICTURES"):
        page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=whole)


def text(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def wait_for(page: Any, script: str) -> None:
    """Wait until an expression is true; the page's own policy forbids Playwright's way."""
    end_s = time.monotonic() + STEP_S
    while not page.evaluate(f"Boolean({script})"):
        assert time.monotonic() < end_s, f"never true: {script}"
        page.wait_for_timeout(100)


def test_a_run_starts_and_a_host_is_killed(
    page: Any, cluster: pw.LocalCluster, clients: list[subprocess.Popen[bytes]]
) -> None:
    wait_for(page, "document.querySelectorAll('#runs tbody tr').length > 3")
    wait_for(page, "picture && picture.rows.length >= 6 && now.transfers.length > 2")
    wait_for(page, "history.length > 30 && now.rates.launches > 10")
    assert "encoder_step" in text(page, "#runs")
    first = page.evaluate("now.sample")
    wait_for(page, f"now.sample > {first}")  # the picture moves
    keep(page, "dashboard", whole=True)
    page.click("#theme")
    keep(page, "dashboard-light")
    page.click("#theme")

    page.keyboard.press("w")
    wait_for(page, "document.querySelector('#dialog pre')")
    page.keyboard.press("Escape")
    page.keyboard.press("q")
    wait_for(page, "document.querySelector('#dialog .body p')?.textContent.includes('policy')")
    page.keyboard.press("Escape")
    page.click("#runs button.link >> nth=0")
    wait_for(page, "document.querySelectorAll('#dialog table').length >= 2")
    keep(page, "dashboard-plan")
    page.keyboard.press("Escape")
    page.click(".island >> nth=0")
    wait_for(page, "document.querySelectorAll('#dialog tbody tr').length == 4")
    keep(page, "dashboard-island")
    page.keyboard.press("Escape")
    with page.expect_download(timeout=STEP_S * 1e3) as saved:
        page.keyboard.press("t")
    assert '"traceEvents"' in Path(saved.value.path()).read_text()
    page.keyboard.press("Escape")

    pid = cluster.hosts[0].runtime_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_for(page, "now.happenings.some(one => one.what === 'lost')")
    wait_for(page, "now.islands.every(one => one.state === 'ready') && now.islands[0].formed > 1")
    assert "island-0" in text(page, "#happenings")
    wait_for(page, "now.lines.some(one => one.process === 'controller')")
    assert "island left its epoch" in text(page, "#log")
    assert page.evaluate("$('#strip canvas').spots.length") > 10
    wait_for(page, "now.rates.launches > 5")
    keep(page, "dashboard-recovered", whole=True)
    page.set_viewport_size(NARROW)
    wait_for(page, f"document.documentElement.scrollWidth <= {NARROW['width']}")
    keep(page, "dashboard-narrow")


def test_slow_and_closed_browsers_harm_nobody(
    browser: Any, page: Any, cluster: pw.LocalCluster
) -> None:
    link = urlsplit(cluster.dashboard)
    token = link.query.partition("=")[2]
    idle = []
    for _ in range(20):  # they ask for the stream, and never read
        one = socket.create_connection((link.hostname, link.port))
        one.sendall(
            f"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        )
        idle.append(one)
    for _ in range(5):
        context = browser.new_context()
        other = context.new_page()
        other.goto(cluster.dashboard)
        context.close()
    before = page.evaluate("now.time_s")
    wait_for(page, f"now.time_s > {before} + 5")
    for one in idle:
        one.close()
    until(lambda: page.evaluate("now.trouble") == "", "a picture that is not old")


MANY = """(() => {
  const [island] = now.islands, [host] = island.hosts;
  const list = (length, make) => Array.from({length}, (_, i) => make(i));
  const name = (pod, at) => `pod-${pod % 16}-host-${at % 32}`;
  const hosts = pod => list(32, at => ({...host, name: name(pod, at), use: Math.random()}));
  const islands = list(16, pod =>
    ({...island, name: `pod-${pod}`, hosts: hosts(pod), expected_hosts: 32, devices: 128}));
  now = {...now, islands, transfers: list(1024, i => [name(i, i), name(i * 7, i * 5), 1e6 * i])};
  stream.close();
  draw();
})()"""


def test_512_hosts_are_drawn_by_island(page: Any) -> None:
    page.evaluate(MANY)
    assert page.locator(".island").count() == 16
    assert page.locator(".cell").count() == 512
    assert "by island" in text(page, "#transfers")
    keep(page, "dashboard-512")
