"""The islands as the controller knows them: which are ready, and which slices are bound to them."""

from __future__ import annotations

from collections.abc import Iterable

from pw.core.actors.actor import Env
from pw.core.ids import scheduler_of
from pw.core.messages import ArrayPlaced, BoundMemory, IslandFormed, Release
from pw.core.sharding import ArraySpec, Binding, DeviceAddress
from pw.sched.control.array_states import ArrayEntry


class Islands:
    """Islands, the way to their schedulers, and the devices of the slices that are bound."""

    def __init__(self, env: Env, *, counts_tenants: bool = False) -> None:
        self._env = env
        self._counts_tenants = counts_tenants
        self.islands: set[str] = set()
        """Names of islands that are ready."""
        self.limited: set[str] = set()
        """Names of islands that count their devices' memory."""
        self.schedulers: dict[str, None] = {}
        """Islands that have a scheduler, in the order in which they were formed first."""
        self.bindings: dict[int, Binding] = {}
        """Bindings of slices, by number; `pw.sched.control.slices` has them changed."""
        self.bounds: dict[int, int] = {}
        """Bytes that arrays and runs of slices may have on a device, by number of each slice with a bound."""

    def is_bound(self, spec: ArraySpec) -> bool:
        """Whether the slice of an array is bound: clients may give back slices on which arrays lie."""
        return spec.placement.slice in self.bindings

    def located(self, spec: ArraySpec) -> tuple[DeviceAddress, ...]:
        """Return the device of each shard of an array whose slice is bound."""
        return self.bindings[spec.placement.slice].located(spec.placement)

    def place(self, island: str, array: int, spec: ArraySpec, *, is_back: bool = False) -> None:
        """Tell a scheduler of the memory of an array that no run makes, or that recovery brings back."""
        slice_ = spec.placement.slice
        placed = ArrayPlaced(array, self.located(spec), spec.device_bytes, is_back, slice_)
        self._env.send(scheduler_of(island), placed)

    def bind(self, binding: Binding, memory_bytes: int) -> None:
        """A slice is bound, and may have so much of each device; 0 for any amount."""
        self.bindings[binding.slice] = binding
        if memory_bytes:
            self.bounds[binding.slice] = memory_bytes
            self.tell(binding.island, BoundMemory(binding.slice, memory_bytes))

    def unbind(self, number: int) -> None:
        """A slice has been given back, or is refused."""
        binding = self.bindings.pop(number, None)
        if self.bounds.pop(number, 0) and binding is not None:
            self.tell(binding.island, BoundMemory(number, 0))

    def lose(self, number: int) -> None:
        """The island of a slice has left its epoch."""
        del self.bindings[number]
        self.bounds.pop(number, None)

    def formed(self, message: IslandFormed) -> bool:
        """An island is ready; return whether it needs a scheduler."""
        self.islands.add(message.island)
        if message.device_memory_bytes is not None or self._counts_tenants:
            self.limited.add(message.island)
        is_new = message.island not in self.schedulers
        self.schedulers[message.island] = None
        return is_new

    def left(self, island: str) -> None:
        """An island has left its epoch."""
        self.islands.discard(island)
        self.limited.discard(island)

    def tell(self, island: str, message: object) -> None:
        """Send a message to the scheduler of an island, if the island is ready."""
        if island in self.islands:
            self._env.send(scheduler_of(island), message)

    def tell_all(self, message: object) -> None:
        """Send a message to every scheduler."""
        for island in self.schedulers:
            self._env.send(scheduler_of(island), message)

    def release(
        self, client: int, arrays: Iterable[tuple[int, ArrayEntry]], *, late: bool = False
    ) -> None:
        """Have hosts drop arrays of a client, after the client's earlier work.

        With `late`, after all of the client's work that uses them: they were deleted before they
        arrived.
        """
        by_island: dict[str, tuple[list[int], list[tuple[str, ...]]]] = {}
        for number, array in arrays:
            if array.hosts and array.island in self.islands:
                numbers, hosts = by_island.setdefault(array.island, ([], []))
                numbers.append(number)
                hosts.append(array.hosts)
        for island, (numbers, hosts) in by_island.items():
            release = Release(client, tuple(numbers), tuple(hosts), late)
            self._env.send(scheduler_of(island), release)
