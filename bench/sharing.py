"""A publication and its way to two readers, beside the least bytes, a move without a name, and Ray's store.

An array lies on one island, split over two devices. It is published, and two readers look it up on islands of
their own: split over two devices of a host, or with a full copy on each of them. The least that can travel is
each byte once to each reader's host.

- Bytes are those that hosts have sent over the bulk plane, divided by that least.
- Time is that of the publication and both lookups, until both have all values; beside it, `pw.put` of the same
  array to the same devices.
- In Ray a driver puts as large a value into its store, and two actors get it, on nodes of their own or on the
  driver's; rows also leave out the put. Ray's nodes share no memory, so hosts that are compared with them use
  tcp, too; its bytes are those of the loopback interface.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import pw
from bench.baselines import ray_readers
from bench.baselines.peer import Peer
from bench.measure import GaveUp, Sample, alternate, seconds
from bench.report import Result

BOUND = 1.1
P = pw.PartitionSpec
WAYS = {"split": P("x"), "a copy on each device": P()}
WHAT = (
    "a publication to two readers: bytes and time, beside the least bytes, pw.put and Ray's store"
)
HERE, OVER_TCP = "published, where it lies", "published, split, over tcp"
LOOPBACK = Path("/sys/class/net/lo/statistics/tx_bytes")
"""Bytes that this machine has sent to itself."""


def run(quick: bool) -> Result:
    """Publish and look up on three islands of one host each, in turns with moves, then beside Ray's store."""
    rows = 256 if quick else 16_384
    result = Result("sharing", WHAT)
    value = np.ones((rows, 1024), np.float32)
    rounds = 1 if quick else 7
    with ExitStack() as stack:
        ray = None
        try:
            peer = Peer(
                "Ray",
                "bench.baselines.ray_readers",
                [[str(value.nbytes)]],
                ready_s=120,
                freeze=True,
            )
            ray = stack.enter_context(peer)
        except GaveUp as error:
            result.notes.append(f"without Ray's store: {error}")
        _on_one_machine(result, value, rounds, ray)
        _over_tcp(result, value, rounds, ray)
    return result


@contextmanager
def _islands(value: np.ndarray[Any, Any]) -> Iterator[tuple[pw.Array, list[pw.Mesh]]]:
    """Start three islands; the array lies on one, and the meshes of readers are on the others."""
    with pw.LocalCluster(islands=3, devices_per_host=2):
        virtual = pw.make_virtual_device_set()
        home, *others = (
            pw.Mesh(virtual.add_slice(devices=2, island=f"island-{at}").devices, ("x",))
            for at in range(3)
        )
        yield pw.put(value, sharding=pw.NamedSharding(home, P("x"))), others


def _on_one_machine(
    result: Result, value: np.ndarray[Any, Any], rounds: int, ray: Peer | None
) -> None:
    with _islands(value) as (array, others):
        cases: dict[str, Callable[[], object]] = {}
        for way, spec in WAYS.items():
            likes = [pw.NamedSharding(mesh, spec) for mesh in others]
            cases[f"published, {way}"] = partial(_published, array, likes)
            cases[f"moved, {way}"] = partial(_moved, array, likes)
        cases[HERE] = partial(_published, array, [None, None])
        sent = {name: _sent_bytes(case) for name, case in cases.items()}
        readings: dict[str, Callable[[], float]] = {
            name: partial(_milliseconds, case) for name, case in cases.items()
        }
        readings |= _of_ray(ray, ray_readers.BESIDE)
        samples = alternate(readings, rounds=rounds, warm_up=1)
    for name, sample in samples.items():
        baseline = f"moved, {name.partition(', ')[2]}"
        if name == HERE or name.startswith("Ray"):
            baseline = f"Ray, {ray_readers.BESIDE}"
        _add(result, samples, name, sample, baseline)
    if ray is not None:
        gain = samples[f"Ray, {ray_readers.BESIDE}"].over(samples[HERE]).median
        result.at_least(1.0, gain, "a publication to two readers where it lies, to Ray's store")
    least = 2 * value.nbytes
    for way in WAYS:
        words = f"{way}: bytes sent / each byte once to each reader's host"
        result.at_most(BOUND, sent[f"published, {way}"] / least, words)
    moved = ", ".join(f"{size / 2**20:.2f} MiB ({name})" for name, size in sent.items())
    result.notes += [f"an array of {value.nbytes / 2**20:.0f} MiB; sent: {moved}"]


def _over_tcp(result: Result, value: np.ndarray[Any, Any], rounds: int, ray: Peer | None) -> None:
    """Publish to two readers on other hosts, beside Ray's readers on other nodes."""
    with patch.dict(os.environ, {"PW_BULK": "tcp"}), _islands(value) as (array, others):
        likes = [pw.NamedSharding(mesh, WAYS["split"]) for mesh in others]
        cases: dict[str, Callable[[], float]] = {
            OVER_TCP: partial(_milliseconds, partial(_published, array, likes))
        }
        baseline = f"Ray, {ray_readers.APART}"
        cases |= _of_ray(ray, ray_readers.APART)
        samples = alternate(cases, rounds=rounds, warm_up=1)
        sent = _sent_bytes(partial(_published, array, likes))
    for name, sample in samples.items():
        _add(result, samples, name, sample, baseline)
    words = f"{OVER_TCP}: bytes sent / each byte once to each reader's host"
    result.at_most(BOUND, sent / (2 * value.nbytes), words)
    if ray is None:
        return
    gain = samples[baseline].over(samples[OVER_TCP]).median
    result.at_least(1.0, gain, "a publication to two other hosts over tcp, to Ray's store")
    if LOOPBACK.exists():
        before = _loopback_bytes()
        ray.seconds(ray_readers.APART, 1)  # it does it twice
        ratio = (_loopback_bytes() - before) / 2 / (2 * value.nbytes)
        result.notes.append(f"Ray, {ray_readers.APART}: {ratio:.3g} of the least bytes")


def _add(
    result: Result, samples: Mapping[str, Sample], name: str, sample: Sample, baseline: str
) -> None:
    """Add a row, with its ratio to a baseline if that is another one that was measured."""
    reference = samples.get(baseline) if name != baseline else None
    result.add(name, {}, sample, "ms", baseline if reference else "", reference)


def _of_ray(ray: Peer | None, way: str) -> dict[str, Callable[[], float]]:
    """Return cases that measure the milliseconds in which both of Ray's readers have an object."""
    if ray is None:
        return {}

    def reading(case: str) -> float:
        return ray.seconds(case, 1) * 1e3

    return {f"Ray, {case}": partial(reading, case) for case in (way, ray_readers.READ[way])}


def _loopback_bytes() -> int:
    return int(LOOPBACK.read_text())


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
