"""`pw.jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import jax

from pw.client.arrays.mesh import OwnMesh, mesh_of
from pw.client.arrays.signature import Statics, both_ways
from pw.client.functions.function import JitFunction
from pw.client.functions.parameters import parameters_of
from pw.client.functions.wrapped import P, R
from pw.client.keywords import checks_keywords


class _Options(TypedDict, total=False):
    devices: Any
    mesh: jax.sharding.Mesh | OwnMesh | None
    in_shardings: Any
    out_shardings: Any
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    check_nans: bool | None
    timeout: float | None


@overload
def jit(fun: Callable[P, R], **options: Unpack[_Options]) -> JitFunction[P, R]: ...


@overload
def jit(
    fun: None = None, **options: Unpack[_Options]
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


@checks_keywords
def jit(
    fun: Callable[..., Any] | None = None,
    *,
    devices: Any = None,
    mesh: jax.sharding.Mesh | OwnMesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    check_nans: bool | None = None,
    timeout: float | None = None,
) -> Any:
    """Compile `fun` to run on virtual devices; calls return futures at once.

    Works as a decorator too, with or without keywords. To type checkers the result takes and gives what
    `fun` does, and a `pw.Array` is a `jax.Array`.

    Args:
        fun: a function that JAX can trace, of trees of arrays and numbers.
        devices: where to run: a slice, a virtual device, or several of one slice. They form a mesh with
            the one axis "devices".
        mesh: instead of `devices`, a `pw.Mesh`. With neither, a call runs on the mesh of its array
            arguments; without any, on a default slice of one device.
        in_shardings: tree prefix of the positional arguments with a PartitionSpec, a `pw.NamedSharding`,
            or None for arguments that keep their sharding (replicated if they are on other devices).
            Arguments with another sharding are moved, but none to another kind of memory: that raises
            ShardingError, as in `jax.jit`.
        out_shardings: the same for the results; None stands for the compiler's choice, which is
            `jax.jit`'s: results of split arrays stay split where that costs nothing. Results that depend on no
            argument's values, as of `jnp.zeros_like`, get the sharding of the argument with the same shape
            and end of its path; they are replicated if there is none, or several that lie differently. A
            `memory_kind` puts results there; with None they lie in the memory in which JAX computes them.
        static_argnums, static_argnames: arguments that the trace depends on.
        donate_argnums, donate_argnames: arguments whose memory may be reused; their arrays are deleted.
        check_nans: raise `NaNFound` for all results of a call, and all that is computed from them, if one of
            them has a NaN. It is for debugging: the hosts enqueue further work only after the check. None
            follows `jax_debug_nans` of JAX's configuration.
        timeout: seconds that a call may take from its launch (time in the queue does not count; waiting for
            other work on the devices does). A call that takes longer fails with `ComputationTimeout`, and so
            do calls that need its results. To end a started computation the island is formed again, which
            takes a moment; other clients keep their arrays there. In a `pw.program` the program's own
            timeout counts instead.

    Raises:
        PlacementError: the devices cannot run one computation together.
        ArgumentError: at a call, an argument that is no array or number.
        TracingError: at the first call, a function that cannot be sent to hosts.
    """
    if devices is not None and mesh is not None:
        raise TypeError("pw.jit takes devices= or mesh=, not both")

    def compiled(fun: Callable[..., Any]) -> JitFunction[..., Any]:
        if not callable(fun):
            raise TypeError(f"pw.jit takes a function, not {fun!r}")
        parameters = parameters_of(fun)
        return JitFunction(
            fun,
            mesh_of(devices) if devices is not None else mesh,
            in_shardings,
            out_shardings,
            Statics(parameters, static_argnums, static_argnames),
            both_ways(parameters, donate_argnums, donate_argnames),
            check_nans,
            timeout,
        )

    return compiled if fun is None else compiled(fun)
