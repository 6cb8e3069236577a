"""The copies of arrays in a host's memory, and how they are made to outlive a crash of its process.

The process around the host's actors puts all that is held where a crash does not reach it, again and
again, one time after the other (`Keeping`): what arrives meanwhile goes with the next time. The
controller hears of a copy when it is kept, so that a checkpoint is answered only for what is safe. A copy
that is not kept in time is dropped, and the controller hears that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pw.core.actor import Env
from pw.core.errors import CheckpointFailed, ErrorReport
from pw.core.ids import CONTROL
from pw.core.landing import Bytes
from pw.core.messages import Holding, Holdings, HoldsNoMore
from pw.core.sharding import Box
from pw.core.ticker import Ticker

Saved = tuple[int, Box, np.ndarray[Any, Any]]
"""An array, one of its boxes, and the bytes there (of any dtype and shape)."""

Keeping = Callable[[Sequence[Saved], Callable[[ErrorReport | None], None]], None]
"""See `pw.devices.host.membership.HostProcess.keep`."""

KEEP_S = 0.05
"""How long after a copy has arrived all are kept, so that those that arrive together are kept together."""

KEPT_WITHIN_S = 10.0
"""How long a copy may wait for that; the checkpoint that asked for it waits as well."""

LEAST_BYTES_PER_S = 100 << 20
"""So much is kept in a second at least: for much of it, a copy may wait longer."""

LOOK_S = 1.0
"""How often it is looked whether one has waited too long."""

KEPT_BYTES = 256 << 20
"""More than that is not kept where other hosts have copies as well: all of it is written each time."""

TOLD_AT_ONCE = 1000
"""Arrays of which the controller is told in one message that they are here."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Note to the store: copies have arrived that a crash of this process would take away."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """Note to the store: copies may have waited too long for being kept."""


class Held:
    """Copies in this host's memory; the only one that tells the controller of them.

    Args:
        env: the store's.
        handed_over: what the last incarnation of this host left.
        keep: puts copies where the next incarnation finds them; without, nothing can.
        has_others: whether other hosts are known, which have copies as well.
    """

    def __init__(
        self,
        env: Env,
        handed_over: Iterable[Saved],
        keep: Keeping | None,
        has_others: Callable[[], bool],
    ) -> None:
        self._env = env
        self._keep = keep
        self._has_others = has_others
        self._boxes: dict[int, dict[Box, Bytes]] = {}
        self._keeps = Ticker(env, KEEP_S, Keep())
        self._looks = Ticker(env, LOOK_S, Overdue())
        self._unkept: dict[tuple[int, Box], float] = {}
        """What a crash would take away, and since when; the controller has not been told of it."""
        self._keeping: frozenset[tuple[int, Box]] | None = None
        """What of that is being kept now; None while nothing is."""
        self._is_kept = True
        """Nothing has changed since keeping began that should be kept, or kept no more."""
        self._patience_s = KEPT_WITHIN_S
        self._left = False
        """All has been handed over to the next incarnation, which will tell of it."""
        for array, box, data in handed_over:
            self._boxes.setdefault(array, {})[box] = flat_bytes(data)

    def __len__(self) -> int:
        """How many arrays."""
        return len(self._boxes)

    def of(self, array: int) -> Mapping[Box, Bytes]:
        """The boxes of an array that are here."""
        return self._boxes.get(array, {})

    def saved(self) -> list[Saved]:
        """All of it."""
        return [
            (array, box, data)
            for array, boxes in self._boxes.items()
            for box, data in boxes.items()
        ]

    def leave(self) -> list[Saved]:
        """All of it, for the next incarnation; this one takes no more."""
        self._left = True
        return self.saved()

    @property
    def size_bytes(self) -> int:
        """Of all boxes together."""
        return sum(data.nbytes for boxes in self._boxes.values() for data in boxes.values())

    # --- what the controller hears -------------------------------------------------------------------

    def announce(self) -> None:
        """Tell the controller all that is held and kept, and that it is all."""
        keys = [(array, box) for array, boxes in self._boxes.items() for box in boxes]
        self._tell(key for key in keys if key not in self._unkept)
        self._env.send(CONTROL, HoldsNoMore())

    def _tell(self, keys: Iterable[tuple[int, Box]]) -> None:
        """So many arrays at a time that a message holds them, whatever the number of their boxes."""
        by_array: dict[int, list[Box]] = {}
        for array, box in keys:
            by_array.setdefault(array, []).append(box)
        holdings = [Holding(array, tuple(boxes)) for array, boxes in by_array.items()]
        for start in range(0, len(holdings), TOLD_AT_ONCE):
            self._env.send(CONTROL, Holdings(tuple(holdings[start : start + TOLD_AT_ONCE])))

    def skip(self, array: int, error: ErrorReport) -> None:
        """There will be no copy of an array here: nothing is to wait for it."""
        self._env.count("copies_skipped")
        self._env.send(CONTROL, Holdings((Holding(array, (), error),)))

    # --- what comes and goes -------------------------------------------------------------------------

    def hold(self, array: int, boxes: Mapping[Box, Bytes]) -> None:
        """Copies have arrived: keep them, and tell the controller then."""
        if self._left:
            return
        held = self._boxes.setdefault(array, {})
        for box in boxes:
            if self._keep is not None and box not in held:
                self._unkept[array, box] = self._env.now_s()
        held.update(boxes)
        self._tell((array, box) for box in boxes if (array, box) not in self._unkept)
        if self._unkept:
            self._keep_soon()
            self._looks.start()

    def forget(self, meant: Callable[[int], bool]) -> None:
        """These arrays are not wanted any more."""
        gone = [array for array in self._boxes if meant(array)]
        for array in gone:
            for box in self._boxes.pop(array):
                self._unkept.pop((array, box), None)
        if gone and not self._boxes:
            self._keep_soon()  # nothing, in place of what was

    # --- keeping -------------------------------------------------------------------------------------

    def _keep_soon(self) -> None:
        if self._keep is not None:
            self._is_kept = False
            self._keeps.start()

    def keep_all(self) -> None:
        """Have all kept, unless that is under way: its end looks again."""
        self._keeps.ticked(more=False)
        if self._keep is None or self._left or self._keeping is not None:
            return
        self._keeping, self._is_kept = frozenset(self._unkept), True
        self._patience_s = KEPT_WITHIN_S + self.size_bytes / LEAST_BYTES_PER_S
        if self.size_bytes > KEPT_BYTES and self._has_others():
            self._kept(None)
        else:
            self._keep(self.saved(), self._kept)

    def _kept(self, error: ErrorReport | None) -> None:
        """What was to be kept is, or will not be."""
        keeping, self._keeping = self._keeping or frozenset(), None
        if self._left:
            return
        if error is not None:
            self._drop(keeping, error)
        else:
            kept = [key for key in self._unkept if key in keeping]
            for key in kept:
                del self._unkept[key]
            self._tell(kept)
        if not self._is_kept:
            self._keeps.start()

    def look_for_overdue(self) -> None:
        """Drop what has waited too long."""
        before_s = self._env.now_s() - self._patience_s
        late = {key for key, since_s in self._unkept.items() if since_s <= before_s}
        if late and not self._left:
            words = (
                f"the copies on host {self._env.address.node} were not safe within "
                f"{self._patience_s:.0f} s, because its pw-worker process does not answer (is it stopped?). "
                "The arrays are as they were: call pw.checkpoint again when it goes on"
            )
            self._drop(late, ErrorReport.of(CheckpointFailed(words), self._env.address.node))
        self._looks.ticked(more=bool(self._unkept) and not self._left)

    def _drop(self, keys: Collection[tuple[int, Box]], error: ErrorReport) -> None:
        """These copies count as not made."""
        unkept = [key for key in self._unkept if key in keys]
        for array, box in unkept:
            del self._unkept[array, box]
            del self._boxes[array][box]
            if not self._boxes[array]:
                del self._boxes[array]
        arrays = dict.fromkeys(array for array, _ in unkept)
        if arrays:
            self._env.log("error", "copies are not kept", arrays=len(arrays), why=error.message)
        for array in arrays:
            self.skip(array, error)


def flat_bytes(data: np.ndarray[Any, Any]) -> Bytes:
    """The bytes of an array, without a copy where they lie one after the other."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
