"""`pw.jit`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast, overload

from pw.client.arrays.mesh import Mesh, mesh_of
from pw.client.arrays.signature import Statics, both_ways
from pw.client.trace.function import JitFunction, P, R, parameters_of

__all__ = ["JitFunction", "jit"]


@overload
def jit(
    fun: Callable[P, R],
    *,
    devices: Any = None,
    mesh: Mesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    check_nans: bool | None = None,
    timeout: float | None = None,
) -> JitFunction[P, R]: ...


@overload
def jit(
    fun: None = None,
    *,
    devices: Any = None,
    mesh: Mesh | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    check_nans: bool | None = None,
    timeout: float | None = None,
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    devices: Any = None,
    mesh: Mesh | None = None,
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
            arguments; if there are none, on a default slice of one device.
        in_shardings: tree prefix of the positional arguments with a PartitionSpec, a `pw.NamedSharding`,
            or None for arguments to be taken as they lie (replicated if they lie elsewhere). Arguments
            that lie differently are moved.
        out_shardings: the same for the results; None stands for the compiler's choice, which is
            `jax.jit`'s: what is made of split arrays stays split where that costs nothing. Results that are
            made of no argument, as by `jnp.zeros_like`, are replicated.
        static_argnums, static_argnames: arguments the function depends on while it is traced.
        donate_argnums, donate_argnames: arguments whose memory may be reused; their arrays are gone.
        check_nans: make a NaN in a result an error, `NaNFound`, of all results of the call, and of all that
            is made of them. It is for finding out where NaNs come from: whatever runs on the same hosts is
            enqueued only when the check has passed. None follows `jax_debug_nans` of JAX's configuration.
        timeout: seconds that a call may take, from the moment in which it is launched on its hosts (not
            while it is queued; waiting for other work on the devices counts). A call that takes longer
            fails with `ComputationTimeout`, and so does what needs its results. Ending a computation that
            has started takes its island out of work for a moment; what others have there is kept. In a
            `pw.program` the program's own timeout counts instead.

    Raises:
        PlacementError: the devices cannot run one computation together.
        ArgumentError: at a call, an argument that is no array or number.
        TracingError: at the first call, a function that cannot be sent to hosts.
    """
    if devices is not None and mesh is not None:
        raise TypeError("pw.jit takes devices= or mesh=, not both")
    if fun is None:
        return cast(
            Any,
            functools.partial(
                jit,
                devices=devices,
                mesh=mesh,
                in_shardings=in_shardings,
                out_shardings=out_shardings,
                static_argnums=static_argnums,
                static_argnames=static_argnames,
                donate_argnums=donate_argnums,
                donate_argnames=donate_argnames,
                check_nans=check_nans,
                timeout=timeout,
            ),
        )
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
