"""XLA's own partitioner, for any number of devices, without devices.

The partitioner is one of the first steps of XLA's compilers, and the same on all platforms. jaxlib has no
function that runs it alone. So a module is compiled for a private CPU client of this process, which has as
many devices as are wanted and runs nothing, and XLA writes down the module as it is behind the partitioner.
What it has written is kept on disk for the next run.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jaxlib.version
import numpy as np
from jax._src.interpreters import mlir  # how JAX gives a module to a compiler
from jax.extend.mlir import ir
from jaxlib import _jax, xla_client

from pw.islands.errors import CannotCut
from pw.processes.kept_files import KeptFiles, cache_folder

LIMIT_BYTES = 256 << 20
"""A larger folder of divided modules loses those that were used longest ago."""

_FORMAT = 1
"""Grows when a file holds something else."""
_AFTER = "after_spmd-partitioning"


class Divided(NamedTuple):
    """A module as one device runs it, and how its arguments and results are divided over all devices."""

    module: Any
    """Of MLIR, in the context of the given one; its function is `main`."""
    arguments: tuple[str, ...]
    """The HLO sharding of each argument, in XLA's words."""
    results: tuple[str, ...]


def divide(
    module: Any, devices: int, options: bytes = b"", files: Divisions | None = None
) -> Divided:
    """Divide a module over so many devices, as its shardings say.

    Args:
        module: of MLIR.
        devices: its partitions.
        options: a serialized `xla.CompileOptionsProto`; without it, what JAX chooses.
        files: what was divided before; the user's, if not given.

    Raises:
        CannotCut: XLA does not divide it; with XLA's words.
    """
    return (files or _files()).divide(module, devices, options)


def _divided(module: Any, devices: int, options: bytes) -> bytes:
    """Return a divided module, as MLIR writes it."""
    if options:
        wanted = xla_client.CompileOptions.ParseFromString(options)
    else:
        wanted = xla_client.CompileOptions()
        wanted.executable_build_options.use_shardy_partitioner = True
    wanted.num_replicas, wanted.num_partitions = 1, devices
    build = wanted.executable_build_options
    build.num_replicas, build.num_partitions = 1, devices
    build.use_spmd_partitioning = True
    build.device_assignment = xla_client.DeviceAssignment.create(np.arange(devices).reshape(1, -1))
    folder = tempfile.mkdtemp(prefix="pw-division-")
    wanted.env_option_overrides = [
        *wanted.env_option_overrides,
        ("xla_dump_to", folder),
        ("xla_dump_hlo_pass_re", "spmd-partitioning"),
        ("xla_dump_hlo_as_proto", True),
        ("xla_dump_hlo_as_text", False),
        ("xla_enable_rgv3_materialization", False),  # groups of devices one by one
        ("xla_backend_optimization_level", 0),
        ("xla_llvm_disable_expensive_passes", True),
    ]
    try:
        error = _compile(mlir.module_to_bytecode(module), devices, wanted)
        found = sorted(Path(folder).glob(f"*.{_AFTER}.*.hlo.pb"))
        if not found:
            words = str(error).splitlines()[0] if error else "its partitioner did not run"
            raise CannotCut(f"XLA does not divide it: {words}")
        return bytes(_jax.mlir.hlo_to_stablehlo(_module_of(found[-1].read_bytes())))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(local: bytes, context: Any) -> Divided:
    made = ir.Module.parse(local, context)
    attributes = made.operation.attributes
    of_parameters = "mhlo.spmd_parameters_shardings"
    listed = ir.ArrayAttr(attributes[of_parameters]) if of_parameters in attributes else ()
    arguments = tuple(ir.StringAttr(one).value for one in listed)
    return Divided(
        made, arguments, _each(ir.StringAttr(attributes["mhlo.spmd_output_sharding"]).value)
    )


class Divisions(KeptFiles):
    """A folder of divided modules."""

    def __init__(self, folder: Path) -> None:
        advice = "give the folder to this user alone (chown, chmod -R go-w), or set XDG_CACHE_HOME"
        super().__init__(folder, LIMIT_BYTES, "divided functions", advice)

    def divide(self, module: Any, devices: int, options: bytes) -> Divided:
        """Return what `divide` does."""
        text = module.operation.get_asm(enable_debug_info=False)
        key = hashlib.sha256(f"{devices} {text}".encode() + options).digest()
        local = self.load_with(key, bytes)
        if local is None:
            local = made = _divided(module, devices, options)
            self.save_with(key, lambda: made)
        return _read(local, module.context)

    def _made_by(self) -> bytes:
        return f"{_FORMAT} {jaxlib.version.__version__}".encode()


@functools.cache
def _files() -> Divisions:
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
            client = xla_client.make_cpu_client(asynchronous=False, num_devices=devices)
            _client = os.getpid(), devices, client
    chosen = xla_client.DeviceList(tuple(client.devices()[:devices]))
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


def _each(said: str) -> tuple[str, ...]:
    """Return the shardings of the elements of a tuple: `{{replicated}, {devices=[2]<=[2]}}`."""
    if not said.startswith("{{"):
        return () if said == "{}" else (said,)
    found, depth, start = [], 0, 0
    for at, letter in enumerate(said):
        if letter == "{":
            depth += 1
            start = at if depth == 2 else start
        elif letter == "}":
            if depth == 2:
                found.append(said[start : at + 1])
            depth -= 1
    return tuple(found)
