"""Checks whether a run can be submitted: its program, its arguments and its results."""

from __future__ import annotations

from collections.abc import Mapping

from pw.core.errors import (
    ArgumentError,
    ArrayDeleted,
    ErrorReport,
    HostLost,
    NotOwner,
    ProtocolError,
)
from pw.core.ids import client_of
from pw.core.messages import Run
from pw.core.sharding import ArraySpec, Binding
from pw.sched.control.clients import Client
from pw.sched.control.programs import Home, RegisteredProgram


class Poisoned(Exception):
    """The program or an argument of a run has failed; the run gets the same error."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report.message)
        self.report = report


def program_of(client: Client, message: Run) -> RegisteredProgram:
    """Return the program of a run. Raises if it is unknown or failed, or does not fit the run."""
    program = client.programs.get(message.program)
    if program is None:
        raise NotOwner(
            "a function was called that the controller does not know; make it anew with pw.jit"
        )
    if program.error is not None:
        raise Poisoned(program.error)
    body = program.body
    if len(message.args) != len(body.inputs):
        raise ArgumentError(
            f"{body.name!r} takes {len(body.inputs)} arrays and was given {len(message.args)}"
        )
    if len(message.results) != len(body.outputs):
        raise ArgumentError(
            f"{body.name!r} makes {len(body.outputs)} arrays, and {len(message.results)} were "
            "expected of it"
        )
    return program


def check_arguments(
    client: Client, program: RegisteredProgram, args: tuple[int | bytes, ...]
) -> tuple[int, ...]:
    """Return the arguments that are still arriving. Raises if an argument cannot be used."""
    arriving = []
    arrays = client.arrays.held
    for position, (arg, spec) in enumerate(zip(args, program.body.inputs, strict=True)):
        if isinstance(arg, bytes):
            if len(arg) != spec.size_bytes:
                raise ArgumentError(
                    f"{_argument(program, position)} takes {spec.size_bytes} bytes, not {len(arg)}"
                )
            continue
        if client_of(arg) != client.number:
            raise NotOwner(
                f"{_argument(program, position)} belongs to another client; pass its value, "
                "pw.get(x)"
            )
        array = arrays.get(arg)
        if array is None:
            raise ArrayDeleted(
                f"{_argument(program, position)} was deleted or donated before this call; pass a "
                "copy where it was, copy.copy(x), or do not donate it"
            )
        if array.error is not None:
            raise Poisoned(array.error)
        if array.spec is not spec and array.spec != spec:
            raise ArgumentError(
                f"{_argument(program, position)} is {_layout(array.spec)}, where the function was "
                f"traced for {_layout(spec)}"
            )
        if array.awaited:
            arriving.append(arg)
    return tuple(arriving)


def check_results(
    client: Client,
    program: RegisteredProgram,
    results: tuple[int, ...],
    bindings: Mapping[int, Binding],
) -> list[Home]:
    """Return where each result will lie. Raises if its number is taken, or it has no devices."""
    for array in results:
        if client_of(array) != client.number or array in client.arrays.held:
            raise ProtocolError("a result has a number that is taken or is another client's")
    if len(set(results)) < len(results):
        raise ProtocolError("two results of a run have the same number")
    homes = program.result_homes(bindings)
    if homes is None:
        raise HostLost(
            f"{program.body.name!r} has no devices at the moment: a host of their island was lost. "
            "Call it again when the island has all its hosts (see pw.status())"
        )
    return homes


def _argument(program: RegisteredProgram, position: int) -> str:
    spec = program.body.inputs[position]
    return f"argument {position} of {program.body.name!r}, {spec.short},"


def _layout(spec: ArraySpec) -> str:
    """Describe how an array is sharded, in a user's words."""
    split = [", ".join(axes) or "-" for axes in spec.sharding.spec]
    how = (
        f"split over the mesh axes ({'; '.join(split)})"
        if any(spec.sharding.spec)
        else "replicated"
    )
    devices = ", ".join(map(str, spec.placement.devices[:8]))
    return f"{spec.short}, {how}, on the devices [{devices}] of its slice"
