"""Gangs over real processes: order across hosts and islands, shown by values (G1, G4).

Under Gloo two hosts that disagree about the order of two collectives of the same shape compute wrong
values without an error, so a test that only looks for hangs would see nothing. Each client therefore runs
a chain in which every all-reduce goes into all later values, in modular integer arithmetic that forgets
nothing, and compares the end with numpy.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.stages.scripts import finish, start_client, two_gangs

pytestmark = pytest.mark.processes

ROUNDS = 200

CHAIN = """
seed, island, rounds = np.uint32({seed}), {island!r}, {rounds}
devices = pw.make_virtual_device_set().add_slice(devices=2, island=island).devices
mesh = pw.Mesh(devices, ("x",))

def step(x):
    total = jnp.sum(x, dtype=jnp.uint32)
    return x * np.uint32(1664525) + total + seed

jitted = pw.jit(step, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))
start = np.arange(4, dtype=np.uint32) + seed
x = pw.put(start, sharding=pw.NamedSharding(mesh, P("x")))
wanted = start
for _ in range(rounds):
    x = jitted(x)
    wanted = wanted * np.uint32(1664525) + wanted.sum(dtype=np.uint32) + seed
np.testing.assert_array_equal(np.asarray(x), wanted)
print("ok")
"""

CROSSING = """
seed, first, second, rounds = np.uint32({seed}), {first!r}, {second!r}, {rounds}
device_set = pw.make_virtual_device_set()
here = pw.Mesh(device_set.add_slice(devices=2, island=first).devices, ("x",))
there = pw.Mesh(device_set.add_slice(devices=2, island=second).devices, ("x",))

def step(x):
    return x * np.uint32(22695477) + jnp.sum(x, dtype=jnp.uint32) + seed

on_first = pw.jit(step, mesh=here, in_shardings=P("x"), out_shardings=P("x"))
on_second = pw.jit(step, mesh=there, in_shardings=P("x"), out_shardings=P("x"))

@pw.program
def there_and_back(x):
    return on_first(on_second(on_first(x)))

start = np.arange(4, dtype=np.uint32) + seed
x = pw.put(start, sharding=pw.NamedSharding(here, P("x")))
wanted = start
for _ in range(rounds):
    x = there_and_back(x)
    for _ in range(3):
        wanted = wanted * np.uint32(22695477) + wanted.sum(dtype=np.uint32) + seed
np.testing.assert_array_equal(np.asarray(x), wanted)
print("ok")
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_gangs() as cluster:
        yield cluster.address


def test_two_clients_collectives_keep_one_order_on_all_hosts(address: str) -> None:
    clients = [
        start_client(address, CHAIN.format(seed=seed, island="island-0", rounds=ROUNDS))
        for seed in (7, 1001)
    ]
    assert [finish(client).strip() for client in clients] == ["ok", "ok"]


def test_programs_that_cross_two_islands_in_opposite_directions_finish(address: str) -> None:
    ways = [("island-0", "island-1"), ("island-1", "island-0")]
    clients = [
        start_client(
            address, CROSSING.format(seed=number + 3, first=first, second=second, rounds=80)
        )
        for number, (first, second) in enumerate(ways)
    ]
    assert [finish(client).strip() for client in clients] == ["ok", "ok"]


def test_the_same_program_of_two_clients_gives_each_its_own_values(address: str) -> None:
    body = CHAIN.format(seed=5, island="island-1", rounds=60)
    clients = [start_client(address, body) for _ in range(2)]
    assert [finish(client).strip() for client in clients] == ["ok", "ok"]


def test_a_killed_client_is_released_and_others_notice_nothing(address: str) -> None:
    victim = start_client(
        address,
        """
        devices = pw.make_virtual_device_set().add_slice(devices=2, island="island-0").devices
        mesh = pw.Mesh(devices, ("x",))
        f = pw.jit(lambda x: x * 1.5 + jnp.sum(x), mesh=mesh, in_shardings=P("x"),
                   out_shardings=P("x"))
        x = pw.put(np.ones(4, np.float32), sharding=pw.NamedSharding(mesh, P("x")))
        big = pw.put(np.ones((1 << 20,), np.float32), sharding=pw.NamedSharding(mesh, P("x")))
        pw.block_until_ready(big)
        kept = []
        while True:
            x = f(x)
            kept.append(x)
            if len(kept) == 50:
                print("running", flush=True)
        """,
    )
    assert victim.stdout.readline().strip() == "running"
    other = start_client(address, CHAIN.format(seed=11, island="island-0", rounds=200))
    victim.process.kill()
    victim.finish(90.0)
    assert finish(other).strip() == "ok"
    watcher = start_client(
        address,
        """
        from pw.client.connection import current
        from tests.stages.daemons import until
        def held():
            return any(c["live_arrays"] for n, c in pw.stats().items() if n.startswith("island-0"))
        until(lambda: len(current.runtime().ask.status().clients) == 1 and not held(), "the release")
        print("ok")
        """,
    )
    assert finish(watcher).strip() == "ok"


def test_large_arrays_between_islands_never_touch_the_controller(address: str) -> None:
    body = """
        device_set = pw.make_virtual_device_set()
        one, two = (pw.Mesh(device_set.add_slice(devices=2, island=f"island-{i}").devices, ("x",))
                    for i in (0, 1))
        value = np.random.default_rng(0).random(4 << 20, dtype=np.float32)
        x = pw.put(value, sharding=pw.NamedSharding(one, P("x")))
        y = pw.put(x, sharding=pw.NamedSharding(two, P("x")))
        z = pw.put(y, sharding=pw.NamedSharding(one, P()))
        np.testing.assert_array_equal(np.asarray(z), value)
        stats = pw.stats()
        controller = {k: v for k, v in stats["controller"].items() if k.startswith("bulk_")}
        assert controller and not any(controller.values()), controller
        assert stats["controller"]["control_bytes_received"] < 1 << 20
        moved = sum(c["bulk_sent_bytes"] for n, c in stats.items() if n.startswith("island-"))
        assert moved >= 3 * value.nbytes, stats
        print("ok")
    """
    assert finish(start_client(address, body)).strip() == "ok"


def test_a_client_far_ahead_blocks_and_memory_stays_bounded(address: str) -> None:
    body = """
        import resource
        devices = pw.make_virtual_device_set().add_slice(devices=1).devices
        f = pw.jit(lambda x: x + 1, devices=devices)
        x = f(np.int32(0))
        for _ in range(2000):
            x = f(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(4_000):
            x = f(x)
            last = x
        assert int(x) == 6_001, int(x)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 64 << 10, f"the client grew by {grown} KiB"
        from tests.stages.daemons import until
        def live():
            return max(c["live_arrays"] for c in pw.stats().values() if "live_arrays" in c)
        until(lambda: live() <= 8, "the release of what is not used")
        print("ok")
    """
    assert finish(start_client(address, body)).strip() == "ok"


def test_values_of_the_paper(address: str) -> None:
    from tests.stages.programs import ROOT

    body = f"import runpy; runpy.run_path({str(ROOT / 'examples' / 'quickstart.py')!r})"
    output = finish(start_client(address, body)).strip()
    namespace = {"array": np.array, "float32": np.float32}
    y, z = eval(output, namespace)
    np.testing.assert_array_equal(y, [3, 5])
    np.testing.assert_array_equal(z, [2, 4])
