"""The shapes that the native linear algebra of JAX on CPU expects.

The kernels of `jaxlib` call LAPACK with sizes that they take from one operand, and write each result
at that size: a result of another shape is memory that they overwrite. XLA does not know these
kernels, so it checks nothing. The table is read from JAX's own calls (`jax/_src/lax/linalg.py`) and
from `jaxlib/cpu/lapack_kernels.cc`.

Kernels of accelerators (`cusolver_*`, `cusparse_*`, `hipsolver_*`) check the shapes themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pw.core.errors import CodeRefused

Tensor = tuple[str, tuple[int, ...]]
"""An element type as MLIR writes it, and a shape."""

_TARGET = re.compile(r"lapack_([sdcz])([a-z0-9]+)_ffi")
_TYPES = {
    "s": {"T": "f32", "R": "f32", "C": "complex<f32>"},
    "d": {"T": "f64", "R": "f64", "C": "complex<f64>"},
    "c": {"T": "complex<f32>", "R": "f32", "C": "complex<f32>"},
    "z": {"T": "complex<f64>", "R": "f64", "C": "complex<f64>"},
}
"""Own type, real type and complex type of a kernel, by its letter."""

Sizes = Mapping[str, int]
Options = Mapping[str, int]


class _Kernel(NamedTuple):
    """Operands and results are a type (T, R, C, or I for `i32`) and the names of sizes.

    A size is known from the operand that names it first. `k` in a result is min(m, n), unless an
    operand has named it; `p` is n - 1.
    """

    takes: str
    gives: str
    options: Mapping[str, str] = {}
    """The letters that each option may be."""
    holds: Callable[[Sizes, Options], bool] = lambda sizes, options: True
    """Condition on the sizes and options."""


_BOTH = "NV"
_SVD = _Kernel("Tmn", "Tmn Rk Tma Tbn I", {"mode": "ASN"})
_SYMMETRIC = _Kernel("Tnn", "Tnn Rn I", {"mode": _BOTH, "uplo": "LU"})
_APPLY_Q = _Kernel(
    "Trk Tk Tmn",
    "Tmn",
    holds=lambda s, o: s["r"] == (s["m"] if o.get("left") else s["n"]) and s["k"] <= s["r"],
)
_MAKE_Q = _Kernel("Tmn Tj", "Tmn", holds=lambda s, o: s["m"] >= s["n"] >= s["j"])
_TRIDIAGONAL = _Kernel("Tnn", "Tnn Rn Rp Tp I", {"uplo": "LU"})

_ALL = {
    "getrf": _Kernel("Tmn", "Tmn Ik I"),
    "geqrf": _Kernel("Tmn", "Tmn Tk"),
    "geqp3": _Kernel("Tmn In", "Tmn In Tk"),
    "potrf": _Kernel("Tnn", "Tnn I", {"uplo": "LU"}),
    "gesdd": _SVD,
    "gesvd": _SVD,
    "gehrd": _Kernel(
        "Tnn",
        "Tnn Tp I",
        holds=lambda s, o: s["n"] == 0 or 1 <= o.get("low", 0) <= o.get("high", 0) <= s["n"],
    ),
    "gtsv": _Kernel("Tn Tn Tn Tnm", "Tn Tn Tn Tnm I"),
    "trsm": _Kernel(
        "Tqq Tmn",
        "Tmn",
        {"side": "LR", "uplo": "LU", "trans_x": "NTC", "diag": "NU"},
        lambda s, o: s["q"] == (s["m"] if o["side"] == ord("L") else s["n"]),
    ),
}
_REAL = {
    "syevd": _SYMMETRIC,
    "sytrd": _TRIDIAGONAL,
    "orgqr": _MAKE_Q,
    "ormqr": _APPLY_Q,
    "geev": _Kernel("Tnn", "Rn Rn Cnn Cnn I", {"compute_left": _BOTH, "compute_right": _BOTH}),
    "gees": _Kernel("Tnn", "Tnn Tnn Rn Rn I I", {"mode": _BOTH, "sort": "N"}),
}
_COMPLEX = {
    "heevd": _SYMMETRIC,
    "hetrd": _TRIDIAGONAL,
    "ungqr": _MAKE_Q,
    "unmqr": _APPLY_Q,
    "geev": _Kernel("Tnn", "Tn Tnn Tnn I", {"compute_left": _BOTH, "compute_right": _BOTH}),
    "gees": _Kernel("Tnn", "Tnn Tnn Tn I I", {"mode": _BOTH, "sort": "N"}),
}


def targets() -> list[str]:
    """Return the names of all kernels in the table."""
    return sorted(
        f"lapack_{letter}{name}_ffi"
        for letter in _TYPES
        for name in {**_ALL, **(_REAL if letter in "sd" else _COMPLEX)}
    )


def is_kernel(target: str) -> bool:
    """Whether a custom call of this name is checked by `check`."""
    return target.startswith("lapack_")


def check(
    target: str,
    operands: Sequence[Tensor],
    results: Sequence[Tensor],
    options: Options,
    batch_dims: int,
) -> None:
    """Raise CodeRefused unless a kernel exists and expects these operands and results.

    Args:
        target: its name.
        operands: the element types and shapes; the first dimensions, alike in all, are a batch.
        results: the element types and shapes of the results.
        options: the numbers in the call's `mhlo.backend_config`; a letter is its code.
        batch_dims: number of dimensions that the partitioner may take for a batch.
    """
    match = _TARGET.fullmatch(target)
    kernel = None
    if match is not None:
        kernel = _ALL.get(match[2]) or (_REAL if match[1] in "sd" else _COMPLEX).get(match[2])
    if match is None or kernel is None:
        raise CodeRefused(f"the function calls {target!r}, which is no function of LAPACK here")
    types = {**_TYPES[match[1]], "I": "i32"}
    takes, gives = kernel.takes.split(), kernel.gives.split()
    if len(takes) != len(operands) or len(gives) != len(results):
        raise _wrong(target, f"{len(operands)} operands and {len(results)} results")
    for name, letters in kernel.options.items():
        if options.get(name) not in [ord(letter) for letter in letters]:
            raise _wrong(target, f"the option {name} {options.get(name)!r}")
    dims = len(takes[0]) - 1
    batch = operands[0][1][: max(0, len(operands[0][1]) - dims)]
    if batch_dims > len(batch):
        raise _wrong(target, f"{batch_dims} batch dimensions, and has {len(batch)}")
    sizes: dict[str, int] = {}
    for pattern, tensor in zip(takes, operands, strict=True):
        _match(target, pattern, tensor, batch, types, sizes, learns=True)
    _derive(sizes, options, results, len(batch))
    if not kernel.holds(sizes, options):
        raise _wrong(target, f"operands of {_shown(operands)}, which do not fit one another")
    for pattern, tensor in zip(gives, results, strict=True):
        _match(target, pattern, tensor, batch, types, sizes, learns=False)


def _derive(sizes: dict[str, int], options: Options, results: Sequence[Tensor], batch: int) -> None:
    """Add the sizes that follow from those of the operands."""
    m, n = sizes.get("m", 0), sizes.get("n", 0)
    sizes.setdefault("k", min(m, n))
    sizes["p"] = max(0, n - 1)
    # Columns of U and rows of V^T; without them, the kernel writes neither.
    is_full = options.get("mode") == ord("A")
    if options.get("mode") == ord("N") and len(results) > 3:
        is_full = results[3][1][batch:] == (n, n) and results[2][1][batch:] == (m, m)
    sizes["a"], sizes["b"] = (m, n) if is_full else (min(m, n), min(m, n))


def _match(
    target: str,
    pattern: str,
    tensor: Tensor,
    batch: tuple[int, ...],
    types: Mapping[str, str],
    sizes: dict[str, int],
    *,
    learns: bool,
) -> None:
    dtype, shape = tensor
    inner = shape[len(batch) :]
    if dtype != types[pattern[0]] or shape[: len(batch)] != batch or len(inner) != len(pattern) - 1:
        raise _wrong(target, f"an array of {_shown([tensor])} for {pattern!r}")
    for name, size in zip(pattern[1:], inner, strict=True):
        expected = sizes.setdefault(name, size) if learns else sizes.get(name, -1)
        if expected != size:
            raise _wrong(
                target, f"an array of {_shown([tensor])}, where one size must be {expected}"
            )
    if any(size < 0 for size in shape):
        raise _wrong(target, "an array without a fixed shape")


def _shown(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in tensors)


def _wrong(target: str, words: str) -> CodeRefused:
    return CodeRefused(
        f"the function calls {target!r} with {words}; JAX makes no such call. Write it with jax.numpy "
        "or jax.lax instead"
    )
