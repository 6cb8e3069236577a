"""`pw top`: the snapshots of a cluster in a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import closing

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pw.client.display.tables import bar
from pw.core.errors import ConnectionFailed
from pw.core.sizes import size_in_words
from pw.operating.dashboard.reader import PERIOD_S, Reader
from pw.operating.dashboard.snapshot import Snapshot

PIPED_S = 0.1
"""Time between two snapshots for a pipe."""
WITH_RATES = 10
"""Number of the first snapshot that has rates: counters have been read twice."""
RUNS = 12
EVENTS = 6


def show(address: str, timeout_s: float) -> None:
    """Draw until Ctrl-C; into a pipe, once. Raises ConnectionFailed if no controller answers in time."""
    console = Console(highlight=False)
    is_piped = not console.is_terminal
    with closing(Reader(address, PIPED_S if is_piped else PERIOD_S)) as reader:
        snapshots = threading.Semaphore(0)
        reader.listeners.append(lambda _: snapshots.release())
        reader.start(timeout_s)
        if is_piped:
            until_s = time.monotonic() + timeout_s
            for _ in range(WITH_RATES):
                snapshots.acquire(timeout=max(0.0, until_s - time.monotonic()))
            if reader.newest is None:
                raise ConnectionFailed(f"the controller has told nothing within {timeout_s:g} s")
            console.print(drawn(reader.newest))
            return
        try:
            with Live(console=console, screen=True, auto_refresh=False) as live:
                while True:
                    if reader.newest is not None:
                        live.update(drawn(reader.newest), refresh=True)
                    time.sleep(0.5)
        except KeyboardInterrupt:
            return


def drawn(now: Snapshot) -> RenderableType:
    """Return a snapshot as tables."""
    rates = now.rates
    head = Text.assemble(
        ("pw top ", "bold"),
        f"{now.address}  {time.strftime('%H:%M:%S', time.localtime(now.time_s))}  policy {now.policy}\n",
        f"{rates.runs:.0f} runs/s  {rates.launches:.0f} launches/s  "
        f"{size_in_words(int(rates.sent_bytes))}/s  use {_percent(rates.use)}  "
        f"{rates.in_flight} in flight  {rates.queued} queued",
    )
    parts: list[RenderableType] = [head]
    if now.trouble:
        parts.append(Text(f"old: {now.trouble}", "bold red"))
    parts += [Text(one.words, "bold yellow") for one in now.slow]
    parts.append(
        _table(
            ("island", "state", "hosts", "use", "", "memory", "launched", "queued"),
            [
                (
                    one.name,
                    one.state,
                    f"{len(one.hosts)}/{one.expected_hosts}",
                    _percent(one.use),
                    bar(one.use),
                    _bytes(one.used_bytes),
                    str(one.launched),
                    str(one.queued),
                )
                for one in now.islands
            ],
        )
    )
    parts.append(
        _table(
            ("client", "tenant", "share", "use", "", "runs", "queued", "mean wait", "arrays"),
            [
                (
                    one.name + (f" (silent for {one.silent_s:.0f} s)" if one.silent_s else ""),
                    one.tenant,
                    f"{one.share:g}",
                    _percent(one.use),
                    bar(one.use),
                    str(one.runs),
                    str(one.queued),
                    f"{one.waited_s / one.launches * 1e3:.1f} ms" if one.launches else "–",
                    _bytes(one.arrays_bytes),
                )
                for one in now.clients
            ],
        )
    )
    oldest = sorted(now.runs, key=lambda run: -run.age_s)[:RUNS]
    runs = [(r.run, r.program, ", ".join(r.islands), f"{r.age_s:.2f} s") for r in oldest]
    parts.append(_table(("run", "program", "islands", "since"), runs))
    parts += [Text(one.words, "dim") for one in now.happenings[-EVENTS:]]
    return Group(*parts)


def _table(columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), expand=False)
    for name in columns:
        table.add_column(name, no_wrap=name not in ("islands", "client"))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{part:.0%}"


def _bytes(size: int | None) -> str:
    return "–" if size is None else size_in_words(size)
