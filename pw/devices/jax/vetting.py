"""Refuses code of clients that could do harm on a host, or is not what its call says.

StableHLO is not a sandbox: a `custom_call` may name any function that is linked into the worker,
also the one that calls Python objects by address. So only listed targets are compiled: linear
algebra libraries, random number kernels, and the markers that the partitioner or the compiler
replaces. Code with effects, or with a channel to the host, is refused as well.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import jax.export

from pw.core.errors import CompileError
from pw.core.program import Computation

_CUSTOM_CALL = re.compile(r'\b\w+\.custom_call\b"?\s*(?:@(?:"([^"]*)"|([\w$.-]+)))?')
_CHOICE = re.compile(r"\bstablehlo\.(?:while|case|if)\b")
_HOST_CHANNEL = re.compile(r"\bstablehlo\.(?:send|recv|infeed|outfeed)\b")
_ALLOWED_TARGETS = re.compile(
    r"(?:lapack|cusolver|cusparse|hipsolver)_[a-z0-9]+_ffi"
    r"|(?:cu|hip)_(?:threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|shape_assertion"
    r"|xla\.sdy\.\w+|MoveToHost|MoveToDevice|PinToDevice"
    r"|AllocateBuffer|ApproxTopK|Eigh|LuDecomposition|ProductOfElementaryHouseholderReflectors|Qr"
    r"|stablehlo\.dynamic_(?:approx_top_k|reduce_window|rng_bit_generator|top_k)"
)


def vet(exported: jax.export.Exported, computation: Computation) -> bool:
    """Raise CompileError unless `exported` is what `computation` says, and harmless.

    Returns whether each call of it takes about as long (see `vet_code`).
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
    return vet_code(str(exported.mlir_module()))


def vet_code(text: str, more_targets: Collection[str] = ()) -> bool:
    """Raise CompileError if a StableHLO module calls native functions that are not listed, or its host.

    `more_targets` are allowed as well.

    Returns whether it has no loops, branches or native calls, so each call takes about as long.
    """
    for match in _CUSTOM_CALL.finditer(text):
        target = match[1] or match[2] or "(unreadable)"
        if target not in more_targets and not _ALLOWED_TARGETS.fullmatch(target):
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
