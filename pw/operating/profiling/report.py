"""`Profile`: where the time of a block went and what to change, in about ten lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from pw.client.display.tables import Shown, Table, bar
from pw.core.sizes import size_in_words
from pw.operating.profiling.work import FunctionWork, Work
from pw.operating.timeline.timeline import Timeline

LARGE = 0.2
"""Part of the time that is worth advice."""
SHORT_S = 1e-3
"""Seconds of computing below which the call itself costs more."""
BUSY = 0.6
"""Devices that compute for less of the time in which some of them do could do more."""
NAMED = 2
"""Functions, ways and clients that a row names."""


@dataclass(slots=True, repr=False)
class Profile(Shown):
    """Where the time of a block went; prints as tables. It is filled when the block has ended.

    Attributes:
        length_s: of the block, in seconds.
        parts_s: seconds of "devices", "transfers", "other clients", "hosts", "controller" and "client". A
            moment belongs to the first of them that has something under way: they add up to `length_s`.
        calls: how many calls the block made.
        devices: how many devices computed for this client.
        busy: the part of the time, from 0 to 1, in which these devices computed, on average.
        functions: names, counts and device time in seconds of the functions that ran, the longest first.
        advice: what to change, the most important first.
        notes: what the timeline lacks; empty if nothing.
    """

    length_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    devices: int = 0
    busy: float = 0.0
    functions: tuple[FunctionWork, ...] = ()
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _mostly: dict[str, str] = field(default_factory=dict)
    """Words about some parts."""

    def take(self, timeline: Timeline, client: int, sent_s: Mapping[int, float]) -> None:
        """Become the profile of a client's work in a timeline (see `Work`)."""
        work = Work(timeline, client, sent_s)
        self.length_s = work.length_s
        self.parts_s = dict(work.parts())
        self.calls, self.devices, self.busy = len(sent_s), len(work.devices), work.busy
        self.functions = tuple(work.functions())
        self.notes = tuple(timeline.notes)
        self._mostly = {
            "devices": ", ".join(
                f"{one.name} {one.calls} × {_time(one.device_s / one.calls)}"
                for one in self.functions[:NAMED]
            ),
            "transfers": ", ".join(
                f"{way} {size_in_words(size)}" for way, size in work.routes()[:NAMED]
            ),
            "other clients": ", ".join(work.neighbours()[:NAMED]),
        }
        large = [name for name, part in self._of_all() if part >= LARGE]
        large.sort(key=lambda name: -self.parts_s[name])
        advice: dict[str, str] = {}
        for name in large:
            for words in self._advised(name, work):
                advice.setdefault(words.partition(": ")[2], words)  # two parts may have one cause
        self.advice = tuple(advice.values())

    def _of_all(self) -> Iterator[tuple[str, float]]:
        return ((name, part_s / (self.length_s or 1.0)) for name, part_s in self.parts_s.items())

    def _advised(self, name: str, work: Work) -> Iterator[str]:
        """Yield what to change about a large part."""
        each_s = work.busy * work.length_s * self.devices / max(1, self.calls)
        if name == "client":
            yield (
                "client: the devices wait for the script. Call ahead, read results of earlier steps, and make "
                "inputs beside the loop, with pw.stream"
            )
        elif name in ("controller", "hosts"):
            program, late_s = work.latest_start()
            if late_s > self.parts_s[name] / 2 and late_s > LARGE * self.length_s:
                yield (
                    f"{name}: a call of {program!r} waited {_time(late_s)} for its launch: it was compiled, or "
                    "its devices were not free. If it was its first call, make one before the loop"
                )
            elif each_s < SHORT_S:
                yield (
                    f"{name}: a call computes for {_time(each_s)} only. Do several steps in one call: "
                    "jax.lax.fori_loop or scan in a pw.jit function, or a pw.program of many calls"
                )
            elif name == "controller":
                yield "controller: calls wait to be launched. Call ahead, without a wait in each step"
            else:
                yield (
                    "hosts: they prepare what they were launched, or run Python functions. `pw why` and "
                    "pw.trace show which"
                )
        elif name == "transfers":
            ways = [way for way, _ in work.routes()]
            yield (
                "transfers: read less, or less often, and feed with pw.stream"
                if ways and "→" not in ways[0]
                else f"transfers: {ways[0]} carries the most. Lay arrays as their consumer needs them, and "
                "functions that exchange much on one island; pw.plan shows the ways"
                if ways
                else "transfers: pw.trace shows them"
            )
        elif name == "other clients":
            yield (
                f"other clients: {work.neighbours()[0]} uses the same devices. Ask for others, or for a larger "
                "share: pw.connect(share=...)"
            )
        elif self.busy * self.length_s < BUSY * self.parts_s[name]:
            yield (
                f"devices: each computes for {self.busy:.0%} of the time, and waits for the others in "
                "between. Give them equal work: more microbatches, other stages (pw.pipeline), another sharding"
            )
        elif self.parts_s[name] == max(self.parts_s.values()):
            yield (
                f"devices: they are the limit. The most time goes into {self.functions[0].name!r}: make it "
                "smaller, divide it over more devices, or use a shorter dtype"
            )

    @property
    def head(self) -> str:
        """One line about the block."""
        calls = f"{self.calls} call{'' if self.calls == 1 else 's'}"
        devices = f"{self.devices} device{'' if self.devices == 1 else 's'}"
        return f"{self.length_s:.2f} s, {calls}; {devices} computed for {self.busy:.0%} of the time"

    def tables(self) -> tuple[Table, ...]:
        """Return the parts."""
        rows = {
            "part": lambda name, _: name,
            "time": lambda name, _: _time(self.parts_s[name]),
            "of all": lambda _, part: f"{part:.0%}",
            "": lambda _, part: bar(part),
            "mostly": lambda name, _: self._mostly.get(name, ""),
        }
        return (Table.of("Where the time went", self._of_all(), rows),)

    def foot(self) -> tuple[str, ...]:
        """Return what to change, and what is missing."""
        return *self.advice, *self.notes


def _time(seconds: float) -> str:
    """Return a time with its unit: "1.62 s", "9.0 ms", "40 µs"."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"
