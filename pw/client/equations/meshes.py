"""Which meshes the calls in equations use, and so whether a loop can be one computation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.equations.calls import kind_of
from pw.client.equations.graph import bodies
from pw.client.equations.island_parts import sharding_of_result
from pw.client.equations.python_calls import mesh_of_python_call


def meshes_in(equations: Iterable[Any]) -> Iterator[tuple[OwnMesh, bool]]:
    """Yield the mesh of each call and of each move, and whether it has to be a computation of its own."""
    for equation in equations:
        kind = kind_of(equation)
        if kind is not None:
            yield kind.mesh, kind.check_nans or bool(kind.mesh.parts)
        elif (mesh := mesh_of_python_call(equation)) is not None:
            yield mesh, True
        elif (joining := sharding_of_result(equation)) is not None:
            yield from ((sharding.mesh, True) for sharding in joining if sharding is not None)
        elif equation.primitive.name == "device_put":
            targets = equation.params["devices"]
            yield from ((to.mesh, False) for to in targets if isinstance(to, OwnSharding))
        else:
            yield from meshes_in(inner for body in bodies(equation) for inner in body.eqns)


def one_mesh(equations: Iterable[Any]) -> OwnMesh | None:
    """Return the mesh of all calls and moves, if they can be one computation there."""
    meshes = {None if is_own else mesh for mesh, is_own in meshes_in(equations)}
    return meshes.pop() if len(meshes) == 1 else None


def first_mesh(equations: Iterable[Any]) -> OwnMesh | None:
    """Return the mesh of the first call or move; None if there is none."""
    return next((mesh for mesh, _ in meshes_in(equations)), None)


def is_on_several(equations: Iterable[Any]) -> bool:
    """Whether calls or moves cannot be one computation."""
    own = list(equations)
    return first_mesh(own) is not None and one_mesh(own) is None
