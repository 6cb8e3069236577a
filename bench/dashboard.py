"""What a dashboard costs a cluster: launches a second with an open page and without one, and an idle page.

Two clusters of one host each take turns. The first has no dashboard; the other has one, with the reader of an
event stream. Each call is a launch of a computation that adds one. Then nothing runs, and the processor
time of the controller and the worker is read while the page is open.
"""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections.abc import Callable

import pw
from bench import report
from bench.events import PROCESSOR, cases_on
from bench.measure import alternate
from bench.processor import busy_s
from pw.client.connection import current

OFF, ON = "no dashboard", "an open page"
IDLE_S = 20.0


def run(quick: bool) -> report.Result:
    """Measure launches and an idle page."""
    result = report.Result("dashboard", "launches a second, with and without an open page")
    with contextlib.ExitStack() as stack:
        cases: dict[str, dict[str, Callable[[], float]]] = {}
        idle = []
        for name, shows in ((OFF, False), (ON, True)):
            cluster = stack.enter_context(pw.LocalCluster(dashboard=shows, connect=False))
            if shows:
                threading.Thread(target=_look, args=(cluster.dashboard,), daemon=True).start()
                time.sleep(3.0)
            idle.append(_idle(cluster, 1.0 if quick else IDLE_S))
            for kind, case in cases_on(cluster, stack, quick).items():
                cases.setdefault(kind, {})[name] = case
        for kind, both in cases.items():
            samples = alternate(both, rounds=1 if quick else 15, warm_up=1)
            unit = "µs" if kind == PROCESSOR else "1/s"
            result.compare(samples, unit=unit, baseline=OFF, params={"calls": kind})
            if kind == "one by one":
                ratio = samples[ON].over(samples[OFF]).median
                result.at_least(
                    0.95, ratio, "launches a second with an open page, to those without"
                )
        words = "of a core for an idle page: controller, worker and dashboard"
        result.at_most(0.01, idle[1] - idle[0], words)
        current.use(None)
    return result


def _idle(cluster: pw.LocalCluster, seconds: float) -> float:
    """Return the part of a core that the daemons take, with the dashboard, while nothing runs."""
    pids = [*cluster.pids, *cluster.page_pids]
    before_s = busy_s(pids)
    time.sleep(seconds)
    return (busy_s(pids) - before_s) / seconds


def _look(link: str) -> None:
    """Read the page's stream until the cluster ends."""
    page, _, token = link.partition("?token=")
    request = urllib.request.Request(f"{page}events", headers={"Authorization": f"Bearer {token}"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request) as stream:
        for _ in stream:
            pass
