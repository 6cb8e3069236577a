"""Functions that return their argument, divided in another way over the same devices of several islands.

`pw.islands` cuts them as every other function: what XLA's partitioner does to divide an array otherwise
happens on each island, with edges between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jax._src.interpreters import mlir  # a context that knows all of JAX's dialects
from jax.extend.mlir import ir
from jaxlib import xla_client

from pw.core.dtypes import DTYPES
from pw.core.programs.stablehlo import Stablehlo
from pw.gateway.arrays import ProxyArray
from pw.gateway.compiled import GatewayExecutable
from pw.gateway.executor import Executor, Ran
from pw.gateway.tiles import Tiles

KEPT = 128
"""Functions that are kept compiled; the one used longest ago is released first."""

_Key = tuple[str, tuple[int, ...], tuple[int, ...], str, str]


class Moves:
    """Compiles and runs such functions for one client."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._known: OrderedDict[_Key, GatewayExecutable] = OrderedDict()

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
        known = source.tiles
        goal = Tiles(wanted.parts, tuple(place[devices[at]] for at in wanted.order))
        key = source.dtype, source.shape, source.devices, _words(known), _words(goal)
        made = self._known.get(key)
        if made is None:
            made = self._known[key] = await self._executor.compiled(_identity(*key), source.devices)
            if len(self._known) > KEPT:
                self._executor.release(self._known.popitem(last=False)[1])
        self._known.move_to_end(key)
        ran = self._executor.run(made, [source])
        return (ran if isinstance(ran, Ran) else await ran).arrays[0]

    def close(self) -> None:
        """Release the functions."""
        for made in self._known.values():
            self._executor.release(made)
        self._known.clear()


def _words(known: Tiles) -> str:
    """Return a sharding in XLA's words."""
    if known.distinct == 1:
        return "{replicated}"
    dims = ",".join(map(str, (*known.parts, known.copies)))
    return f"{{devices=[{dims}]{','.join(map(str, known.order))} last_tile_dim_replicate}}"


def _identity(
    dtype: str, shape: tuple[int, ...], devices: tuple[int, ...], given: str, wanted: str
) -> Stablehlo:
    """Return a function that returns its argument."""
    kind = f"tensor<{''.join(f'{size}x' for size in shape)}{DTYPES[dtype].mlir}>"
    text = f'''
module @reshard attributes {{
  mhlo.num_partitions = {len(devices)} : i32, mhlo.num_replicas = 1 : i32
}} {{
  func.func public @main(
    %arg0: {kind} {{mhlo.sharding = "{given}"}}
  ) -> ({kind} {{mhlo.sharding = "{wanted}"}}) {{
    return %arg0 : {kind}
  }}
}}'''
    with mlir.make_ir_context() as context:
        module = bytes(mlir.module_to_bytecode(ir.Module.parse(text, context)))
    options = xla_client.CompileOptions()
    options.executable_build_options.use_spmd_partitioning = True
    return Stablehlo(module, bytes(options.SerializeAsString()))
