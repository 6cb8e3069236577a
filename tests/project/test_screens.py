"""The pictures of `pw top` and of a notebook can be made again; they take long, and Chromium."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from docs.site import screens

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif("CI" in os.environ, reason="CI has no browser"),
]


def test_pw_top_is_drawn_with_what_runs() -> None:
    drawing = screens.top()
    assert "encoder_step" in drawing
    assert "island-2" in drawing
    assert set(re.findall(r"https?://[^/\"]+", drawing)) <= {
        "http://www.w3.org",
        "https://www.textualize.io",
    }


@pytest.mark.skipif(not any(map(shutil.which, screens.BROWSERS)), reason="there is no Chromium")
@pytest.mark.skipif(not screens.NOTEBOOK.exists(), reason="make docs has not run")
def test_a_notebook_is_drawn(tmp_path: Path) -> None:
    picture = tmp_path / "notebook.png"
    screens.notebook(picture)
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    sides = [int.from_bytes(data[at : at + 4]) for at in (16, 20)]
    assert sides == [screens.WIDTH, screens.HEIGHT]
    assert len(data) > 100_000, "it is empty"
