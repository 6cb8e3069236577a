"""What a script called before its end happens, however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.test_pathways import AS_PROXY
from tests.stages.daemons import Program, until
from tests.stages.gateway_stage import Stage
from tests.stages.samples import long

pytestmark = pytest.mark.processes

UNTIL_THERE = """
import os, time

def until_there(file):
    while not os.path.exists(file):
        time.sleep(0.01)
"""
LAST = """
open("last", "w").close()
"""
"""The last statement of a script, or the one before an error."""
CALLED = f"""
import sys
{UNTIL_THERE}
import jax, jax.numpy as jnp
from jax.experimental import io_callback

def write(value):
    until_there("last")
    with open("written", "a") as file:
        file.write(f"{{value}}")

@jax.jit
def last(x):
    jax.debug.print("printed {{}}", x.sum())
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
HOST_FUNCTION = f"""
import sys
{UNTIL_THERE}
import jax, jax.numpy as jnp
import pw

folder = os.getcwd()

def write(value):
    until_there(folder + "/last")
    with open(folder + "/written", "a") as file:
        file.write(f"{{value.sum()}}")
    return value

pw.host_function(write, jax.ShapeDtypeStruct((4,), jnp.float32), hosts=1)(jnp.ones(4))
"""
COLOCATED = f"""
{UNTIL_THERE}
import jax, jax.numpy as jnp
from jax.experimental import colocated_python as colocated

folder = os.getcwd()

@colocated.colocated_python
def write(x):
    if os.path.exists(folder + "/written"):
        until_there(folder + "/last")
    else:
        until_there(folder + "/many")
    with open(folder + "/written", "a") as file:
        file.write(f"{{x.sum()}}")
    return x

write = write.specialize(out_specs_fn=lambda x: x)
x = jax.device_put(jnp.ones(4), jax.devices()[0])
add = jax.jit(lambda x: x + 1)
write(x)
for at in range(600):  # more than there may be in flight
    add(x)
    if at == 20:
        open("many", "w").close()
write(x)
"""
HANDED_OVER = """
jax.device_put(jnp.ones(()), jax.devices()[1]).block_until_ready()
"""
"""The gateway has read the calls before. A script that ends earlier loses some."""
REFUSED = """
import jax.numpy as jnp
try:
    jax.jit(lambda x: jax.debug.print("{}", x))(jnp.ones(()))
except jax.errors.JaxRuntimeError as error:
    print(error)
jax.jit(lambda x: x + 1)(jnp.ones(()))
"""
NOT_ALLOWED = """
import sys
import jax, jax.numpy as jnp
import pw

devices = pw.make_virtual_device_set().add_slice(devices=1, island="single").devices
write = pw.host_function(
    lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32), mesh=pw.Mesh(devices, ("x",))
)
called = write(jnp.ones(4))
"""
CATCH = """
try:
    called.block_until_ready()
except pw.PythonRefused:
    print("caught")
"""
ENDS = {"by itself": ("", 0), "by sys.exit": ("sys.exit(3)", 3), "by an error": ("1 / 0", 1)}
ENDINGS = [
    *[("by itself", "embedded"), ("by itself", "a cluster"), ("by an error", "embedded")],
    long("by sys.exit", "embedded"),
]


class Scripts:
    """Every script in every setting, started by the first test that asks for it."""

    def __init__(self, stage: Stage, folder: Path) -> None:
        self._stage, self._folder = stage, folder
        self.started: list[Program] = []

    def start(self, setting: str, body: str) -> Program:
        """Start a script of plain JAX, or of pw."""
        address = self._stage.cluster.address or ""
        variables = {"PW_DEVICES": "2", "JAX_PLATFORMS": "pw"}
        if "\nimport pw\n" in body:
            del variables["JAX_PLATFORMS"]
        if setting == "embedded":
            variables["PW_ISLANDS"] = ""
        elif setting == "a cluster":
            variables |= {"PW_ISLANDS": "island-0", "PW_ADDRESS": address}
        else:
            body = AS_PROXY + body
            variables = {"JAX_PLATFORMS": "proxy,cpu", "JAX_BACKEND_TARGET": self._stage.address}
        script = Program(self._folder, ["-c", body], **variables)
        self.started.append(script)
        return script


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    with Stage() as stage:
        scripts = Scripts(stage, tmp_path_factory.mktemp("exits"))
        try:
            yield scripts
        finally:
            for script in scripts.started:
                script.kill()


@pytest.mark.parametrize(("how", "setting"), ENDINGS)
def test_effects_of_the_last_call_happen_when_a_script_ends(
    how: str, setting: str, scripts: Scripts
) -> None:
    script = scripts.start(setting, CALLED + LAST + ENDS[how][0])
    assert script.end() == ENDS[how][1], script.err
    assert script.out == "printed 4.0\n"
    assert (script.folder / "written").read_text() == "4.0"
    lines = script.err.splitlines()
    assert lines[:1] + lines[-1:] == (
        ["Traceback (most recent call last):", "ZeroDivisionError: division by zero"]
        if how == "by an error"
        else []
    )


@pytest.mark.parametrize("setting", ["embedded", long("a cluster")])
def test_the_caught_error_of_a_callback_is_not_told_at_the_end(
    setting: str, scripts: Scripts
) -> None:
    script = scripts.start(setting, CAUGHT)
    assert script.end() == 0, script.err
    assert script.out == "caught\n"
    assert script.err.count("ValueError: of this callback") <= 2, script.err  # logged by JAX


@pytest.mark.parametrize(
    ("how", "setting"),
    [
        *[("by itself", "embedded"), ("by sys.exit", "a cluster")],
        *[long("by an error", "embedded"), long("by itself", "a cluster")],
    ],
)
def test_a_host_function_ends_before_its_script(how: str, setting: str, scripts: Scripts) -> None:
    script = scripts.start(setting, HOST_FUNCTION + LAST + ENDS[how][0])
    assert script.end() == ENDS[how][1], script.err
    assert script.err == "" or how == "by an error"
    assert (script.folder / "written").read_text() == "4.0"


@pytest.mark.parametrize("setting", ["embedded", long("a cluster"), "a gateway"])
def test_a_colocated_function_ends_though_its_script_has_ended(
    setting: str, scripts: Scripts
) -> None:
    handed_over = HANDED_OVER if setting == "a gateway" else ""
    script = scripts.start(setting, COLOCATED + handed_over + LAST)
    assert script.end() == 0, script.err
    assert "Traceback" not in script.err
    written = script.folder / "written"
    if setting == "a gateway":  # which ends later than its script
        until(lambda: written.exists() and written.read_text() == "4.04.0", "both calls")
    assert written.read_text() == "4.04.0"


def test_a_script_of_a_far_gateway_ends_well_after_a_refused_effect(scripts: Scripts) -> None:
    script = scripts.start("a gateway", REFUSED)
    assert script.end() == 0, script.err
    assert "callback" in script.out
    assert "Traceback" not in script.err


@pytest.mark.parametrize("how", ["told", "untold"])
def test_a_script_says_which_function_was_not_called_unless_it_knows(
    how: str, scripts: Scripts
) -> None:
    script = scripts.start("a cluster", NOT_ALLOWED + (CATCH if how == "told" else ""))
    assert script.end() == 0, script.err
    if how == "told":
        assert (script.out, script.err) == ("caught\n", "")
    else:
        assert script.err.startswith("the call of '<lambda>' failed: ")
        assert script.err.count("\n") == 1
        assert "--allow-python" in script.err
