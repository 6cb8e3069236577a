"""Feeds a small language model from a tokenising generator that runs on the hosts.

Run it: `python -m examples.feeding`. The generator learns byte pairs from the sources of Python's standard
library, cuts files into tokens, and saves its state: the file, and the tokens left over. In the middle
the script writes a checkpoint of the parameters and the stream, restores both, and trains on from there.
"""

from __future__ import annotations

import itertools
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw
from examples.train_lm.corpus import source_files

ROWS, CONTEXT, MERGES, WIDTH = 8, 64, 64, 32
VOCABULARY = 256 + MERGES
STEPS = 40
Pair = tuple[int, int]


def learned_pairs(text: bytes) -> list[Pair]:
    """Learn byte-pair encoding (Sennrich et al., 2016): the pairs to merge, in their order."""
    tokens, pairs = list(text), []
    for number in range(MERGES):
        pair, _ = Counter(itertools.pairwise(tokens)).most_common(1)[0]
        pairs.append(pair)
        tokens = merged(tokens, pair, 256 + number)
    return pairs


def merged(tokens: list[int], pair: Pair, token: int) -> list[int]:
    """Replace each occurrence of a pair by a token."""
    found, at = [], 0
    while at < len(tokens):
        if at + 1 < len(tokens) and (tokens[at], tokens[at + 1]) == pair:
            found.append(token)
            at += 2
        else:
            found.append(tokens[at])
            at += 1
    return found


class Tokens(Iterator[Any]):
    """Windows of tokens for one part of the rows: part i of n reads each n-th file."""

    def __init__(self, part: pw.Part) -> None:
        files = source_files(Path(sysconfig.get_paths()["stdlib"]))
        self._files = files[part.index :: part.count]
        rows, _ = part.slices
        self._rows = rows.stop - rows.start
        self._pairs = learned_pairs(files[0].read_bytes()[:4096])
        self._file = 0
        self._left: list[int] = []

    def get_state(self) -> tuple[int, bytes]:
        """The next file, and the tokens that are left of the last one."""
        return self._file, np.array(self._left[:400], np.uint16).tobytes()

    def set_state(self, state: tuple[int, bytes]) -> None:
        """Go on from a state."""
        self._file, left = state
        self._left = np.frombuffer(left, np.uint16).tolist()

    def __next__(self) -> np.ndarray[Any, Any]:
        wanted = self._rows * (CONTEXT + 1)
        while len(self._left) < wanted:
            text = self._files[self._file % len(self._files)].read_bytes()[:2048]
            self._file += 1
            tokens = list(text)
            for number, pair in enumerate(self._pairs):
                tokens = merged(tokens, pair, 256 + number)
            self._left += tokens
        window, self._left = self._left[:wanted], self._left[wanted:][:400]
        return np.array(window, np.int32).reshape(self._rows, CONTEXT + 1)


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    """A bigram model: the cross entropy of each token after the one before it."""
    logits = params["in"][tokens[:, :-1]] @ params["out"]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
    return -picked.mean()


def step(params: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent; returns the parameters and the loss."""
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return jax.tree.map(lambda p, g: p - 2.0 * g, params, grads), value


def main() -> None:
    """Train, and train again from the checkpoint in the middle; the losses are equal."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("data",))
    like = jax.ShapeDtypeStruct((ROWS, CONTEXT + 1), jnp.int32)
    stream = pw.stream(lambda part: Tokens(part), like, sharding=pw.NamedSharding(mesh, P("data")))
    draw = np.random.default_rng(0)
    whole = pw.NamedSharding(mesh, P())
    params: Any = pw.put(
        {
            "in": draw.normal(0, 0.1, (VOCABULARY, WIDTH)).astype(np.float32),
            "out": draw.normal(0, 0.1, (WIDTH, VOCABULARY)).astype(np.float32),
        },
        sharding=whole,
    )
    train = pw.jit(step, mesh=mesh, in_shardings=(P(), P("data")), out_shardings=P())
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(STEPS):
            if number == STEPS // 2:
                tree = {"params": params, "stream": stream}
                pw.checkpoint(tree, path=f"{folder}/middle").result()
            params, value = train(params, next(stream))
            losses.append(value)
        print(f"{STEPS} steps: loss {float(losses[0]):.3f} to {float(losses[-1]):.3f}")
        back = pw.restore(f"{folder}/middle", tree)
        params, stream = back["params"], back["stream"]
        print(f"restored at element {stream.position}")
        again = []
        for _ in range(STEPS - STEPS // 2):
            params, value = train(params, next(stream))
            again.append(value)
        same = [float(a) == float(b) for a, b in zip(losses[STEPS // 2 :], again, strict=True)]
        print(f"losses from there: {'equal bit for bit' if all(same) else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
