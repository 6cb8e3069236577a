"""`jax.experimental.colocated_python`: a Python function of the client that runs on the hosts of its devices.

JAX's client sends the pickled function as a `CustomCallProgram`. It becomes a computation of the kind
PYTHON, which hosts run if they allow it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import cloudpickle

from pw.core.functions.parts import HostPart
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Sharding
from pw.gateway.arrays.arrays import ProxyArray
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs
from pw.gateway.plugins.plugins import Outcome, Plugin
from pw.gateway.plugins.reshards import Reshards
from pw.gateway.protocol import protos, shardings, statuses
from pw.gateway.protocol.dtypes import STRING, kind_of, name_of

CUSTOM = "xla::ifrt::CustomCallProgram"
_COLOCATED = "jax_colocated_python"

STRING_BYTES = 1 << 16
"""A string result, with zeros behind it. JAX lets a function return its own specs in one."""


class Colocated:
    """Makes programs of one client's functions."""

    def __init__(self, devices: Devices, runs: Runs, reshards: Reshards) -> None:
        self._devices = devices
        self._runs = runs
        self._reshards = reshards

    def load(self, data: bytes) -> Plugin:
        """Return the program of a `CustomCallProgramProto`. Raises Status."""
        proto = protos.message("xla.ifrt.CustomCallProgramProto").FromString(data)
        if not proto.type.startswith(_COLOCATED):
            raise statuses.unsupported(f"programs of the kind {proto.type} are not supported")
        numbers = tuple(proto.devices.device_ids)
        placement = self._devices.placement(numbers)
        everywhere = Sharding(("_",), (len(numbers),))
        inputs: list[ArraySpec] = []
        outputs: list[ArraySpec] = []
        for specs, side in ((proto.input_specs, inputs), (proto.output_specs, outputs)):
            for spec in specs:
                if spec.dtype.kind == kind_of(STRING) and not spec.shape.dims:
                    side.append(ArraySpec((STRING_BYTES,), "uint8", everywhere, placement))
                    continue
                shape = tuple(spec.shape.dims)
                side.append(ArraySpec(shape, name_of(spec.dtype.kind), everywhere, placement))
        artifact = cloudpickle.dumps(
            ColocatedFunction(bytes(proto.serialized_program_text), numbers)
        )
        digest = hashlib.sha256(artifact).digest()
        computation = Computation(
            proto.name, digest, placement, tuple(inputs), tuple(outputs), kind=Kind.PYTHON
        )
        layouts = [
            shardings.read(one.sharding, tuple(one.shape.dims)) for one in proto.output_specs
        ]
        node = Node(0, tuple(ValueRef(-1, at) for at in range(len(inputs))))
        programs: dict[tuple[tuple[ArraySpec, ...], tuple[ArraySpec, ...]], int] = {}

        async def run(asked: Any, args: Sequence[ProxyArray]) -> Outcome:
            stored = []
            for array in args:
                if array.value is not None:
                    self._runs.own(array)
                stored.append(await self._reshards.gathered(array))
            arrays, targets = [], []
            for output, layout, one in zip(outputs, layouts, proto.output_specs, strict=True):
                if one.dtype.kind == kind_of(STRING):
                    text = ProxyArray(STRING, (), (), layout.devices, layout.memory, True)
                    arrays.append(text)
                    targets.append((text, output))
                    continue
                target = self._reshards.unfilled(output.dtype, output.shape, layout)
                if target is None or len(target[1]) > 1:
                    raise _several(proto.name)
                arrays.append(target[0])
                targets += target[1]
            sources, wanted = tuple(one.spec for one in stored), tuple(spec for _, spec in targets)
            program = programs.get((sources, wanted))
            if program is None:
                results = tuple(Output(ValueRef(0, at), spec) for at, spec in enumerate(wanted))
                body = Program(proto.name, (computation,), (node,), sources, results)
                program = self._runs.runtime.register_program(body, {digest: artifact})
                programs[sources, wanted] = program
            await self._runs.credit()
            ran = self._runs.run(program, [one.number for one in stored], wanted)
            for result, (part, _) in zip(ran, targets, strict=True):
                part.consist_of(result)
            return Outcome(arrays, ran)

        def release() -> None:
            for program in programs.values():
                self._runs.runtime.release_program(program)
            programs.clear()

        return Plugin(proto.name, None, numbers, run, release)


def _several(name: str) -> statuses.StatusError:
    return statuses.unsupported(
        f"the Python function {name} takes or returns an array over several islands; it runs on one"
    )


class ColocatedFunction:
    """A function of JAX's client on a host; it takes and returns whole arrays.

    Args:
        pickled: the function with its shapes and shardings, in JAX's own form.
        numbers: the client's numbers of the devices.
    """

    def __init__(self, pickled: bytes, numbers: tuple[int, ...]) -> None:
        self._pickled = pickled
        self._numbers = numbers
        self._loaded: Any = None
        """Loaded function, kept because an object of `colocated_python_class` lives as long as its methods."""

    def __call__(self, share: HostPart, *leaves: Any) -> list[Any]:
        """Call the function with arrays on the host's CPU devices, in place of the client's devices."""
        import jax
        import numpy as np

        if self._loaded is None:
            self._loaded = self._load(jax.local_devices(backend="cpu"))
        fun, structure, specs, _, results, _ = self._loaded
        with jax.enable_x64(any(_is_wide(spec.dtype) for spec in (*specs, *results))):
            placed = [
                jax.device_put(leaf, spec.sharding)
                for leaf, spec in zip(leaves, specs, strict=True)
            ]
            args, kwargs = jax.tree.unflatten(structure, placed)
            values = jax.tree.leaves(fun(*args, **kwargs))
            return share.cut([_on_host(np.asarray(leaf)) for leaf in values], is_part=False)

    def _load(self, local: Sequence[Any]) -> Any:
        from jax.experimental.colocated_python import serialization

        if len(local) < len(self._numbers):
            raise RuntimeError(
                f"the function is for {len(self._numbers)} devices, and this host has {len(local)} CPU "
                "devices: colocated_python runs on devices of one host"
            )
        here = dict(zip(self._numbers, local, strict=False))
        module: Any = serialization
        before, module._get_cpu_device_map = module._get_cpu_device_map, lambda: here
        try:
            return module._deserialize(self._pickled)
        finally:
            module._get_cpu_device_map = before


def _is_wide(dtype: Any) -> bool:
    """Whether JAX has this dtype only with x64, which is on in workers."""
    return str(dtype) in ("int64", "uint64", "float64", "complex128")


def _on_host(value: Any) -> Any:
    """Return a result as the runtime takes it."""
    import numpy as np

    if value.dtype.kind != "T":
        return value
    text = value.item().encode()
    if len(text) > STRING_BYTES:
        raise ValueError(
            f"the specs of the results take {len(text)} bytes, and {STRING_BYTES} are possible: give them with "
            "fun.specialize(out_specs_fn=...)"
        )
    return np.frombuffer(text.ljust(STRING_BYTES, bytes(1)), np.uint8)
