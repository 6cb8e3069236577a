"""What a script called before its end happens, however it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.test_pathways import AS_PROXY
from tests.stages.daemons import Program
from tests.stages.gateway_stage import Stage

pytestmark = pytest.mark.processes

CALLED = """
import sys, time
import jax, jax.numpy as jnp
from jax.experimental import io_callback

def write(value):
    time.sleep(0.3)
    with open("written", "a") as file:
        file.write(f"{value}")

@jax.jit
def last(x):
    jax.debug.print("printed {}", x.sum())
    io_callback(write, None, x.sum())
    return x + 1

last(jnp.ones(4))
"""
CAUGHT = """
import jax, jax.numpy as jnp
from jax.experimental import io_callback

def fail(value):
    raise ValueError("of this callback")

try:
    jax.jit(lambda x: io_callback(fail, None, x))(jnp.ones(()))
    jax.effects_barrier()
except jax.errors.JaxRuntimeError:
    print("caught", flush=True)
"""
HOST_FUNCTION = """
import os, time
import jax, jax.numpy as jnp
import pw

folder = os.getcwd()

def write(value):
    time.sleep(1)
    with open(folder + "/written", "a") as file:
        file.write(f"{value.sum()}")
    return value

pw.host_function(write, jax.ShapeDtypeStruct((4,), jnp.float32))(jnp.ones(4))
"""
REFUSED = (
    AS_PROXY
    + """
import jax.numpy as jnp
try:
    jax.jit(lambda x: jax.debug.print("{}", x))(jnp.ones(()))
except jax.errors.JaxRuntimeError as error:
    print(error)
jax.jit(lambda x: x + 1)(jnp.ones(()))
"""
)
ENDS = {"by itself": ("", 0), "by sys.exit": ("sys.exit(3)", 3), "by an error": ("1 / 0", 1)}
SETTINGS = ["embedded", "a cluster"]
ENDINGS = [(how, "embedded") for how in ENDS] + [("by itself", "a cluster")]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Program]]:
    """Every script in every setting, at the same time."""
    folder = tmp_path_factory.mktemp("exits")
    bodies = {how: CALLED + end for how, (end, _) in ENDS.items()}
    bodies |= {"with a caught error": CAUGHT, "after a host function": HOST_FUNCTION}
    started = {}
    with Stage() as stage:
        try:
            for setting in SETTINGS:
                where = {"PW_ADDRESS": stage.cluster.address or ""} if setting != "embedded" else {}
                for how, body in bodies.items():
                    if how in ENDS and (how, setting) not in ENDINGS:
                        continue
                    platform = {} if body is HOST_FUNCTION else {"JAX_PLATFORMS": "pw"}
                    variables = {"PW_DEVICES": "2"} | platform | where
                    started[setting, how] = Program(folder, ["-c", body], **variables)
            proxy = {"JAX_PLATFORMS": "proxy,cpu", "JAX_BACKEND_TARGET": stage.address}
            started["a gateway", "refused"] = Program(folder, ["-c", REFUSED], **proxy)
            yield started
        finally:
            for script in started.values():
                script.kill()


@pytest.mark.parametrize(("how", "setting"), ENDINGS)
def test_effects_of_the_last_call_happen_when_a_script_ends(
    how: str, setting: str, scripts: dict[tuple[str, str], Program]
) -> None:
    script = scripts[setting, how]
    assert script.end() == ENDS[how][1], script.err
    assert script.out == "printed 4.0\n"
    assert (script.folder / "written").read_text() == "4.0"
    lines = script.err.splitlines()
    assert lines[:1] + lines[-1:] == (
        ["Traceback (most recent call last):", "ZeroDivisionError: division by zero"]
        if how == "by an error"
        else []
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_caught_error_of_a_callback_is_not_told_at_the_end(
    setting: str, scripts: dict[tuple[str, str], Program]
) -> None:
    script = scripts[setting, "with a caught error"]
    assert script.end() == 0, script.err
    assert script.out == "caught\n"
    assert script.err.count("ValueError: of this callback") <= 2, script.err  # logged by JAX


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_host_function_ends_before_its_script(
    setting: str, scripts: dict[tuple[str, str], Program]
) -> None:
    script = scripts[setting, "after a host function"]
    assert script.end() == 0, script.err
    assert script.err == ""
    assert (script.folder / "written").read_text() == "4.0"


def test_a_script_of_a_far_gateway_ends_well_after_a_refused_effect(
    scripts: dict[tuple[str, str], Program],
) -> None:
    script = scripts["a gateway", "refused"]
    assert script.end() == 0, script.err
    assert "callback" in script.out
    assert "Traceback" not in script.err
