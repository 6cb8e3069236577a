"""A runtime without a cluster: programs run here, on this process's CPU devices, as they are told.

It does what hosts do with a program (compile artifacts, lay values out as specs say, run nodes in
order) and checks on the way that every computation takes and leaves its values as its specs say.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax._src.op_shardings import are_hlo_shardings_equal
from jaxlib import xla_client

from pw.client.connection import current
from pw.client.connection.waiting import Waiting
from pw.client.session.leases import Leases
from pw.client.session.thread_messages import Await, Get, Put, Tell
from pw.core.errors import Disconnected, InsufficientDevices
from pw.core.messages import Run
from pw.core.programs.program import Computation, Program, ValueRef
from pw.core.programs.stablehlo import Stablehlo, decode, encode
from pw.core.sharding import ArraySpec, DeviceAddress, dtype_of
from pw.devices.jax import making, modules
from pw.devices.jax.layouts import Layouts

DEVICES = 8


def _done(value: Any) -> Waiting[Any]:
    future: Waiting[Any] = Waiting()
    future.set_result(value)
    return future


class QuietThread:
    """What a runtime asks of its session's thread, but for what it posts there."""

    has_frames = True
    certificate = ""
    nothing: Any = None
    leases = Leases(nothing, nothing, nothing)

    def post(self, note: object) -> None:
        raise NotImplementedError

    def put(self, note: Put) -> None:
        self.post(note)

    def call(
        self,
        run: int,
        program: int,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        wanted: Await | None,
    ) -> None:
        self.post(Tell(Run(run, program, args, results)))
        if wanted is not None:
            self.ask(wanted)

    def ask(self, note: Await | Get) -> None:
        self.post(note)

    def wait_for_hosts(self) -> None:
        pass

    def drive(self, future: Waiting[Any], timeout_s: float) -> None:
        pass

    def look(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def watch(self) -> None:
        pass

    def is_here(self) -> bool:
        return False

    def forked(self) -> None:
        pass

    def trouble(self) -> str:
        return ""

    def counters(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class LocalRuntime:
    """Runs programs at once, in the caller's thread."""

    ended = None
    forked = False

    def __init__(self, platform: str = "cpu", islands: Sequence[str] = ("east", "west")) -> None:
        self.alive = True
        self.platform = platform
        self.islands = islands
        self.programs: dict[int, Program] = {}
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.released: list[int] = []
        self.read_only: dict[int, tuple[str, int]] = {}
        self.released_slices: list[int] = []
        self.released_programs: list[int] = []
        self.artifacts: dict[bytes, bytes] = {}
        self.runs: list[tuple[int, list[int | bytes]]] = []
        self.uploads = 0
        self.waits = 0
        self._ids = itertools.count(1)
        self._compiled: dict[Any, Any] = {}

    @classmethod
    @contextlib.contextmanager
    def in_use(cls, islands: Sequence[str] = ("east", "west")) -> Iterator[LocalRuntime]:
        """In the block, this process's calls go to a new one."""
        local = cls(islands=islands)
        current.use(local)
        yield local
        local.close()
        current.use(None)

    def close(self) -> None:
        self.alive = False

    def allocate_slice(
        self,
        devices: int,
        kind: Any = None,
        island: Any = None,
        topology: Any = None,
        apart: Sequence[int] = (),
        exclusive: bool = False,
    ) -> Any:
        if devices > DEVICES:
            raise InsufficientDevices(f"{devices} devices were asked for; there are {DEVICES}")
        return SimpleNamespace(
            slice=next(self._ids),
            island=island or self.islands[len(apart)],
            platform=self.platform,
            kind=kind,
            devices=range(devices),
            coords=(),
            topology=topology or (),
        )

    def coords(self, slice: int) -> tuple[tuple[int, ...], ...]:
        return ()  # it has no grid

    def island(self, slice: int) -> str:
        return ""  # as it was bound

    def is_lost(self, slice: int) -> bool:
        return False

    def release_slice(self, slice: int) -> None:
        self.released_slices.append(slice)

    def register_program(self, program: Program, artifacts: Mapping[bytes, bytes]) -> int:
        self._check()
        number = next(self._ids)
        self.programs[number] = program
        self.artifacts.update(artifacts)
        return number

    def release_program(self, program: int) -> None:
        self.released_programs.append(program)

    def run(self, program: int, args: Sequence[int | bytes], results: int) -> list[int]:
        self._check()
        graph = self.programs[program]
        assert len(args) == len(graph.inputs)
        assert len(graph.outputs) == results
        self.runs.append((program, list(args)))
        values: dict[ValueRef, np.ndarray[Any, Any]] = {}
        for index, (arg, spec) in enumerate(zip(args, graph.inputs, strict=True)):
            if isinstance(arg, bytes):
                value = np.frombuffer(arg, dtype_of(spec.dtype)).reshape(spec.shape)
            else:
                value = self.arrays[arg]
            assert (value.shape, value.dtype) == (spec.shape, dtype_of(spec.dtype))
            values[ValueRef(-1, index)] = value
        for number, node in enumerate(graph.nodes):
            computation = graph.computations[node.computation]
            made = self._execute(computation, [values[arg] for arg in node.args])
            for index, value in enumerate(made):
                values[ValueRef(number, index)] = value
        for index in graph.donated:
            if not isinstance(arg := args[index], bytes):
                del self.arrays[arg]
        made_ids = [next(self._ids) for _ in graph.outputs]
        for array, output in zip(made_ids, graph.outputs, strict=True):
            self.arrays[array] = values[output.value]
        return made_ids

    def _execute(self, computation: Computation, args: Sequence[Any]) -> list[Any]:
        spec: ArraySpec = (computation.inputs + computation.outputs)[0]
        devices = np.array([jax.devices("cpu")[i] for i in spec.placement.devices])
        mesh = jax.sharding.Mesh(
            devices.reshape(spec.sharding.axis_sizes), spec.sharding.axis_names
        )
        with jax.enable_x64(True):
            # Islands share devices here, and what is compiled for them.
            key = (computation.artifact, spec.placement.devices, mesh)
            if key not in self._compiled:
                self._compiled[key] = self._loaded(computation, mesh)
            laid = [
                jax.device_put(value, self._sharding(mesh, spec), may_alias=False)
                for value, spec in zip(args, computation.inputs, strict=True)
            ]
            return [np.asarray(result) for result in self._compiled[key](*laid)]

    def _loaded(self, computation: Computation, mesh: Any) -> Any:
        """Compile a computation as a host does; XLA divides the results as the computation says.

        Where the module does not say it, XLA chooses.
        """
        physical = [*mesh.devices.flat]
        places = tuple(DeviceAddress("h", at) for at in range(len(physical)))
        options = compiler.get_compile_options(1, len(physical))
        build = options.executable_build_options
        build.allow_spmd_sharding_propagation_to_output = [True] * len(computation.outputs)
        module = decode(self.artifacts[computation.artifact]).module
        artifact = encode(Stablehlo(module, options.SerializeAsString()))
        made, executable = making.make(making.Order(artifact, places), physical)
        if made.needs_lapack:
            making.find_lapack()
        divided = executable.get_output_shardings()
        if divided is not None and len(physical) > 1:
            for found, spec in zip(divided, computation.outputs, strict=True):
                lies = xla_client.HloSharding.from_proto(found)
                wanted = self._sharding(mesh, spec)._to_xla_hlo_sharding(len(spec.shape))
                assert are_hlo_shardings_equal(lies, wanted), (lies, spec)
        loaded = modules.Module(executable, made.facts, made.is_straight)
        layouts = Layouts("h", lambda address: physical[address.ordinal])
        return modules.call_of(loaded, computation, places, layouts)

    @staticmethod
    def _sharding(mesh: Any, spec: ArraySpec) -> Any:
        axes = [entry or None for entry in spec.sharding.spec]
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))

    def upload(
        self,
        value: np.ndarray[Any, Any],
        spec: ArraySpec,
        keep: bool = False,
        for_run: bool = False,
    ) -> int:
        self._check()
        assert (value.shape, value.dtype) == (spec.shape, dtype_of(spec.dtype))
        self.uploads += 1
        array = next(self._ids)
        self.arrays[array] = np.array(value)
        return array

    def fetch(self, array: int, spec: ArraySpec) -> Waiting[Any]:
        self._check()
        value = self.arrays[array].view()
        value.flags.writeable = False
        return _done(value)

    def wait(self, arrays: Sequence[tuple[int, ArraySpec]]) -> Waiting[None]:
        self._check()
        self.waits += 1
        return _done(None)

    def release(self, array: int, size_bytes: int) -> None:
        self.released.append(array)

    def delete(self, arrays: Sequence[int]) -> None:
        for array in arrays:
            self.arrays.pop(array, None)

    def _check(self) -> None:
        if not self.alive:
            raise Disconnected("the session is closed")
