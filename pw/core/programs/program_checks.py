"""Checks of a client's program, before anything is computed from it.

Clients are not trusted. After these checks each index points at something, each spec is possible, and the
program does not take too long to lower. Whether it fits physical devices is checked when it is lowered
(`pw.core.programs.physical`).
"""

from __future__ import annotations

from collections.abc import Callable

from pw.core.errors import ArgumentError, Error
from pw.core.ids import NAME_CHARACTERS
from pw.core.programs.guards import check_merge
from pw.core.programs.program import Computation, Kind, Program, ValueRef
from pw.core.programs.spec_checks import VALUES, check_spec, shortened
from pw.core.programs.views import check_view, check_view_program
from pw.core.sharding import ArraySpec

CALLS = 1 << 14
"""Number of calls in one program, at most: each takes some 50 µs to plan, while other clients wait."""

STEPS = 1 << 22
"""Number of devices in all calls and different specs of one program, at most: each takes less than 1 µs."""

TIMEOUT_S = 1e9

_CHECKS = {Kind.VIEW: check_view, Kind.MERGE: check_merge}
"""What else has to be true of a computation of a kind."""


def check_program(body: Program, devices: Callable[[int], int | None] = lambda slice: None) -> None:
    """Raise an Error unless a program makes sense.

    Args:
        body: the program.
        devices: returns how many devices a slice has, None if that is not known.

    Raises:
        ArgumentError: the program is too large, or names something that does not exist.
        ShardingError: an array cannot be.
        PlacementError: an array does not fit the devices of its slice.
    """
    _check_size(body)
    _check_indices(body)
    specs = dict.fromkeys((*body.inputs, *(output.spec for output in body.outputs)))
    for computation in body.computations:
        specs |= dict.fromkeys((*computation.inputs, *computation.outputs))
    steps = sum(len(spec.placement.devices) for spec in specs)
    steps += sum(len(body.computations[n.computation].placement.devices) for n in body.nodes)
    if steps > STEPS:
        raise ArgumentError(
            f"{body.name!r} would take {steps} steps to plan (its calls and its different specs, times "
            f"their devices); {STEPS} are the most. Make several programs of it"
        )
    for spec in specs:
        try:
            check_spec(spec, devices(spec.placement.slice))
        except Error as error:
            raise type(error)(f"{body.name!r} cannot run: {error}") from error
    for computation in body.computations:
        _check_computation(computation)
    check_view_program(body)
    _check_graph(body)


def _check_size(body: Program) -> None:
    name = max((body.name, *(one.name for one in body.computations)), key=len)
    if len(name) > NAME_CHARACTERS:
        raise ArgumentError(
            f"the name {shortened(name, 40)!r} has {len(name)} characters; {NAME_CHARACTERS} are the most"
        )
    if not 0 <= body.timeout_s < TIMEOUT_S:
        raise ArgumentError(f"{body.name!r} cannot have a timeout of {body.timeout_s} s")
    if max(len(body.nodes), len(body.computations)) > CALLS:
        raise ArgumentError(
            f"{body.name!r} has {len(body.nodes)} calls of {len(body.computations)} functions; {CALLS} are "
            "the most. Make several programs of it, or a loop"
        )
    values = len(body.inputs) + len(body.outputs)
    values += sum(len(node.args) + len(node.counted) for node in body.nodes)
    values += sum(len(one.inputs) + len(one.outputs) for one in body.computations)
    if values > VALUES:
        raise ArgumentError(
            f"{body.name!r} has {values} arguments and results in all its calls; {VALUES} are the most. Make "
            "several programs of it"
        )


def _check_indices(body: Program) -> None:
    for index, node in enumerate(body.nodes):
        if not 0 <= node.computation < len(body.computations):
            raise ArgumentError(
                f"call {index} of {body.name!r} names a function that does not exist"
            )
    for what, count, donated in (
        (body.name, len(body.inputs), body.donated),
        *((one.name, len(one.inputs), one.donated) for one in body.computations),
    ):
        if any(not 0 <= position < count for position in donated):
            raise ArgumentError(f"{what!r} donates an argument that it does not have")
        if len(set(donated)) < len(donated):
            raise ArgumentError(f"{what!r} donates an argument twice")


def _check_computation(computation: Computation) -> None:
    name = computation.name
    if not computation.traits.from_clients:
        raise ArgumentError(f"{name!r} is a {computation.kind}, which only the controller makes")
    if check := _CHECKS.get(computation.kind):
        check(computation)
    if not computation.checks:
        return
    flags = computation.outputs[-1] if computation.outputs else None
    if flags is None or (flags.dtype, flags.shape) != ("bool", (len(computation.checks),)):
        raise ArgumentError(f"{name!r} is checked for NaNs, and does not say in what it found them")
    if any(flags.sharding.spec):
        raise ArgumentError(f"{name!r} does not say on each of its devices where it found NaNs")


def _check_graph(body: Program) -> None:
    for index, node in enumerate(body.nodes):
        computation = body.computations[node.computation]
        inputs = computation.inputs
        if len(inputs) != len(node.args):
            raise ArgumentError(
                f"{computation.name!r} takes {len(inputs)} arguments, and call {index} of "
                f"{body.name!r} gives it {len(node.args)}"
            )
        for value, wanted in zip(node.args, inputs, strict=True):
            spec = _checked_spec(body, value, index)
            if (spec.shape, spec.dtype) != (wanted.shape, wanted.dtype):
                raise ArgumentError(
                    f"call {index} of {body.name!r} gets {spec.dtype}{list(spec.shape)} where it takes "
                    f"{wanted.dtype}{list(wanted.shape)}"
                )
        if node.guard is not None:
            guard = _checked_spec(body, node.guard, index)
            if (guard.shape, guard.dtype) != ((), "bool"):
                raise ArgumentError(
                    f"the guard of call {index} of {body.name!r} is no scalar boolean"
                )
        for position, counts in node.counted:
            _checked_spec(body, counts, index)
            if not 0 <= position < len(inputs):
                raise ArgumentError(
                    f"call {index} of {body.name!r} has counts for an argument that it does not have"
                )
    for output in body.outputs:
        spec = _checked_spec(body, output.value, len(body.nodes))
        if (spec.shape, spec.dtype) != (output.spec.shape, output.spec.dtype):
            raise ArgumentError(
                f"the shape or dtype of an output of {body.name!r} is not its value's"
            )
        if output.counts is not None:
            _checked_spec(body, output.counts, len(body.nodes))


def _checked_spec(body: Program, value: ValueRef, before: int) -> ArraySpec:
    """Return the spec of `value`, which must be made before call `before`."""
    if value.node < 0:
        if 0 <= value.index < len(body.inputs):
            return body.inputs[value.index]
    elif value.node < before:
        outputs = body.computations[body.nodes[value.node].computation].outputs
        if 0 <= value.index < len(outputs):
            return outputs[value.index]
    raise ArgumentError(
        f"{body.name!r} uses value {value.node}.{value.index} where it does not exist"
    )
