"""The source text of Python's standard library, a corpus that every machine with Python has.

A batch depends on (seed, step) only, so the pipeline and the reference read the same bytes.
"""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_HELD_OUT_FRACTION = 0.02


def source_files(root: Path) -> list[Path]:
    """Lists the .py files below `root`, sorted, without installed packages and tests."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found.extend(Path(folder, name) for name in names if name.endswith(".py"))
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Batch:
    """Bytes, and for each byte the next one; int32 `[micro_batches, rows, context]`."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Corpus:
    """The bytes of the training, and a held-out tail."""

    training: NDArray[np.uint8]
    held_out: NDArray[np.uint8]
    file_count: int

    @classmethod
    def standard_library(cls) -> Corpus:
        """Reads the sources of the running Python (about 10 MB)."""
        files = source_files(Path(sysconfig.get_paths()["stdlib"]))
        text = np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)
        split = int(len(text) * (1 - _HELD_OUT_FRACTION))
        return cls(training=text[:split], held_out=text[split:], file_count=len(files))

    def training_batch(
        self, *, seed: int, step: int, micro_batches: int, rows: int, context: int
    ) -> Batch:
        """Draws the random windows of one training step."""
        draw = np.random.default_rng((seed, step))
        return _windows(self.training, draw, micro_batches, rows, context)

    def held_out_batch(self, *, rows: int, context: int) -> Batch:
        """Draws one fixed batch of the held-out text."""
        return _windows(self.held_out, np.random.default_rng(0), 1, rows, context)


def _windows(
    text: NDArray[np.uint8], draw: np.random.Generator, micro_batches: int, rows: int, context: int
) -> Batch:
    starts = draw.integers(0, len(text) - context, size=(micro_batches, rows, 1))
    windows = text[starts + np.arange(context + 1)].astype(np.int32)
    return Batch(inputs=windows[..., :-1], targets=windows[..., 1:])
