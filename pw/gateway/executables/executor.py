"""Compiles modules for one client, and runs what was compiled; it knows no handles.

A computation on one island is a program of one computation (`pw.core.programs.stablehlo`). A host
compiles it first, because only the compiler knows how the results are divided. A computation on several
islands is divided here, and is a program of several computations (`joined`). The program is registered,
and each execution is a run of it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from pw.core.errors import HostLost
from pw.core.messages import Detail
from pw.core.programs.stablehlo import Facts, Stablehlo, encode
from pw.core.sharding import Placement
from pw.gateway.arrays.arrays import ProxyArray, Stored
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs
from pw.gateway.executables import joined
from pw.gateway.executables.compiled import GatewayExecutable, ResultFacts, describe
from pw.gateway.executables.completion import with_completion
from pw.gateway.executables.foreseen import SmallModules
from pw.gateway.executables.tokens import has_tokens, without_tokens
from pw.gateway.protocol import statuses

FACTS_KEPT = 1024
"""Modules whose facts are kept, for the time when their island is away."""
_FactsKey = tuple[bytes, int]
"""SHA-256 of a module, and the number of its devices."""


class Ran(NamedTuple):
    """An execution that is sent to the runtime."""

    arrays: list[ProxyArray]
    ends: Sequence[Stored]
    """Arrays that are ready when the execution has ended."""


class Executor:
    """Compiles and runs for one client."""

    def __init__(self, devices: Devices, runs: Runs) -> None:
        self._devices = devices
        self._runs = runs
        self._small = SmallModules()
        self._compiled: dict[_FactsKey, Facts] = {}
        """Facts of the modules that hosts have compiled last."""

    # --- compiling -----------------------------------------------------------------------------------

    async def compiled(self, code: Stablehlo, devices: tuple[int, ...]) -> GatewayExecutable:
        """Compile a module for these devices. Raises Status, CompileError."""
        islands = self._devices.islands(devices)
        if len(islands) > 1:
            executable = await asyncio.to_thread(joined.joined, code, devices, islands)
            by_island = await asyncio.gather(
                *(self._facts(*source) for source in executable.sources)
            )
            executable.facts = replace(
                executable.facts,
                code_bytes=sum(one.code_bytes for one in by_island) // len(islands),
                temporary_bytes=max(one.temporary_bytes for one in by_island),
            )
            return executable
        placement = islands[0].placement
        if len(devices) > 1 and has_tokens(code.module):
            code = Stablehlo(without_tokens(code.module), code.options, code.callbacks)
        forecast = self._small.foreseen(code) if len(devices) == 1 else None
        if forecast is not None:
            return describe(devices, placement, forecast.code, forecast.facts, source=code)
        facts = await self._facts(code, placement)
        has_completion = not facts.outputs
        if has_completion:
            code = Stablehlo(with_completion(code.module), code.options, code.callbacks)
            facts = await self._facts(code, placement)
        return describe(devices, placement, code, facts, has_completion=has_completion)

    async def _facts(self, code: Stablehlo, placement: Placement) -> Facts:
        """Return what the compiler says of a module, if need be on an island with the same devices.

        So not the call fails whose island is away, but its run. Raises HostLost if all of them are away, and
        none has compiled the module before.
        """
        key = hashlib.sha256(encode(code)).digest(), len(placement.devices)
        runtime = self._runs.runtime
        if not runtime.is_lost(placement.slice) or not self._may_ask_elsewhere(key, placement):
            try:
                return await self._asked(key, code, placement)
            except HostLost:
                if not self._may_ask_elsewhere(key, placement):
                    raise
        if (facts := self._compiled.get(key)) is not None:
            return facts
        return await self._asked(key, code, self._elsewhere(placement)[0])

    def _may_ask_elsewhere(self, key: _FactsKey, placement: Placement) -> bool:
        return key in self._compiled or bool(self._elsewhere(placement))

    def _elsewhere(self, placement: Placement) -> list[Placement]:
        is_lost = self._runs.runtime.is_lost
        return [one for one in self._devices.alike(placement) if not is_lost(one.slice)]

    async def _asked(self, key: _FactsKey, code: Stablehlo, placement: Placement) -> Facts:
        asked = self._runs.runtime.ask.compile(code, placement, Detail.FACTS)
        facts = (await self._runs.waited(asked)).facts
        assert facts is not None
        self._compiled[key] = facts
        if len(self._compiled) > FACTS_KEPT:
            del self._compiled[next(iter(self._compiled))]
        return facts

    def register(self, executable: GatewayExecutable) -> None:
        """Register the program that donates what it can."""
        self._program(executable, _donated(executable, executable.facts.donated))

    def _program(self, executable: GatewayExecutable, donated: tuple[int, ...]) -> int:
        """Return the program that donates these inputs; registers it the first time."""
        number = executable.programs.get(donated)
        if number is None:
            body = replace(executable.graph, donated=donated)
            number = self._runs.runtime.register_program(body, executable.artifacts)
            executable.programs[donated] = number
        return number

    def release(self, executable: GatewayExecutable) -> None:
        """Release the programs of an executable."""
        for program in executable.programs.values():
            self._runs.runtime.release_program(program)

    # --- running -------------------------------------------------------------------------------------

    def run(
        self,
        executable: GatewayExecutable,
        args: Sequence[ProxyArray],
        donations: Sequence[int] = (),
    ) -> Ran | Coroutine[Any, Any, Ran]:
        """Run an executable once. Returns the rest of it if that must wait for a credit.

        Args:
            executable: compiled for the devices of its arguments.
            args: its arguments.
            donations: positions of arguments that are deleted then.

        Raises:
            Status: it takes other arguments.
        """
        if len(args) != len(executable.facts.inputs):
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"{executable.name} takes {len(executable.facts.inputs)} arrays, and was given {len(args)}",
            )
        if donations:
            _check_donated(args, donations)
        parts = args
        if executable.islands:
            _check_places(executable, args)
            parts = [
                part
                for one in args
                for part in one.parts or joined.take_apart(one, executable.islands)
            ]
        argument = self._runs.argument
        arguments = [
            argument(one, spec) for one, spec in zip(parts, executable.inputs, strict=True)
        ]
        if None in arguments:
            _check_places(executable, args)
        elif self._runs.runtime.has_credit():
            return self._run(executable, args, parts, arguments, donations)
        return self._run_later(executable, args, parts, arguments, donations)

    async def _run_later(
        self,
        executable: GatewayExecutable,
        args: Sequence[ProxyArray],
        parts: Sequence[ProxyArray],
        arguments: list[int | bytes | None],
        donations: Sequence[int],
    ) -> Ran:
        """Make the views that the arguments need, and run when there is a credit."""
        kept: list[Stored] = []
        for at, argument in enumerate(arguments):
            if argument is None:
                kept.append(await self._runs.fitting(parts[at], executable.inputs[at]))
                arguments[at] = kept[-1].number
        await self._runs.credit()
        return self._run(executable, args, parts, arguments, donations)

    def _run(
        self,
        executable: GatewayExecutable,
        args: Sequence[ProxyArray],
        parts: Sequence[ProxyArray],
        arguments: Sequence[Any],
        donations: Sequence[int],
    ) -> Ran:
        donated: tuple[int, ...] = ()
        if donations:
            donated = _donated(
                executable, [at for at in donations if _may_be_donated(executable, parts, at)]
            )
            for at in donations:
                if (one := args[at].stored) is not None:
                    one.is_donated()
        program = self._program(executable, donated)
        stored = self._runs.run(program, (*arguments, *executable.numbers), executable.specs)
        habits = executable.habits
        for at, one in enumerate(stored):
            one.origin = habits, at
        for at in tuple(habits.read):
            self._runs.fetch_ahead(stored[at])
        if habits.has_waited:  # it is about to wait again: the run goes before other requests
            habits.has_waited = False
            self._runs.hurry()
        if executable.calls_back:
            executable.last = tuple(stored)
        for at in donations:
            args[at].delete()
        count = len(executable.islands) or 1
        results = () if executable.has_completion else executable.results
        arrays = [
            _result(executable, result, stored[at * count : (at + 1) * count])
            for at, result in enumerate(results)
        ]
        return Ran(arrays, stored if executable.calls_back else stored[-count:])


def _result(
    executable: GatewayExecutable, result: ResultFacts, stored: Sequence[Stored]
) -> ProxyArray:
    array = ProxyArray(
        result.dtype,
        result.shape,
        result.shard_shape,
        executable.devices,
        result.memory,
        result.is_replicated,
        sharding=result.sharding,
    )
    if not executable.islands:
        array.consist_of(stored[0])
        return array
    parts = []
    for one, island in zip(stored, executable.islands, strict=True):
        part = ProxyArray(
            result.dtype,
            result.shard_shape,
            result.shard_shape,
            tuple(executable.devices[position] for position in island),
            result.memory,
            not one.spec.sharding.spec,
        )
        part.consist_of(one)
        parts.append(part)
    array.parts = tuple(parts)
    array.pieces = tuple([(parts[island], at) for island, at in executable.places])
    return array


def _donated(executable: GatewayExecutable, arguments: Sequence[int]) -> tuple[int, ...]:
    """Return the positions of the inputs that arguments are."""
    count = len(executable.islands) or 1
    return tuple(at * count + island for at in arguments for island in range(count))


def _may_be_donated(
    executable: GatewayExecutable, parts: Sequence[ProxyArray], argument: int
) -> bool:
    count = len(executable.islands) or 1
    own = parts[argument * count : (argument + 1) * count]
    return all(one.stored is not None and one.stored.may_be_donated for one in own)


def _check_donated(args: Sequence[ProxyArray], donations: Sequence[int]) -> None:
    """Raise Status if an array is donated that is also another argument."""
    roots: dict[int, int] = {}
    for at, array in enumerate(args):
        for root in _identities(array):
            other = roots.setdefault(root, at)
            if other != at and (at in donations or other in donations):
                raise statuses.StatusError(
                    "INVALID_ARGUMENT",
                    f"Attempt to donate the same buffer twice in Execute() (arguments {other} and {at}); pass "
                    "a copy, or do not donate it",
                )


def _identities(array: ProxyArray) -> Iterator[int]:
    for root in array.roots():
        yield id(root.stored or root)


def _check_places(executable: GatewayExecutable, args: Sequence[ProxyArray]) -> None:
    """Raise Status unless all arguments lie on the devices of an executable."""
    for at, array in enumerate(args):
        if array.devices != executable.devices:
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"{executable.name} runs on the devices {list(executable.devices)}, but its argument {at} lies "
                f"on {list(array.devices)}; move it with jax.device_put",
            )
