"""What clients give to a compiler: artifacts of StableHLO, and compile options.

XLA and MLIR end their process for some inputs, so a process beside the host reads them first. A host reads the
options itself as well: it must live with all that the process beside it has taken.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
from jax._src.interpreters import mlir
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pw.core.errors import CompileError
from pw.core.programs.stablehlo import Stablehlo, decode, encode
from pw.core.sharding import DeviceAddress
from pw.devices.jax import modules
from pw.devices.jax.compile_process import Bounds
from pw.devices.jax.compile_processes import CompileProcesses
from pw.devices.jax.making import Order
from tests.fuzz import mutation
from tests.fuzz.target import Run, Target

BOUND_S = 20.0
"""The time of a process for one input."""


def _options() -> list[bytes]:
    made = []
    for replicas in (1, 2):
        options = xla_client.CompileOptions()
        options.num_replicas, options.num_partitions = 1, 1
        options.executable_build_options.use_spmd_partitioning = replicas == 1
        options.env_option_overrides = [("xla_cpu_enable_fast_math", True)] * (replicas - 1)
        made.append(options.SerializeAsString())
    return made


@functools.cache
def _module() -> bytes:
    """A module; its bytes do not depend on where this file lies, so a failure happens everywhere."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    text = jax.jit(lambda x: jnp.sin(x) + 1).lower(shape).as_text()
    with mlir.make_ir_context():
        code = mlir.module_to_bytecode(ir.Module.parse(text))
    version = stablehlo.get_current_version()
    return bytes(_jax.mlir.serialize_portable_artifact(code, version, True))


def _artifacts() -> list[bytes]:
    return [
        encode(Stablehlo(b"a module", options, callbacks))
        for options in _options()
        for callbacks in ((), (b"one", b"two"))
    ]


def _decode(data: bytes) -> None:
    assert isinstance(decode(data), Stablehlo)


def _fail(error: BaseException) -> None:
    raise error


@contextmanager
def _examined(is_module: bool) -> Iterator[Run]:
    """Have a process beside this one read each input; then this process reads the options, as a host does."""
    # The parser of MLIR does not end for some inputs.
    processes = CompileProcesses(lambda: 1, _fail, Bounds(timeout_s=BOUND_S))

    def run(data: bytes) -> None:
        code = Stablehlo(data, _options()[0]) if is_module else Stablehlo(_module(), data)
        artifact = encode(code)
        order = Order(artifact, (DeviceAddress("h", 0),))
        processes.wait_for(1, "f", hashlib.sha256(artifact).digest(), order)
        modules.options_of(code.options, jax.devices()[:1])

    try:
        yield run
    finally:
        for thread in processes.close():
            thread.join()


TARGETS = [
    Target("artifacts", _artifacts, _decode, allowed=(CompileError,), weight=8),
    Target(
        "artifacts-of-right-types",
        _artifacts,
        _decode,
        allowed=(CompileError,),
        weight=1,
        mutate=mutation.of_trees,
    ),
    Target(
        "modules",
        lambda: [_module()],
        opened=partial(_examined, True),
        allowed=(CompileError,),
        weight=0.012,
    ),
    Target(
        "compile-options",
        _options,
        opened=partial(_examined, False),
        allowed=(CompileError,),
        weight=0.012,
    ),
]
