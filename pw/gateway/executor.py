"""Compiles modules for one client, and runs what was compiled; it knows no handles.

A computation on one island is a program of one computation (`pw.core.programs.stablehlo`). A host
compiles it first, because only the compiler knows how the results are divided. A computation on several
islands is divided here, and is a program of several computations (`pw.gateway.joined`). The program is
registered, and each execution is a run of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from pw.core.messages import Detail
from pw.core.programs.stablehlo import Facts, Stablehlo
from pw.core.sharding import Placement
from pw.gateway import joined, statuses
from pw.gateway.arrays import ProxyArray, Stored
from pw.gateway.compiled import GatewayExecutable, ResultFacts, describe
from pw.gateway.completion import with_completion
from pw.gateway.devices import Devices
from pw.gateway.foreseen import SmallModules
from pw.gateway.runs import Runs
from pw.gateway.tokens import has_tokens, without_tokens


class Ran(NamedTuple):
    """An execution that is sent to the runtime."""

    arrays: list[ProxyArray]
    ends: Sequence[Stored]
    """It ends when these are ready."""


class Executor:
    """Compiles and runs for one client."""

    def __init__(self, devices: Devices, runs: Runs) -> None:
        self._devices = devices
        self._runs = runs
        self._small = SmallModules()

    # --- compiling -----------------------------------------------------------------------------------

    async def compiled(self, code: Stablehlo, devices: tuple[int, ...]) -> GatewayExecutable:
        """Compile a module for these devices. Raises Status, CompileError."""
        islands = self._devices.islands(devices)
        if len(islands) > 1:
            made = await asyncio.to_thread(joined.joined, code, devices, islands)
            told = await asyncio.gather(*(self._facts(*source) for source in made.sources))
            made.facts = replace(
                made.facts,
                code_bytes=sum(one.code_bytes for one in told) // len(islands),
                temporary_bytes=max(one.temporary_bytes for one in told),
            )
            return made
        placement = islands[0].placement
        if len(devices) > 1 and has_tokens(code.module):
            code = Stablehlo(without_tokens(code.module), code.options, code.callbacks)
        known = self._small.foreseen(code) if len(devices) == 1 else None
        if known is not None:
            return describe(devices, placement, known.code, known.facts, source=code)
        facts = await self._facts(code, placement)
        has_completion = not facts.outputs
        if has_completion:
            code = Stablehlo(with_completion(code.module), code.options, code.callbacks)
            facts = await self._facts(code, placement)
        return describe(devices, placement, code, facts, has_completion=has_completion)

    async def _facts(self, code: Stablehlo, placement: Placement) -> Facts:
        asked = self._runs.runtime.ask.compile(code, placement, Detail.FACTS)
        compiled = await self._runs.waited(asked)
        assert compiled.facts is not None
        return compiled.facts

    def register(self, made: GatewayExecutable) -> None:
        """Register the program that donates what it can."""
        self._program(made, _donated(made, made.facts.donated))

    def _program(self, made: GatewayExecutable, donated: tuple[int, ...]) -> int:
        """Return the program that donates these inputs; registers it the first time."""
        number = made.programs.get(donated)
        if number is None:
            body = replace(made.graph, donated=donated)
            number = self._runs.runtime.register_program(body, made.artifacts)
            made.programs[donated] = number
        return number

    def release(self, made: GatewayExecutable) -> None:
        """Release the programs of an executable."""
        for program in made.programs.values():
            self._runs.runtime.release_program(program)

    # --- running -------------------------------------------------------------------------------------

    def run(
        self, made: GatewayExecutable, args: Sequence[ProxyArray], given: Sequence[int] = ()
    ) -> Ran | Coroutine[Any, Any, Ran]:
        """Run an executable once. Returns the rest of it if that must wait for a credit.

        Args:
            made: the executable.
            args: its arguments.
            given: positions of arguments that are deleted then.

        Raises:
            Status: it takes other arguments.
        """
        if len(args) != len(made.facts.inputs):
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"{made.name} takes {len(made.facts.inputs)} arrays, and was given {len(args)}",
            )
        if given:
            _check_donated(args, given)
        parts = args
        if made.islands:
            _check_places(made, args)
            parts = [
                part for one in args for part in one.parts or joined.take_apart(one, made.islands)
            ]
        argument = self._runs.argument
        arguments = [argument(one, spec) for one, spec in zip(parts, made.inputs, strict=True)]
        if None in arguments:
            _check_places(made, args)
        elif self._runs.runtime.has_credit():
            return self._run(made, args, parts, arguments, given)
        return self._run_later(made, args, parts, arguments, given)

    async def _run_later(
        self,
        made: GatewayExecutable,
        args: Sequence[ProxyArray],
        parts: Sequence[ProxyArray],
        arguments: list[int | bytes | None],
        given: Sequence[int],
    ) -> Ran:
        """Make the views that the arguments need, and run when there is a credit."""
        kept: list[Stored] = []
        for at, known in enumerate(arguments):
            if known is None:
                kept.append(await self._runs.fitting(parts[at], made.inputs[at]))
                arguments[at] = kept[-1].number
        await self._runs.credit()
        return self._run(made, args, parts, arguments, given)

    def _run(
        self,
        made: GatewayExecutable,
        args: Sequence[ProxyArray],
        parts: Sequence[ProxyArray],
        arguments: Sequence[Any],
        given: Sequence[int],
    ) -> Ran:
        donated: tuple[int, ...] = ()
        if given:
            donated = _donated(made, [at for at in given if _may_be_donated(made, parts, at)])
            for at in given:
                if (one := args[at].stored) is not None:
                    one.is_donated()
        program = self._program(made, donated)
        stored = self._runs.run(program, (*arguments, *made.numbers), made.specs)
        habits = made.habits
        for at, one in enumerate(stored):
            one.origin = habits, at
        for at in tuple(habits.read):
            self._runs.fetch_ahead(stored[at])
        if habits.has_waited:  # it is about to wait again: the run goes before other requests
            habits.has_waited = False
            self._runs.hurry()
        if made.calls_back:
            made.last = tuple(stored)
        for at in given:
            args[at].delete()
        count = len(made.islands) or 1
        results = () if made.has_completion else made.results
        arrays = [
            _result(made, result, stored[at * count : (at + 1) * count])
            for at, result in enumerate(results)
        ]
        return Ran(arrays, stored if made.calls_back else stored[-count:])


def _result(made: GatewayExecutable, result: ResultFacts, stored: Sequence[Stored]) -> ProxyArray:
    array = ProxyArray(
        result.dtype,
        result.shape,
        result.shard_shape,
        made.devices,
        result.memory,
        result.is_replicated,
        sharding=result.sharding,
    )
    if not made.islands:
        array.consist_of(stored[0])
        return array
    parts = []
    for one, island in zip(stored, made.islands, strict=True):
        part = ProxyArray(
            result.dtype,
            result.shard_shape,
            result.shard_shape,
            tuple(made.devices[position] for position in island),
            result.memory,
            not one.spec.sharding.spec,
        )
        part.consist_of(one)
        parts.append(part)
    array.parts = tuple(parts)
    array.pieces = tuple([(parts[island], at) for island, at in made.places])
    return array


def _donated(made: GatewayExecutable, arguments: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the inputs that arguments are."""
    count = len(made.islands) or 1
    return tuple(at * count + island for at in arguments for island in range(count))


def _may_be_donated(made: GatewayExecutable, parts: Sequence[ProxyArray], argument: int) -> bool:
    count = len(made.islands) or 1
    own = parts[argument * count : (argument + 1) * count]
    return all(one.stored is not None and one.stored.may_be_donated for one in own)


def _check_donated(args: Sequence[ProxyArray], given: Sequence[int]) -> None:
    """Raise Status if an array is donated that is also another argument."""
    roots: dict[int, int] = {}
    for at, array in enumerate(args):
        for root in _identities(array):
            other = roots.setdefault(root, at)
            if other != at and (at in given or other in given):
                raise statuses.StatusError(
                    "INVALID_ARGUMENT",
                    f"Attempt to donate the same buffer twice in Execute() (arguments {other} and {at}); pass "
                    "a copy, or do not donate it",
                )


def _identities(array: ProxyArray) -> Iterator[int]:
    for root in array.roots():
        yield id(root.stored or root)


def _check_places(made: GatewayExecutable, args: Sequence[ProxyArray]) -> None:
    """Raise Status unless all arguments lie on the devices of an executable."""
    for at, array in enumerate(args):
        if array.devices != made.devices:
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"{made.name} runs on the devices {list(made.devices)}, but its argument {at} lies on "
                f"{list(array.devices)}; move it with jax.device_put",
            )
