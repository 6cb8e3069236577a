"""XLA's own partitioner, for any number of devices, without devices.

The partitioner is one of the first steps of XLA's compilers, and the same on all platforms. jaxlib has no
function that runs it alone. So a module is compiled for a private CPU client of this process, which has as
many devices as are wanted and runs nothing, and XLA writes down the module as it is behind the partitioner.
It gets one more result, of a native function that there is not: so XLA stops before it makes machine code,
which takes longest. What it has written is kept on disk for the next run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax.extend.mlir import ir
from jax.interpreters import mlir

from pw.core.installed import version
from pw.core.jax_private.compiling import CompileOptions, DeviceList, assignment_of, cpu_client
from pw.core.jax_private.stablehlo import of_hlo
from pw.core.programs.stablehlo import harmless_options
from pw.islands.errors import CannotCut
from pw.processes.kept_files import KeptFiles, cache_folder

LIMIT_BYTES = 256 << 20
"""Most bytes of the folder of divided modules; those that were used longest ago go first."""

_FORMAT = 3
"""Grows when a file holds something else."""
_AFTER = "after_spmd-partitioning"
_STOP = "pw_stop"
"""Name of a native function that does not exist."""
_RESULTS = "mhlo.spmd_output_sharding"


class Divided(NamedTuple):
    """A module as one device runs it, and how its arguments and results are divided over all devices."""

    module: Any
    """Module of MLIR, in the context of the one that was divided; its function is `main`."""
    arguments: tuple[str, ...]
    """The HLO sharding of each argument, in XLA's words."""
    results: tuple[str, ...]
    is_of_other: bool = False
    """Whether it was divided for an equal module, whose other locations it has."""


def divide(
    module: Any,
    devices: int,
    options: bytes = b"",
    files: Divisions | None = None,
    *,
    afresh: bool = False,
) -> Divided:
    """Divide a module over so many devices, as its shardings say.

    Args:
        module: of MLIR.
        devices: its partitions.
        options: a serialized `xla.CompileOptionsProto`; without it, what JAX chooses.
        files: what was divided before; the user's, if not given.
        afresh: divide it also if it was divided before.

    Raises:
        CannotCut: XLA does not divide it; with XLA's words.
        CodeRefused: an option may reach files.
    """
    return (files or kept_divisions()).divide(module, devices, options, afresh=afresh)


def _divided(module: Any, devices: int, options: bytes) -> bytes:
    """Return a divided module, as MLIR writes it."""
    if options:
        wanted = CompileOptions.ParseFromString(options)
    else:
        wanted = CompileOptions()
        wanted.executable_build_options.use_shardy_partitioner = True
    wanted.num_replicas, wanted.num_partitions = 1, devices
    build = wanted.executable_build_options
    build.num_replicas, build.num_partitions = 1, devices
    build.use_spmd_partitioning = True
    propagated = build.allow_spmd_sharding_propagation_to_output
    if len(propagated) > 1:
        build.allow_spmd_sharding_propagation_to_output = [*propagated, True]
    build.device_assignment = assignment_of(range(devices), 1, devices)
    asked = harmless_options(wanted.env_option_overrides)
    folder = tempfile.mkdtemp(prefix="pw-division-")
    wanted.env_option_overrides = [
        *asked,
        ("xla_dump_to", folder),
        ("xla_dump_hlo_pass_re", "spmd-partitioning"),
        ("xla_dump_hlo_as_proto", True),
        ("xla_dump_hlo_as_text", False),
        ("xla_enable_rgv3_materialization", False),  # groups of devices one by one
        ("xla_backend_optimization_level", 0),
        ("xla_llvm_disable_expensive_passes", True),
    ]
    try:
        error = _compile(_with_stop(module), devices, wanted)
        dumps = sorted(Path(folder).glob(f"*.{_AFTER}.*.hlo.pb"))
        if not dumps:
            words = str(error).splitlines()[0] if error else "its partitioner did not run"
            raise CannotCut(f"XLA does not divide it: {words}")
        local = of_hlo(_module_of(dumps[-1].read_bytes()))
        return _without_stop(local, module.context)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_stop(module: Any) -> bytes:
    """Return a module with one more result, of a function that there is not."""
    stopping = ir.Module.parse(mlir.module_to_bytecode(module), module.context)
    main = ir.SymbolTable(stopping.operation)["main"]
    block = main.regions[0].blocks[0]
    last = block.operations[len(block.operations) - 1].operation
    attributes = {
        "call_target_name": ir.StringAttr.get(_STOP, module.context),
        "api_version": ir.IntegerAttr.get(ir.IntegerType.get_signless(32, module.context), 4),
        "backend_config": ir.DictAttr.get({}, module.context),
    }
    with last.location:
        kind = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1, module.context))
        stop = ir.Operation.create(
            "stablehlo.custom_call", [kind], [], attributes, ip=ir.InsertionPoint(last)
        )
        _return(main, [*last.operands, stop.results[0]])
    return bytes(mlir.module_to_bytecode(stopping))


def _without_stop(local: bytes, context: Any) -> bytes:
    """Return a divided module without the last result."""
    divided = ir.Module.parse(local, context)
    main = ir.SymbolTable(divided.operation)["main"]
    block = main.regions[0].blocks[0]
    *results, stop = block.operations[len(block.operations) - 1].operation.operands
    with main.location:
        _return(main, results)
        attributes = divided.operation.attributes
        *shardings, _ = _each(ir.StringAttr(attributes[_RESULTS]).value)
        attributes[_RESULTS] = ir.StringAttr.get(f"{{{', '.join(shardings)}}}")
    stop.owner.operation.erase()
    return bytes(mlir.module_to_bytecode(divided))


def _return(main: Any, values: Sequence[Any]) -> None:
    """Let a function return other values; in place."""
    block = main.regions[0].blocks[0]
    block.operations[len(block.operations) - 1].operation.erase()
    ir.Operation.create("func.return", [], list(values), ip=ir.InsertionPoint(block))
    kinds = ir.FunctionType.get(main.type.inputs, [value.type for value in values])
    main.attributes["function_type"] = ir.TypeAttr.get(kinds)
    if "res_attrs" in main.attributes:
        attributes = list(ir.ArrayAttr(main.attributes["res_attrs"]))
        every = [*attributes, ir.DictAttr.get({})][: len(values)]
        main.attributes["res_attrs"] = ir.ArrayAttr.get(every)


def _read(local: bytes, context: Any, *, is_of_other: bool) -> Divided:
    module = ir.Module.parse(local, context)
    attributes = module.operation.attributes
    of_parameters = "mhlo.spmd_parameters_shardings"
    listed = ir.ArrayAttr(attributes[of_parameters]) if of_parameters in attributes else ()
    arguments = tuple(ir.StringAttr(one).value for one in listed)
    results = _each(ir.StringAttr(attributes[_RESULTS]).value)
    return Divided(module, arguments, results, is_of_other)


class Divisions(KeptFiles):
    """A folder of divided modules."""

    def __init__(self, folder: Path) -> None:
        advice = "give the folder to this user alone (chown, chmod -R go-w), or set XDG_CACHE_HOME"
        super().__init__(folder, LIMIT_BYTES, "divided functions", advice)

    def divide(self, module: Any, devices: int, options: bytes, *, afresh: bool = False) -> Divided:
        """Return what `divide` does."""
        text = module.operation.get_asm(enable_debug_info=False)
        key = hashlib.sha256(f"{devices} {text}".encode() + options).digest()
        located = hashlib.sha256(mlir.module_to_bytecode(module)).digest()
        kept = None if afresh else self.load_with(key, bytes)
        if kept is None:
            kept = content = located + _divided(module, devices, options)
            self.save_with(key, lambda: content)
        size = len(located)
        return _read(kept[size:], module.context, is_of_other=kept[:size] != located)

    def _versions(self) -> bytes:
        return f"{_FORMAT} {version('jaxlib')}".encode()


@functools.cache
def kept_divisions() -> Divisions:
    """Return the user's."""
    return Divisions(cache_folder("divisions"))


_lock = threading.Lock()
_client: tuple[int, int, Any] = (0, 0, None)
"""The process, the number of devices, and the client."""


def _compile(module: bytes, devices: int, options: Any) -> Exception | None:
    """Compile for the first devices of the private client; return XLA's error, if there is one."""
    global _client
    with _lock:
        process, size, client = _client
        if process != os.getpid() or size < devices:
            client = cpu_client(devices)
            _client = os.getpid(), devices, client
    chosen = DeviceList(tuple(client.devices()[:devices]))
    try:
        client.compile_and_load(module, chosen, options)
    except Exception as error:  # noqa: BLE001 - what XLA raises has no common class
        return error
    return None


def _module_of(proto: bytes) -> bytes:
    """Return the `HloModuleProto` in an `HloProto`, whose first field it is."""
    size, shift, at = 0, 0, 1
    while True:
        byte = proto[at]
        at += 1
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return proto[at : at + size]


def _each(words: str) -> tuple[str, ...]:
    """Return the shardings of the elements of a tuple: `{{replicated}, {devices=[2]<=[2]}}`."""
    if not words.startswith("{{"):
        return () if words == "{}" else (words,)
    elements, depth, start = [], 0, 0
    for at, letter in enumerate(words):
        if letter == "{":
            depth += 1
            start = at if depth == 2 else start
        elif letter == "}":
            if depth == 2:
                elements.append(words[start : at + 1])
            depth -= 1
    return tuple(elements)
