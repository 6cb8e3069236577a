"""pw: one ordinary Python process programs accelerators on many hosts as if they were its own.

Functions compiled by JAX are placed on *virtual devices* (`make_virtual_device_set`, `Mesh`) with `jit` and
`pmap`; `program` traces a Python function that calls several of them into one dataflow graph; every
call returns futures (`Array`) at once. Without an address the first call starts a small cluster beside the
script; see `connect` and `LocalCluster`. Lost hosts are recovered from; `checkpoint` makes that sure and
quick, `drain` leaves a host on purpose. All errors derive from `Error`.

Names are loaded when first used, so that `import pw` alone does not import JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pw.core import installed as _installed
from pw.core.errors import (
    AccessRefused,
    ArgumentError,
    ArrayDeleted,
    ArrayLost,
    Cancelled,
    CheckpointExists,
    CheckpointFailed,
    CheckpointNotFound,
    CodeRefused,
    CompileError,
    ComputationFailed,
    ComputationTimeout,
    ConnectionFailed,
    Disconnected,
    Error,
    HostLost,
    InsufficientDevices,
    InternalError,
    IslandFull,
    NaNFound,
    NotOwner,
    OutOfDeviceMemory,
    OutOfHostMemory,
    PlacementError,
    ProtocolError,
    PythonRefused,
    ResultMismatch,
    ShardingError,
    TracerError,
    TracingError,
    TransferFailed,
    VersionMismatch,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pw.client.arrays.array import Array
    from pw.client.arrays.devices import make_virtual_device_set
    from pw.client.arrays.ragged import Ragged
    from pw.client.cancelling import cancel
    from pw.client.checkpoint import Checkpoint, checkpoint, drain
    from pw.client.checkpoint_files import restore
    from pw.client.connection.cluster import LocalCluster
    from pw.client.connection.current import connect, disconnect, stats, why
    from pw.client.gradients.gradients import grad, value_and_grad
    from pw.client.loops.mapping import map
    from pw.client.loops.while_loop import while_loop
    from pw.client.memory import memory
    from pw.client.plan import plan
    from pw.client.show import show
    from pw.client.status import status
    from pw.client.trace.cond import cond
    from pw.client.trace.host_function import host_function
    from pw.client.trace.jit import jit
    from pw.client.trace.pmap import pmap
    from pw.client.trace.program import program
    from pw.client.transfer import block_until_ready, get, put, ready
    from pw.core.functions.parts import ResultPart
    from pw.deploy.on_ray import on_ray
    from pw.display.advice import PerformanceWarning
    from pw.experts.layer import moe
    from pw.feeding.stream import Stream, stream
    from pw.pipelines.marks import stage_boundary
    from pw.pipelines.pipeline import Pipeline, pipeline
    from pw.pipelines.schedule import Schedule
    from pw.profiling.profile import load_ipython_extension as load_ipython_extension
    from pw.profiling.profile import profile
    from pw.timeline.tracing import trace

__version__ = _installed.version(_installed.DISTRIBUTION)

_LAZY = {
    "connect": "pw.client.connection.current",
    "disconnect": "pw.client.connection.current",
    "LocalCluster": "pw.client.connection.cluster",
    "on_ray": "pw.deploy.on_ray",
    "make_virtual_device_set": "pw.client.arrays.devices",
    "Mesh": "jax.sharding",
    "NamedSharding": "jax.sharding",
    "Ragged": "pw.client.arrays.ragged",
    "PartitionSpec": "jax.sharding",
    "jit": "pw.client.trace.jit",
    "pmap": "pw.client.trace.pmap",
    "program": "pw.client.trace.program",
    "grad": "pw.client.gradients.gradients",
    "value_and_grad": "pw.client.gradients.gradients",
    "cond": "pw.client.trace.cond",
    "map": "pw.client.loops.mapping",
    "while_loop": "pw.client.loops.while_loop",
    "host_function": "pw.client.trace.host_function",
    "moe": "pw.experts.layer",
    "ResultPart": "pw.core.functions.parts",
    "stream": "pw.feeding.stream",
    "Stream": "pw.feeding.stream",
    "pipeline": "pw.pipelines.pipeline",
    "Pipeline": "pw.pipelines.pipeline",
    "stage_boundary": "pw.pipelines.marks",
    "Schedule": "pw.pipelines.schedule",
    "Array": "pw.client.arrays.array",
    "put": "pw.client.transfer",
    "get": "pw.client.transfer",
    "block_until_ready": "pw.client.transfer",
    "ready": "pw.client.transfer",
    "cancel": "pw.client.cancelling",
    "checkpoint": "pw.client.checkpoint",
    "Checkpoint": "pw.client.checkpoint",
    "restore": "pw.client.checkpoint_files",
    "drain": "pw.client.checkpoint",
    "memory": "pw.client.memory",
    "plan": "pw.client.plan",
    "profile": "pw.profiling.profile",
    "show": "pw.client.show",
    "stats": "pw.client.connection.current",
    "status": "pw.client.status",
    "trace": "pw.timeline.tracing",
    "why": "pw.client.connection.current",
    "PerformanceWarning": "pw.display.advice",
    "load_ipython_extension": "pw.profiling.profile",
}

__all__ = [
    "connect",
    "disconnect",
    "LocalCluster",
    "on_ray",
    "make_virtual_device_set",
    "Mesh",
    "NamedSharding",
    "Ragged",
    "PartitionSpec",
    "jit",
    "pmap",
    "program",
    "grad",
    "value_and_grad",
    "cond",
    "map",
    "while_loop",
    "host_function",
    "moe",
    "ResultPart",
    "stream",
    "Stream",
    "pipeline",
    "Pipeline",
    "stage_boundary",
    "Schedule",
    "Array",
    "put",
    "get",
    "block_until_ready",
    "ready",
    "cancel",
    "checkpoint",
    "Checkpoint",
    "restore",
    "drain",
    "memory",
    "plan",
    "profile",
    "show",
    "stats",
    "status",
    "trace",
    "why",
    "PerformanceWarning",
    "Error",
    "AccessRefused",
    "ArgumentError",
    "ArrayDeleted",
    "ArrayLost",
    "Cancelled",
    "CheckpointExists",
    "CheckpointFailed",
    "CheckpointNotFound",
    "CodeRefused",
    "CompileError",
    "ComputationFailed",
    "ComputationTimeout",
    "ConnectionFailed",
    "Disconnected",
    "HostLost",
    "InsufficientDevices",
    "InternalError",
    "IslandFull",
    "NaNFound",
    "NotOwner",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "PlacementError",
    "ProtocolError",
    "PythonRefused",
    "ResultMismatch",
    "ShardingError",
    "TracerError",
    "TracingError",
    "TransferFailed",
    "VersionMismatch",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'pw' has no attribute {name!r}")
    _installed.check()
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
