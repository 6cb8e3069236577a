"""Decodes with a model in two stages on two islands, until all sequences have ended.

Run it: `python -m examples.decoding`. It starts a cluster of two islands of two hosts each. Each iteration goes
through both stages; the second one chooses the next tokens, which go back to the first. The hosts see when all
sequences have ended; the client calls `pw.while_loop` once, and launches ahead of them.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

ROWS, WIDTH, VOCABULARY, LONGEST, END = 8, 32, 24, 60, 0


def parameters(seed: int) -> Any:
    """The parameters of both stages."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def matrix(*shape: int) -> Any:
        return np.asarray(jax.random.normal(next(keys), shape) / shape[0] ** 0.5)

    cells = [{"of_x": matrix(WIDTH, 2 * WIDTH), "of_h": matrix(WIDTH, 2 * WIDTH)} for _ in range(2)]
    return {
        "embed": matrix(VOCABULARY, WIDTH) * 5,
        "cells": cells,
        "head": matrix(WIDTH, VOCABULARY),
    }


def cell(weights: Any, hidden: Any, x: Any) -> Any:
    """A recurrent layer with a gate."""
    gate, new = jnp.split(x @ weights["of_x"] + hidden @ weights["of_h"], 2, axis=-1)
    return hidden + jax.nn.sigmoid(gate) * (jnp.tanh(2 * new) - hidden)


def first(weights: Any, embed: Any, hidden: Any, tokens: Any) -> Any:
    """The first stage: from the last tokens to what the second stage takes."""
    return cell(weights, hidden, jnp.take(embed, tokens, axis=0))


def second(weights: Any, head: Any, hidden: Any, x: Any, text: Any, at: Any) -> Any:
    """The second stage: chooses the next token of each sequence that has not ended, and writes it down."""
    hidden = cell(weights, hidden, x)
    last = text[:, at]
    chosen = jnp.argmax(hidden @ head, axis=-1).astype(last.dtype)
    tokens = jnp.where(last == END, END, chosen)
    return hidden, tokens, text.at[:, at + 1].set(tokens), at + 1


def unfinished(text: Any, at: Any) -> Any:
    """Whether a sequence goes on."""
    return (at < LONGEST) & jnp.any(text[:, at] != END)


def decode(stages: Any, while_loop: Any, params: Any, prompt: Any) -> Any:
    """Return all texts, and their lengths; the same code for both systems."""

    def step(carry: Any) -> Any:
        one, two, tokens, text, at = carry
        one = stages.first(params["cells"][0], params["embed"], one, tokens)
        return one, *stages.second(params["cells"][1], params["head"], two, one, text, at)

    def goes_on(carry: Any) -> Any:
        return stages.unfinished(*carry[3:])

    hidden = np.zeros((ROWS, WIDTH), np.float32)
    text = np.zeros((ROWS, LONGEST + 1), np.int32)
    text[:, 0] = prompt
    return while_loop(goes_on, step, (hidden, hidden, prompt, text, np.int32(0)))[3:]


def main() -> None:
    """Decode, and compare with plain JAX."""
    params, prompt = parameters(9), np.arange(1, ROWS + 1, dtype=np.int32)
    plain = SimpleNamespace(first=first, second=second, unfinished=unfinished)
    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1):
        slices = pw.make_virtual_device_set()
        near, far = (
            pw.Mesh(slices.add_slice(devices=2, island=island).devices, ("rows",))
            for island in ("island-0", "island-1")
        )
        rows = P("rows")
        ours = SimpleNamespace(
            first=pw.jit(first, mesh=near, out_shardings=rows),
            second=pw.jit(second, mesh=far, out_shardings=(rows, rows, rows, P())),
            unfinished=pw.jit(unfinished, mesh=far),
        )
        text, steps = pw.get(decode(ours, pw.while_loop, params, prompt))
    wanted, at = decode(plain, jax.lax.while_loop, params, prompt)
    np.testing.assert_array_equal(text, wanted)
    assert steps == at
    lengths = np.argmax(text[:, 1:] == END, axis=1)
    print(
        f"{ROWS} sequences of {min(lengths)} to {max(lengths)} tokens, in {steps} steps; as in plain JAX"
    )


if __name__ == "__main__":
    main()
