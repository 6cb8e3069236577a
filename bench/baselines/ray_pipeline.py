"""Ray compiled graphs: pipelines of 2 and of 4 actors, several values in flight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.baselines.peer import Peer, serve
from bench.baselines.ray_actors import running
from bench.measure import in_flight

STAGES = (2, 4)
IN_FLIGHT = (1, 4)


def start() -> Peer:
    """Ray with both pipelines, ready to measure; `case_name` names the cases.

    Raises GaveUp if Ray is not installed or does not start.
    """
    return Peer("Ray graph", "bench.baselines.ray_pipeline", ready_s=120, freeze=True)


def case_name(stages: int, most: int) -> str:
    """The name of a case; its count is of values that go through the pipeline."""
    return f"{stages} stages, {most} in flight"


class Stage:
    """One actor: adds one, on a device of its own."""

    def __init__(self) -> None:
        from pw.devices.jax import group

        group.prepare("cpu", 1)
        import jax

        self._step = jax.jit(lambda x: x + 1)

    def step(self, x: Any) -> Any:
        """The stage's computation; returns host memory, since Ray moves no jax arrays."""
        return np.asarray(self._step(x))


def cases(ray: Any) -> Mapping[str, Callable[[int], object]]:
    """A case for each number of stages and of values in flight."""
    from ray.dag import InputNode

    remote = ray.remote(num_cpus=0)(Stage)
    zero = np.zeros(1, np.float32)

    def pipeline(stages: int) -> Any:
        with InputNode() as given:
            value = given
            for _ in range(stages):
                value = remote.remote().step.bind(value)
        graph = value.experimental_compile(_max_inflight_executions=max(IN_FLIGHT))
        assert ray.get(graph.execute(zero))[0] == stages
        return graph

    def case(graph: Any, most: int) -> Callable[[int], object]:
        return lambda count: in_flight(count, most, lambda: graph.execute(zero), ray.get)

    graphs = {stages: pipeline(stages) for stages in STAGES}
    return {
        case_name(stages, most): case(graph, most)
        for stages, graph in graphs.items()
        for most in IN_FLIGHT
    }


def main() -> None:
    """The driver."""
    with running() as ray:
        serve(lambda: cases(ray))


if __name__ == "__main__":
    main()
