"""Installs computations: has executables made of their artifacts, and shares one among equal ones.

An artifact is a serialized `jax.export` of a flat function, a StableHLO module (see `modules`), or a
pickled Python function. `making` says how an executable is made of one of the first two, and where.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax

from pw.core.errors import CompileError, ErrorReport
from pw.core.messages import Detail
from pw.core.programs.program import Computation, Kind
from pw.core.programs.stablehlo import Facts, decode
from pw.core.sharding import ArraySpec, DeviceAddress, Sharding
from pw.devices.host.backend import DoneCompiling, DoneInstalling
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax import making, modules
from pw.devices.jax.callbacks import Calls, Results
from pw.devices.jax.compile_process import Job
from pw.devices.jax.compile_processes import CompileProcesses
from pw.devices.jax.executables import Executables, key_of
from pw.devices.jax.layouts import Layouts
from pw.devices.jax.making import Made, Order
from pw.devices.jax.modules import Module
from pw.devices.jax.python_functions import PythonFunctions
from pw.devices.jax.threads import Completions, QueueThread


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


class _Shared(NamedTuple):
    """An executable, shared by equal computations."""

    executable: Executable
    temporary_bytes: int | None
    """Memory it takes on a device while it runs, besides arguments and results; None if unknown."""
    keys: set[bytes]
    """The keys that it is installed under."""
    module: Module | None = None
    """What it calls, if it is a StableHLO module; kept here, so that others can share it."""


@dataclass(frozen=True)
class _Wanted:
    """An executable to be made."""

    client: int
    name: str
    digest: bytes
    order: Order
    physical: list[jax.Device]
    functions: making.Functions
    kept_as: bytes | None


@dataclass
class _Pending:
    """An executable that is being made, and what waits for it."""

    then: dict[bytes, tuple[_Wanted, Callable[[Any], None]]] = field(default_factory=dict)
    """By key: called with the executable on its devices, or with an exception."""
    job: Job | None = None


Publish = Callable[[bytes, Executable | None], None]


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
    """Installs the computations of a host, on the compile thread.

    With `processes`, executables for CPU devices are made there, in any order. Without them, and for
    accelerators, they are made on the compile thread in the order of `install`: the hosts of a gang
    may talk to one another while they compile.
    """

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
        processes: CompileProcesses | None = None,
    ) -> None:
        self._host = host
        self._layouts = layouts
        self._completions = completions
        self._publish = publish
        self._executables = executables
        self._python = python
        self._output = output
        self._calls = calls
        self._processes = processes
        self._pending: dict[Any, _Pending] = {}
        self._modules: WeakValueDictionary[Any, Module] = WeakValueDictionary()
        """The compiled modules, each as long as something refers to it."""
        self._held: dict[bytes, Module] = {}
        """Modules that are kept for a program which may come."""
        self._wish_of: dict[bytes, Any] = {}
        self._made: dict[Any, _Shared] = {}
        self.compilations = 0
        """How many executables were compiled, not loaded."""
        self.thread: QueueThread[Callable[[], None]] = QueueThread(
            "pw-compile", lambda job: job(), completions.fail
        )

    def __len__(self) -> int:
        return len(self._wish_of) + len(self._held)

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
        """Drop `key`, and its executable when no other key shares it, also one that is being made."""
        self.thread.put(partial(self._forget, key))

    def _install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: DoneInstalling,
    ) -> None:
        def installed(wish: Any) -> None:
            self._completions.post(done, self._made[wish].temporary_bytes)

        def failed(error: Exception) -> None:
            self._completions.post(done, ErrorReport.of(error, self._host, CompileError))

        def made(found: Any) -> None:
            try:
                if isinstance(found, Exception):
                    raise found
                if wish not in self._made:
                    self._made[wish] = self._shared(found, computation, devices)
                self._share(key, wish)
            except Exception as error:  # noqa: BLE001 - the error is the answer
                failed(error)
            else:
                installed(wish)

        try:
            if key in self._wish_of:
                return installed(self._wish_of[key])
            if computation.is_python:
                wish: Any = key
                with self._output.on_behalf_of(owner_of(key)):
                    function = self._python.load(key, computation, artifact, devices)
                executable = Executable(function, (), computation.name)
                self._made[wish] = _Shared(executable, None, set())
                return made(None)
            wish = _wish(computation, devices)
            client = owner_of(key)
            if computation.kind is Kind.STABLEHLO:
                wish = (wish, client if computation.calls_back else 0)
            if wish in self._made:
                return made(None)
            if computation.has_artifact:
                _check_digest(computation, artifact)
            for spec in (*computation.inputs, *computation.outputs):
                spec.sharding.check(spec.shape)
            if computation.kind is Kind.STABLEHLO:
                self._load_module(key, computation.name, artifact, devices, made)
            else:
                self._load_function(key, wish, computation, artifact, made)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            failed(error)
        return None

    def _examine(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: DoneCompiling,
    ) -> None:
        def made(found: Any) -> None:
            told: Facts | str | dict[str, float] | ErrorReport
            try:
                if isinstance(found, Exception):
                    raise found
                told = found.told(detail)
                self._held[key] = found
            except Exception as error:  # noqa: BLE001 - the error is the answer
                told = ErrorReport.of(error, self._host, CompileError)
            self._completions.post(done, told)

        try:
            self._load_module(key, "", artifact, devices, made)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            made(error)

    def _forget(self, key: bytes) -> None:
        self._held.pop(key, None)
        for place, pending in list(self._pending.items()):
            waits = pending.then.pop(key, None)
            if waits is not None:
                if not pending.then:
                    del self._pending[place]
                    if pending.job is not None and self._processes is not None:
                        self._processes.cancel(pending.job)
                waits[1](CompileError("the function was released while it was compiled"))
        wish = self._wish_of.pop(key, None)
        if wish is not None:
            keys = self._made[wish].keys
            keys.discard(key)
            if not keys:
                del self._made[wish]
            self._publish(key, None)

    def _share(self, key: bytes, wish: Any) -> None:
        made = self._made[wish]
        made.keys.add(key)
        self._wish_of[key] = wish
        self._publish(key, made.executable)

    def _load_module(
        self,
        key: bytes,
        name: str,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        then: Callable[[Any], None],
    ) -> None:
        """Call `then` with the `Module` of an artifact, or an exception."""
        client, code = owner_of(key), decode(artifact)
        digest = hashlib.sha256(artifact).digest()
        # One that calls its client is not shared with other clients.
        place = (digest, devices, client if code.callbacks else 0)
        module = self._modules.get(place)
        if module is not None:
            return then(module)
        if len(set(devices)) < len(devices) or not devices:
            raise CompileError("a function is compiled for one or more different devices")
        physical = self._physical(devices)
        count = len(code.callbacks)

        def functions(calls: dict[int, Results]) -> list[Callable[..., Any]]:
            return self._calls.functions(client, digest, count, calls)

        # An executable with functions of this process cannot be kept.
        kept_as = None if count else key_of(physical, "stablehlo", digest)
        order = Order(Kind.STABLEHLO, artifact, devices)
        wanted = _Wanted(client, name, digest, order, physical, functions, kept_as)

        def loaded(found: Any) -> None:
            if not isinstance(found, Exception):
                made, executable = found
                facts = made.facts
                assert facts is not None
                found = self._modules.get(place)
                if found is None:
                    found = Module(executable, facts, made.is_straight, bool(count))
                    self._modules[place] = found
            then(found)

        return self._make(("module", *place), key, wanted, loaded)

    def _load_function(
        self,
        key: bytes,
        wish: Any,
        computation: Computation,
        artifact: bytes,
        then: Callable[[Any], None],
    ) -> None:
        """Call `then` with a `Made`, a compiled function of global arrays and its devices, or an
        exception."""
        devices = wish[1]
        physical = self._physical(devices)
        order = Order(computation.kind, artifact, devices, computation)
        digest = computation.artifact
        name, kept_as = computation.name, self._kept_as(wish)
        wanted = _Wanted(owner_of(key), name, digest, order, physical, lambda _: (), kept_as)

        def loaded(found: Any) -> None:
            if not isinstance(found, Exception):
                made, executable = found
                found = made, making.call_of(made, executable, order, physical, self._layouts)
            then(found)

        self._make(wish, key, wanted, loaded)

    def _shared(
        self, found: Any, computation: Computation, devices: tuple[DeviceAddress, ...]
    ) -> _Shared:
        device = devices[0].ordinal if len(devices) == 1 else None
        if isinstance(found, Module):
            call: Any = modules.call_of(found, computation, devices, self._layouts)
            donated, temporary_bytes = found.facts.donated, found.facts.temporary_bytes
            is_straight, module = found.is_straight, found
        else:
            made, call = found
            donated, temporary_bytes = computation.donated, made.temporary_bytes
            is_straight, module = made.is_straight, None
        is_straight = is_straight and device is not None
        executable = Executable(call, donated, computation.name, device, is_straight)
        return _Shared(executable, temporary_bytes, set(), module)

    def _make(self, place: Any, key: bytes, wanted: _Wanted, then: Callable[[Any], None]) -> None:
        """Load or make an executable, and call `then` with a `Made` and XLA's executable, or an
        exception."""
        if wanted.kept_as is not None:
            place = wanted.kept_as  # one executable serves several devices
        pending = self._pending.get(place)
        if pending is not None:
            pending.then[key] = wanted, then
            return None
        load = partial(making.load, physical=wanted.physical, functions=wanted.functions)
        if wanted.kept_as is not None:
            found = self._executables.load_with(wanted.kept_as, load)
            if found is not None:
                return then(found)
        is_ours = wanted.order.kind is Kind.RESHARD
        if self._processes is None or is_ours or wanted.physical[0].platform != "cpu":
            return then(self._made_here(wanted, is_vetted=self._processes is None or is_ours))
        pending = self._pending[place] = _Pending({key: (wanted, then)})

        def answered(answer: bytes | ErrorReport) -> None:
            self.thread.put(partial(self._answered, place, pending, answer))

        pending.job = self._processes.put(
            wanted.client, wanted.name, wanted.digest, wanted.order, answered, only_examine=False
        )
        return None

    def _answered(self, place: Any, pending: _Pending, answer: bytes | ErrorReport) -> None:
        """A process has made an executable, or failed to."""
        if self._pending.get(place) is not pending:
            return
        del self._pending[place]
        if not isinstance(answer, ErrorReport):
            self.compilations += 1
        is_kept = False
        for wanted, then in pending.then.values():
            found: Any
            try:
                if isinstance(answer, ErrorReport):
                    raise answer.exception()
                found = making.load(answer, wanted.physical, wanted.functions)
                if wanted.kept_as is not None and not is_kept:
                    self._executables.save_with(wanted.kept_as, lambda: answer)
                    is_kept = True
            except Exception as error:  # noqa: BLE001 - the error is the answer
                found = error
            then(found)

    def _made_here(self, wanted: _Wanted, *, is_vetted: bool) -> tuple[Made, Any] | Exception:
        try:
            if not is_vetted and self._processes is not None:
                self._processes.wait_for(wanted.client, wanted.name, wanted.digest, wanted.order)
            with self._output.on_behalf_of(wanted.client):
                found = making.make(wanted.order, wanted.physical, wanted.functions)
                if found[0].needs_lapack and wanted.physical[0].platform == "cpu":
                    making.find_lapack()
            self.compilations += 1
            if wanted.kept_as is not None:
                self._executables.save_with(wanted.kept_as, lambda: making.saved(*found))
        except Exception as error:  # noqa: BLE001 - the error is the answer
            return error
        return found

    def _physical(self, devices: tuple[DeviceAddress, ...]) -> list[jax.Device]:
        mesh = self._layouts(Sharding(("_",), (len(devices),)), devices).sharding.mesh
        return [*mesh.devices.flat]

    def _kept_as(self, wish: Any) -> bytes | None:
        """What a wish is called beyond this epoch, in which hosts may have other names and ranks."""
        artifact, devices, inputs, outputs, donated = wish
        number = {address: position for position, address in enumerate(devices)}
        lie = [
            (shape, dtype, sharding, [number[address] for address in where], memory)
            for shape, dtype, sharding, where, memory in (*inputs, *outputs)
        ]
        return key_of(self._physical(devices), artifact, len(inputs), lie, donated)
