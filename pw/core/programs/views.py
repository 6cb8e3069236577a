"""Views: arrays that consist of shards of other arrays, where they lie.

A view takes no device memory and moves no bytes: disassembling an array into one array for each device,
assembling it again, or choosing other shards costs hosts a few references. A view is a program of its own,
with one computation of `Kind.VIEW`. Its arrays may have other shapes and shardings than their sources: only
shards matter. They may lie on fewer devices than the computation, whose placement is all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence

from pw.core.errors import ArgumentError, PlacementError, ShardingError
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement

Shards = Sequence[Sequence[tuple[int, int]]]
"""Shards of each output: the (input, mesh position there) of the shard at each mesh position."""

NAME = "view"


def view_program(
    inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec], shards: Shards
) -> Program:
    """Return the program that makes views.

    Args:
        inputs: the arrays whose shards are named, all on one slice.
        outputs: the arrays that consist of these shards.
        shards: for each output, the (input, mesh position there) of its shard at each mesh position.

    Raises:
        ArgumentError: there is no output.
        PlacementError: an array lies on another slice, or a shard on another device.
        ShardingError: a shard is not named, does not exist, or has another shape or dtype; or an array does
            not divide as its sharding says.
    """
    if not outputs:
        raise ArgumentError(
            "a view has no outputs; name at least one array to be made of the shards"
        )
    specs = (*inputs, *outputs)
    for spec in specs:
        spec.sharding.check(spec.shape)
    devices = {device for spec in specs for device in spec.placement.devices}
    placement = Placement(outputs[0].placement.slice, tuple(sorted(devices)))
    named = tuple([tuple([(number, at) for number, at in row]) for row in shards])
    computation = Computation(
        NAME, b"", placement, tuple(inputs), tuple(outputs), kind=Kind.VIEW, shards=named
    )
    check_view(computation)
    node = Node(0, tuple([ValueRef(-1, number) for number in range(len(inputs))]))
    results = tuple([Output(ValueRef(0, number), spec) for number, spec in enumerate(outputs)])
    return Program(NAME, (computation,), (node,), tuple(inputs), results)


def check_view(view: Computation) -> None:
    """Raise PlacementError or ShardingError unless each shard is one of an input on the same device.

    The number of devices of each spec is the caller's to check.
    """
    devices = set(view.placement.devices)
    for kind, specs in (("input", view.inputs), ("output", view.outputs)):
        for number, spec in enumerate(specs):
            if spec.placement.slice != view.placement.slice:
                raise PlacementError(
                    f"{kind} {number} of {view.name!r}, {spec.short}, lies on another slice than its other "
                    "arrays; a view names shards of one slice. Move it first, with pw.put(x, sharding=...)"
                )
            if not devices.issuperset(spec.placement.devices):
                raise PlacementError(
                    f"{kind} {number} of {view.name!r}, {spec.short}, lies on devices that do not run it"
                )
    if len(view.shards) != len(view.outputs):
        raise ShardingError(
            f"{view.name!r} makes {len(view.outputs)} arrays, and names the shards of {len(view.shards)}"
        )
    for number, (spec, row) in enumerate(zip(view.outputs, view.shards, strict=True)):
        _check_output(view, number, spec, row)


def _check_output(
    view: Computation, number: int, spec: ArraySpec, row: Sequence[tuple[int, int]]
) -> None:
    what = f"output {number} of {view.name!r}, {spec.short},"
    devices = spec.placement.devices
    if len(row) != len(devices):
        raise ShardingError(f"{what} has {len(devices)} shards, and {len(row)} are named for it")
    shape = spec.sharding.shard_shape(spec.shape)
    for position, (source, at) in enumerate(row):
        if not 0 <= source < len(view.inputs):
            raise ShardingError(f"{what} names input {source}; there are {len(view.inputs)} inputs")
        origin = view.inputs[source]
        there = origin.placement.devices
        if not 0 <= at < len(there):
            raise ShardingError(
                f"{what} names shard {at} of input {source}, {origin.short}, which has {len(there)} shards"
            )
        if there[at] != devices[position]:
            raise PlacementError(
                f"{what} has its shard {position} on device {devices[position]} of its slice, and shard {at} "
                f"of input {source}, {origin.short}, lies on device {there[at]}; a view moves nothing. Move "
                "the array first, with pw.put(x, sharding=...)"
            )
        if origin.memory != spec.memory:
            raise PlacementError(
                f"{what} lies in {spec.memory or 'the memory of its devices'}, and input {source}, "
                f"{origin.short}, in {origin.memory or 'that of its devices'}; a view moves nothing. Move "
                "the array first, with pw.put(x, sharding=...)"
            )
        if origin.dtype != spec.dtype or origin.sharding.shard_shape(origin.shape) != shape:
            raise ShardingError(
                f"{what} has shards of {spec.dtype}{list(shape)}, and those of input {source}, {origin.short}, "
                f"are {origin.dtype}{list(origin.sharding.shard_shape(origin.shape))}"
            )


def check_view_program(program: Program) -> None:
    """Raise ArgumentError if a program makes views and does something else as well."""
    if not program.makes_views:
        return
    view = program.computations[0]
    nodes = (Node(0, tuple([ValueRef(-1, number) for number in range(len(program.inputs))])),)
    results = tuple([Output(ValueRef(0, number), spec) for number, spec in enumerate(view.outputs)])
    if (
        len(program.computations) > 1
        or (program.nodes, program.outputs) != (nodes, results)
        or (program.inputs, program.donated, view.donated) != (view.inputs, (), ())
    ):
        raise ArgumentError(
            f"{program.name!r} makes a view and does something else as well; a view is a program of its own, "
            "which donates nothing"
        )
