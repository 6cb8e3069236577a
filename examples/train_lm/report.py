"""The output of a training run: a live bar on a terminal, or a line every few seconds."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LINE_EVERY_S = 5.0


class TrainingProgress:
    """Shows a training run on the console; a context manager.

    It measures speed from the end of the first step, without compilation.
    """

    def __init__(self, console: Console, *, steps: int | None, seconds: float, step_tokens: int):
        self._console = console
        self._steps = steps
        self._seconds = seconds
        self._step_tokens = step_tokens
        self._started_s = time.monotonic()
        self._first_step_s: float | None = None
        self._last_line_s = -_LINE_EVERY_S
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            TextColumn("{task.fields[line]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task(
            "training", total=steps or seconds, line="compiling the stages"
        )
        self.tokens_per_s = 0.0

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def step_done(self, step: int, loss: float) -> None:
        """Shows the loss of a finished step; steps count from 0."""
        now_s = time.monotonic()
        if self._first_step_s is None:
            self._first_step_s = now_s
        else:
            self.tokens_per_s = step * self._step_tokens / (now_s - self._first_step_s)
        line = (
            f"step {step + 1:4d}   loss {loss:.3f} nats/byte   {self.tokens_per_s:6,.0f} tokens/s"
        )
        done = step + 1 if self._steps else now_s - self._started_s
        self._progress.update(self._task, completed=done, line=line)
        if not self._console.is_terminal and now_s - self._last_line_s >= _LINE_EVERY_S:
            self._last_line_s = now_s
            self._console.print(line, highlight=False)
