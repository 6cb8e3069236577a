"""Ray: one actor a host, called one by one or through a compiled graph.

The actors that run the all-reduce are members of one `jax.distributed` group, set up like pw's
workers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bench.baselines.peer import Peer, free_address, serve
from bench.measure import in_flight

IN_FLIGHT = 64  # calls; Ray is not faster with more
GRAPH_IN_FLIGHT = 8  # the buffers of a compiled graph's channels


def start(hosts: int) -> Peer:
    """Ray with `hosts` actors of each kind, ready to measure.

    Raises GaveUp if Ray is not installed or does not start.
    """
    # Ray's daemons are never idle: they would take up to a quarter of a core from the others.
    return Peer("Ray", "bench.baselines.ray_actors", [[str(hosts)]], ready_s=120, freeze=True)


@contextlib.contextmanager
def prepared() -> Iterator[tuple[str, dict[str, object]]]:
    """Return a folder for Ray's files, which is removed at the end, and its settings."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    folder = tempfile.mkdtemp(prefix="ray")
    try:
        # A stopped daemon does not answer; Ray must not count it as lost.
        yield folder, {"health_check_timeout_ms": 600_000}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def running() -> Iterator[Any]:
    """Start Ray, and remove its files at the end."""
    with prepared() as (folder, settings):
        import ray

        ray.init(
            address="local",
            num_cpus=64,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=512 << 20,
            _temp_dir=folder,
            _system_config=settings,
        )
        try:
            yield ray
        finally:
            ray.shutdown()


def cases(ray: Any, hosts: int) -> Mapping[str, Callable[[int], object]]:
    """The cases of `bench.dispatch`; a count is of computations."""
    from ray.dag import InputNode, MultiOutputNode

    from bench.baselines.jax_group import Member

    remote = ray.remote(num_cpus=0)(Member)

    def actors() -> list[Any]:
        address = free_address()
        made = [remote.remote(address, hosts, rank) for rank in range(hosts)]
        ray.get([actor.done.remote() for actor in made])
        return made

    called = actors()

    def blocking(method: str) -> Callable[[int], object]:
        def case(count: int) -> None:
            for _ in range(count):
                ray.get([getattr(actor, method).remote(True) for actor in called])

        return case

    def pipelined(method: str) -> Callable[[int], object]:
        def case(count: int) -> None:
            flying: deque[Any] = deque()
            for _ in range(count):
                flying.append([getattr(actor, method).remote(False) for actor in called])
                if len(flying) > IN_FLIGHT:
                    ray.get(flying.popleft())
            ray.get([actor.done.remote() for actor in called])

        return case

    in_graph = actors()
    with InputNode() as given:
        outputs = [actor.local.bind(given) for actor in in_graph]
        dag = MultiOutputNode(outputs) if hosts > 1 else outputs[0]
    graph = dag.experimental_compile(_max_inflight_executions=GRAPH_IN_FLIGHT)

    def graph_blocking(count: int) -> None:
        for _ in range(count):
            ray.get(graph.execute(True))

    def graph_pipelined(count: int) -> None:
        in_flight(count, GRAPH_IN_FLIGHT, lambda: graph.execute(False), ray.get)

    return {
        "op by op, blocking": blocking("all_reduce"),
        "op by op": pipelined("all_reduce"),
        "local, op by op, blocking": blocking("local"),
        "local, op by op": pipelined("local"),
        "graph: local, op by op, blocking": graph_blocking,
        "graph: local, op by op": graph_pipelined,
    }


def main() -> None:
    """The driver: HOSTS."""
    with running() as ray:
        serve(lambda: cases(ray, int(sys.argv[1])))


if __name__ == "__main__":
    main()
