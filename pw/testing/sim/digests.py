"""The results of simulated computations: a digest of the artifact and all inputs.

Every byte of an output is a function of every byte of every input, of the artifact, of which output
it is, and of where in the output it stands. A buffer that is lost, stale, doubled, crossed with
another or laid out wrongly therefore changes the result, whatever the program.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from pw.core.errors import CompileError
from pw.core.functions.feeding import Note
from pw.core.messages import Detail
from pw.core.programs.stablehlo import Facts, decode
from pw.core.sharding import ArraySpec, dtype_of

DOES_NOT_COMPILE = b"does not compile"
RAISES = b"raises"
"""Prefixes of artifacts that no host can compile, and that always fail."""
_FEEDS = b"feeds "
"""Prefix of artifacts of streams."""
STATE_ROOM = 48
"""Bytes for the state of a stream's iterator."""
_COUNTS = b"counts "
"""Prefix of artifacts whose results of `int32` are counts of rows."""
_LASTS = b"lasts "
"""Prefix of artifacts with a fixed duration."""


def compute(
    artifact: bytes, inputs: Sequence[bytes], outputs: Sequence[ArraySpec]
) -> list[np.ndarray[Any, Any]]:
    """The whole outputs of a computation, from the bytes of its whole inputs."""
    if artifact.startswith(_FEEDS):
        return _fed(artifact, int.from_bytes(inputs[0][:8], "little"), outputs)
    digest = hashlib.blake2b(artifact, digest_size=32)
    for data in inputs:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    seed = digest.digest()
    arrays = []
    for index, spec in enumerate(outputs):
        data = _stretched(seed + index.to_bytes(4, "little"), spec.size_bytes)
        if spec.dtype == "bool":
            data = bytes([byte & 1 for byte in data])
        array = np.frombuffer(data, dtype_of(spec.dtype)).reshape(spec.shape)
        if artifact.startswith(_COUNTS) and spec.dtype == "int32":
            array = _counts(artifact, array)
        arrays.append(array)
    return arrays


@functools.lru_cache(512)
def _stretched(seed: bytes, size_bytes: int) -> bytes:
    """Return bytes of this size from a seed; the oracle and the devices ask for the same ones."""
    return hashlib.shake_128(seed).digest(size_bytes)


def counts_up_to(capacity: int, name: bytes, *, impossible: bool) -> bytes:
    """Return the artifact of a computation that makes rows, and counts from 0 to `capacity`."""
    return b"%s%d %d %s" % (_COUNTS, capacity, impossible, name)


def _counts(artifact: bytes, drawn: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return counts: of three cells, one has no row, and one has all."""
    capacity, impossible, _ = artifact[len(_COUNTS) :].split(b" ", 2)
    most = int(capacity)
    some = drawn // 8 % (most + 1)
    counts = np.array(np.choose(drawn % 3, [np.zeros_like(some), some, np.full_like(some, most)]))
    if impossible == b"1":
        counts.flat[-1] = most + 3
    return counts.astype(np.int32, copy=False)


def feeds(name: bytes, length: int, has_state: bool) -> bytes:
    """Return the artifact of a stream of so many elements."""
    return b"%s%d %d %s" % (_FEEDS, length, has_state, name)


def feeds_for(artifact: bytes) -> tuple[int, bool]:
    """Return how many elements a stream has, and whether its iterator has a state."""
    length, has_state, _ = artifact[len(_FEEDS) :].split(b" ", 2)
    return int(length), has_state == b"1"


def element_of(
    artifact: bytes, number: int, outputs: Sequence[ArraySpec]
) -> list[np.ndarray[Any, Any]]:
    """Return an element of a stream, with something in the place of the note."""
    seed = hashlib.blake2b(b"%s/%d" % (artifact, number), digest_size=32).digest()
    return [
        np.frombuffer(_stretched(seed, spec.size_bytes), dtype_of(spec.dtype)).reshape(spec.shape)
        for spec in outputs
    ]


def _fed(artifact: bytes, number: int, outputs: Sequence[ArraySpec]) -> list[np.ndarray[Any, Any]]:
    """Return what a stream makes for a request: the element, and the note on each device."""
    length, has_state = feeds_for(artifact)
    *elements, notes = outputs
    leaves = element_of(artifact, number, elements)
    state = pickle.dumps(number + 1) if has_state else None
    if number >= length:
        leaves, state = [np.zeros_like(one) for one in leaves], None
    row = Note(number >= length, state, 0, 1).row(STATE_ROOM)
    return [*leaves, np.tile(row, (notes.shape[0], 1))]


def lasting(name: bytes, takes_s: float) -> bytes:
    """The artifact of a computation that takes so many seconds."""
    return b"%s%d us %s" % (_LASTS, round(takes_s * 1e6), name)


def lasts_s(artifact: bytes) -> float | None:
    """Return the seconds that a computation takes, if its artifact has them."""
    if not artifact.startswith(_LASTS):
        return None
    return int(artifact[len(_LASTS) :].partition(b" ")[0]) * 1e-6


def computes(artifact: bytes) -> bool:
    """Whether the artifact is of a computation that works."""
    return not artifact.startswith((DOES_NOT_COMPILE, RAISES))


def crashes_compiler(artifact: bytes) -> bool:
    """Whether an artifact ends the process that compiles it: half of those that do not compile."""
    return artifact.startswith(DOES_NOT_COMPILE) and hashlib.sha256(artifact).digest()[0] < 128


def module_of(artifact: bytes) -> bytes:
    """Return the module of an artifact; the artifact itself if it is that of a simulated program."""
    try:
        return decode(artifact).module
    except CompileError:
        return artifact


def examined(artifact: bytes, detail: Detail) -> Facts | str | dict[str, float]:
    """Return the facts of the compiler about a StableHLO artifact. Raises CompileError if it does not
    compile.
    """
    module = module_of(artifact)
    if module.startswith(DOES_NOT_COMPILE):
        raise CompileError(f"the module {module!r} does not compile")
    if detail is Detail.TEXT:
        return module.hex()
    if detail is Detail.COSTS:
        return {module.hex(): 1.0}
    return Facts(module.hex(), (), (), (), *[0] * 5)
