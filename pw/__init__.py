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
    IslandLost,
    NameNotFound,
    NaNFound,
    NotOwner,
    OutOfDeviceMemory,
    OutOfHostMemory,
    PlacementError,
    ProtocolError,
    PythonRefused,
    QuotaExceeded,
    ResultMismatch,
    ShardingError,
    TracerError,
    TracingError,
    TransferFailed,
    VersionMismatch,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from pw.building.experts.layer import moe
    from pw.building.feeding.stream import Stream, stream
    from pw.building.pipelines.marks import stage_boundary
    from pw.building.pipelines.pipeline import Pipeline, pipeline
    from pw.building.pipelines.schedule import Schedule
    from pw.client.arrays.array import Array
    from pw.client.arrays.devices import make_virtual_device_set
    from pw.client.arrays.ragged import Ragged
    from pw.client.checkpoints.checkpoint import Checkpoint, checkpoint
    from pw.client.checkpoints.files import restore
    from pw.client.connection.current import connect, disconnect, stats, why
    from pw.client.display.advice import PerformanceWarning
    from pw.client.functions.cancelling import cancel
    from pw.client.functions.cond import cond
    from pw.client.functions.gradients import grad, value_and_grad
    from pw.client.functions.host_function import host_function
    from pw.client.functions.jit import jit
    from pw.client.functions.pmap import pmap
    from pw.client.functions.program import program
    from pw.client.functions.transfer import block_until_ready, get, put, ready
    from pw.client.looking.device_tests import test_devices
    from pw.client.looking.islands import IslandEvent, island_events, on_island_event
    from pw.client.looking.memory import memory
    from pw.client.looking.names import names
    from pw.client.looking.plan import plan
    from pw.client.looking.queue import queue
    from pw.client.looking.show import show
    from pw.client.looking.status import status
    from pw.client.loops.mapping import map
    from pw.client.loops.while_loop import while_loop
    from pw.client.moving import drain, migrate, resume, suspend
    from pw.client.rebalancing import rebalance
    from pw.client.sharing.lookup import lookup, version_of
    from pw.client.sharing.publish import Publication, publish, unpublish
    from pw.core.functions.parts import ResultPart
    from pw.operating.deploy.local_cluster import LocalCluster
    from pw.operating.deploy.on_ray import on_ray
    from pw.operating.profiling.profile import load_ipython_extension as load_ipython_extension
    from pw.operating.profiling.profile import profile
    from pw.operating.timeline.tracing import trace

__version__ = _installed.version(_installed.DISTRIBUTION)

_LAZY = {
    "connect": "pw.client.connection.current",
    "disconnect": "pw.client.connection.current",
    "LocalCluster": "pw.operating.deploy.local_cluster",
    "on_ray": "pw.operating.deploy.on_ray",
    "make_virtual_device_set": "pw.client.arrays.devices",
    "Mesh": "jax.sharding",
    "NamedSharding": "jax.sharding",
    "Ragged": "pw.client.arrays.ragged",
    "PartitionSpec": "jax.sharding",
    "jit": "pw.client.functions.jit",
    "pmap": "pw.client.functions.pmap",
    "program": "pw.client.functions.program",
    "grad": "pw.client.functions.gradients",
    "value_and_grad": "pw.client.functions.gradients",
    "cond": "pw.client.functions.cond",
    "map": "pw.client.loops.mapping",
    "while_loop": "pw.client.loops.while_loop",
    "host_function": "pw.client.functions.host_function",
    "moe": "pw.building.experts.layer",
    "ResultPart": "pw.core.functions.parts",
    "stream": "pw.building.feeding.stream",
    "Stream": "pw.building.feeding.stream",
    "pipeline": "pw.building.pipelines.pipeline",
    "Pipeline": "pw.building.pipelines.pipeline",
    "stage_boundary": "pw.building.pipelines.marks",
    "Schedule": "pw.building.pipelines.schedule",
    "Array": "pw.client.arrays.array",
    "put": "pw.client.functions.transfer",
    "get": "pw.client.functions.transfer",
    "block_until_ready": "pw.client.functions.transfer",
    "ready": "pw.client.functions.transfer",
    "cancel": "pw.client.functions.cancelling",
    "checkpoint": "pw.client.checkpoints.checkpoint",
    "Checkpoint": "pw.client.checkpoints.checkpoint",
    "restore": "pw.client.checkpoints.files",
    "drain": "pw.client.moving",
    "suspend": "pw.client.moving",
    "resume": "pw.client.moving",
    "migrate": "pw.client.moving",
    "rebalance": "pw.client.rebalancing",
    "IslandEvent": "pw.client.looking.islands",
    "island_events": "pw.client.looking.islands",
    "on_island_event": "pw.client.looking.islands",
    "arrays_lost": "pw.client.looking.lost",
    "publish": "pw.client.sharing.publish",
    "Publication": "pw.client.sharing.publish",
    "unpublish": "pw.client.sharing.publish",
    "lookup": "pw.client.sharing.lookup",
    "version_of": "pw.client.sharing.lookup",
    "names": "pw.client.looking.names",
    "memory": "pw.client.looking.memory",
    "test_devices": "pw.client.looking.device_tests",
    "plan": "pw.client.looking.plan",
    "queue": "pw.client.looking.queue",
    "profile": "pw.operating.profiling.profile",
    "show": "pw.client.looking.show",
    "stats": "pw.client.connection.current",
    "status": "pw.client.looking.status",
    "trace": "pw.operating.timeline.tracing",
    "why": "pw.client.connection.current",
    "PerformanceWarning": "pw.client.display.advice",
    "load_ipython_extension": "pw.operating.profiling.profile",
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
    "suspend",
    "resume",
    "migrate",
    "rebalance",
    "IslandEvent",
    "island_events",
    "on_island_event",
    "arrays_lost",
    "publish",
    "Publication",
    "unpublish",
    "lookup",
    "version_of",
    "names",
    "memory",
    "test_devices",
    "plan",
    "queue",
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
    "IslandLost",
    "InsufficientDevices",
    "InternalError",
    "IslandFull",
    "NameNotFound",
    "NaNFound",
    "NotOwner",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "PlacementError",
    "ProtocolError",
    "PythonRefused",
    "QuotaExceeded",
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
