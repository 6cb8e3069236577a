"""Pictures of what people look at: `python -m docs.site.screens` writes them into docs/pictures.

- `top.svg` is `pw top`, beside a cluster with two clients.
- `notebook.png` is the notebook docs/notebooks/looking.md as `make docs` has run it; it needs Chromium.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from rich.console import Console

import pw
from docs.site.pictures import PICTURES
from pw.cli.top import drawn
from pw.operating.dashboard.reader import Reader

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs/_build/html/notebooks/looking.html"
WORKLOAD = ROOT / "tests/dashboard/workload.py"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1500, 2500
ALONE = """<style>
.bd-sidebar-primary, .bd-sidebar-secondary, .bd-header-article, .header-article, footer, .prev-next-footer
{ display: none !important }
.bd-article-container, .bd-content, .bd-page-width, .bd-main { max-width: none !important }
.bd-article { column-count: 2; column-gap: 3em; font-size: 90% }
.highlight, table, svg { break-inside: avoid }
</style>"""
"""Leaves of a page of the site its text only, in two columns."""
CLIENTS = (("encoder", "island-0", "island-1"), ("decoder", "island-1", "island-2"))
WATCHED_S = 8.0
"""How long the clients work before the picture is taken."""


def top() -> str:
    """Return `pw top` as SVG, beside a cluster of three islands on which two clients work."""
    with pw.LocalCluster(3, 2, 2, connect=False, device_memory="256MiB") as cluster:
        environment = os.environ | {"PW_ADDRESS": cluster.address or "", "PYTHONPATH": str(ROOT)}
        clients = [
            subprocess.Popen([sys.executable, str(WORKLOAD), *names], env=environment)
            for names in CLIENTS
        ]
        try:
            with closing(Reader(cluster.address or "")) as reader:
                reader.start(30.0)
                deadline_s = time.monotonic() + 60.0
                while reader.newest is None or len(reader.newest.runs) < 2:
                    if time.monotonic() > deadline_s:
                        raise TimeoutError("the clients have not begun to work")
                    time.sleep(0.1)
                time.sleep(WATCHED_S)
                console = Console(record=True, width=118, file=io.StringIO())
                console.print(drawn(reader.newest))
                drawing = console.export_svg(title="pw top")
                return re.sub(r"@font-face {.*?}", "", drawing, flags=re.S)  # from another server
        finally:
            for client in clients:
                client.kill()
                client.wait()


def notebook(to: Path, page: Path = NOTEBOOK) -> None:
    """Write the picture of a notebook of the site. Raises FileNotFoundError: no page, or no Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise FileNotFoundError("there is no Chromium: apt-get install chromium")
    alone = page.with_name("alone.html")
    alone.write_text(page.read_text().replace("</head>", f"{ALONE}</head>"))
    try:
        with tempfile.TemporaryDirectory() as profile:
            subprocess.run(
                [
                    *(browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"),
                    *(f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}"),
                    *("--virtual-time-budget=3000", f"--screenshot={to}", alone.as_uri()),
                ],
                check=True,
                capture_output=True,
                timeout=120,
            )
    finally:
        alone.unlink()


if __name__ == "__main__":
    (PICTURES / "top.svg").write_text(top())
    notebook(PICTURES / "notebook.png")
    print("docs/pictures/top.svg, docs/pictures/notebook.png")
