"""Random programs: chains, fans, diamonds, pipelines across islands, reshardings, donation.

A client works with a few *kinds* of arrays (a shape, and a sharding on one of its slices); programs
take and return arrays of these kinds, so that one program can use the results of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec.structs import replace

from pw.core.messages import Artifact
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.digests import DOES_NOT_COMPILE, RAISES

_SHAPES = ((4,), (16,), (8, 4), (64,), (4, 4, 2))
_LARGE = ((8, 4096), (32, 1024))
"""More than travels inside a control message, even split over a few hosts."""
_DTYPES = ("uint8", "uint8", "uint16", "uint32")


@dataclass(frozen=True, slots=True)
class SimSlice:
    """A slice of a client."""

    number: int
    size: int


@dataclass(frozen=True, slots=True)
class ProgramDraft:
    """A program before it is registered."""

    body: Program
    artifacts: tuple[Artifact, ...]
    blobs: dict[bytes, bytes]


class Drafting:
    """A program while computations are added to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.computations: list[Computation] = []
        self.nodes: list[Node] = []
        self.blobs: dict[bytes, bytes] = {}

    def artifact(self, blob: bytes) -> bytes:
        """Add an artifact; return its digest."""
        digest = hashlib.sha256(blob).digest()
        self.blobs[digest] = blob
        return digest

    def compute(
        self,
        name: str,
        takes: Sequence[ArraySpec],
        makes: Sequence[ArraySpec],
        args: Sequence[ValueRef],
        *,
        blob: bytes = b"",
        placement: Placement | None = None,
        donated: tuple[int, ...] = (),
        **how: Any,
    ) -> list[ValueRef]:
        """Add a computation, by default on the devices of its first result, and a call of it."""
        digest = self.artifact(blob or f"computes {name}".encode())
        on = placement or makes[0].placement
        computation = Computation(name, digest, on, tuple(takes), tuple(makes), donated)
        return self.add(computation, args, **how)

    def add(self, computation: Computation, args: Sequence[ValueRef], **how: Any) -> list[ValueRef]:
        """Add a computation and a call of it; return its results."""
        self.computations.append(computation)
        return self.call(len(self.computations) - 1, args, **how)

    def call(self, computation: int, args: Sequence[ValueRef], **how: Any) -> list[ValueRef]:
        """Add a call (see `Node`); return its results."""
        self.nodes.append(Node(computation, tuple(args), **how))
        count = len(self.computations[computation].outputs)
        return [ValueRef(len(self.nodes) - 1, index) for index in range(count)]

    def draft(
        self, inputs: Sequence[ArraySpec], outputs: Sequence[Output], donated: tuple[int, ...] = ()
    ) -> ProgramDraft:
        """Return the program."""
        computations, nodes = tuple(self.computations), tuple(self.nodes)
        body = Program(self.name, computations, nodes, tuple(inputs), tuple(outputs), donated)
        artifacts = tuple(Artifact(digest, blob) for digest, blob in sorted(self.blobs.items()))
        return ProgramDraft(body, artifacts, self.blobs)


def _some_devices(random: Random, part: SimSlice) -> tuple[int, ...]:
    size = random.choice([n for n in (1, 2, 4, part.size) if n <= part.size])
    start = random.randrange(part.size - size + 1)
    return tuple(range(start, start + size))


def random_spec(
    random: Random,
    part: SimSlice,
    shape: tuple[int, ...],
    dtype: str,
    devices: tuple[int, ...] = (),
) -> ArraySpec:
    """Return a random spec of this shape on a slice."""
    devices = devices or _some_devices(random, part)
    if len(devices) > 1 and random.random() < 0.15:
        shuffled = list(devices)
        random.shuffle(shuffled)
        devices = tuple(shuffled)
    count = len(devices)
    for _ in range(4):
        sizes: tuple[int, ...] = (count,)
        if count % 2 == 0 and count > 2 and random.random() < 0.4:
            sizes = (2, count // 2)
        names = ("x", "y")[: len(sizes)]
        free = list(names)
        axes: list[tuple[str, ...]] = []
        for _ in shape:
            axis = tuple(name for name in free if random.random() < 0.6)
            free = [name for name in free if name not in axis]
            axes.append(axis)
        sharding = Sharding(names, sizes, tuple(axes))
        if all(n % p == 0 for n, p in zip(shape, sharding.partitions(len(shape)), strict=True)):
            return ArraySpec(shape, dtype, sharding, Placement(part.number, devices))
    return ArraySpec(shape, dtype, Sharding(("x",), (count,)), Placement(part.number, devices))


def random_kinds(random: Random, slices: Sequence[SimSlice]) -> list[ArraySpec]:
    """The kinds of arrays that a client works with."""
    shapes = [random.choice(_SHAPES), random.choice(_SHAPES)]
    if random.random() < 0.6:
        shapes.append(random.choice(_LARGE))
    dtype = random.choice(_DTYPES)
    return [
        random_spec(random, random.choice(slices), shape, "uint8" if shape in _LARGE else dtype)
        for shape in shapes
        for _ in range(random.choice((1, 2)))
    ]


def some_in_host_memory(
    random: Random, kinds: Sequence[ArraySpec], share: float
) -> list[ArraySpec]:
    """Return the kinds, about such a share of them in host memory."""
    return [
        replace(kind, memory="pinned_host") if random.random() < share else kind for kind in kinds
    ]


def random_program(
    random: Random,
    slices: Sequence[SimSlice],
    kinds: Sequence[ArraySpec],
    name: str,
    *,
    broken: bool = False,
) -> ProgramDraft:
    """A program over these slices that takes and returns arrays of these kinds.

    Args:
        random: the source of chance.
        slices: where its computations may run.
        kinds: what its inputs and outputs may be.
        name: names its client, and makes its results differ from those of other programs.
        broken: one of its computations does not compile, or always fails.
    """
    form = random.choice(("chain", "chain", "pipeline", "fan", "diamond", "copy", "any"))
    inputs = [random.choice(kinds) for _ in range(random.choice((1, 1, 2)))]
    values = [ValueRef(-1, index) for index in range(len(inputs))]
    specs = list(inputs)
    step = Drafting(name)
    wanted = {"copy": 0, "chain": random.randint(1, 5), "pipeline": random.randint(2, 6)}
    count = wanted.get(form, random.randint(2, 5))
    if broken:
        count = max(count, 1)
    bad = random.randrange(count) if broken else -1
    order = list(slices)
    for number in range(count):
        part = random.choice(order) if form != "pipeline" else order[number % len(order)]
        if form in ("chain", "pipeline") and number:
            operands = [len(values) - 1]
        elif form == "fan" and number:
            operands = [random.randrange(len(inputs))]
        elif form == "diamond" and number == count - 1:
            operands = list({random.randrange(len(values)), len(values) - 1})
        else:
            operands = random.choices(range(len(values)), k=random.choice((1, 1, 2)))
        devices = _some_devices(random, part)
        takes = []
        for index in operands:
            spec = specs[index]
            own = spec.placement.slice == part.number and set(spec.placement.devices) == set(
                devices
            )
            if own and random.random() < 0.7:
                takes.append(spec)
            else:
                takes.append(random_spec(random, part, spec.shape, spec.dtype, devices))
        makes = []
        for _ in range(random.choice((1, 1, 1, 2))):
            model = random.choice(kinds)
            fits = set(model.placement.devices) == set(devices)
            if fits and model.placement.slice == part.number and random.random() < 0.7:
                makes.append(model)
            else:
                makes.append(random_spec(random, part, model.shape, model.dtype, devices))
        prefix = random.choice((DOES_NOT_COMPILE, RAISES)) if number == bad else b"computes"
        values += step.compute(
            f"{name}/{number}",
            takes,
            makes,
            [values[index] for index in operands],
            blob=prefix + f" {name}/{number}".encode(),
            placement=Placement(part.number, devices),
            donated=tuple(i for i in range(len(takes)) if random.random() < 0.2),
        )
        specs += makes
    outputs = _outputs(random, kinds, values, specs, len(inputs))
    gone = tuple(index for index in range(len(inputs)) if random.random() < 0.15)
    return step.draft(inputs, outputs, gone)


def random_step(random: Random, kinds: Sequence[ArraySpec], name: str) -> ProgramDraft:
    """Return a program of one computation, on the devices of the arrays that it takes and returns."""
    first = random.choice(kinds)
    near = [
        kind
        for kind in kinds
        if kind.placement.slice == first.placement.slice
        and set(kind.placement.devices) == set(first.placement.devices)
    ]
    inputs = [random.choice(near) for _ in range(random.choice((1, 1, 2)))]
    makes = [random.choice(near) for _ in range(random.choice((1, 1, 2)))]
    step = Drafting(name)
    donated = tuple(index for index in range(len(inputs)) if random.random() < 0.3)
    args = [ValueRef(-1, index) for index in range(len(inputs))]
    results = step.compute(
        f"{name}/0", inputs, makes, args, placement=first.placement, donated=donated
    )
    outputs = [Output(result, spec) for result, spec in zip(results, makes, strict=True)]
    if len(outputs) > 1 and random.random() < 0.3:
        del outputs[random.randrange(len(outputs))]
    gone = tuple(index for index in donated if random.random() < 0.7)
    return step.draft(inputs, tuple(outputs), gone)


def _outputs(
    random: Random,
    kinds: Sequence[ArraySpec],
    values: Sequence[ValueRef],
    specs: Sequence[ArraySpec],
    inputs: int,
) -> tuple[Output, ...]:
    """The last value and perhaps others, each as a kind of its shape if there is one."""
    chosen = {len(values) - 1}
    for index in range(inputs, len(values) - 1):
        if random.random() < 0.25:
            chosen.add(index)
    if random.random() < 0.05:
        chosen.add(0)
    outputs = []
    for index in sorted(chosen):
        spec = specs[index]
        alike = [k for k in kinds if (k.shape, k.dtype) == (spec.shape, spec.dtype)]
        outputs.append(Output(values[index], random.choice(alike) if alike else spec))
    return tuple(outputs)
