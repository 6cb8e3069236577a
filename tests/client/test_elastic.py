"""Training state moves to another number of devices, also after an island was lost for good."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import pw
from pw import NamedSharding, PartitionSpec
from tests.stages.stage import BOUND_S

P = PartitionSpec
pytestmark = pytest.mark.processes

STATE = {
    "weights": np.arange(64 * 256.0, dtype=np.float32).reshape(64, 256),  # too large for a message
    "bias": np.arange(8.0, dtype=np.float32),
    "step": np.int32(7),
    "key": jax.random.key(3),
}
"""Arrays of a training, of several sizes and types."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=2, devices_per_host=2, recovery_timeout_s=1.0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def layouts(cluster: pw.LocalCluster) -> dict[str, dict[str, NamedSharding]]:
    """Shardings of STATE over one island, the other one, one device, and both."""
    slices = [
        pw.make_virtual_device_set().add_slice(devices=2, island=f"island-{at}") for at in (0, 1)
    ]
    both = np.array([one.devices for one in slices])
    meshes = {
        "one": pw.Mesh(both[0], ("data",)),
        "two": pw.Mesh(both[1], ("data",)),
        "a device": pw.Mesh(both[1][:1], ("data",)),
        "both": pw.Mesh(both, ("island", "data")),
    }
    specs = {"copies": {}, "split": {"weights": P("data"), "bias": P("data")}}
    layouts = {
        f"{name}, {how}": {
            leaf: NamedSharding(mesh, spec.get(leaf, P()))
            for leaf in STATE  # a scalar and a key have no rows
        }
        for name, mesh in meshes.items()
        for how, spec in specs.items()
    }
    rows = dict.fromkeys(("weights", "bias"), P(("island", "data")))
    layouts["both, split over all"] = {
        leaf: NamedSharding(meshes["both"], rows.get(leaf, P())) for leaf in STATE
    }
    return layouts


def check(state: Any, shardings: dict[str, NamedSharding]) -> None:
    for leaf, value in pw.get(state).items():
        assert state[leaf].sharding == shardings[leaf]
        if leaf == "key":
            assert np.array_equal(jax.random.key_data(value), jax.random.key_data(STATE["key"]))
        else:
            np.testing.assert_array_equal(value, STATE[leaf])


ROUTE = (
    *("both, split over all", "one, split", "both, copies", "two, copies", "both, split"),
    *("a device, copies", "both, split over all", "two, split", "one, copies", "both, copies"),
)


def test_state_moves_by_one_put(layouts: dict[str, dict[str, NamedSharding]]) -> None:
    state: Any = STATE
    for name in ROUTE:
        state = pw.put(state, layouts[name])
        check(state, layouts[name])


def test_state_moves_in_a_program(layouts: dict[str, dict[str, NamedSharding]]) -> None:
    state: Any = pw.put(STATE, layouts[ROUTE[0]])
    for name in ROUTE[1:]:

        @pw.program
        def move(tree: Any, name: str = name) -> Any:
            return pw.put(tree, layouts[name])

        state = move(state)
        check(state, layouts[name])


@pytest.mark.parametrize("lost", ["island-1", "island-0"])
def test_copies_on_the_islands_that_are_left(
    cluster: pw.LocalCluster, layouts: dict[str, dict[str, NamedSharding]], lost: str
) -> None:
    survivor, gone = ("one", "two") if lost == "island-1" else ("two", "one")
    heard: list[str] = []
    changed = threading.Condition()

    def hear(event: pw.IslandEvent) -> None:
        with changed:
            heard.extend([event.what] * (event.island == lost))
            changed.notify_all()

    (host,) = [one for one in cluster.hosts if one.name.startswith(lost)]
    step = pw.jit(
        lambda tree: tree | {"bias": tree["bias"] + 1 - 1},
        mesh=layouts["both, copies"]["bias"].mesh,
    )
    copies = step(pw.put(STATE, layouts["both, copies"]))
    split = pw.put(STATE, layouts["both, split over all"])
    elsewhere = pw.put(STATE, layouts[f"{gone}, copies"])
    pw.checkpoint(copies).result()
    with pw.on_island_event(hear):
        host.kill()
        with changed:
            assert changed.wait_for(lambda: "given_up" in heard, BOUND_S)
        for how in ("copies", "split"):
            state = pw.put(copies, layouts[f"{survivor}, {how}"])
            check(state, layouts[f"{survivor}, {how}"])
        for name, value in pw.get(copies).items():
            assert name == "key" or np.array_equal(value, STATE[name])
        for lying in (split, elsewhere):
            with pytest.raises((pw.HostLost, pw.ArrayLost)):
                pw.get(pw.put(lying, layouts[f"{survivor}, copies"]))
        number = pw.publish("bias", state["bias"]).result(BOUND_S)
        with pytest.raises(pw.HostLost):
            pw.publish("bias", elsewhere["bias"]).result(BOUND_S)
        np.testing.assert_array_equal(pw.lookup("bias"), STATE["bias"])
        assert max(pw.names()["bias"].versions) == number, "the other one is none"
        pw.unpublish("bias")
        host.restart()
        with changed:
            assert changed.wait_for(lambda: "returned" in heard, BOUND_S)
    state = pw.put(state, layouts["both, split over all"])
    check(state, layouts["both, split over all"])
