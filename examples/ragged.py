"""Values that decide their size: a filter, unique values, and batches of sentences, from island to island.

Run it: `python -m examples.ragged`. It starts a cluster of two islands. With PW_ADDRESS it runs on that
cluster, which needs two islands with two devices each, and hosts that run Python functions.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw

READINGS, LINES, WORDS = 4096, 64, 128


def unusual(readings: Any) -> pw.Ragged:
    """The rows whose first column is far from the mean, in their order."""
    chosen = jnp.abs(readings[:, 0]) > 2.0
    order = jnp.argsort(~chosen, stable=True)
    return pw.Ragged(readings[order], chosen.sum(dtype=jnp.int32))


def unique(labels: Any) -> pw.Ragged:
    """The different labels, sorted."""
    found, counts = jnp.unique(labels, return_counts=True, size=labels.size, fill_value=0)
    return pw.Ragged(found, (counts > 0).sum(dtype=jnp.int32))


def mean(rows: pw.Ragged) -> Any:
    """The mean of the rows that count."""
    kept = jnp.where(rows.mask()[:, None], rows.rows, 0)
    return kept.sum(0) / jnp.maximum(rows.counts, 1)


def sentences(number: Any) -> list[np.ndarray[Any, Any]]:
    """A batch of sentences of different lengths, as a tokenizer makes them."""
    draw = np.random.default_rng(int(number))
    return [draw.integers(1, 1000, draw.integers(1, WORDS // 4), np.int32) for _ in range(LINES)]


def main() -> None:
    """Run all three, and compare with numpy on this machine."""
    cluster: Any = nullcontext()
    if "PW_ADDRESS" not in os.environ:
        cluster = pw.LocalCluster(islands=2, devices_per_host=2, allow_python=True)
    with cluster:
        virtual = pw.make_virtual_device_set()
        first, second = (pw.Mesh(virtual.add_slice(devices=2).devices, ("data",)) for _ in range(2))
        draw = np.random.default_rng(0)
        readings = draw.normal(size=(READINGS, 64)).astype(np.float32)
        labels = draw.integers(0, 50, READINGS).astype(np.int32)

        look = pw.jit(mean, mesh=second)
        far = pw.jit(unusual, mesh=first)(pw.put(readings, first.devices))
        ours = np.asarray(look(far))
        wanted = readings[np.abs(readings[:, 0]) > 2.0]
        print(f"{far.counts} of {READINGS} readings are unusual")
        assert int(far.counts) == len(wanted)
        np.testing.assert_allclose(ours, wanted.mean(0), atol=1e-5)

        kinds = pw.jit(unique, mesh=first)(labels)
        there = pw.get(pw.put(kinds, second.devices[0]))
        np.testing.assert_array_equal(there.rows[there.mask()], np.unique(labels))
        print(f"{there.counts} different labels")

        batch = pw.Ragged(
            jax.ShapeDtypeStruct((LINES, WORDS), jnp.int32),
            jax.ShapeDtypeStruct((LINES,), jnp.int32),
        )
        read = pw.host_function(sentences, batch, mesh=first)
        count = pw.jit(lambda r: jnp.where(r.mask(), r.rows, 0).sum(), mesh=second)
        step = pw.program(lambda number: count(read(number)))
        totals = [step(np.int32(number)) for number in range(8)]
        for number, total in enumerate(totals):
            assert int(total) == sum(int(line.sum()) for line in sentences(number))
        print("8 batches of sentences: as numpy says")


if __name__ == "__main__":
    main()
