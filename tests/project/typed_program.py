"""What a type checker makes of a user's program: read by mypy in `make lint`, run by nothing.

Lines with an `ignore` are a user's mistakes. mypy complains of an `ignore` where it finds none.
"""

from __future__ import annotations

from typing import assert_type

import jax

import pw


@pw.jit
def scaled(x: jax.Array, n: int = 2) -> jax.Array:
    return x * n


@pw.jit(static_argnames="n")
def both(x: pw.Array, n: int) -> tuple[pw.Array, pw.Array]:
    return x, x * n


@pw.program
def pipeline(x: pw.Array) -> pw.Array:
    return both(x, 2)[0]


@pw.pmap(axis_name="i")
def mapped(x: pw.Array) -> pw.Array:
    return x


class Model:
    @pw.jit(static_argnums=0)
    def apply(self, x: pw.Array) -> pw.Array:
        return x


def use(x: pw.Array, model: Model) -> None:
    assert_type(scaled(x), jax.Array)
    scaled(x, n=3)
    scaled()  # type: ignore[call-arg]
    scaled(x, "three")  # type: ignore[arg-type]

    first, second = both(x, n=2)
    assert_type(second, pw.Array)
    both(first)  # type: ignore[call-arg]

    assert_type(pipeline(x), pw.Array)
    pipeline(x, x)  # type: ignore[call-arg]
    assert_type(mapped(x), pw.Array)
    assert_type(model.apply(x), pw.Array)
    model.apply()  # type: ignore[call-arg]
    assert_type(scaled.lower(x).as_text(), str)

    assert_type(pw.publish("base", {"x": x}, keep="1h").result(), int)
    pw.lookup("base", like=None, for_ever=True)  # type: ignore[call-arg]

    assert_type(x.sum(axis=1, keepdims=True), pw.Array)
    assert_type(x.T.is_ready(), bool)
    x.sum(ax=1)  # type: ignore[call-arg]
    x.sumption()  # type: ignore[attr-defined]
