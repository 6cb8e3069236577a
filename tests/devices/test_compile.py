"""The question `Compile`, from a client to the hosts of a slice and back, and the programs that follow it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection.current import runtime as current_runtime
from pw.client.connection.runtime import Runtime
from pw.core.messages import Detail
from pw.core.programs.program import Node, Output, Program, ValueRef
from pw.core.programs.stablehlo import Stablehlo, decode, spec_of_shards
from pw.core.sharding import ArraySpec, Placement
from pw.testing import InProcessCluster
from tests.devices.test_stablehlo import REFUSED, psum_of, sums
from tests.stages.daemons import until
from tests.stages.lowered import computation_of, like, over, stablehlo_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(devices_per_island=4) as cluster:
        yield cluster


def register(
    session: Runtime,
    code: Stablehlo,
    inputs: Sequence[ArraySpec],
    outputs: Sequence[ArraySpec],
    donated: tuple[int, ...] = (),
) -> int:
    """A program of one computation."""
    computation, artifact = computation_of(code, inputs, outputs, donated)
    node = Node(0, tuple(ValueRef(-1, index) for index in range(len(inputs))))
    results = tuple(Output(ValueRef(0, index), spec) for index, spec in enumerate(outputs))
    body = Program("f", (computation,), (node,), tuple(inputs), results, donated)
    return session.register_program(body, {computation.artifact: artifact})


def counters(session: Runtime) -> dict[str, int]:
    """Of all hosts together."""
    total: dict[str, int] = {}
    for node, found in session.stats().items():
        if node not in ("controller", "client"):
            for name, value in found.items():
                total[name] = total.get(name, 0) + value
    return total


def test_a_client_compiles_then_runs(cluster: InProcessCluster) -> None:
    session = cluster.client()
    before = counters(session)["compilations"]
    bound = session.allocate_slice(4)
    devices = Placement(bound.slice, (0, 1, 2, 3))
    code = sums(4, donate_argnums=0)
    facts = session.ask.compile(code, devices).result(60).facts
    assert facts is not None
    assert facts.donated == (0,)
    x_spec = spec_of_shards(facts.inputs[0].shape, "float32", devices, is_stacked=True)
    y_spec = spec_of_shards(facts.inputs[1].shape, "float32", devices, is_stacked=False)
    total_spec = spec_of_shards(facts.outputs[0].shape, "float32", devices, is_stacked=False)
    program = register(session, code, [x_spec, y_spec], [total_spec, x_spec], facts.donated)
    x, y = np.arange(128, dtype=np.float32).reshape(16, 8), np.eye(8, dtype=np.float32)
    given, other = session.upload(x, x_spec), session.upload(y, y_spec)
    total, following = session.run(program, [given, other], 2)
    np.testing.assert_array_equal(session.fetch(total, total_spec).result(60), x.sum(axis=0))
    (again, _) = session.run(program, [following, other], 2)
    np.testing.assert_array_equal(session.fetch(again, total_spec).result(60), (x + 1).sum(axis=0))
    for array, spec in ((given, x_spec), (following, x_spec)):
        with pytest.raises(pw.ArrayDeleted):
            session.fetch(array, spec).result(60)
    text = session.ask.compile(code, devices, Detail.TEXT).result(60).text
    assert "HloModule jit_sum_and_next" in text
    assert session.ask.compile(code, devices, Detail.COSTS).result(60).costs["flops"] > 0
    assert counters(session)["compilations"] == before + 1
    session.close()


def test_the_compilers_own_words_come_back(cluster: InProcessCluster) -> None:
    session = cluster.client()
    devices = Placement(session.allocate_slice(1).slice, (0,))
    (_, artifact), words = REFUSED["an option that does not exist"][0](), "xla_no_such_thing"
    code = decode(artifact)
    with pytest.raises(pw.CompileError, match=f"INVALID_ARGUMENT: .*{words}"):
        session.ask.compile(code, devices).result(60)
    session.close()


def test_a_program_that_is_not_what_it_says_fails_its_runs(cluster: InProcessCluster) -> None:
    session = cluster.client()
    devices = Placement(session.allocate_slice(1).slice, (0,))
    spec = spec_of_shards((8,), "float32", devices, is_stacked=False)
    wrong = spec_of_shards((9,), "float32", devices, is_stacked=False)
    code = stablehlo_of(lambda x: x + 1, [like((8,))])
    program = register(session, code, [spec], [wrong])
    (made,) = session.run(program, [np.zeros(8, np.float32).tobytes()], 1)
    with pytest.raises(pw.CompileError, match=r"the results of the compiled function are .*\(8,\)"):
        session.fetch(made, wrong).result(60)
    session.close()


def test_arrays_move_between_memories(cluster: InProcessCluster) -> None:
    """An edge without a computation, there and back, and between devices."""
    session = cluster.client()
    slice = session.allocate_slice(4).slice
    first, second = Placement(slice, (0, 1)), Placement(slice, (2, 3))
    aside = spec_of_shards((4,), "float32", first, is_stacked=True, memory="pinned_host")
    here = spec_of_shards((4,), "float32", first, is_stacked=True)
    there = spec_of_shards((4,), "float32", second, is_stacked=True, memory="unpinned_host")
    results = (here, there, aside)
    outputs = tuple(Output(ValueRef(-1, 0), spec) for spec in results)
    program = session.register_program(Program("move", (), (), (aside,), outputs), {})
    x = np.arange(8, dtype=np.float32)
    made = session.run(program, [session.upload(x, aside)], 3)
    for array, spec in zip(made, results, strict=True):
        np.testing.assert_array_equal(session.fetch(array, spec).result(60), x)
    store: Any = cluster.hosts[0].node.actors["store"]
    payloads: list[Any] = [store.arrays[array].value.payload for array in made]
    kinds = [array.sharding.memory_kind for array in payloads]
    assert kinds == ["device", "unpinned_host", "pinned_host"]
    session.close()


def test_nothing_is_left_of_a_client_that_has_gone(cluster: InProcessCluster) -> None:
    other = cluster.client()
    before = counters(other)
    session = cluster.client()
    devices = Placement(session.allocate_slice(1).slice, (0,))
    for index in range(3):
        code = stablehlo_of(lambda x, number=index: x + number, [like((8,))])
        assert session.ask.compile(code, devices).result(60).facts is not None
    assert counters(other)["compilations_kept"] == before["compilations_kept"] + 3
    assert counters(other)["installed"] == before["installed"] + 3
    session.close()
    names = ("compilations_kept", "installed")
    until(lambda: all(counters(other)[name] == before[name] for name in names), "all dropped")
    other.close()


@pytest.mark.processes
def test_two_hosts_in_one_gang() -> None:
    """A collective over both; then one of them is killed while they compile, and both form anew."""
    # Without a cache: else one host may find what the other has saved.
    with pw.LocalCluster(
        islands=1, hosts_per_island=2, devices_per_host=2, compile_cache=""
    ) as cluster:
        session: Any = current_runtime()
        devices = Placement(session.allocate_slice(4).slice, (0, 1, 2, 3))
        code = psum_of(4)
        facts = session.ask.compile(code, devices).result(60).facts
        assert [one.shape for one in facts.outputs] == [(1, 4), (1, 4)]
        x_spec = spec_of_shards((1, 4), "float32", devices, is_stacked=True)
        total_spec = spec_of_shards((1, 4), "float32", devices, is_stacked=False)
        program = register(session, code, [x_spec], [total_spec, x_spec])
        x = np.arange(16, dtype=np.float32).reshape(4, 4)
        scaled = session.upload(x, x_spec)
        wanted, column = x, np.arange(4, dtype=np.float32)[:, None]
        for _ in range(8):
            total, scaled = session.run(program, [scaled], 2)
            total_wanted, wanted = wanted.sum(0, keepdims=True), wanted * column
        np.testing.assert_array_equal(session.fetch(scaled, x_spec).result(60), wanted)
        np.testing.assert_array_equal(session.fetch(total, total_spec).result(60), total_wanted)
        assert counters(session)["compilations"] == 2

        answers = [session.ask.compile(long_compilation(4, n), devices) for n in range(2)]
        os.kill(cluster.hosts[1].runtime_pid(), signal.SIGKILL)
        for answer in answers:
            assert answer.result(120).facts.outputs[0].shape == (1, 4)
        (total, _) = session.run(program, [session.upload(x, x_spec)], 2)
        np.testing.assert_array_equal(
            session.fetch(total, total_spec).result(120), x.sum(0, keepdims=True)
        )


def long_compilation(devices: int, number: int) -> Stablehlo:
    """A module that a compiler works on for a while, another one for each number."""

    def function(x: Any) -> Any:
        for index in range(15):
            x = x @ x[:1].T * x + index + number
        return x

    return stablehlo_of(
        function,
        [like((devices, 4), sharding=over(devices, "x"))],
        out_shardings=over(devices, "x"),
    )
