"""The physical devices of specs, and the routes between specs.

Micro-batches and chains have the same few specs thousands of times, so the devices, hosts and
routes of a spec are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping

from pw.core.errors import PlacementError
from pw.core.programs.plan import Route
from pw.core.programs.program import Computation, Program
from pw.core.programs.reshard import plan_routes
from pw.core.programs.spec_checks import check_placement
from pw.core.sharding import ArraySpec, Binding, Box, DeviceAddress, Placement


class Physical:
    """Checks that the specs of a program fit its devices, and caches their devices, hosts and routes."""

    def __init__(self, program: Program, bindings: Mapping[int, Binding]) -> None:
        self.bindings = {number: bindings[number] for number in sorted(program.slices())}
        self._devices: dict[Placement, tuple[DeviceAddress, ...]] = {}
        self._hosts: dict[Placement, tuple[str, ...]] = {}
        self._boxes: dict[ArraySpec, dict[DeviceAddress, Box]] = {}
        self._moves: dict[tuple[ArraySpec, ArraySpec], tuple[Route, ...] | None] = {}
        self.rank: dict[str, int] = {}
        self.island_of: dict[str, str] = {}
        for binding in self.bindings.values():
            for device in binding.devices:
                self.rank.setdefault(device.host, len(self.rank))
                self.island_of[device.host] = binding.island
        for computation in program.computations:
            self._check_computation(computation)
        for spec in (*program.inputs, *(output.spec for output in program.outputs)):
            self.devices(spec.placement)

    def island(self, placement: Placement) -> str:
        """The island that `placement` is on."""
        return self.bindings[placement.slice].island

    def devices(self, placement: Placement) -> tuple[DeviceAddress, ...]:
        """The physical device at every position of `placement`."""
        if placement not in self._devices:
            self._devices[placement] = self._located(placement)
        return self._devices[placement]

    def hosts(self, placement: Placement) -> tuple[str, ...]:
        """The hosts of `placement`, in binding order."""
        if placement not in self._hosts:
            hosts = dict.fromkeys(device.host for device in self.devices(placement))
            self._hosts[placement] = tuple(sorted(hosts, key=self.rank.__getitem__))
        return self._hosts[placement]

    def routes(
        self, source: ArraySpec, destination: ArraySpec, *, always: bool = False
    ) -> tuple[Route, ...] | None:
        """Return the routes from one spec to the other; None if every device has its shard already.

        `always`: return routes also then.
        """
        pair = (source, destination)
        if always and self._moves.get(pair) is None:
            there, here = self.devices(destination.placement), self.devices(source.placement)
            return plan_routes(source, destination, here, there)
        if pair not in self._moves:
            there, here = self.devices(destination.placement), self.devices(source.placement)
            same = self.is_there(source, destination)
            self._moves[pair] = None if same else plan_routes(source, destination, here, there)
        return self._moves[pair]

    def is_there(self, source: ArraySpec, destination: ArraySpec) -> bool:
        """Return whether every device has its shard already."""
        return source == destination or (
            (source.shape, source.dtype) == (destination.shape, destination.dtype)
            and source.memory == destination.memory
            and set(self.devices(source.placement)) == set(self.devices(destination.placement))
            and self._layout(source) == self._layout(destination)
        )

    def _layout(self, spec: ArraySpec) -> dict[DeviceAddress, Box]:
        if spec not in self._boxes:
            self._boxes[spec] = {
                device: spec.box(position)
                for position, device in enumerate(self.devices(spec.placement))
            }
        return self._boxes[spec]

    def _located(self, placement: Placement) -> tuple[DeviceAddress, ...]:
        binding = self.bindings[placement.slice]
        check_placement(placement, len(binding.devices))
        devices = binding.located(placement)
        if len(set(devices)) < len(devices):
            raise PlacementError(
                "two positions of its mesh are the same physical device; make the mesh of different devices"
            )
        return devices

    def _check_computation(self, computation: Computation) -> None:
        placement = computation.placement
        try:
            own = set(self.devices(placement))
        except PlacementError as error:
            raise PlacementError(f"{computation.name!r} cannot run: {error}") from error
        for what, specs in (("input", computation.inputs), ("output", computation.outputs)):
            for number, spec in enumerate(specs):
                devices = self.devices(spec.placement)
                if computation.traits.spans_devices:
                    continue
                if self.island(spec.placement) != self.island(placement):
                    raise PlacementError(
                        f"{computation.name!r} runs on island {self.island(placement)}, but its {what} "
                        f"{number}, {spec.short}, lies on island {self.island(spec.placement)}; a computation "
                        "runs on one island. Move it first, with pw.put(x, sharding=...)"
                    )
                if set(devices) != own:
                    raise PlacementError(
                        f"{computation.name!r} runs on {len(own)} devices, but its {what} {number}, "
                        f"{spec.short}, lies on other ones; all inputs and outputs lie on exactly the devices "
                        "that run it. Move it first, with pw.put(x, sharding=...)"
                    )
