"""The json files of the suite: outcomes of plain JAX that are kept, and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.jax_suite.compare import Comparison
from tests.jax_suite.processes import FileRun, Outcome


class Baseline:
    """The outcomes of plain JAX, by file; kept on disk if there is a path."""

    def __init__(self, path: Path | None, settings: Mapping[str, str]) -> None:
        self.path = path
        self.settings = dict(settings)
        self.files: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            known = json.loads(path.read_text())
            if known["settings"] != self.settings:
                raise SystemExit(
                    f"{path} was made with {known['settings']}, and this run has {self.settings}; "
                    "name another file with --baseline"
                )
            self.files = known["files"]

    def get(self, file: str, match: str, sample: int) -> FileRun | None:
        """What is known about a file, if it was run as a whole or with the same selection."""
        known = self.files.get(file)
        if known is None or (known["match"], known["sample"]) not in (("", 1), (match, sample)):
            return None
        outcomes = {test: Outcome(**outcome) for test, outcome in known["outcomes"].items()}
        return FileRun(outcomes, known["broken"], known["seconds"], known["processes"])

    def put(self, file: str, match: str, sample: int, run: FileRun) -> None:
        self.files[file] = {"match": match, "sample": sample, **asdict(run)}
        if self.path is not None:
            write(self.path, {"settings": self.settings, "files": self.files})


def write_results(
    path: Path,
    platform: str,
    settings: Mapping[str, str],
    comparisons: Sequence[Comparison],
    runs: Mapping[str, FileRun],
) -> None:
    """Write the figures, the groups of failures, and each test's outcome."""
    files = {
        comparison.file: {
            **asdict(comparison),
            "failed": comparison.failed,
            "skipped": comparison.skipped,
            "percent": round(comparison.percent, 2),
            "run": asdict(runs[comparison.file]),
        }
        for comparison in comparisons
    }
    write(path, {"platform": platform, "settings": dict(settings), "files": files})


def not_passed(path: Path) -> dict[str, set[str]]:
    """The tests of each file that failed or were skipped in these results."""
    return {
        file: {test for group in (*found["failures"], *found["skips"]) for test in group["tests"]}
        for file, found in json.loads(path.read_text())["files"].items()
    }


def write(path: Path, content: object) -> None:
    """Replace a json file: a reader sees the old content or the new."""
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(content, indent=1) + "\n")
    beside.replace(path)
