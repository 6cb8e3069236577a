"""Export: from a Python function to an artifact that hosts can compile.

A function is traced over an abstract mesh (axis sizes and names, no devices) under the caller's JAX
configuration, and exported as portable StableHLO for the platform of its slice. The client needs
neither that platform nor the devices. Three things change. Typed PRNG keys become unsigned
integers, their only form in the runtime. Arrays that the function closes over become arguments:
handles stay in place, and large host constants are uploaded (jax arrays once for all traces, NumPy
arrays, which may change, for each trace). Constructs that cannot travel, such as a callback into
this process, raise `TracingError`. The artifact says nothing about lines of the script: hosts find
what they have compiled by the artifact's digest, also when the script has changed elsewhere.

A function with `check_nans` has one more result: a vector with a boolean for each floating-point
result. It is the same on all devices, so all hosts agree; users never see it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.joined import uploaded
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType, host_value, is_key
from pw.client.arrays.transformed import for_hosts
from pw.client.computations.captured import lift
from pw.client.computations.exported import Call, Export, export_once
from pw.client.computations.like_arguments import like_arguments
from pw.client.computations.stablehlo import artifact_of, result_specs
from pw.core.errors import TracingError
from pw.core.jax_private.tracing import without_lines
from pw.core.platforms import jax_platform
from pw.core.programs.program import Computation

BAKED_BYTES = 1024
"""Host constants up to this size stay in the artifact."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A computation, its artifact, and the captured arrays of each call."""

    computation: Computation
    artifact: bytes
    mesh: OwnMesh
    inputs: tuple[ArrayType, ...]
    """Types of the leaves of the arguments."""
    captured: tuple[Array, ...]
    """Arrays that follow the explicit arguments."""
    outputs: tuple[ArrayType, ...]
    tree: Any
    """Tree of the results."""
    counted: tuple[tuple[int, int], ...] = ()
    """Positions of the rows and of the counts of each argument that is a `Ragged`."""


def trace(call: Call) -> Traced:
    """Trace and export the function of a call.

    Raises:
        TracingError: the function can be traced but not sent to the hosts.
        Exception: the function's own errors.
    """
    result, mesh = export_once(call, export), call.mesh
    specs = [type_.spec for type_ in result.outputs]
    if result.checks:
        flags = jax.core.ShapedArray((len(result.checks),), np.dtype(bool))
        specs.append(ArrayType.of(flags, OwnSharding.replicated(mesh)).spec)
    artifact = artifact_of(result.module, call.donated, () if result.is_divided else specs)
    computation = Computation(
        call.name,
        hashlib.sha256(artifact).digest(),
        mesh.placement,
        tuple(type_.spec for type_ in result.inputs),
        tuple(specs),
        call.donated,
        checks=result.checks,
    )
    return Traced(
        computation,
        artifact,
        mesh,
        call.types,
        result.captured,
        result.outputs,
        result.tree,
        pairs_of(call.tree),
    )


def export(call: Call) -> Export:
    """Trace and export the function of a call as `trace` does."""
    mesh = call.mesh
    closed, tree = jaxpr_of(call)
    jaxpr, constants, lifted = lift(closed, _must_lift)
    captured = tuple(_on_mesh(value, mesh) for value in lifted)
    types = (*call.types, *(_captured_type(array, mesh) for array in captured))
    avals = closed.out_avals
    wanted = like_arguments(jaxpr, call.tree, call.types, tree, call.out_shardings(tree, avals))
    for aval, sharding in zip(avals, wanted, strict=True):
        if sharding is not None:
            sharding.core.check(tuple(aval.shape))
    checks = _checks(tree, avals) if call.check_nans else {}
    module = _exported(jaxpr, constants, call.name, mesh, types, wanted, tuple(checks))
    shardings = _settled(module, mesh, avals, wanted)
    outputs = tuple(map(ArrayType.of, avals, shardings))
    is_divided = mesh.size == 1 or None not in wanted
    return Export(module, captured, types, outputs, tuple(checks.values()), tree, is_divided)


def jaxpr_of(call: Call) -> tuple[Any, Any]:
    """Trace the function of a call. Returns its closed jaxpr, and the tree of its results."""
    call.mesh.check_alive()
    trees = []

    @functools.wraps(call.function)
    def flat(*args: Any, **kwargs: Any) -> list[Any]:
        results, tree = jax.tree_util.tree_flatten(call.function(*args, **kwargs))
        trees.append(tree)
        return results

    args, kwargs = jax.tree_util.tree_unflatten(call.tree, [type_.aval for type_ in call.types])
    with tracing(call.mesh):
        closed = jax.make_jaxpr(flat)(*args, **kwargs)
    return closed, trees[-1]


@contextlib.contextmanager
def tracing(mesh: OwnMesh) -> Iterator[None]:
    """In the block, functions are traced for the hosts of a mesh."""
    with for_hosts(mesh), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield


def _settled(
    module: bytes, mesh: OwnMesh, avals: Sequence[Any], wanted: Sequence[OwnSharding | None]
) -> list[OwnSharding]:
    """Return the sharding of every result: the wanted one, or the compiler's choice.

    The function chooses the memory of such a result, as JAX's type of it says.
    """
    if mesh.size == 1 or None not in wanted:
        chosen = [OwnSharding.replicated(mesh)] * len(avals)
    else:
        # The integers of a typed key have dimensions of their own, behind those of the array.
        specs = result_specs(module, [aval.shape for aval in avals])
        chosen = [
            OwnSharding.over(mesh, PartitionSpec(*spec[: aval.ndim]))
            for spec, aval in zip(specs, avals, strict=False)
        ]
    return [
        sharding or choice.in_space(aval.memory_space)
        for sharding, choice, aval in zip(wanted, chosen, avals, strict=True)
    ]


def _checks(tree: Any, avals: Sequence[Any]) -> dict[int, str]:
    """Return the positions and names of the results that could have NaNs."""
    numbers = jax.tree_util.tree_unflatten(tree, range(len(avals)))
    names = {}
    for path, index in jax.tree_util.tree_flatten_with_path(numbers)[0]:
        aval = avals[index]
        if aval.size and jnp.issubdtype(aval.dtype, jnp.inexact):
            names[index] = f"result{jax.tree_util.keystr(path)}, {aval.str_short()}"
    return names


def _exported(
    jaxpr: Any,
    constants: Sequence[Any],
    name: str,
    mesh: OwnMesh,
    inputs: Sequence[ArrayType],
    wanted: Sequence[OwnSharding | None],
    checked: Sequence[int],
) -> bytes:
    evaluate = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(jaxpr, list(constants)))

    def physical(*buffers: Any) -> list[Any]:
        arguments = [
            buffer
            if type_.key_impl is None
            else jax.random.wrap_key_data(buffer, impl=type_.key_impl)
            for type_, buffer in zip(inputs, buffers, strict=True)
        ]
        results = list(evaluate(*arguments))
        if checked:
            results.append(jnp.stack([jnp.any(results[at] != results[at]) for at in checked]))
        return [
            jax.random.key_data(result) if is_key(jax.typeof(result).dtype) else result
            for result in results
        ]

    asked = [*wanted, OwnSharding.replicated(mesh)] if checked else wanted
    physical.__name__ = physical.__qualname__ = name if name.isidentifier() else "computation"
    compiled = jax.jit(
        physical,
        in_shardings=tuple(type_.sharding.abstract() for type_ in inputs),
        out_shardings=[None if sharding is None else sharding.abstract() for sharding in asked],
        keep_unused=True,
    )
    avals = [
        jax.core.ShapedArray(
            type_.spec.shape, type_.numpy_dtype, memory_space=type_.aval.memory_space
        )
        for type_ in inputs
    ]
    platform = jax_platform(mesh.slice.platform)
    try:
        # Pieces of a function over islands get their lines removed when it is cut: errors name them.
        with contextlib.nullcontext() if mesh.parts else without_lines():
            exported = jax.export.export(compiled, platforms=[platform])(*avals)
        return bytes(exported.mlir_module_serialized)
    except Exception as error:
        raise TracingError(
            f"the function {name!r} was traced but cannot be sent to the hosts: "
            f"{type(error).__name__}: {str(error).rstrip('.')}. Callbacks into this process (jax.debug.print, "
            "pure_callback, io_callback) and meshes of its devices (jax.pmap without devices=) cannot "
            "travel: return such values and print them here, and name virtual devices"
        ) from error


def _must_lift(value: Any) -> bool:
    if isinstance(value, Array) or is_key(value.dtype):
        return True
    return int(value.size) * int(value.dtype.itemsize) > BAKED_BYTES


def _on_mesh(value: Any, mesh: OwnMesh) -> Array:
    """Return a captured array; replicate a captured host constant on the mesh."""
    if isinstance(value, Array):
        value._check_owner(mesh.runtime)
        return value
    return constant(value, ArrayType.of(jax.typeof(value), OwnSharding.replicated(mesh)))


def constant(value: Any, type_: ArrayType) -> Array:
    """Return a host value on devices; a jax array is uploaded once for all functions that close over it."""
    slice_ = type_.sharding.mesh.slice
    table = slice_.constants
    key = (id(value), type_)
    source, upload = table.get(key, (None, None))
    if source is not None and source() is value:
        earlier: Array | None = upload()
        if earlier is not None:
            return earlier
    array = uploaded(slice_.runtime, host_value(value, type_), type_)
    if isinstance(value, jax.Array):

        def forget(_: Any) -> None:
            table.pop(key, None)

        table[key] = (weakref.ref(value, forget), weakref.ref(array, forget))
    return array


def _captured_type(array: Array, mesh: OwnMesh) -> ArrayType:
    if array._type.sharding.mesh == mesh:
        return array._type
    replicated = OwnSharding.replicated(mesh)
    return array._type.with_sharding(replicated.in_space(array.aval.memory_space))
