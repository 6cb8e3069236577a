"""The processes of clients' Python functions: what they may not do, and which tenants' functions run."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest

from pw.core.compact import Compact
from pw.core.functions.parts import HostPart
from pw.core.programs.program import Kind
from pw.devices.python.confining import ChildBounds, environment
from pw.devices.python.process import FunctionRaised, ProcessEnded, PythonProcess
from pw.devices.python.wire import Load
from tests.stages.actors import World
from tests.stages.scripted import chain, join, split

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Call = Callable[[Callable[[], Any], ChildBounds], np.ndarray[Any, Any]]


@pytest.fixture
def call() -> Iterator[Call]:
    """Calls a function in a Python process with bounds; it returns numbers."""
    processes = []

    def make(function: Callable[[], Any], bounds: ChildBounds) -> np.ndarray[Any, Any]:
        process = PythonProcess(dict, np.empty, bounds)
        processes.append(process)
        artifact = cloudpickle.dumps(lambda share, *arrays: [np.asarray(function())])
        process.load(Load(b"k", artifact, HostPart("f", 0, 1, (), (), ())))
        (made,) = process.call(b"k", (), lambda is_error, text: None)
        return made

    yield make
    for process in processes:
        process.close()


def status(field: str) -> str:
    with open("/proc/self/status") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith(field))


def test_variables_of_pw_and_of_secrets_do_not_reach_strangers() -> None:
    variables = {
        "PATH": "/bin",
        "PW_CREDENTIALS": "x",
        "HF_TOKEN": "x",
        "aws_secret_access_key": "x",
    }
    assert environment(variables, ChildBounds()).keys() == {
        "PATH",
        "HF_TOKEN",
        "aws_secret_access_key",
    }
    strict = environment(variables, ChildBounds(strangers=True)).keys()
    assert strict == {"PATH", "PW_PYTHON_CONFINE"}


@pytest.mark.parametrize("strangers", [False, True])
def test_a_process_gets_no_rights_leaves_no_core_and_has_only_its_own_descriptors(
    call: Call, strangers: bool
) -> None:
    def look() -> list[int]:
        targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3, 200) if is_open(fd)]
        strange = [
            one for one in targets if not one.startswith(("socket:", "pipe:", "anon_inode:"))
        ]
        core = resource.getrlimit(resource.RLIMIT_CORE)[0]
        return [int(status("NoNewPrivs")), core, len(strange), "PW_PYTHON_CONFINE" in os.environ]

    def is_open(fd: int) -> bool:
        return os.path.exists(f"/proc/self/fd/{fd}")

    descriptor = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        assert call(look, ChildBounds(strangers=strangers)).tolist() == [1, 0, 0, 0]
    finally:
        os.close(descriptor)


def test_strangers_have_a_user_namespace_of_their_own_and_keep_their_user(call: Call) -> None:
    def look() -> list[int]:
        return [os.stat("/proc/self/ns/user").st_ino, os.geteuid()]

    space, user = call(look, ChildBounds(strangers=True)).tolist()
    own = os.stat("/proc/self/ns/user").st_ino
    assert user == os.geteuid()
    plain, _ = call(look, ChildBounds()).tolist()
    assert plain == own
    if _can_have_namespaces():
        assert space != own


def _can_have_namespaces() -> bool:
    """Whether this system lets this user make user namespaces."""
    import subprocess

    return (
        subprocess.run(["unshare", "-U", "true"], capture_output=True, check=False).returncode == 0
    )


def test_memory_is_bounded(call: Call) -> None:
    def take() -> int:
        return np.ones(600 << 20, np.uint8)[-1]

    assert call(take, ChildBounds()) == 1
    with pytest.raises((FunctionRaised, ProcessEnded), match=r"Memory|allocate|ended|killed"):
        call(take, ChildBounds(memory_bytes=512 << 20))


# --- tenants ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tenant", "runs"), [("red", True), ("blue", False)])
def test_a_host_runs_python_functions_of_the_tenants_that_it_allows(
    tenant: str, runs: bool
) -> None:
    import msgspec

    from pw.core.messages import Artifact, RegisterProgram
    from tests.stages.scripted import digest

    world = World()
    world.controller()
    world.host("h", "i", python=True, python_tenants=("red",))
    world.tenants["c"] = tenant
    client = join(world, "c")
    slice_ = client.slice(1)
    world.settle()
    spec = split(slice_, 1)
    body = chain([spec])
    (computation,) = body.computations
    python = msgspec.structs.replace(computation, kind=Kind.PYTHON)
    number = client.id()
    client.outputs[number] = (spec,)
    body = msgspec.structs.replace(body, computations=(python,))
    client.tell(RegisterProgram(number, Compact.of(body), (Artifact(digest(b"1"), b"1"),)))
    world.settle()
    (made,) = client.run(number, np.arange(8))
    world.settle()
    if runs:
        assert made not in client.failed
        return
    error = client.failed[made]
    assert error.kind == "PythonRefused"
    assert "of tenant 'blue', and this host runs those of red only" in error.message
