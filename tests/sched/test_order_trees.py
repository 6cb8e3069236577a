"""Orders to large gangs go down a tree: a cluster of the production actors, with messages in any order."""

from __future__ import annotations

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.ids import RESOURCES, executor_of
from tests.stages.actors import FakeHost, World
from tests.stages.samples import parts
from tests.stages.scripted import Client, chain, join, split

HOSTS = 7
TREES = msg.Trees(over=2, fan=2)
SCHEDULER = "controller"


def large_island(seed: int) -> tuple[World, list[FakeHost], Client]:
    world = World(seed)
    world.trees = TREES
    world.controller()
    hosts = [world.host(f"a{rank}", "a", HOSTS) for rank in range(HOSTS)]
    world.settle()
    return world, hosts, join(world, "c")


@pytest.mark.parametrize("seeds", parts(range(20), 6))
def test_launches_down_a_tree_and_direct_ones_keep_their_order(seeds: list[int]) -> None:
    for seed in seeds:
        world, hosts, client = large_island(seed)
        wide = split(client.slice(HOSTS, "a"), HOSTS, HOSTS * 4)
        narrow = split(client.slice(1, "a"), 1, HOSTS * 4)
        world.settle()
        together, apart = client.program(chain([wide, wide])), client.program(chain([narrow]))
        x = np.arange(HOSTS * 4)
        made = []
        for turn in range(12):
            program = together if turn % 3 else apart
            (y,) = client.run(program, x + turn)
            made.append((y, x + turn + (2 if turn % 3 else 1)))
            world.steps(world.random.randrange(30))
        world.settle()
        for array, expected in made:
            np.testing.assert_array_equal(client.value(array), expected)
        assert not world.to(RESOURCES, msg.EndEpoch)
        launches = [
            (sender.node, to.node)
            for sender, to, message in world.sent
            if isinstance(message, msg.GangOrder) and isinstance(message.order, msg.Launch)
        ]
        from_scheduler = [to for sender, to in launches if sender == SCHEDULER]
        assert len(from_scheduler) == TREES.fan * 8
        assert len(launches) == HOSTS * 8, "each host of the gang gets each launch once"
        client.delete(*[array for array, _ in made])
        for program in (together, apart):
            client.release(program)
        world.settle()
        world.wait(60)
        assert all(not any(host.census().values()) for host in hosts)


@pytest.mark.parametrize("seeds", parts(range(12), 6))
def test_a_host_that_dies_with_what_it_should_pass_on_ends_the_epoch(seeds: list[int]) -> None:
    for seed in seeds:
        world, hosts, client = large_island(seed)
        wide = split(client.slice(HOSTS, "a"), HOSTS, HOSTS * 4)
        world.settle()
        program = client.program(chain([wide]))
        world.settle()
        made = [client.run(program, np.arange(HOSTS * 4))[0] for _ in range(6)]
        world.steps(20 + world.random.randrange(60))
        dead = world.random.randrange(2)  # the scheduler sends orders to the first two
        world.kill(f"a{dead}")
        world.settle()
        assert all(host.stopped for at, host in enumerate(hosts) if at != dead), "all leave"
        for at, host in enumerate(hosts):
            if at == dead:
                world.host(f"a{at}", "a", HOSTS)
            else:
                host.restart()
        world.settle()
        client.known.clear()
        for array in made:
            np.testing.assert_array_equal(client.value(array), np.arange(HOSTS * 4) + 1)


def test_a_lost_link_between_hosts_ends_the_epoch_if_no_host_is_lost() -> None:
    world, hosts, client = large_island(0)
    wide = split(client.slice(HOSTS, "a"), HOSTS, HOSTS * 4)
    world.settle()
    client.run(client.program(chain([wide])), np.arange(HOSTS * 4))
    world.settle()
    a0 = hosts[0].executor
    a0.receive(executor_of("a0"), msg.PeerLost("a6", "silent"))
    world.wait(4)
    assert not world.to(RESOURCES, msg.EndEpoch), "it passes nothing on to that one"
    a0.receive(executor_of("a0"), msg.PeerLost("a2", "silent"))
    world.wait(1)
    assert not world.to(RESOURCES, msg.EndEpoch), "the scheduler may lose the host"
    world.wait(3)
    (ended,) = world.to(RESOURCES, msg.EndEpoch)
    assert "a0" in ended.reason
    assert "a2" in ended.reason
