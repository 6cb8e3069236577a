"""`pw.pmap`: one call of a function on every device, with collectives between them.

It is a `jax.shard_map` over a mesh with one axis: the mapped axis of an argument is split over the
devices, and each device sees its own slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import OwnMesh, default_mesh, mesh_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, Statics, aval_of, both_ways, describe_leaf
from pw.client.functions.function import JitFunction
from pw.client.functions.parameters import parameters_of
from pw.client.functions.prefixes import spread
from pw.client.functions.wrapped import P, R, tree_flatten, tree_unflatten
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError

_DEFAULT_AXIS = "pmap_axis"


class _PmapFunction(JitFunction[P, R]):
    _kind = "pw.pmap function"

    def __init__(
        self,
        fun: Callable[P, R],
        axis_name: str,
        in_axes: Any,
        out_axes: Any,
        mesh: OwnMesh | None,
        statics: Statics,
        donated: tuple[frozenset[int], frozenset[str]],
        check_nans: bool | None,
        timeout: float | None,
    ) -> None:
        super().__init__(
            fun, mesh, statics=statics, donated=donated, check_nans=check_nans, timeout=timeout
        )
        self._axis_name = axis_name
        self._in_axes = in_axes
        self._out_axes = out_axes

    def _mesh_of_call(self, tree: Any, signature: Sequence[Any]) -> OwnMesh:
        """Return the mesh of the arguments; for host values one device for each slice, as in JAX."""
        if any(isinstance(leaf, ArrayType) for leaf in signature):
            mesh = super()._mesh_of_call(tree, signature)
        else:
            axes = self._axes_in(tree, len(signature))
            avals = [aval_of(leaf) for leaf in signature]
            sizes = [
                aval.shape[axis]
                for axis, aval in zip(axes, avals, strict=True)
                if axis is not None and -aval.ndim <= axis < aval.ndim
            ]
            mesh = default_mesh(max(sizes, default=1) or 1)
        return OwnMesh(mesh.devices.reshape(-1), (self._axis_name,))

    def _how(self) -> Any:
        axes = jax.tree_util.tree_flatten((self._in_axes, self._out_axes), is_leaf=_is_none)
        return self._axis_name, tuple(axes[0]), axes[1]

    def _inlined(self, *args: Any, **kwargs: Any) -> Any:
        """Under another transformation: the same mathematics, vectorised."""
        arguments, statics = self._statics.split(args, kwargs)
        leaves, tree = tree_flatten(arguments)
        return jax.vmap(
            self._flat(tree, statics),
            in_axes=tuple(self._axes_in(tree, len(leaves))),
            out_axes=self._out_axes,
            axis_name=self._axis_name,
        )(*leaves)

    def _axes_in(self, tree: Any, count: int) -> list[Any]:
        return self._by_leaf(self._in_axes, 0, tree, count, "in_axes")

    def _input_shardings(self, tree: Any, avals: Sequence[Any], mesh: OwnMesh) -> list[Any]:
        axes = self._axes_in(tree, len(avals))
        for index, (axis, aval) in enumerate(zip(axes, avals, strict=True)):
            if axis is None:
                continue
            where = f"{self._name}: {describe_leaf(tree_unflatten(tree, range(len(avals))), index)}"
            if not -aval.ndim <= axis < aval.ndim:
                raise ArgumentError(
                    f"{where} has {aval.ndim} dimensions, but its axis {axis} is to be mapped over the "
                    "devices; with in_axes=None it is given to every device"
                )
            if aval.shape[axis] != mesh.size:
                raise ArgumentError(
                    f"{where} has size {aval.shape[axis]} in its mapped axis {axis} (shape "
                    f"{tuple(aval.shape)}), but there are {mesh.size} devices; the mapped axis holds "
                    "one slice for each device"
                )
        splits = (
            OwnSharding(mesh, self._split(axis, aval.ndim))
            for axis, aval in zip(axes, avals, strict=True)
        )
        return [
            sharding.in_space(aval.memory_space)
            for sharding, aval in zip(splits, avals, strict=True)
        ]

    def _split(self, axis: int | None, ndim: int) -> PartitionSpec:
        if axis is None:
            return PartitionSpec()
        return PartitionSpec(*([None] * (axis % ndim)), self._axis_name)

    def _body(
        self, tree: Any, statics: tuple[Any, ...], mesh: OwnMesh, inputs: Sequence[ArrayType]
    ) -> Callable[..., Any]:
        axes = self._axes_in(tree, len(inputs))
        local = self._flat(tree, statics)

        def one_device(*blocks: Any) -> Any:
            pairs = zip(axes, blocks, strict=True)
            result = local(*(b if axis is None else jnp.squeeze(b, axis) for axis, b in pairs))
            leaves, out_tree = tree_flatten(result)
            out_axes = spread(self._out_axes, result, f"out_axes of {self._name!r}")
            return tree_unflatten(
                out_tree,
                [
                    leaf if axis is None else jnp.expand_dims(leaf, axis)
                    for axis, leaf in zip(out_axes, leaves, strict=True)
                ],
            )

        return jax.shard_map(
            one_device,
            mesh=mesh.abstract_mesh,
            in_specs=tuple(
                self._split(axis, type_.aval.ndim) for axis, type_ in zip(axes, inputs, strict=True)
            ),
            out_specs=self._asked_out_shardings(),
            check_vma=False,
        )

    def _asked_out_shardings(self) -> Any:
        return jax.tree_util.tree_map(
            lambda axis: self._split(axis, 1 + (axis or 0)), self._out_axes, is_leaf=_is_none
        )

    def _output_shardings(
        self, tree: Any, avals: Sequence[Any], mesh: OwnMesh, inputs: Sequence[ArrayType]
    ) -> list[OwnSharding]:
        numbers = tree_unflatten(tree, range(len(avals)))
        axes = spread(self._out_axes, numbers, f"out_axes of {self._name!r}")
        return [
            OwnSharding(mesh, self._split(axis, aval.ndim))
            for axis, aval in zip(axes, avals, strict=True)
        ]


def _is_none(entry: Any) -> bool:
    return entry is None


class _Options(TypedDict, total=False):
    devices: Any
    in_axes: Any
    out_axes: Any
    static_broadcasted_argnums: int | Sequence[int]
    donate_argnums: int | Sequence[int]
    check_nans: bool | None
    timeout: float | None


@overload
def pmap(
    fun: Callable[P, R], axis_name: str | None = None, **options: Unpack[_Options]
) -> JitFunction[P, R]: ...


@overload
def pmap(
    fun: None = None, axis_name: str | None = None, **options: Unpack[_Options]
) -> Callable[[Callable[P, R]], JitFunction[P, R]]: ...


@checks_keywords
def pmap(
    fun: Callable[..., Any] | None = None,
    axis_name: str | None = None,
    *,
    devices: Any = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Sequence[int] = (),
    donate_argnums: int | Sequence[int] = (),
    check_nans: bool | None = None,
    timeout: float | None = None,
) -> Any:
    """Run `fun` on every device at once, each with its own slice of the arguments.

    Args:
        fun: a function that JAX can trace; it sees one slice, without the mapped axis.
        axis_name: name for collectives such as `jax.lax.psum`.
        devices: where to run: a slice, or virtual devices of one slice. None stands for the devices
            of the array arguments; for host values as many devices as they have slices.
        in_axes: tree prefix of the positional arguments: the axis to split, of the size of the number
            of devices, or None for a value that every device gets whole.
        out_axes: tree prefix of the result: the axis along which the devices' results are put
            together (not negative), or None where they are all the same.
        static_broadcasted_argnums: arguments the function depends on while it is traced.
        donate_argnums: arguments whose memory may be reused; their arrays are gone.
        check_nans: make a NaN in a result an error, as for `pw.jit`.
        timeout: seconds that a call may take once it is launched, as for `pw.jit`.

    Raises:
        ArgumentError: at a call, a mapped axis that has not the size of the number of devices.
    """
    if any(axis < 0 for axis in jax.tree_util.tree_leaves(out_axes)):
        raise ArgumentError(f"out_axes of pw.pmap are not negative; {out_axes!r} was given")
    name = axis_name or _DEFAULT_AXIS

    def wrap(fun: Callable[..., Any]) -> JitFunction[..., Any]:
        if not callable(fun):
            raise TypeError(f"pw.pmap takes a function, not {fun!r}")
        parameters = parameters_of(fun)
        return _PmapFunction(
            fun,
            name,
            in_axes,
            out_axes,
            None if devices is None else OwnMesh(mesh_of(devices).devices, (name,)),
            Statics(parameters, static_broadcasted_argnums, None),
            both_ways(parameters, donate_argnums, None),
            check_nans,
            timeout,
        )

    return wrap if fun is None else wrap(fun)
