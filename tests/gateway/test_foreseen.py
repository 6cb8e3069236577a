"""What the gateway says of small modules before they are compiled is what the compiler says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler
from msgspec.structs import replace

from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import DeviceAddress
from pw.devices.jax import making
from pw.gateway.executables.foreseen import Foreseen, SmallModules

OPTIONS = compiler.get_compile_options(1, 1).SerializeAsString()
X = np.ones((4, 6), np.float32)
KEY = np.zeros(2, np.uint32)
TYPED_KEY = jax.eval_shape(lambda: jax.random.key(0))

Function = Callable[[Any], Any]

SMALL: dict[str, tuple[Function, Any]] = {
    "one operation": (jnp.sin, X),
    "a constant": (lambda x: x + 1.5, X),
    "random numbers": (lambda key: jax.random.normal(key, (28, 28)), KEY),
    "keys": (jax.random.split, KEY),
    "typed keys": (lambda key: jax.random.uniform(key, (3, 4)), TYPED_KEY),
    "a loop": (lambda x: jax.lax.fori_loop(0, 5, lambda _, y: y * 2, x), X.astype(np.int8)),
    "several results": (lambda x: (x > 0, x.astype(jnp.bfloat16), x), X),
    "no elements": (lambda x: x + x, X[:0]),
    "no dimensions": (lambda x: x[0, 0], X.astype(np.complex64)),
    "a sort": (jnp.sort, X),
    "a product": (lambda x: x @ x.T, X),
    "the same array twice": (lambda x: (x, x), X),
    "an argument that is not used": (lambda x: jnp.zeros(3), X),
}


def module_of(function: Function, x: Any, **options: Any) -> Stablehlo:
    return Stablehlo(
        jax.export.export(jax.jit(function, **options))(x).mlir_module_serialized, OPTIONS
    )


def foreseen(code: Stablehlo) -> Foreseen | None:
    return SmallModules().foreseen(code)


@pytest.mark.parametrize("name", SMALL)
def test_it_is_what_the_compiler_says(name: str) -> None:
    code = module_of(*SMALL[name])
    known = foreseen(code)
    assert known is not None
    for compiled in (code, known.code):
        order = making.Order(encode(compiled), (DeviceAddress("h", 0),))
        made, _ = making.make(order, jax.devices("cpu")[:1])
        assert replace(made.facts, code_bytes=0, temporary_bytes=0) == known.facts


def test_a_module_is_the_same_wherever_the_script_has_it() -> None:
    def one(x: Any) -> Any:
        return x * 2.0

    first = module_of(one, X)

    def one(x: Any) -> Any:  # type: ignore[no-redef]  # the same on other lines
        return x * 2.0

    second = module_of(one, X)
    assert first != second
    reader = SmallModules()
    assert reader.foreseen(first) == reader.foreseen(second) != None  # noqa: E711


def test_one_context_reads_so_many_modules() -> None:
    reader = SmallModules(modules=2)
    code = module_of(jnp.sin, X)
    assert len({reader.foreseen(code) for _ in range(5)}) == 1


LARGE = np.zeros(1, np.float32)

ASKED: dict[str, Callable[[], Stablehlo]] = {
    "linear algebra": lambda: module_of(jnp.linalg.inv, X[:4, :4]),
    "a donated argument": lambda: module_of(lambda x: x + 1, X, donate_argnums=0),
    "no results": lambda: module_of(lambda x: (), X),
    "four bits": lambda: module_of(lambda x: x.astype(jnp.int4), X),
    "more than memory": lambda: module_of(
        lambda x: jax.lax.broadcast(x, (1 << 20, 1 << 20)).sum(), LARGE
    ),
    "options": lambda: replace(
        module_of(jnp.sin, X),
        options=compiler.get_compile_options(
            1, 1, env_options_overrides={"xla_cpu_enable_fast_math": "true"}
        ).SerializeAsString(),
    ),
    "a callback": lambda: replace(module_of(jnp.sin, X), callbacks=(b"",)),
    "much code": lambda: module_of(lambda x: sum(jnp.sin(x * at) for at in range(300)), X),
}


@pytest.mark.parametrize("name", ASKED)
def test_of_others_the_compiler_is_asked(name: str) -> None:
    assert foreseen(ASKED[name]()) is None
