"""What errors say: what happened, to which of the user's objects, and what to do.

Nothing of the runtime's insides: no string of the source may have them, and errors that are made here do not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.core.errors import Error, ErrorReport
from pw.core.messages import PeerLost, Run
from pw.sched.island.quarantine import STRIKES, Quarantine
from pw.testing import InProcessCluster
from pw.transport.links import codec
from tests.client import test_session
from tests.project.user_words import insides, sentences
from tests.sched import test_controller, test_lineage, test_rebuild
from tests.stages.scripted import chain, split
from tests.stages.stage import held, mesh_on, numbers

SOURCE = Path(pw.__file__).parent

FOR_OPERATORS = {
    "client/looking/plan.py": "pw plan shows how hosts run a program: people ask for segments and edges",
    "operating/deploy/slurm.py": "scripts for Slurm, which calls machines nodes",
    "devices/jax/coordination.py": "hosts tell each other, and their logs",
    "devices/jax/coordination_service.py": "hosts tell each other, and their logs",
    "devices/jax/group.py": "hosts tell their logs",
    "transport/bulk/shared.py": "what a wire may not carry is counted and logged",
    "transport/links/node.py": "how the parts of pw are put together",
}

REASONS = ("replaced by a newer incarnation", "frames lost (expected {}, got {})")
"""Of lost links, as logs have them: `PeerLost.words` says them to users."""


def test_no_string_of_the_source_tells_users_of_the_insides() -> None:
    told = [
        f"{path}:{line}: {insides(text)} in {text!r}"
        for path in sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))
        if not path.startswith("testing/") and path not in FOR_OPERATORS
        for line, text in sentences(SOURCE / path)
        if insides(text) and text not in REASONS
    ]
    assert not told, "say it in a user's words, or see tests/project/user_words.py:\n" + "\n".join(
        told
    )


def test_the_words_are_found_where_they_are(tmp_path: Path) -> None:
    """The check above can fail."""
    module = tmp_path / "module.py"
    module.write_text(
        '''
        """An epoch in a docstring."""
        def f(name, epoch):
            """Another epoch."""
            words = f"the island {name} left epoch {epoch}" + " of its own"
            log("info", "this epoch is for a log")
            raise HostLost(words if name else "a slot of " f"{name} is not bound")
        '''.replace("\n        ", "\n")
    )
    found = [insides(text) for _, text in sentences(module)]
    assert [words for words in found if words] == [["epoch"], ["slot"]]


# --- errors, made -----------------------------------------------------------------------------------------


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


def check(error: Exception, *objects: str) -> None:
    """It is one of pw's (or Python's own kind of one), in plain words, and names the user's objects."""
    text = f"{type(error).__name__}: {error}"
    assert not insides(str(error)), text
    assert isinstance(error, (Error, TypeError, ValueError, TimeoutError)), text
    for pattern in objects:
        assert re.search(pattern, str(error)), f"{pattern!r} is not in {text}"


def failed(client: Any, array: int) -> Error:
    found = client.failed.get(array) or client.value(array)
    assert isinstance(found, ErrorReport), found
    return found.exception()


def of_an_island_that_is_gone() -> tuple[Any, int, int, int]:
    """A client, what it had made there, what it called afterwards, and what it called when all was over."""
    cluster = test_rebuild.Cluster()
    client, world = cluster.client, cluster.world
    program = client.program(chain([cluster.b]))
    (array,) = client.run(program, test_rebuild.X)
    world.settle()
    cluster.hosts["b0"].die()
    (late,) = client.run(program, test_rebuild.X)
    world.settle()
    world.wait(31)
    world.wait(61)
    (after,) = client.run(program, test_rebuild.X)
    world.settle()
    return client, array, late, after


@pytest.mark.parametrize("which", [1, 2, 3])
def test_an_island_that_does_not_come_back(which: int) -> None:
    gone = of_an_island_that_is_gone()
    check(
        failed(gone[0], gone[which]),
        "'chain'",
        "'b'",
        "host b0",
        "make_virtual_device_set",
        "status",
    )


def test_a_value_that_is_not_kept_anywhere() -> None:
    cluster = test_rebuild.Cluster()
    cluster.client.keeps_inputs = False
    step = cluster.client.program(chain([cluster.b], donated=(0,)))
    (state,) = cluster.client.run(step, cluster.client.upload(test_rebuild.X, cluster.b))
    cluster.world.settle()
    cluster.hosts["b0"].crash()
    cluster.world.settle()
    check(failed(cluster.client, state), r"int64\[8\]", "keep=True", "pw.checkpoint")


def test_what_cannot_be_made_again() -> None:
    def lost(wanted: int, history: test_lineage.History, **how: Any) -> Error:
        return history.plan(wanted, **how).lost[wanted].exception()

    history = test_lineage.History()
    history.run(1)
    history.lineage.add_input(2, test_lineage.SPEC)
    record = history.run(3, 2)
    named = r"int64\[8\] that 'chain' made"
    check(lost(1, history, bound=lambda slice: False), named, "h was lost", "add_slice")
    history.lineage.origins[2].is_input = False
    check(lost(2, history), r"int64\[8\]", "pw.checkpoint")
    record.attempts, record.attempted_s = test_lineage.ATTEMPTS, 0.0
    check(lost(3, history), named, "lost again each time")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("silent for 3 s", "no heartbeat for 3 s"),
        ("connection lost", "its process has ended"),
        ("closed", "it has ended"),
        ("replaced by a newer incarnation", "started again"),
        ("connected anew", "connection"),
        ("frames lost (expected 4, got 7)", "messages were lost"),
    ],
)
def test_how_a_host_was_lost(reason: str, words: str) -> None:
    lost = PeerLost("east-1", reason)
    assert words in lost.words
    assert not insides(lost.words)


def test_no_controller() -> None:
    bench = test_session.Bench()
    future = bench.get()
    bench.tell(PeerLost("controller", "connection lost"), sender=test_session.ME)
    check(raised(lambda: future.result(0)), "controller was lost", "its process has ended")


def test_a_program_that_crashes_its_hosts() -> None:
    for crash, kind in (("compiling", pw.CompileError), ("running", pw.ComputationFailed)):
        quarantine, body = Quarantine(), chain([split(1, 2)])
        quarantine.install(1, body)
        for _ in range(STRIKES):
            quarantine.host_lost([1] if crash == "compiling" else [], [1])
        refusal = quarantine.install(1, body) or quarantine.refusal(1)
        assert refusal is not None
        error = refusal.exception()
        assert type(error) is kind
        check(error, "'chain'", f"{STRIKES} times")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((), "takes 1 arrays and was given 0"),
        ((b"short",), r"argument 0 of 'chain', int64\[8\], takes 64 bytes, not 5"),
        (("theirs",), r"argument 0 of 'chain', .* another client.*pw\.get"),
        (("deleted",), r"argument 0 of 'chain', .* was deleted or donated before .*copy"),
        (("elsewhere",), r"argument 0 of 'chain', .* is int64\[8\], split over .* traced for"),
    ],
)
def test_calls_that_are_refused(args: tuple[Any, ...], words: str) -> None:
    stage = test_controller.Stage()
    client = stage.client
    program = client.program(chain([stage.spec]))
    other, slice_ = stage.join("other")
    theirs = other.upload(test_controller.X, split(slice_, 2))
    (deleted,) = client.run(program, test_controller.X)
    client.delete(deleted)
    elsewhere = client.upload(test_controller.X, split(stage.slice, 1))
    stage.world.settle()
    named = {"theirs": theirs, "deleted": deleted, "elsewhere": elsewhere}
    made = client.id()
    client.sent_runs += 1
    client.tell(Run(client.id(), program, tuple(named.get(a, a) for a in args), (made,)))
    stage.world.settle()
    check(client.failed[made].exception(), words)


def test_devices_that_were_given_back() -> None:
    stage = test_controller.Stage()
    _, slice_ = stage.join("other")
    program = stage.client.program(chain([split(slice_, 2)]))
    (array,) = stage.client.run(program, test_controller.X)
    stage.world.settle()
    check(
        stage.client.failed[array].exception(), "'chain'", "given back", "make_virtual_device_set"
    )


def test_a_fault_of_pw_is_said_to_be_one_and_only_once() -> None:
    error = ErrorReport("InternalError", "two and two are five", "east-1").exception()
    again = ErrorReport.of(error).exception()
    assert str(error) == str(again)
    assert str(error).count("please report it") == 1
    assert "fault of pw" not in str(ErrorReport("HostLost", "host a was lost").exception())


# --- in a cluster -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mesh(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


def donated_twice(mesh: pw.Mesh) -> Any:
    x = pw.put(numbers(4), sharding=pw.NamedSharding(mesh, P()))
    step = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
    step(x)
    return step(x)


def deleted(mesh: pw.Mesh) -> Any:
    x = pw.put(numbers(4), sharding=pw.NamedSharding(mesh, P()))
    x.delete()
    return np.asarray(x)


def hungry(mesh: pw.Mesh) -> Any:
    def broadcast(x: Any) -> Any:
        return jnp.broadcast_to(x, (1 << 44,)) * 2

    return pw.jit(broadcast, mesh=mesh)(np.float32(1)).block_until_ready()


def too_many_host_values(mesh: pw.Mesh) -> Any:
    small = np.zeros(codec.MAX_FRAME_BYTES // 2 // 64, np.uint8)
    return pw.jit(lambda *xs: xs[0], mesh=mesh)(*[small] * 100)


CALLS: dict[str, tuple[Callable[[pw.Mesh], Any], tuple[str, ...]]] = {
    "a donated array": (donated_twice, (r"float32\[4\]", "donated")),
    "a deleted array": (deleted, (r"float32\[4\]", r"delete\(\)")),
    "out of memory": (hungry, ("'broadcast'", "host-0")),
    "a check for NaNs": (
        lambda mesh: np.asarray(pw.jit(jnp.log, mesh=mesh, check_nans=True)(np.float32(-1))),
        ("'log'", "NaN"),
    ),
    "a slice that is too large": (
        lambda mesh: pw.make_virtual_device_set().add_slice(devices=77),
        ("77", "island-0"),
    ),
    "an island that is not there": (
        lambda mesh: pw.make_virtual_device_set().add_slice(devices=1, island="mars"),
        ("mars", "island-0"),
    ),
    "a host that is not there": (lambda mesh: pw.drain("mars"), ("'mars'", "host-0")),
    "a path that is not there": (
        lambda mesh: pw.restore("/nowhere/at/all", {"w": pw.NamedSharding(mesh, P())}),
        ("/nowhere/at/all",),
    ),
    "a sharding that does not fit": (
        lambda mesh: pw.put(numbers(3), sharding=pw.NamedSharding(mesh, P("x"))),
        (r"\(3,\)", "divide"),
    ),
    "what cannot be an argument": (lambda mesh: pw.jit(jnp.sin, mesh=mesh)(object()), ("sin",)),
    "what is no function": (lambda mesh: pw.jit(3), ("3",)),
    "another address": (
        lambda mesh: pw.connect("tcp://127.0.0.1:1"),
        ("disconnect", "127.0.0.1:1"),
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_calls_that_cannot_be(cluster: InProcessCluster, mesh: pw.Mesh, what: str) -> None:
    call, objects = CALLS[what]
    check(raised(lambda: call(mesh)), *objects)


def test_arrays_of_another_session(cluster: InProcessCluster, mesh: pw.Mesh) -> None:
    x = pw.put(numbers(4), sharding=pw.NamedSharding(mesh, P()))
    mine = pw.connect()
    other = cluster.client()
    current.use(other)
    try:
        there = mesh_on(1)
        check(raised(lambda: pw.jit(lambda v: v, mesh=there)(x)), r"float32\[4\]|devices", "pw.get")
    finally:
        current.use(mine)
        other.close()
    there_now = pw.NamedSharding(there, P())
    check(raised(lambda: pw.put(numbers(4), sharding=there_now)), "devices", "connect again")


def test_calls_that_are_ended_before_they_have() -> None:
    """Their island has to stop, so each has a cluster for itself."""

    def slow(x: Any) -> Any:
        return x + 1

    with InProcessCluster(devices_per_island=1) as cluster, held(cluster):
        late = raised(pw.jit(slow, timeout=0.05)(1.0).block_until_ready)
    assert type(late) is pw.ComputationTimeout
    check(late, "'slow'", "0.05 s", "island-0")
    with InProcessCluster(devices_per_island=1) as cluster, held(cluster):
        unwanted = pw.jit(slow)(2.0)
        pw.cancel(unwanted)
        cancelled = raised(unwanted.block_until_ready)
    assert type(cancelled) is pw.Cancelled
    check(cancelled, "'slow'", r"pw\.cancel", "call it again")
