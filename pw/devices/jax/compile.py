"""Installs computations: has executables made of their artifacts, and shares one among equal ones.

An artifact is a StableHLO module (see `modules`), or a pickled Python function. `making` says how an
executable is made of a module, and where.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax

from pw.core.errors import CompileError, ErrorReport
from pw.core.jax_private.compiling import find_lapack
from pw.core.messages import Detail
from pw.core.platforms import platform_of
from pw.core.programs.program import Computation
from pw.core.programs.stablehlo import Facts, decode
from pw.core.sharding import DeviceAddress, Sharding
from pw.devices.host.backend import DoneCompiling, DoneInstalling
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax import making, modules
from pw.devices.jax.callbacks import CallbackCalls, Raised, Results
from pw.devices.jax.compile_process import Job
from pw.devices.jax.compile_processes import CompileProcesses
from pw.devices.jax.executables import ExecutableFiles, key_of, may_be_kept
from pw.devices.jax.layouts import Layouts
from pw.devices.jax.making import ExecutableFacts, Order
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
    devices: tuple[int, ...] = ()
    """Ordinals of this host's devices that it runs on."""
    is_straight: bool = False
    """True if it has no loops, branches, native calls or collectives, so that calls take equally long."""


@dataclass(frozen=True)
class _Recipe:
    """What an executable is made of, for whom and on which devices."""

    client: int
    name: str
    digest: bytes
    order: Order
    physical: list[jax.Device]
    functions: making.Functions
    kept_as: bytes | None
    is_ours: bool
    """True if this host has made the code, which then needs no vetting."""


@dataclass
class _Pending:
    """An executable that is being made, and what waits for it."""

    then: dict[bytes, tuple[_Recipe, Callable[[Any], None]]] = field(default_factory=dict)
    """Calls by key: each takes the executable on its devices, or an exception."""
    job: Job | None = None
    began_s: float = field(default_factory=time.monotonic)


Publish = Callable[[bytes, Executable | None], None]


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
    accelerators, they are made on the compile thread. The hosts of a gang of accelerators talk to one
    another while they compile, and two clients may have asked them in different orders: each of these
    executables is made on a thread of its own, so that none waits behind another one.
    """

    def __init__(
        self,
        host: str,
        layouts: Layouts,
        completions: Completions,
        publish: Publish,
        executables: ExecutableFiles,
        python: PythonFunctions,
        output: Output,
        calls: CallbackCalls,
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
        self._installed: dict[bytes, Module | None] = {}
        """The module of each computation that is installed; None for a Python function."""
        self.compilations = 0
        """Number of executables that were compiled, not loaded."""
        self.compile_s = 0.0
        """Seconds that all compilations took."""
        self.thread: QueueThread[Callable[[], None]] = QueueThread(
            "pw-compile", lambda job: job(), completions.fail
        )

    def __len__(self) -> int:
        return len(self._installed) + len(self._held)

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
        def installed(module: Module | None, executable: Executable | None = None) -> None:
            if executable is not None:
                self._installed[key] = module
                self._publish(key, executable)
            temporary_bytes = None if module is None else module.facts.temporary_bytes
            self._completions.post(done, temporary_bytes)

        def finish(result: Any) -> None:
            try:
                if isinstance(result, Exception):
                    raise result
                call = modules.call_of(result, computation, devices, self._layouts)
                own = tuple(device.ordinal for device in devices if device.host == self._host)
                donated, name = result.facts.donated, computation.name
                installed(result, Executable(call, donated, name, own, result.is_straight))
            except Exception as error:  # noqa: BLE001 - the error is the answer
                self._completions.post(done, ErrorReport.of(error, self._host, CompileError))

        try:
            if key in self._installed:
                return installed(self._installed[key])
            if computation.traits.runs_on_host:
                with self._output.on_behalf_of(owner_of(key)):
                    function = self._python.load(key, computation, artifact, devices)
                return installed(None, Executable(function, (), computation.name))
            is_ours = not computation.traits.has_artifact
            if is_ours:
                source, destination = *computation.inputs, *computation.outputs
                here = self._layouts.of(source, devices).sharding
                there = self._layouts.of(destination, devices).sharding
                artifact = making.reshard_of(destination, here, there)
            else:
                _check_digest(computation, artifact)
            self._load(key, computation.name, artifact, devices, finish, is_ours=is_ours)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            finish(error)
        return None

    def _examine(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: DoneCompiling,
    ) -> None:
        def finish(result: Any) -> None:
            answer: Facts | str | dict[str, float] | ErrorReport
            try:
                if isinstance(result, Exception):
                    raise result
                answer = result.describe(detail)
                self._held[key] = result
            except Exception as error:  # noqa: BLE001 - the error is the answer
                answer = ErrorReport.of(error, self._host, CompileError)
            self._completions.post(done, answer)

        try:
            self._load(key, "", artifact, devices, finish)
        except Exception as error:  # noqa: BLE001 - the error is the answer
            finish(error)

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
        if key in self._installed:
            del self._installed[key]
            self._publish(key, None)

    def _load(
        self,
        key: bytes,
        name: str,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        then: Callable[[Any], None],
        *,
        is_ours: bool = False,
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
        sharding = Sharding(("_",), (len(devices),))
        physical: list[jax.Device] = [*self._layouts(sharding, devices).sharding.mesh.devices.flat]
        count = len(code.callbacks)
        raised = Raised() if count and len(devices) > 1 else None

        def functions(calls: dict[int, Results]) -> list[Callable[..., Any]]:
            return self._calls.functions(client, digest, count, calls, raised)

        # An executable with functions of this process cannot be kept.
        kept_as = None if count else key_of(physical, digest)
        order = Order(artifact, devices)
        recipe = _Recipe(client, name, digest, order, physical, functions, kept_as, is_ours)

        def loaded(result: Any) -> None:
            if not isinstance(result, Exception):
                details, executable = result
                result = self._modules.get(place)
                if result is None:
                    result = Module(
                        executable, details.facts, details.is_straight, bool(count), raised
                    )
                    self._modules[place] = result
            then(result)

        return self._make(place, key, recipe, loaded)

    def _make(self, place: Any, key: bytes, recipe: _Recipe, then: Callable[[Any], None]) -> None:
        """Load or make an executable, and call `then` with a `ExecutableFacts` and XLA's executable, or an
        exception."""
        if recipe.kept_as is not None:
            place = recipe.kept_as  # one executable serves several devices
        pending = self._pending.get(place)
        if pending is not None:
            pending.then[key] = recipe, then
            return None
        load = partial(making.load, physical=recipe.physical, functions=recipe.functions)
        if recipe.kept_as is not None:
            match = self._executables.load_with(recipe.kept_as, load)
            if match is not None:
                return then(match)
        if not may_be_kept(recipe.physical):
            pending = self._pending[place] = _Pending({key: (recipe, then)})
            aside = partial(self._make_aside, place, pending, recipe)
            threading.Thread(target=aside, name="pw-compile-gang", daemon=True).start()
            return None
        is_host = platform_of(recipe.physical[0].platform).is_host
        if self._processes is None or recipe.is_ours or not is_host:
            return then(self._make_here(recipe))
        pending = self._pending[place] = _Pending({key: (recipe, then)})

        def answered(answer: bytes | ErrorReport) -> None:
            self.thread.put(partial(self._answered, place, pending, answer))

        pending.job = self._processes.put(
            recipe.client, recipe.name, recipe.digest, recipe.order, answered, only_examine=False
        )
        return None

    def _make_aside(self, place: Any, pending: _Pending, recipe: _Recipe) -> None:
        """Make an executable that other hosts make at the same time."""
        answer = self._make_here(recipe)

        def tell() -> None:
            if self._pending.get(place) is pending:
                del self._pending[place]
                for _, then in pending.then.values():
                    then(answer)

        self.thread.put(tell)

    def _answered(self, place: Any, pending: _Pending, answer: bytes | ErrorReport) -> None:
        """A process has made an executable, or failed to."""
        if self._pending.get(place) is not pending:
            return
        del self._pending[place]
        if not isinstance(answer, ErrorReport):
            self.compilations += 1
            self.compile_s += time.monotonic() - pending.began_s
        is_kept = False
        for recipe, then in pending.then.values():
            result: Any
            try:
                if isinstance(answer, ErrorReport):
                    raise answer.exception()
                result = making.load(answer, recipe.physical, recipe.functions)
                if recipe.kept_as is not None and not is_kept:
                    self._executables.save_with(recipe.kept_as, lambda: answer)
                    is_kept = True
            except Exception as error:  # noqa: BLE001 - the error is the answer
                result = error
            then(result)

    def _make_here(self, recipe: _Recipe) -> tuple[ExecutableFacts, Any] | Exception:
        try:
            if self._processes is not None and not recipe.is_ours:
                self._processes.wait_for(recipe.client, recipe.name, recipe.digest, recipe.order)
            with self._output.on_behalf_of(recipe.client):
                began_s = time.monotonic()
                result = making.make(recipe.order, recipe.physical, recipe.functions)
                if result[0].needs_lapack and platform_of(recipe.physical[0].platform).is_host:
                    find_lapack()
            self.compilations += 1
            self.compile_s += time.monotonic() - began_s
            if recipe.kept_as is not None:
                self._executables.save_with(recipe.kept_as, lambda: making.saved(*result))
        except Exception as error:  # noqa: BLE001 - the error is the answer
            return error
        return result
