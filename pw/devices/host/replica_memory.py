"""The replicas in a host's memory and its files, and how they outlive a crash of its process.

The process around the host's actors writes all replicas to a place that survives a crash, one time
after the other (`Keeping`); replicas that arrive meanwhile are written the next time. The
controller hears of a replica when it is kept, so that a checkpoint is answered only for safe
data. A replica that is not kept in time is dropped, and the controller hears that as well.

A replica that is to lie in a file (`pw.devices.host.held_boxes`) is kept when it is there, or when it
cannot be written.
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
from pw.core.packing import flat_bytes
from pw.core.sharding import Box
from pw.devices.host.held_boxes import HeldBoxes, Key
from pw.devices.host.spill_files import SpillFiles


class Replica(NamedTuple):
    """One box of an array, and the bytes there."""

    array: int
    box: Box
    data: np.ndarray[Any, Any]
    """Value of the box, of any dtype and shape."""
    proof: bytes = b""
    """Proof for the controller that a controller has offered the replica (`OfferReplica`)."""
    in_file: bool = False
    """True if the value is a view of a file, so that it takes no memory."""


Keeping = Callable[[Sequence[Replica], Callable[[ErrorReport | None], None]], None]
"""See `pw.devices.host.membership.HostProcess.keep`."""

KEEP_S = 0.05
"""Seconds that a replica waits for others, so that they are kept together."""

KEPT_WITHIN_S = 10.0
"""Seconds that a replica, and the checkpoint that asked for it, wait until it is kept."""

LEAST_BYTES_PER_S = 100 << 20
"""The least speed of keeping: many bytes may take longer."""

DISK_SLOWER = 10
"""Factor by which it may take longer to keep replicas of which some are in files."""

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
        files: where replicas go that leave memory; None if they stay there.
        spill_bytes: bytes of replicas that may stay in memory; 0 for any number.
        least_bytes_per_s: the speed at which they are kept at least.
        kept_bytes: more bytes are not kept if other hosts have replicas as well.
        told_at_once: arrays in one message to the controller.
    """

    def __init__(
        self,
        env: Env,
        inherited: Iterable[Replica],
        keep: Keeping | None,
        files: SpillFiles | None = None,
        spill_bytes: int = 0,
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
        self.held = HeldBoxes(env, files, spill_bytes, self._settled)
        """The boxes of the replicas, in memory and in files."""
        self._unwritten: dict[int, dict[Box, None]] = {}
        """Replicas that wait for their file, and are to be kept then, by array."""
        self._proofs: dict[int, bytes] = {}
        """Proofs of the arrays that other hosts gave."""
        self._keeps = Ticker(env, KEEP_S, self._keep_all)
        self._looks = Ticker(env, LOOK_S, self._drop_overdue)
        self._unkept: dict[Key, float] = {}
        """Replicas that are not safe, and since when; the controller does not know them."""
        self._keeping: frozenset[Key] | None = None
        """Replicas of `_unkept` that are being kept now; None while none is."""
        self._is_kept = True
        """True if nothing has changed since the last time began."""
        self._patience_s = KEPT_WITHIN_S
        self._left = False
        """The next incarnation has all replicas, and will announce them."""
        for array, box, data, proof, in_file in inherited:
            self.held.inherit(array, box, flat_bytes(data), in_file=in_file)
            if proof:
                self._proofs[array] = proof

    def __len__(self) -> int:
        return len(self.held)

    def of(self, array: int) -> Mapping[Box, Bytes]:
        """Return the boxes of an array that are here."""
        return self.held.of(array)

    def all(self) -> list[Replica]:
        """Return all replicas, those in files first."""
        return [
            Replica(array, box, data, self._proofs.get(array, b""), in_file)
            for (array, box), data, in_file in self.held.all()
        ]

    def leave(self) -> list[Replica]:
        """Return all replicas for the next incarnation; this one takes no more."""
        self._left = True
        return self.all()

    @property
    def size_bytes(self) -> int:
        """Size of all boxes together."""
        return self.memory_bytes + self.file_bytes

    @property
    def memory_bytes(self) -> int:
        """Size of the boxes in memory."""
        return self.held.memory_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the boxes in files."""
        return self.held.file_bytes

    def announce(self) -> None:
        """Tell the controller all replicas that are kept, and that these are all."""
        self._tell(key for key, _, _ in self.held.all() if self._is_safe(key))
        self._env.send(CONTROL, HoldsNoMore())

    def _is_safe(self, key: Key) -> bool:
        """Whether the controller may know a replica."""
        array, box = key
        return key not in self._unkept and box not in self._unwritten.get(array, ())

    def _tell(self, keys: Iterable[Key]) -> None:
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

    def hold(
        self, array: int, boxes: Mapping[Box, Bytes], proof: bytes = b"", *, to_files: bool = False
    ) -> None:
        """Add replicas; the controller hears of them when they are kept.

        Args:
            array: whose boxes they are.
            boxes: the bytes of each box.
            proof: proof for the controller that it has offered them.
            to_files: True to keep them when they are in a file, if there can be one.
        """
        if self._left:
            return
        if proof:
            self._proofs[array] = proof
        before = self.held.of(array)
        unsafe = [box for box in boxes if box not in before or (array, box) in self._unkept]
        for box, data in boxes.items():
            self.held.put(array, box, data)
        if to_files and self.held.ask(array):
            self._unwritten.setdefault(array, {}).update(dict.fromkeys(unsafe))
            for box in unsafe:
                self._unkept.pop((array, box), None)
        elif self._keep is not None:
            for box in unsafe:
                self._unkept.setdefault((array, box), self._env.now_s())
        self._tell((array, box) for box in boxes if self._is_safe((array, box)))
        if self._unkept:
            self._keep_soon()
            self._looks.start()
        self.held.write_next()

    def write(self, arrays: Iterable[int]) -> None:
        """Have the replicas of these arrays go to files; they are kept as before meanwhile."""
        if self._left:
            return
        for array in arrays:
            self.held.ask(array)
        self.held.write_next()

    def _settled(self) -> None:
        """Replicas are in their files, or stay in memory: have them kept.

        All are kept again when no file is written any more: what was kept of them is in memory.
        """
        unwritten, self._unwritten = self._unwritten, {}
        keys = [(array, box) for array, boxes in unwritten.items() for box in boxes]
        if self._left:
            return
        if self._keep is None:
            self._tell(keys)
            return
        self._unkept.update(dict.fromkeys(keys, self._env.now_s()))
        if keys or not self.held.is_writing:
            self._keep_soon()
        if keys:
            self._looks.start()

    def forget(self, meant: Callable[[int], bool]) -> None:
        """Remove the replicas of these arrays."""
        gone = [array for array in self.held.arrays() if meant(array)]
        for array in gone:
            self._proofs.pop(array, None)
            self._unwritten.pop(array, None)
            for box in list(self.held.of(array)):
                self.held.remove(array, box)
                self._unkept.pop((array, box), None)
        if gone and not self.held:
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
        slower = DISK_SLOWER if self.file_bytes else 1
        self._patience_s = KEPT_WITHIN_S + slower * self.size_bytes / self.least_bytes_per_s
        if self.size_bytes > self.kept_bytes and self.has_others:
            self._kept(None)
        else:
            self._keep([one for one in self.all() if self._is_written(one)], self._kept)
        return False

    def _is_written(self, replica: Replica) -> bool:
        return replica.box not in self._unwritten.get(replica.array, ())

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

    def _drop(self, keys: Collection[Key], error: ErrorReport) -> None:
        unkept = [key for key in self._unkept if key in keys]
        for array, box in unkept:
            del self._unkept[array, box]
            self.held.remove(array, box)
            if not self.held.of(array):
                self._proofs.pop(array, None)
        arrays = dict.fromkeys(array for array, _ in unkept)
        if arrays:
            self._env.log("error", "replicas are not kept", arrays=len(arrays), why=error.message)
        for array in arrays:
            self.skip(array, error)
