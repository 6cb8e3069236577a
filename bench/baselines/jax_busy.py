"""Multi-controller JAX with computations that take a while: see `bench.smallest`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping

from bench.baselines.jax_group import compiled, enter, zeros
from bench.baselines.peer import Peer, serve
from bench.clients import busy_together, calls


def start(hosts: int, steps: tuple[int, ...]) -> Peer:
    """A group of `hosts` processes of one device, with a case for each number of steps.

    Raises GaveUp if it could not be formed.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    numbers = list(map(str, steps))
    members = [[address, str(hosts), str(rank), *numbers] for rank in range(hosts)]
    return Peer("JAX", "bench.baselines.jax_busy", members)


def cases(
    address: str, hosts: int, rank: int, steps: list[str]
) -> Mapping[str, Callable[[int], object]]:
    """`x = f(x)` over the whole group, for each number of steps."""
    mesh = enter(address, hosts, rank)
    return {
        number: calls(compiled(busy_together(int(number)), mesh), zeros(mesh)) for number in steps
    }


def main() -> None:
    """One process of the group: ADDRESS HOSTS RANK STEPS..."""
    address, hosts, rank, *steps = sys.argv[1:]
    serve(lambda: cases(address, int(hosts), int(rank), steps))


if __name__ == "__main__":
    main()
