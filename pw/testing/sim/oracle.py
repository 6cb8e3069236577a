"""The oracle: the right value of every array, computed without a cluster.

An array may also end in an error, if its program asks for it (a computation that does not compile,
or always fails), or if an injected fault excuses it: one that touched the client, the controller,
or a host of an island of the array or of its lineage. No loss of a host excuses the loss of an
array that can be replayed: its client keeps all inputs, and no run has donated anything on the way.
A checkpoint ends the lineage, so only replicas
restore its arrays: they outlive every process, and all machines but the last one that has them. The next
controller does not know released slices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.errors import Error
from pw.core.ids import arrays_in
from pw.core.programs.program import Program, ValueRef
from pw.core.sharding import ArraySpec, box_slices, dtype_of
from pw.sched.control.checkpoints.replicas import REPLICAS
from pw.testing.sim.digests import DOES_NOT_COMPILE, compute, computes
from pw.testing.sim.ledger import A_READ, DISPLACED, GIVEN_BACK, SUSPENDED, Ledger
from pw.testing.sim.programs import ProgramDraft
from pw.testing.sim.ragged import travelled
from pw.testing.sim.views import contents

INFRASTRUCTURE = frozenset(
    ("HostLost", "IslandLost", "ArrayLost", "TransferFailed", "ConnectionFailed", "Disconnected")
)
_TRUE = b"\x01"
"""Predicate of a branch that is taken."""
_SKIPPED = b"skipped"
"""Value in the place of what a branch that is not taken would make."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The right value of one array."""

    spec: ArraySpec
    data: bytes | None
    """Bytes of the array; None if it can only fail."""
    kinds: frozenset[str]
    """Names of errors that the array's programs ask for; with `data`, it may fail or not."""
    computations: frozenset[str]
    slices: frozenset[int]
    """Numbers of the slices of the array's lineage; `computations` has its computations."""
    durable: bool
    """True if a replay can make the array from inputs that the client keeps."""
    made_of: frozenset[int]
    """Numbers of the array itself, and of all arrays that it was made from."""


@dataclass(eq=False)
class Oracle:
    """The right values of one client's arrays."""

    _client: str
    _keeps: bool
    """True if the client keeps the values of all that it has uploaded."""
    _ledger: Ledger
    _nodes_of: Callable[[int], tuple[str, ...]]
    """Function that returns the nodes that matter to a slice of the client, or of its exporters."""
    arrays: dict[int, Truth] = field(default_factory=dict)
    _copied: set[int] = field(default_factory=set)

    def put(self, array: int, spec: ArraySpec, value: np.ndarray[Any, Any]) -> None:
        """An upload."""
        nothing: frozenset[str] = frozenset()
        slices = frozenset((spec.placement.slice,))
        data = value.tobytes()
        made_of = frozenset((array,))
        self.arrays[array] = Truth(spec, data, nothing, nothing, slices, self._keeps, made_of)

    def take(
        self, array: int, spec: ArraySpec, exporter: Oracle, source: int, together: list[int]
    ) -> None:
        """An array of another client, which it has offered `together` with others."""
        truth = exporter.arrays[source]
        kinds = frozenset[str]().union(*(exporter.arrays[one].kinds for one in together))
        made_of = frozenset[int]().union(*(exporter.arrays[one].made_of for one in together))
        slices = truth.slices | {spec.placement.slice}
        self.arrays[array] = Truth(
            spec, truth.data, kinds, truth.computations, slices, False, made_of | {array}
        )

    def checkpoint(self, arrays: tuple[int, ...]) -> None:
        """Count a checkpoint: from now on only replicas may restore these arrays."""
        self._copied.update(arrays)

    def run(
        self, draft: ProgramDraft, args: tuple[int | bytes, ...], results: tuple[int, ...]
    ) -> None:
        """A run, in the client's order."""
        body = draft.body
        values: dict[tuple[int, int], bytes | None] = {}
        sources = [self.arrays[arg] for arg in arrays_in(args)]
        kinds = frozenset().union(*(truth.kinds for truth in sources))
        for index, arg in enumerate(args):
            values[-1, index] = arg if isinstance(arg, bytes) else self.arrays[arg].data
        blobs = [draft.blobs.get(computation.artifact, b"") for computation in body.computations]
        if any(blob.startswith(DOES_NOT_COMPILE) for blob in blobs):
            kinds |= {"CompileError"}
        if "CompileError" in kinds:  # the controller knows, and does not start the run
            values = dict.fromkeys(values)
        for number, node in enumerate(body.nodes):
            computation, blob = body.computations[node.computation], blobs[node.computation]
            operands = [values[arg.node, arg.index] for arg in node.args]
            for at, counts in node.counted:
                moved = _moved(body, node.args[at], computation.inputs[at], counts, values)
                operands[at], errors = moved
                kinds |= errors
            inputs = [data for data in operands if data is not None]
            results_data: list[Any] = [None] * len(computation.outputs)
            guard = node.guard
            predicate = _TRUE if guard is None else values[guard.node, guard.index]
            if predicate is _SKIPPED or (
                predicate is not None and (predicate == _TRUE) is node.unless
            ):
                results_data = [_SKIPPED] * len(computation.outputs)
            elif predicate is None:
                pass
            elif computation.traits.predicates:
                if operands[0] is not None:  # a predicate that was skipped counts as false
                    first = 1 if operands[0] == _TRUE else 1 + len(results_data)
                    results_data = operands[first : first + len(results_data)]
            elif body.makes_views:
                results_data = list(contents(computation, operands))
            elif not computes(blob):
                kinds |= {"ComputationFailed"}
            elif len(inputs) == len(operands):
                arrays = compute(blob, inputs, computation.outputs)
                results_data = [array.tobytes() for array in arrays]
            for index, data in enumerate(results_data):
                values[number, index] = data
        names = frozenset(computation.name for computation in body.computations)
        computations = names.union(*(truth.computations for truth in sources))
        slices = frozenset(body.slices()).union(*(truth.slices for truth in sources))
        durable = not body.donated and all(truth.durable for truth in sources)
        made_of = frozenset[int]().union(*(truth.made_of for truth in sources))
        # If the controller knows of a failed source, it fails all results of a view, and what is made of them.
        may_fail = body.makes_views or any(
            truth.kinds and truth.data is not None for truth in sources
        )
        for array, output in zip(results, body.outputs, strict=True):
            data = values[output.value.node, output.value.index]
            if output.counts is not None:
                data, errors = _moved(body, output.value, output.spec, output.counts, values)
                kinds |= errors
            asked = kinds if data is None or may_fail else frozenset[str]()
            self.arrays[array] = Truth(
                output.spec, data, asked, computations, slices, durable, made_of | {array}
            )

    def check_value(self, array: int, parts: list[tuple[Any, np.ndarray[Any, Any]]]) -> str | None:
        """Return the error of a fetched value, or None if it is right."""
        truth = self.arrays[array]
        spec = truth.spec
        value = np.zeros(spec.shape, dtype_of(spec.dtype))
        covered = 0
        for box, part in parts:
            value[box_slices(box)] = part
            covered += part.size
        if covered != value.size:
            return f"array {array:x} came with {covered} of {value.size} elements"
        if truth.data is None:
            return f"array {array:x} has a value, but can only be {sorted(truth.kinds)}"
        if value.tobytes() != truth.data:
            return f"array {array:x} ({spec.dtype}{list(spec.shape)}) has a wrong value"
        return None

    def check_ready(self, array: int) -> str | None:
        """Return the error of a wait that has ended without one, or None if it is right."""
        truth = self.arrays[array]
        if truth.data is None:
            return f"array {array:x} is said to be ready, but can only be {sorted(truth.kinds)}"
        return None

    def check_error(self, array: int, error: BaseException, *, held: bool = True) -> str | None:
        """Return the violation if no program asks for this error and no fault excuses it, else None.

        The controller does not restore arrays that the client does not hold any more.
        """
        truth = self.arrays[array]
        kind, words = type(error).__name__, str(error)
        if kind in truth.kinds:
            return None
        violation = f"array {array:x} ended in {kind}: {words}"
        if not isinstance(error, Error):
            return violation
        if kind == "OutOfDeviceMemory" and self._ledger.injected["memory is short"]:
            return None
        if kind == "QuotaExceeded" and self._ledger.injected["quotas"]:
            return None
        if kind == "ComputationFailed":
            injected = self._ledger.failed_computation(words.split(" [on ")[0])
            if injected is not None:
                is_its = injected in truth.computations or injected == A_READ
                return None if is_its else f"{violation} (of another array)"
            if "closed by the peer" not in words:
                return violation
        elif self._ledger.injected[DISPLACED] and (
            kind == "InsufficientDevices" or "given back" in words
        ):
            return None
        elif kind == "PlacementError" and "handed over" in words:
            return None if self._ledger.injected[GIVEN_BACK] else violation
        elif kind not in INFRASTRUCTURE:
            return violation
        placeless = ("drain", "named host replaced", DISPLACED)
        lasts = truth.durable and not any(self._ledger.injected[fault] for fault in placeless)
        if not self._copied.isdisjoint(truth.made_of):
            lasts = lasts and self._ledger.injected["machine crash"] < REPLICAS
        faults = self._ledger.injected
        restarted = faults["controller killed"] or faults["controller stopped"]
        forgotten = restarted and "given back" in words
        if held and lasts and not forgotten and f"{self._client} has no room" not in words:
            return f"{violation} (it could be made again)"
        if not held and (self._ledger.any or faults[SUSPENDED]):
            return None  # its island may have been formed anew because another one was lost
        nodes = [node for number in truth.slices for node in self._nodes_of(number)]
        return None if self._ledger.touched(nodes) else f"{violation} (no fault excuses that)"


def _moved(
    body: Program,
    rows: ValueRef,
    wanted: ArraySpec,
    counts: ValueRef,
    values: dict[tuple[int, int], bytes | None],
) -> tuple[bytes | None, frozenset[str]]:
    """Return rows as a consumer gets them, and the errors that impossible counts ask for."""
    nothing: frozenset[str] = frozenset()
    data, numbers = values[rows.node, rows.index], values[counts.node, counts.index]
    if body.spec_of(rows) == wanted or data is None or numbers is None:
        return data, nothing
    if data is _SKIPPED or numbers is _SKIPPED:
        return _SKIPPED, nothing
    spec = body.spec_of(counts)
    row_counts = np.frombuffer(numbers, dtype_of(spec.dtype)).reshape(spec.shape)
    moved = travelled(data, body.spec_of(rows), row_counts)
    return moved, nothing if moved is not None else frozenset(("ResultMismatch",))
