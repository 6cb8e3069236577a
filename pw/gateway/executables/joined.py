"""Executables over several islands: `pw.islands` divides and cuts them, and their pieces are one program.

The part of an argument or result on an island is *replicated* or *stacked* over its devices, like every
array of the gateway.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from pw.core.dtypes import BY_MLIR, PACKED
from pw.core.jax_private.compiling import CompileOptions, HloSharding
from pw.core.jax_private.stablehlo import parsed
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.programs.stablehlo import CALLS, Facts, ShardFacts, Stablehlo, decode, encode
from pw.core.sharding import ArraySpec, Sharding, dtype_of
from pw.devices.jax.vetting import vet
from pw.gateway.arrays.arrays import ProxyArray, memory_of
from pw.gateway.arrays.devices import DevicesOfIsland
from pw.gateway.executables.compiled import GatewayExecutable, Source, dtype_in, results_of
from pw.gateway.executables.completion import with_completion
from pw.gateway.protocol.statuses import unsupported
from pw.islands.assignment import Assignment
from pw.islands.cut import cut
from pw.islands.division import Divided
from pw.islands.errors import CannotCut
from pw.islands.flat import element_of, is_token, shape_of
from pw.islands.labels import labels_of
from pw.islands.plan import Code, Lies, Plan
from pw.islands.running import run
from pw.islands.writing import Sides

_AXIS = "_"
"""The only axis of an island's devices."""
_MEMORY = "mhlo.memory_kind"
_DONATED = ("jax.buffer_donor", "tf.aliasing_output")


def take_apart(array: ProxyArray, islands: Sequence[Sequence[int]]) -> tuple[ProxyArray, ...]:
    """Return the array of the shards on each island, whose positions are given; the array keeps them."""
    array.parts = tuple(_part(array, positions) for positions in islands)
    return array.parts


def _part(array: ProxyArray, positions: Sequence[int]) -> ProxyArray:
    source, _ = array.pieces[positions[0]]
    if len(source.devices) == len(positions) and all(
        array.pieces[position] == (source, at) for at, position in enumerate(positions)
    ):
        return source
    return array.part(positions, (array.pieces[position] for position in positions))


def joined(
    code: Stablehlo, devices: tuple[int, ...], islands: Sequence[DevicesOfIsland]
) -> GatewayExecutable:
    """Return an executable over several islands.

    Args:
        code: as the client has sent it.
        devices: JAX's numbers, in the order of the partitions.
        islands: that the devices are on.

    Raises:
        Status: it cannot run on several islands.
        CompileError: hosts would refuse it.
    """
    try:
        with mlir.make_ir_context() as context, ir.Location.unknown(context):
            return _Joined(code, devices, islands).executable()
    except CannotCut as error:
        raise unsupported(
            f"this function cannot run on several islands: {error.why}{error.where}"
        ) from None


class _Joined:
    def __init__(
        self, code: Stablehlo, devices: tuple[int, ...], islands: Sequence[DevicesOfIsland]
    ) -> None:
        self._code = code
        self._devices = devices
        self._islands = islands
        self._facts = Facts("", (), (), (), 0, 0, 0, 0, 0)
        self._sides = Sides((), (), ())
        self._divided = b""

    def executable(self) -> GatewayExecutable:
        """Divide, cut and describe the function; in a context of MLIR."""
        if CompileOptions.ParseFromString(self._code.options).num_replicas > 1:
            raise CannotCut("it has replicas; use jax.jit or jax.shard_map")
        module = parsed(self._code.module)
        vet(module, CALLS)  # XLA's partitioner would call functions of the script, by address
        has_completion = not _main(module).type.results
        if has_completion:
            module = parsed(with_completion(self._code.module))
        name = ir.StringAttr(module.operation.attributes["sym_name"]).value
        arguments, results = (_attributes(_main(module), of) for of in ("arg_attrs", "res_attrs"))
        donated = tuple(
            at for at, one in enumerate(arguments) if any(name in one for name in _DONATED)
        )
        memories = [_memory(one) for one in arguments], [_memory(one) for one in results]
        of_partition = {
            at: number for number, one in enumerate(self._islands) for at in one.positions
        }
        assignment = Assignment([of_partition[at] for at in range(len(self._devices))])

        def sides(divided: Divided) -> Sides:
            self._describe(divided, name, memories, donated, assignment)
            return self._sides

        short = name.removeprefix("jit_")
        planned = cut(module, assignment, sides, short, donated, self._code.options)
        return self._recorded(planned, has_completion=has_completion)

    def _describe(
        self,
        divided: Divided,
        name: str,
        memories: tuple[list[str], list[str]],
        donated: tuple[int, ...],
        assignment: Assignment,
    ) -> None:
        """Note what is known of the divided function."""
        inner = _main(divided.module)
        block = inner.regions[0].blocks[0]
        returned = list(block.operations[len(block.operations) - 1].operation.operands)
        values = (list(block.arguments), returned)
        self._facts = _facts(name, divided, values, memories, donated)
        self._divided = bytes(mlir.module_to_bytecode(divided.module))
        arguments, results = (
            [self._lies(one, words, assignment) for one, words in zip(side, shardings, strict=True)]
            for side, shardings in (
                (self._facts.inputs, divided.arguments),
                (self._facts.outputs, divided.results),
            )
        )
        self._sides = Sides(
            tuple({_AXIS: len(one.positions)} for one in self._islands),
            tuple(arguments),
            tuple(results),
        )

    def _lies(self, one: ShardFacts, sharding: str, assignment: Assignment) -> tuple[Lies, ...]:
        labels = labels_of(sharding, assignment.partitions)
        is_equal = all(len({labels[at] for at in own}) == 1 for own in assignment.members)
        dtype = dtype_of(dtype_in(one))
        lies = []
        for own in assignment.members:
            if is_equal or not one.shape or len(own) == 1:
                lies.append(Lies(one.shape, dtype, ()))
            else:
                first, *rest = one.shape
                lies.append(Lies((len(own) * first, *rest), dtype, ((_AXIS,),)))
        return tuple(lies)

    def _spec(self, lies: Lies, island: int, memory: str = "") -> ArraySpec:
        placement = self._islands[island].placement
        sharding = Sharding((_AXIS,), (len(placement.devices),), lies.axes)
        return ArraySpec(lies.shape, lies.dtype.name, sharding, placement, memory)

    def _specs(
        self, side: Sequence[Sequence[Lies]], facts: Sequence[ShardFacts]
    ) -> list[tuple[ArraySpec, ...]]:
        """Return how the parts of arguments or results are given to the program, or taken from it."""
        return [
            tuple(
                self._spec(lies, island, memory_of(one.memory_kind))
                for island, lies in enumerate(own)
            )
            for own, one in zip(side, facts, strict=True)
        ]

    def _recorded(self, plan: Plan, *, has_completion: bool) -> GatewayExecutable:
        facts, sides, count = self._facts, self._sides, len(self._islands)
        inputs = [one for own in self._specs(sides.arguments, facts.inputs) for one in own]
        specs = self._specs(sides.results, facts.outputs)
        numbers: list[bytes] = []
        of_numbers: list[ArraySpec] = []
        computations: dict[Computation, int] = {}
        artifacts: dict[bytes, bytes] = {}
        nodes: list[Node] = []
        by_code: dict[tuple[Code, int], Computation] = {}
        sources: list[Source] = []

        def call(code: Code, island: int, values: list[ValueRef]) -> list[ValueRef]:
            computation = by_code.get((code, island))
            if computation is None:
                computation, artifact = self._computation(code, island)
                by_code[code, island] = computation
                computations.setdefault(computation, len(computations))
                artifacts[computation.artifact] = artifact
                sources.append(Source(decode(artifact), computation.placement))
            nodes.append(Node(computations[computation], tuple(values)))
            return [ValueRef(len(nodes) - 1, at) for at in range(len(code.outputs))]

        def constant(number: np.generic, island: int) -> ValueRef:
            numbers.append(number.tobytes())
            of_numbers.append(self._spec(Lies((), number.dtype, ()), island))
            return ValueRef(-1, len(inputs) + len(numbers) - 1)

        results = run(
            plan,
            [
                [ValueRef(-1, at * count + island) for island in range(count)]
                for at in range(len(sides.arguments))
            ],
            constant,
            call,
        )
        graph = Program(
            facts.name,
            tuple(computations),
            tuple(nodes),
            (*inputs, *of_numbers),
            tuple(
                Output(value, spec)
                for values, own in zip(results, specs, strict=True)
                for value, spec in zip(values, own, strict=True)
            ),
        )
        return GatewayExecutable(
            facts.name,
            self._devices,
            facts,
            tuple(sources),
            graph,
            artifacts,
            tuple(inputs),
            results_of(facts, len(self._devices), specs, is_divided=True),
            has_completion,
            tuple(one.positions for one in self._islands),
            tuple(numbers),
            self._divided,
        )

    def _computation(self, code: Code, island: int) -> tuple[Computation, bytes]:
        """Return a piece on an island, and its artifact."""
        artifact = code.artifact
        if code.calls_back:
            artifact = encode(
                msgspec.structs.replace(decode(artifact), callbacks=self._code.callbacks)
            )
        computation = Computation(
            code.name,
            hashlib.sha256(artifact).digest(),
            self._islands[island].placement,
            tuple(self._spec(lies, island) for lies in code.inputs),
            tuple(self._spec(lies, island) for lies in code.outputs),
            code.donated,
            calls_back=code.calls_back,
        )
        return computation, artifact


def _main(module: Any) -> Any:
    return ir.SymbolTable(module.operation)["main"]


def _attributes(main: Any, of: str) -> list[Any]:
    """Return the attributes of each argument, or of each result."""
    count = len(main.type.inputs if of == "arg_attrs" else main.type.results)
    if of not in main.attributes:
        return [{}] * count
    return [ir.DictAttr(one) for one in ir.ArrayAttr(main.attributes[of])]


def _memory(attributes: Any) -> str:
    return ir.StringAttr(attributes[_MEMORY]).value if _MEMORY in attributes else ""


def _facts(
    name: str,
    divided: Divided,
    values: tuple[Sequence[Any], Sequence[Any]],
    memories: tuple[Sequence[str], Sequence[str]],
    donated: tuple[int, ...],
) -> Facts:
    """Return what a compiler would say; `values` are the arguments, and what is returned."""
    inputs, outputs = (
        tuple(map(_shard, own, shardings, kinds))
        for own, shardings, kinds in zip(
            values, (divided.arguments, divided.results), memories, strict=True
        )
    )
    input_bytes, output_bytes = (sum(map(_bytes, side)) for side in (inputs, outputs))
    reused = min(output_bytes, sum(_bytes(inputs[at]) for at in donated))
    return Facts(name, inputs, outputs, donated, 0, input_bytes, output_bytes, reused, 0)


def _shard(value: Any, words: str, memory: str) -> ShardFacts:
    """Return what is known of an argument or result of the divided function."""
    shape = shape_of(value)
    dtype = "token" if is_token(value) else BY_MLIR[str(element_of(value))]
    sharding = HloSharding.from_string(words).to_proto().SerializeToString()
    bits = element_of(value).width if dtype in PACKED else 0
    return ShardFacts(dtype, shape, sharding, tuple(reversed(range(len(shape)))), bits, memory)


def _bytes(one: ShardFacts) -> int:
    each = one.element_bits or 8 * dtype_of(dtype_in(one)).itemsize
    return -(-math.prod(one.shape) * each // 8)
