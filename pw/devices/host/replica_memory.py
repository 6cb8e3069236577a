"""The replicas in a host's memory, and how they outlive a crash of its process.

The process around the host's actors writes all replicas to a place that survives a crash, one time
after the other (`Keeping`); replicas that arrive meanwhile are written the next time. The
controller hears of a replica when it is kept, so that a checkpoint is answered only for safe
data. A replica that is not kept in time is dropped, and the controller hears that as well.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pw.core.actors.actor import Env, Part
from pw.core.actors.ticker import Ticker
from pw.core.errors import CheckpointFailed, ErrorReport
from pw.core.ids import CONTROL
from pw.core.landing import Bytes
from pw.core.messages import Holding, Holdings, HoldsNoMore
from pw.core.sharding import Box


class Replica(NamedTuple):
    """One box of an array, and the bytes there."""

    array: int
    box: Box
    data: np.ndarray[Any, Any]
    """Value of the box, of any dtype and shape."""
    proof: bytes = b""
    """Proof for the controller that a controller has offered the replica (`OfferReplica`)."""


Keeping = Callable[[Sequence[Replica], Callable[[ErrorReport | None], None]], None]
"""See `pw.devices.host.membership.HostProcess.keep`."""

KEEP_S = 0.05
"""Seconds that a replica waits for others, so that they are kept together."""

KEPT_WITHIN_S = 10.0
"""Seconds that a replica, and the checkpoint that asked for it, wait until it is kept."""

LEAST_BYTES_PER_S = 100 << 20
"""The least speed of keeping: many bytes may take longer."""

LOOK_S = 1.0
"""Time between two looks for replicas that have waited too long."""

KEPT_BYTES = 256 << 20
"""More bytes are not kept if other hosts have replicas as well: each time writes all of them."""

TOLD_AT_ONCE = 1000
"""Arrays in one message to the controller."""


class ReplicaMemory(Part):
    """The replicas in this host's memory; only this part tells the controller of them.

    Args:
        env: the store's.
        inherited: the replicas that the last incarnation of this host left.
        keep: puts replicas where the next incarnation finds them; None if there is no such place.
        least_bytes_per_s: the speed at which they are kept at least.
        kept_bytes: more bytes are not kept if other hosts have replicas as well.
        told_at_once: arrays in one message to the controller.
    """

    def __init__(
        self,
        env: Env,
        inherited: Iterable[Replica],
        keep: Keeping | None,
        least_bytes_per_s: int = LEAST_BYTES_PER_S,
        kept_bytes: int = KEPT_BYTES,
        told_at_once: int = TOLD_AT_ONCE,
    ) -> None:
        self.least_bytes_per_s, self.kept_bytes = least_bytes_per_s, kept_bytes
        self.told_at_once = told_at_once
        self._env = env
        self._keep = keep
        self.has_others = False
        """Other hosts are known, which may have replicas as well."""
        self._boxes: dict[int, dict[Box, Bytes]] = {}
        self._proofs: dict[int, bytes] = {}
        """Proofs of the arrays that other hosts gave."""
        self._keeps = Ticker(env, KEEP_S, self._keep_all)
        self._looks = Ticker(env, LOOK_S, self._drop_overdue)
        self._unkept: dict[tuple[int, Box], float] = {}
        """Replicas that are not safe, and since when; the controller does not know them."""
        self._keeping: frozenset[tuple[int, Box]] | None = None
        """Replicas of `_unkept` that are being kept now; None while none is."""
        self._is_kept = True
        """True if nothing has changed since the last time began."""
        self._patience_s = KEPT_WITHIN_S
        self._left = False
        """The next incarnation has all replicas, and will announce them."""
        for array, box, data, proof in inherited:
            self._boxes.setdefault(array, {})[box] = flat_bytes(data)
            if proof:
                self._proofs[array] = proof

    def __len__(self) -> int:
        return len(self._boxes)

    def of(self, array: int) -> Mapping[Box, Bytes]:
        """Return the boxes of an array that are here."""
        return self._boxes.get(array, {})

    def all(self) -> list[Replica]:
        """Return all replicas."""
        return [
            Replica(array, box, data, self._proofs.get(array, b""))
            for array, boxes in self._boxes.items()
            for box, data in boxes.items()
        ]

    def leave(self) -> list[Replica]:
        """Return all replicas for the next incarnation; this one takes no more."""
        self._left = True
        return self.all()

    @property
    def size_bytes(self) -> int:
        """Size of all boxes together."""
        return sum(data.nbytes for boxes in self._boxes.values() for data in boxes.values())

    def announce(self) -> None:
        """Tell the controller all replicas that are kept, and that these are all."""
        keys = [(array, box) for array, boxes in self._boxes.items() for box in boxes]
        self._tell(key for key in keys if key not in self._unkept)
        self._env.send(CONTROL, HoldsNoMore())

    def _tell(self, keys: Iterable[tuple[int, Box]]) -> None:
        """Tell the controller of replicas, in messages of bounded size."""
        by_array: dict[int, list[Box]] = {}
        for array, box in keys:
            by_array.setdefault(array, []).append(box)
        holdings = [
            Holding(array, tuple(boxes), None, self._proofs.get(array, b""))
            for array, boxes in by_array.items()
        ]
        for start in range(0, len(holdings), self.told_at_once):
            part = holdings[start : start + self.told_at_once]
            self._env.send(CONTROL, Holdings(tuple(part)))

    def skip(self, array: int, error: ErrorReport) -> None:
        """Tell the controller that there will be no replica of an array here."""
        self._env.count("copies_skipped")
        self._env.send(CONTROL, Holdings((Holding(array, (), error),)))

    def hold(self, array: int, boxes: Mapping[Box, Bytes], proof: bytes = b"") -> None:
        """Add replicas; the controller hears of them when they are kept."""
        if self._left:
            return
        if proof:
            self._proofs[array] = proof
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
        """Remove the replicas of these arrays."""
        gone = [array for array in self._boxes if meant(array)]
        for array in gone:
            self._proofs.pop(array, None)
            for box in self._boxes.pop(array):
                self._unkept.pop((array, box), None)
        if gone and not self._boxes:
            self._keep_soon()  # nothing, in place of the earlier replicas

    def _keep_soon(self) -> None:
        if self._keep is not None:
            self._is_kept = False
            self._keeps.start()

    def _keep_all(self) -> bool:
        """Have all replicas kept, unless that is under way: its end looks again."""
        if self._keep is None or self._left or self._keeping is not None:
            return False
        self._keeping, self._is_kept = frozenset(self._unkept), True
        self._patience_s = KEPT_WITHIN_S + self.size_bytes / self.least_bytes_per_s
        if self.size_bytes > self.kept_bytes and self.has_others:
            self._kept(None)
        else:
            self._keep(self.all(), self._kept)
        return False

    def _kept(self, error: ErrorReport | None) -> None:
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

    def _drop_overdue(self) -> bool:
        """Drop the replicas that have waited too long."""
        before_s = self._env.now_s() - self._patience_s
        late = {key for key, since_s in self._unkept.items() if since_s <= before_s}
        if late and not self._left:
            words = (
                f"the replicas on host {self._env.address.node} were not safe within "
                f"{self._patience_s:.0f} s, because its pw-worker process does not answer (is it stopped?). "
                "The arrays are as they were: call pw.checkpoint again when it goes on"
            )
            self._drop(late, ErrorReport.of(CheckpointFailed(words), self._env.address.node))
        return bool(self._unkept) and not self._left

    def _drop(self, keys: Collection[tuple[int, Box]], error: ErrorReport) -> None:
        unkept = [key for key in self._unkept if key in keys]
        for array, box in unkept:
            del self._unkept[array, box]
            del self._boxes[array][box]
            if not self._boxes[array]:
                del self._boxes[array]
                self._proofs.pop(array, None)
        arrays = dict.fromkeys(array for array, _ in unkept)
        if arrays:
            self._env.log("error", "replicas are not kept", arrays=len(arrays), why=error.message)
        for array in arrays:
            self.skip(array, error)


def flat_bytes(data: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes of an array, without a copy where they are contiguous."""
    return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
