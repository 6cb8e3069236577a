"""Functions that return their argument, divided in another way over the same devices of several islands.

`pw.islands` cuts them as every other function: what XLA's partitioner does to divide an array otherwise
happens on each island, with edges between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jax.extend.mlir import ir
from jax.interpreters import mlir

from pw.core.dtypes import DTYPES
from pw.core.jax_private.compiling import CompileOptions
from pw.core.programs.stablehlo import Stablehlo
from pw.gateway.arrays.arrays import ProxyArray
from pw.gateway.executables.compiled import GatewayExecutable
from pw.gateway.executables.executor import Executor, Ran
from pw.gateway.protocol.tiles import Tiles

KEPT = 128
"""Functions that are kept compiled; the one used longest ago is released first."""

_Key = tuple[str, tuple[int, ...], tuple[int, ...], str, str]


class Moves:
    """Compiles and runs such functions for one client."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._executables: OrderedDict[_Key, GatewayExecutable] = OrderedDict()

    async def moved(self, source: ProxyArray, devices: Sequence[int], wanted: Tiles) -> ProxyArray:
        """Return an array on the devices of another one, in their order, divided in another way.

        Args:
            source: an array on several islands.
            devices: the same devices, in any order.
            wanted: which part each of `devices` has.

        Raises:
            Status: it is not known which part of the array each shard is.
        """
        place = {device: at for at, device in enumerate(source.devices)}
        tiles = source.tiles
        goal = Tiles(wanted.parts, tuple(place[devices[at]] for at in wanted.order))
        key = source.dtype, source.shape, source.devices, _words(tiles), _words(goal)
        executable = self._executables.get(key)
        if executable is None:
            executable = self._executables[key] = await self._executor.compiled(
                _identity(*key), source.devices
            )
            if len(self._executables) > KEPT:
                self._executor.release(self._executables.popitem(last=False)[1])
        self._executables.move_to_end(key)
        ran = self._executor.run(executable, [source])
        return (ran if isinstance(ran, Ran) else await ran).arrays[0]

    def close(self) -> None:
        """Release the functions."""
        for executable in self._executables.values():
            self._executor.release(executable)
        self._executables.clear()


def _words(tiles: Tiles) -> str:
    """Return a sharding in XLA's words."""
    if tiles.distinct == 1:
        return "{replicated}"
    dims = ",".join(map(str, (*tiles.parts, tiles.copies)))
    return f"{{devices=[{dims}]{','.join(map(str, tiles.order))} last_tile_dim_replicate}}"


def _identity(
    dtype: str, shape: tuple[int, ...], devices: tuple[int, ...], origin: str, wanted: str
) -> Stablehlo:
    """Return a function that returns its argument."""
    kind = f"tensor<{''.join(f'{size}x' for size in shape)}{DTYPES[dtype].mlir}>"
    text = f'''
module @reshard attributes {{
  mhlo.num_partitions = {len(devices)} : i32, mhlo.num_replicas = 1 : i32
}} {{
  func.func public @main(
    %arg0: {kind} {{mhlo.sharding = "{origin}"}}
  ) -> ({kind} {{mhlo.sharding = "{wanted}"}}) {{
    return %arg0 : {kind}
  }}
}}'''
    with mlir.make_ir_context() as context:
        module = bytes(mlir.module_to_bytecode(ir.Module.parse(text, context)))
    options = CompileOptions()
    options.executable_build_options.use_spmd_partitioning = True
    return Stablehlo(module, bytes(options.SerializeAsString()))
