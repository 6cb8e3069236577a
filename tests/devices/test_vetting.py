"""Native functions of linear algebra overwrite memory if a call says other shapes than they expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lax import linalg
from jaxlib.cpu import _lapack
from jaxlib.mlir import ir

from pw.core.errors import CompileError
from pw.devices.jax import kernels
from pw.devices.jax.vetting import vet
from tests.devices.test_jax_backend import Host, export, on_host, spec_of
from tests.devices.test_stablehlo import ONE, replicated
from tests.stages.lowered import computation_of, like, stablehlo_of

Struct = jax.ShapeDtypeStruct

SVD = linalg.SvdAlgorithm


def _calls() -> Iterator[tuple[str, Callable[..., Any], list[Struct]]]:
    """What JAX calls on CPU."""
    for dtype in ("float32", "float64", "complex64", "complex128"):
        square, tall, wide = (Struct(s, dtype) for s in ((3, 3), (2, 5, 3), (3, 5)))
        vector, few = Struct((3,), dtype), Struct((2,), dtype)
        yield "lu", linalg.lu, [tall]
        yield "cholesky", jnp.linalg.cholesky, [square]
        yield "qr", lambda x: jnp.linalg.qr(x, mode="reduced"), [tall]
        yield "complete qr", lambda x: jnp.linalg.qr(x, mode="complete"), [tall]
        yield "pivoted qr", lambda x: linalg.qr(x, pivoting=True), [square]
        yield "q", linalg.householder_product, [Struct((5, 3), dtype), few]
        for left in (True, False):
            reflectors = Struct((5 if left else 4, 3), dtype)
            apply = lambda a, t, c, left=left: linalg.ormqr(a, t, c, left=left)  # noqa: E731
            yield "apply q", apply, [reflectors, vector, Struct((5, 4), dtype)]
            solve = lambda a, b, left=left: linalg.triangular_solve(a, b, left_side=left)  # noqa: E731
            yield "solve", solve, [square, Struct((3, 7) if left else (7, 3), dtype)]
        for full in (True, False):
            for vectors in (True, False):
                for algorithm in (SVD.QR, SVD.DIVIDE_AND_CONQUER):
                    for x in (tall, wide):
                        options: dict[str, Any] = {
                            "full_matrices": full,
                            "compute_uv": vectors,
                            "algorithm": algorithm,
                        }
                        yield "svd", lambda x, options=options: linalg.svd(x, **options), [x]
        yield "eigh", jnp.linalg.eigh, [square]
        yield "eig", jnp.linalg.eig, [square]
        yield "eigvals", jnp.linalg.eigvals, [square]
        yield "schur", linalg.schur, [square]
        yield "hessenberg", linalg.hessenberg, [square]
        yield "tridiagonal", lambda x: linalg.tridiagonal(x, lower=True), [square]
        yield "banded", linalg.tridiagonal_solve, [vector, vector, vector, Struct((3, 2), dtype)]


Found = tuple[str, list[kernels.Tensor], list[kernels.Tensor], dict[str, int], int]


def found_calls(function: Callable[..., Any], args: list[Struct]) -> list[Found]:
    """The calls of LAPACK in a function, whose vetting succeeds."""
    found: list[Found] = []
    check = kernels.check
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True):
        patch.setattr(kernels, "check", lambda *call: (check(*call), found.append(call)))
        lowered: Any = jax.jit(function).lower(*args)
        vet(lowered.compiler_ir())
    return found


@pytest.fixture(scope="module")
def calls() -> list[Found]:
    """All calls that differ."""
    found: dict[str, Found] = {}
    for name, function, args in _calls():
        for call in found_calls(function, args):
            found.setdefault(f"{name} {call[0]} {args[0].shape} {call[3]}", call)
    return list(found.values())


def test_all_kernels_are_in_the_table_and_are_tried(calls: list[Found]) -> None:
    registered = {name for name in _lapack.registrations() if name.startswith("lapack_")}
    assert set(kernels.targets()) == registered
    assert {call[0] for call in calls} == registered


def test_a_result_of_another_shape_or_type_is_refused(calls: list[Found]) -> None:
    for call in calls:
        refuses_other_results(*call)


def refuses_other_results(
    target: str,
    operands: list[kernels.Tensor],
    results: list[kernels.Tensor],
    options: dict[str, int],
    batch: int,
) -> None:
    """Change one thing of a call at a time."""
    kernels.check(target, operands, results, options, batch)
    for at, (dtype, shape) in enumerate(results):
        others: list[kernels.Tensor] = [(dtype, (*shape, 1)), ("i64", shape), ("f16", shape)]
        others += [
            (dtype, (*shape[:dim], size + step, *shape[dim + 1 :]))
            for dim, size in enumerate(shape)
            for step in (-1, 1)
        ]
        for other in others:
            if options.get("mode") == ord("N") and at in (2, 3) and other[0] == dtype:
                continue  # without vectors, two shapes are right, and nothing is written
            changed = [*results[:at], other, *results[at + 1 :]]
            with pytest.raises(CompileError, match="JAX makes no such call"):
                kernels.check(target, operands, changed, options, batch)
    for fewer in (results[:-1], [*results, results[0]]):
        with pytest.raises(CompileError, match="operands and"):
            kernels.check(target, operands, fewer, options, batch)
    beyond = batch + 1
    with pytest.raises(CompileError, match="batch dimensions"):
        kernels.check(target, operands, results, options, beyond)
    for option in options:
        if option not in ("low", "left", "transpose"):
            with pytest.raises(CompileError):
                kernels.check(target, operands, results, {**options, option: ord("O")}, batch)


def lying(x: Any) -> Any:
    """The factors of a large matrix in a small result."""
    results = [Struct((2, 2), "float32"), Struct((2,), "int32"), Struct((), "int32")]
    matrix = jnp.zeros((512, 512), "float32") + x[0]
    factors, _, _ = jax.ffi.ffi_call("lapack_sgetrf_ffi", results)(matrix)
    return x + factors[0, 0]


@on_host
async def test_a_native_call_that_would_overwrite_memory_is_refused(host: Host) -> None:
    spec = spec_of()
    report = await host.install(b"k", export(lambda x: (lying(x),), [spec], [spec]))
    assert report is not None
    assert "calls 'lapack_sgetrf_ffi' with an array of f32[2, 2]" in report.message
    flat = replicated((8,), "float32", ONE)
    code = stablehlo_of(lying, [like((8,))])
    report = await host.install(b"k", computation_of(code, [flat], [flat]))
    assert report is not None
    assert "lapack_sgetrf_ffi" in report.message
    inverse = export(lambda x: (jnp.linalg.inv(jnp.diag(x)),), [spec], [spec_of((8, 8))])
    assert await host.install(b"k", inverse) is None
    (made,) = host.execute(b"k", host.build(spec, np.arange(8) + 1))
    found = await host.read(made, spec_of((8, 8)))
    np.testing.assert_allclose(np.diag(found), 1 / (np.arange(8) + 1.0), rtol=1e-6)


def test_other_dialects_are_refused() -> None:
    with mlir.make_ir_context():
        text = """
        module { func.func @main(%x: i1) { "cf.assert"(%x) {msg = ""} : (i1) -> () return } }
        """
        with pytest.raises(CompileError, match=r"not StableHLO: cf\.assert"):
            vet(ir.Module.parse(text))
