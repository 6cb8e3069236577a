"""The results of simulated computations: a digest of the artifact and all inputs.

Every byte of an output is a function of every byte of every input, of the artifact, of which output
it is, and of where in the output it stands. A buffer that is lost, stale, doubled, crossed with
another or laid out wrongly therefore changes the result, whatever the program.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.errors import CompileError
from pw.core.messages import Detail
from pw.core.sharding import ArraySpec, dtype_of
from pw.core.stablehlo import Facts, decode

DOES_NOT_COMPILE = b"does not compile"
RAISES = b"raises"
"""Prefixes of artifacts that no host can compile, and that always fail."""
_LASTS = b"lasts "
"""The prefix of artifacts with a fixed duration."""


def compute(
    artifact: bytes, inputs: Sequence[bytes], outputs: Sequence[ArraySpec]
) -> list[np.ndarray[Any, Any]]:
    """The whole outputs of a computation, from the bytes of its whole inputs."""
    digest = hashlib.blake2b(artifact, digest_size=32)
    for data in inputs:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    seed = digest.digest()
    made = []
    for index, spec in enumerate(outputs):
        data = _stretched(seed + index.to_bytes(4, "little"), spec.size_bytes)
        made.append(np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape))
    return made


@functools.lru_cache(512)
def _stretched(seed: bytes, size_bytes: int) -> bytes:
    """As many bytes as wanted; the oracle and the devices ask for the same ones."""
    return hashlib.shake_128(seed).digest(size_bytes)


def lasting(name: bytes, takes_s: float) -> bytes:
    """The artifact of a computation that takes so many seconds."""
    return b"%s%d us %s" % (_LASTS, round(takes_s * 1e6), name)


def lasts_s(artifact: bytes) -> float | None:
    """How many seconds a computation takes, if its artifact says so."""
    if not artifact.startswith(_LASTS):
        return None
    return int(artifact[len(_LASTS) :].partition(b" ")[0]) * 1e-6


def computes(artifact: bytes) -> bool:
    """Whether the artifact is of a computation that works."""
    return not artifact.startswith((DOES_NOT_COMPILE, RAISES))


def examined(artifact: bytes, detail: Detail) -> Facts | str | dict[str, float]:
    """What the compiler says of a StableHLO artifact. Raises CompileError if it does not compile."""
    module = decode(artifact).module
    if module.startswith(DOES_NOT_COMPILE):
        raise CompileError(f"the module {module!r} does not compile")
    if detail is Detail.TEXT:
        return module.hex()
    if detail is Detail.COSTS:
        return {module.hex(): 1.0}
    return Facts(module.hex(), (), (), (), *[0] * 5)
