"""Makes executables of artifacts: checks them, compiles them, and shares one among equal computations.

An artifact is a serialized `jax.export` of a flat function, a StableHLO module (see `modules`), or a
pickled Python function. It comes from a client, so it is vetted (see `vetting`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export

from pw.core.errors import CompileError, ErrorReport
from pw.core.messages import Detail
from pw.core.program import Computation, Kind
from pw.core.sharding import ArraySpec, DeviceAddress, Sharding, dtype_of
from pw.core.stablehlo import Facts
from pw.devices.host.backend import DoneCompiling, DoneInstalling
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax.callbacks import Calls
from pw.devices.jax.executables import Executables, key_of
from pw.devices.jax.layouts import SUB_BYTE, Layouts
from pw.devices.jax.modules import Module, Modules
from pw.devices.jax.python_functions import PythonFunctions
from pw.devices.jax.threads import Completions, QueueThread
from pw.devices.jax.vetting import vet


class Executable(NamedTuple):
    """A computation that can be enqueued."""

    call: Any
    """The compiled function, called with one `jax.Array` for each argument, or a `PythonFunction`."""
    donated: tuple[int, ...]
    """Positions of the arguments that it donates."""
    name: str
    device: int | None = None
    """Its device; None if it runs on several."""
    is_straight: bool = False
    """It has one device, and no loops, branches or native calls, so each call takes about as long."""


class _Made(NamedTuple):
    """An executable, shared by equal computations."""

    executable: Executable
    temporary_bytes: int | None
    """Memory it takes on a device while it runs, besides arguments and results; None if unknown."""
    keys: set[bytes]
    """The keys that it is installed under."""
    module: Module | None = None
    """What it calls, if it is a StableHLO module; kept here, so that others can share it."""


Publish = Callable[[bytes, Executable | None], None]


def _flat(exported: jax.export.Exported) -> Callable[..., tuple[jax.Array, ...]]:
    """`exported` from arrays to a tuple of arrays, whatever trees it was made with."""

    def computation(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return tuple(jax.tree.leaves(exported.call(*args, **kwargs)))

    return computation


def _same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """A re-shard, whose work is in its shardings."""
    return arrays


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    try:
        analysis: Any = compiled.memory_analysis()
        return max(0, int(analysis.temp_size_in_bytes))
    except Exception:  # noqa: BLE001 - not every platform says, and none has to
        return 0


def _wish(computation: Computation, devices: tuple[DeviceAddress, ...]) -> Any:
    """What determines an executable: the code, the devices, and the layouts of arguments and
    results."""
    located = dict(zip(computation.placement.devices, devices, strict=True))

    def wished(spec: ArraySpec) -> tuple[Any, ...]:
        if not located.keys() >= set(spec.placement.devices):
            raise CompileError(
                f"{spec.short} does not lie on the devices of {computation.name!r}; make the function anew"
            )
        where = tuple(located[index] for index in spec.placement.devices)
        return (spec.shape, spec.dtype, spec.sharding, where, spec.memory)

    inputs = tuple(wished(spec) for spec in computation.inputs)
    outputs = tuple(wished(spec) for spec in computation.outputs)
    return (computation.artifact, devices, inputs, outputs, computation.donated)


def _check_digest(computation: Computation, artifact: bytes) -> None:
    """Raise CompileError if code was stored under the hash of other code.

    Clients share executables, so none may do that.
    """
    if hashlib.sha256(artifact).digest() != computation.artifact:
        raise CompileError(
            "the code of the function was damaged on its way; make the pw.jit function anew"
        )


class Compiler:
    """Installs the computations of a host, in the order of `install`, on the compile thread."""

    def __init__(
        self,
        host: str,
        layouts: Layouts,
        completions: Completions,
        publish: Publish,
        executables: Executables,
        python: PythonFunctions,
        output: Output,
        calls: Calls,
    ) -> None:
        self._host = host
        self._layouts = layouts
        self._completions = completions
        self._publish = publish
        self._executables = executables
        self._python = python
        self._output = output
        self._modules = Modules(layouts, executables, calls)
        self._held: dict[bytes, Module] = {}
        """Modules that are kept for a program which may come."""
        self._wish_of: dict[bytes, Any] = {}
        self._made: dict[Any, _Made] = {}
        self._exports_compiled = 0
        self.thread: QueueThread[Callable[[], None]] = QueueThread(
            "pw-compile", lambda job: job(), completions.fail
        )

    def __len__(self) -> int:
        return len(self._wish_of) + len(self._held)

    @property
    def compilations(self) -> int:
        """How many executables were compiled, not loaded."""
        return self._exports_compiled + self._modules.compiled

    def install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: DoneInstalling,
    ) -> None:
        """Compile a computation unless an equal one is there; publish it, then call `done`."""
        self.thread.put(partial(self._install, key, computation, artifact, devices, done))

    def examine(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: DoneCompiling,
    ) -> None:
        """Compile a StableHLO module, keep it until `forget(key)`, and call `done` with a detail of it."""
        self.thread.put(partial(self._examine, key, artifact, devices, detail, done))

    def forget(self, key: bytes) -> None:
        """Drop `key`, and its executable when no other key shares it."""
        self.thread.put(partial(self._forget, key))

    def _install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: DoneInstalling,
    ) -> None:
        told: int | ErrorReport | None
        try:
            with self._output.on_behalf_of(owner_of(key)):
                if key not in self._wish_of:
                    self.compile(key, computation, artifact, devices)
                told = self._made[self._wish_of[key]].temporary_bytes
        except Exception as error:  # noqa: BLE001 - the error is the answer
            told = ErrorReport.of(error, self._host, CompileError)
        self._completions.post(done, told)

    def _examine(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: DoneCompiling,
    ) -> None:
        told: Facts | str | dict[str, float] | ErrorReport
        try:
            with self._output.on_behalf_of(owner_of(key)):
                module = self._modules.load(artifact, devices, owner_of(key))
                told = module.told(detail)
            self._held[key] = module
        except Exception as error:  # noqa: BLE001 - the error is the answer
            told = ErrorReport.of(error, self._host, CompileError)
        self._completions.post(done, told)

    def _forget(self, key: bytes) -> None:
        self._held.pop(key, None)
        wish = self._wish_of.pop(key, None)
        if wish is not None:
            keys = self._made[wish].keys
            keys.discard(key)
            if not keys:
                del self._made[wish]
            self._publish(key, None)

    def compile(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
    ) -> None:
        """Compile or load, and publish; on the compile thread. Raises CompileError, or what JAX
        raises."""
        if computation.is_python:
            wish: Any = key
            function = self._python.load(key, computation, artifact, devices)
            self._made[wish] = _Made(Executable(function, (), computation.name), None, set())
        elif computation.kind is Kind.STABLEHLO:
            client = owner_of(key)
            wish = (_wish(computation, devices), client if computation.calls_back else 0)
            if wish not in self._made:
                self._made[wish] = self._of_module(computation, artifact, devices, client)
        else:
            wish = _wish(computation, devices)
            if wish not in self._made:
                self._made[wish] = self._compiled(wish, computation, artifact)
        made = self._made[wish]
        made.keys.add(key)
        self._wish_of[key] = wish
        self._publish(key, made.executable)

    def _compiled(self, wish: Any, computation: Computation, artifact: bytes) -> _Made:
        _, devices, inputs, outputs, _ = wish
        is_straight = computation.kind is Kind.RESHARD
        function: Callable[..., Any] = _same
        if not is_straight:
            _check_digest(computation, artifact)
            exported = jax.export.deserialize(bytearray(artifact))
            is_straight = vet(exported, computation)
            function = _flat(exported)
        for spec in (*computation.inputs, *computation.outputs):
            spec.sharding.check(spec.shape)
        jitted = jax.jit(
            function,
            in_shardings=tuple(self._layouts(*lies[2:]).sharding for lies in inputs),
            out_shardings=tuple(self._layouts(*lies[2:]).sharding for lies in outputs),
            donate_argnums=computation.donated,
        )
        avals = (
            jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype)) for spec in computation.inputs
        )
        kept_as = self._kept_as(wish)
        compiled: Any = None if kept_as is None else self._executables.load(kept_as)
        if compiled is None:
            compiled = jitted.lower(*avals).compile()
            self._exports_compiled += 1
            if kept_as is not None:
                self._executables.save(kept_as, compiled)
        temporary_bytes = _temporary_bytes(compiled)
        if any(spec.dtype in SUB_BYTE for spec in computation.inputs):
            compiled = jitted
        device = devices[0].ordinal if len(devices) == 1 else None
        is_straight = is_straight and device is not None and compiled is not jitted
        executable = Executable(
            compiled, computation.donated, computation.name, device, is_straight
        )
        return _Made(executable, temporary_bytes, set())

    def _of_module(
        self,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        client: int,
    ) -> _Made:
        _check_digest(computation, artifact)
        module = self._modules.load(artifact, devices, client)
        device = devices[0].ordinal if len(devices) == 1 else None
        executable = Executable(
            self._modules.call_of(module, computation, devices),
            module.facts.donated,
            computation.name,
            device,
            module.is_straight and device is not None,
        )
        return _Made(executable, module.facts.temporary_bytes, set(), module)

    def _kept_as(self, wish: Any) -> bytes | None:
        """What a wish is called beyond this epoch, in which hosts may have other names and ranks."""
        artifact, devices, inputs, outputs, donated = wish
        mesh = self._layouts(Sharding(("_",), (len(devices),)), devices).sharding.mesh
        number = {address: position for position, address in enumerate(devices)}
        lie = [
            (shape, dtype, sharding, [number[address] for address in where], memory)
            for shape, dtype, sharding, where, memory in (*inputs, *outputs)
        ]
        return key_of([*mesh.devices.flat], artifact, len(inputs), lie, donated)
