"""Makes executables of artifacts: checks them, compiles them, and shares one among equal computations.

An artifact is a serialized `jax.export` of a flat function. It comes from a client, and StableHLO
is not a sandbox: a `custom_call` may name any function that is linked into the worker, also the one
that calls Python objects by address. So only listed targets are compiled: linear algebra libraries,
random number kernels, and the markers that the partitioner replaces. Artifacts with effects, or
with a channel to the host, are refused as well.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.export

from pw.core.errors import CompileError, ErrorReport
from pw.core.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, Sharding, dtype_of
from pw.devices.host.backend import DoneInstalling
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax.executables import Executables
from pw.devices.jax.layouts import SUB_BYTE, Layouts
from pw.devices.jax.python_functions import PythonFunctions
from pw.devices.jax.threads import Completions, QueueThread

_CUSTOM_CALL = re.compile(r'\b\w+\.custom_call\b"?\s*(?:@(?:"([^"]*)"|([\w$.-]+)))?')
_CHOICE = re.compile(r"\bstablehlo\.(?:while|case|if)\b")
_HOST_CHANNEL = re.compile(r"\bstablehlo\.(?:send|recv|infeed|outfeed)\b")
_ALLOWED_TARGETS = re.compile(
    r"(?:lapack|cusolver|cusparse|hipsolver)_[a-z0-9]+_ffi"
    r"|(?:cu|hip)_(?:threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|shape_assertion"
    r"|AllocateBuffer|ApproxTopK|Eigh|LuDecomposition|ProductOfElementaryHouseholderReflectors|Qr"
    r"|stablehlo\.dynamic_(?:approx_top_k|reduce_window|rng_bit_generator|top_k)"
)


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


Publish = Callable[[bytes, Executable | None], None]


def vet(exported: jax.export.Exported, computation: Computation) -> bool:
    """Raise CompileError unless `exported` is what `computation` says, and harmless.

    Returns whether it has no loops, branches or native calls.
    """
    if exported.ordered_effects or exported.unordered_effects:
        raise CompileError(
            "the function has side effects; callbacks and prints cannot run on a worker. Return what is to be "
            "seen, and print it in this process"
        )
    for what, avals, specs in (
        ("arguments", exported.in_avals, computation.inputs),
        ("results", exported.out_avals, computation.outputs),
    ):
        found = [(tuple(aval.shape), aval.dtype.name) for aval in avals]
        wanted = [(spec.shape, spec.dtype) for spec in specs]
        if found != wanted:
            raise CompileError(
                f"the {what} of the compiled function are {found}, not {wanted} as its call says; "
                "make the pw.jit function anew"
            )
    if beyond := [at for at in computation.donated if not 0 <= at < len(computation.inputs)]:
        raise CompileError(f"the arguments {beyond} are donated, and there are none of that number")
    text = str(exported.mlir_module())
    for match in _CUSTOM_CALL.finditer(text):
        target = match[1] or match[2] or "(unreadable)"
        if not _ALLOWED_TARGETS.fullmatch(target):
            raise CompileError(
                f"the function calls the native function {target!r}, which workers do not allow; write it with "
                "jax.numpy or jax.lax instead"
            )
    if channel := _HOST_CHANNEL.search(text):
        raise CompileError(
            f"the function talks to its host ({channel[0]}), which is not allowed; return such values, or "
            "use a pw.host_function"
        )
    return not _CHOICE.search(text) and not _CUSTOM_CALL.search(text)


def _flat(exported: jax.export.Exported) -> Callable[..., tuple[jax.Array, ...]]:
    """`exported` from arrays to a tuple of arrays, whatever trees it was made with."""

    def computation(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return tuple(jax.tree.leaves(exported.call(*args, **kwargs)))

    return computation


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    try:
        analysis: Any = compiled.memory_analysis()
        return max(0, int(analysis.temp_size_in_bytes))
    except Exception:  # noqa: BLE001 - not every platform says, and none has to
        return 0


def may_be_kept(devices: Iterable[jax.Device]) -> bool:
    """Whether one process may load an executable for `devices` while others compile it.

    On accelerators, processes that compile together divide the search for the quickest kernels
    among them, and wait for what the others have found.
    """
    first, *others = devices
    return first.platform == "cpu" or all(d.process_index == first.process_index for d in others)


def _wish(computation: Computation, devices: tuple[DeviceAddress, ...]) -> Any:
    """What determines an executable: the code, the devices, and the layouts of arguments and
    results."""
    located = dict(zip(computation.placement.devices, devices, strict=True))

    def wished(spec: ArraySpec) -> tuple[Any, ...]:
        where = tuple(located[index] for index in spec.placement.devices)
        return (spec.shape, spec.dtype, spec.sharding, where)

    inputs = tuple(wished(spec) for spec in computation.inputs)
    outputs = tuple(wished(spec) for spec in computation.outputs)
    return (computation.artifact, devices, inputs, outputs, computation.donated)


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
    ) -> None:
        self._host = host
        self._layouts = layouts
        self._completions = completions
        self._publish = publish
        self._executables = executables
        self._python = python
        self._output = output
        self._wish_of: dict[bytes, Any] = {}
        self._made: dict[Any, _Made] = {}
        self.compilations = 0
        self.thread: QueueThread[Callable[[], None]] = QueueThread(
            "pw-compile", lambda job: job(), completions.fail
        )

    def __len__(self) -> int:
        return len(self._wish_of)

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

    def _forget(self, key: bytes) -> None:
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
            function = self._python.load(computation, artifact, devices)
            self._made[wish] = _Made(Executable(function, (), computation.name), None, set())
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
        # Clients share executables: none may store its code under the hash of another client's.
        if hashlib.sha256(artifact).digest() != computation.artifact:
            raise CompileError(
                "the code of the function was damaged on its way; make the pw.jit function anew"
            )
        exported = jax.export.deserialize(bytearray(artifact))
        is_straight = vet(exported, computation)
        for spec in (*computation.inputs, *computation.outputs):
            spec.sharding.check(spec.shape)
        jitted = jax.jit(
            _flat(exported),
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
            self.compilations += 1
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

    def _kept_as(self, wish: Any) -> bytes | None:
        """What a wish is called beyond this epoch, in which hosts may have other names and ranks.

        None if nothing is to be kept of it.
        """
        artifact, devices, inputs, outputs, donated = wish
        mesh = self._layouts(Sharding(("_",), (len(devices),)), devices).sharding.mesh
        if not may_be_kept(mesh.devices.flat):
            return None
        names = {
            address: f"{device.platform}:{device.process_index}:{device.id}"
            for address, device in zip(devices, mesh.devices.flat, strict=True)
        }
        lie = [
            (shape, dtype, sharding, [names[address] for address in where])
            for shape, dtype, sharding, where in (*inputs, *outputs)
        ]
        here = (jax.process_index(), jax.process_count(), jax.__version__)
        described = repr((artifact, [*names.values()], len(inputs), lie, donated, here))
        return hashlib.sha256(described.encode()).digest()
