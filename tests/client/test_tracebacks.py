"""Errors of a user's function, raised while it is traced: the user's lines, and nothing of pw in between."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from tests.stages.local_runtime import LocalRuntime


@pytest.fixture(autouse=True)
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use() as local:
        yield local


def frames(error: BaseException) -> list[tuple[str, str, str]]:
    """Function, line and origin of every frame, outermost first: "tests", "pw" or "" for others."""
    origins = {"tests": Path(__file__).parent, "pw": Path(pw.__file__).parent}
    return [
        (
            frame.name,
            str(frame.line),
            next(
                (at for at, folder in origins.items() if folder in Path(frame.filename).parents), ""
            ),
        )
        for frame in traceback.extract_tb(error.__traceback__)
    ]


@pw.jit(static_argnames="scale")
def decides(params: Any, x: Any, scale: int = 3) -> Any:
    if x > 0:
        return x * scale
    return -x


def calls_it() -> None:
    decides({"w": 1.0}, np.float32(2))


def test_an_if_on_a_tracer_shows_the_users_function_and_line() -> None:
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        calls_it()
    shown = frames(caught.value)
    assert [(name, line) for name, line, _ in shown[-2:]] == [
        ("calls_it", 'decides({"w": 1.0}, np.float32(2))'),
        ("decides", "if x > 0:"),
    ]
    assert all(origin == "tests" for _, _, origin in shown)
    said = str(caught.value)
    assert "tracing the function decides at" in said
    assert f"{Path(__file__).name}:" in said
    assert "depends on the value of the argument x" in said


def dividing(x: Any) -> Any:
    return x * (1 // 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: pw.jit(dividing)(1.0),
        lambda: pw.jit(dividing).lower(1.0),
        lambda: pw.jit(jax.grad(dividing))(1.0),
        lambda: pw.pmap(dividing)(np.ones(2)),
        lambda: pw.program(dividing)(1.0),
        lambda: pw.program(lambda x: pw.jit(dividing)(x))(1.0),
        lambda: pw.jit(lambda x: jax.lax.scan(lambda c, _: (dividing(c), None), x, length=2))(1.0),
    ],
)
def test_no_frame_of_pw_is_shown(call: Callable[[], Any]) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        call()
    shown = frames(caught.value)
    assert shown[-1][:2] == ("dividing", "return x * (1 // 0)")
    assert "pw" not in {origin for _, _, origin in shown}


def test_errors_of_pw_keep_their_frames() -> None:
    with pytest.raises(pw.ArgumentError) as caught:
        pw.jit(dividing)("text")
    assert frames(caught.value)[-1][2] == "pw"


def test_all_frames_are_there_if_jax_is_asked_for_all() -> None:
    was = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(ZeroDivisionError) as caught:
            pw.jit(dividing)(1.0)
    finally:
        jax.config.update("jax_traceback_filtering", was)
    assert {"pw", "tests"} <= {origin for _, _, origin in frames(caught.value)}


def test_names_of_arguments_are_the_users(rt: LocalRuntime) -> None:
    """Also where leaves are many, and for functions without a signature."""
    with pytest.raises(jax.errors.ConcretizationTypeError, match=r"argument params\['w'\]"):
        pw.jit(lambda params, n: jnp.zeros(n) if int(params["w"]) else n)({"b": 1, "w": 2}, 3)
    assert pw.jit(jnp.add)(1, 2).item() == 3
