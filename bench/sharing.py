"""A publication and its way to two readers, beside the least bytes and beside a move without a name.

An array lies on one island, split over two devices. It is published, and two readers look it up on islands of
their own: split over two devices of a host, or with a full copy on each of them. The least that can travel is
each byte once to each reader's host.

- Bytes are those that hosts have sent over the bulk plane, divided by that least.
- Time is that of the publication and both lookups, until both have all values; beside it, `pw.put` of the same
  array to the same devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import pw
from bench.measure import alternate, seconds
from bench.report import Result

BOUND = 1.1
P = pw.PartitionSpec
WAYS = {"split": P("x"), "a copy on each device": P()}
WHAT = "a publication to two readers: bytes and time, beside the least bytes and beside pw.put"


def run(quick: bool) -> Result:
    """Publish and look up on three islands of one host each, in turns with moves."""
    rows = 256 if quick else 16_384
    result = Result("sharing", WHAT)
    with pw.LocalCluster(islands=3, devices_per_host=2):
        virtual = pw.make_virtual_device_set()
        home, *others = (
            pw.Mesh(virtual.add_slice(devices=2, island=f"island-{at}").devices, ("x",))
            for at in range(3)
        )
        value = np.ones((rows, 1024), np.float32)
        array = pw.put(value, sharding=pw.NamedSharding(home, P("x")))
        cases: dict[str, Callable[[], object]] = {}
        for way, spec in WAYS.items():
            likes = [pw.NamedSharding(mesh, spec) for mesh in others]
            cases[f"published, {way}"] = partial(_published, array, likes)
            cases[f"moved, {way}"] = partial(_moved, array, likes)
        cases["published, where it lies"] = partial(_published, array, [None, None])
        sent = {name: _sent_bytes(case) for name, case in cases.items()}
        readings = {name: partial(_milliseconds, case) for name, case in cases.items()}
        samples = alternate(readings, rounds=1 if quick else 7, warm_up=1)
    for name, sample in samples.items():
        way = name.partition(", ")[2]
        baseline = f"moved, {way}"
        reference = samples.get(baseline) if name != baseline else None
        result.add(name, {}, sample, "ms", baseline if reference else "", reference)
    least = 2 * value.nbytes
    for way in WAYS:
        words = f"{way}: bytes sent / each byte once to each reader's host"
        result.at_most(BOUND, sent[f"published, {way}"] / least, words)
    moved = ", ".join(f"{size / 2**20:.2f} MiB ({name})" for name, size in sent.items())
    result.notes += [f"an array of {value.nbytes / 2**20:.0f} MiB; sent: {moved}"]
    return result


def _published(array: pw.Array, likes: Sequence[pw.NamedSharding | None]) -> object:
    """Publish, and have both readers look it up."""
    pw.publish("bench", array).result()
    return pw.block_until_ready([pw.lookup("bench", like=like) for like in likes])


def _moved(array: pw.Array, likes: list[pw.NamedSharding]) -> object:
    """Move the array without a name."""
    return pw.block_until_ready([pw.put(array, sharding=like) for like in likes])


def _milliseconds(case: Callable[[], object]) -> float:
    return seconds(case) * 1e3


def _sent_bytes(case: Callable[[], object]) -> int:
    """Return the bytes that all hosts send in one call."""
    case()
    before = _settled_bytes()
    case()
    return _settled_bytes() - before


def _settled_bytes() -> int:
    """Return the bytes that all hosts have sent: a sender counts a little later than its receiver has them."""
    former, total = -1, 0
    while former != total:
        time.sleep(0.1)
        sent = (of["bulk_sent_bytes"] for of in pw.stats().values() if "bulk_sent_bytes" in of)
        former, total = total, sum(sent)
    return total
