"""xoscar: one actor a host, each in a process of its own, called one by one.

The actors are members of one `jax.distributed` group, set up like pw's workers.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

try:
    import xoscar
except ImportError:
    xoscar = None

from bench.baselines.peer import Peer, free_address, serve

IN_FLIGHT = 64  # calls


def start(hosts: int) -> Peer:
    """An xoscar pool with `hosts` actors, ready to measure.

    Raises GaveUp if xoscar is not installed or does not start.
    """
    return Peer("xoscar", "bench.baselines.xoscar_actors", [[str(hosts)]])


class Host(xoscar.Actor if xoscar is not None else object):  # type: ignore[misc]
    """A member of the group, as an actor of xoscar."""

    def __init__(self, address: str, hosts: int, rank: int) -> None:
        super().__init__()
        self._where = (address, hosts, rank)

    async def enter(self) -> None:
        """Join the group; the call returns when all members have joined."""
        from bench.baselines.jax_group import Member

        self._member = await asyncio.to_thread(Member, *self._where)

    def step(self, method: str, wait: bool) -> None:
        """Call a method of the member."""
        getattr(self._member, method)(wait)


def main() -> None:
    """The client: HOSTS."""
    hosts = int(sys.argv[1])
    loop = asyncio.new_event_loop()
    serve(lambda: loop.run_until_complete(_cases(hosts, loop)))


async def _cases(
    hosts: int, loop: asyncio.AbstractEventLoop
) -> Mapping[str, Callable[[int], object]]:
    address = free_address()
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=hosts)
    await pool.start()
    actors = [
        await xoscar.create_actor(
            Host,
            address,
            hosts,
            rank,
            address=pool.external_address,
            allocate_strategy=xoscar.allocate_strategy.ProcessIndex(rank + 1),
        )
        for rank in range(hosts)
    ]
    await asyncio.gather(*(actor.enter() for actor in actors))

    async def each(method: str, wait: bool) -> None:
        await asyncio.gather(*(actor.step(method, wait) for actor in actors))

    async def blocking(method: str, count: int) -> None:
        for _ in range(count):
            await each(method, True)

    async def pipelined(method: str, count: int) -> None:
        flying: set[asyncio.Task[None]] = set()
        for _ in range(count):
            flying.add(asyncio.create_task(each(method, False)))
            if len(flying) >= IN_FLIGHT:
                _, flying = await asyncio.wait(flying, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*flying)
        await each("done", True)

    def case(
        work: Callable[[str, int], Coroutine[Any, Any, None]], method: str
    ) -> Callable[[int], object]:
        return lambda count: loop.run_until_complete(work(method, count))

    return {
        "op by op, blocking": case(blocking, "all_reduce"),
        "op by op": case(pipelined, "all_reduce"),
        "local, op by op, blocking": case(blocking, "local"),
        "local, op by op": case(pipelined, "local"),
    }


if __name__ == "__main__":
    main()
