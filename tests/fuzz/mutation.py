"""Changes valid inputs: bits, spans, and numbers, or the values of a msgpack tree."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

LARGEST_BYTES = 1 << 16
"""Longer inputs are cut."""

_EXTREMES = [
    value.to_bytes(width, order, signed=value < 0)
    for width in (1, 2, 4, 8)
    for value in (
        0,
        1,
        -1,
        (1 << (8 * width - 1)) - 1,
        -(1 << (8 * width - 1)),
        (1 << (8 * width - 2)),
        16,
        100,
    )
    for order in ("little", "big")
]
_BYTES = [bytes((value,)) for value in range(256)]


def of_bytes(rng: random.Random, seeds: list[bytes]) -> Callable[[], bytes]:
    """Return a function that returns a changed seed each time."""
    chance = rng.random

    def flip(data: bytearray) -> None:
        at = int(chance() * len(data))
        data[at] ^= 1 << int(chance() * 8)

    def set_byte(data: bytearray) -> None:
        data[int(chance() * len(data))] = int(chance() * 256)

    def extreme(data: bytearray) -> None:
        value = _EXTREMES[int(chance() * len(_EXTREMES))]
        at = int(chance() * len(data))
        data[at : at + len(value)] = value

    def cut(data: bytearray) -> None:
        del data[int(chance() * len(data)) :]

    def remove(data: bytearray) -> None:
        at = int(chance() * len(data))
        del data[at : at + 1 + int(chance() * 8)]

    def insert(data: bytearray) -> None:
        at = int(chance() * (len(data) + 1))
        data[at:at] = rng.randbytes(1 + int(chance() * 8))

    def repeat(data: bytearray) -> None:
        at = int(chance() * len(data))
        span = data[at : at + 1 + int(chance() * 32)]
        data[at:at] = span * (1 + int(chance() ** 12 * 1000))

    def splice(data: bytearray) -> None:
        other = seeds[int(chance() * len(seeds))]
        at = int(chance() * len(data))
        data[at:] = other[int(chance() * len(other)) :]

    def append(data: bytearray) -> None:
        data += seeds[int(chance() * len(seeds))]

    changes = (flip, flip, set_byte, extreme, extreme, cut, remove, insert, repeat, splice, append)

    def next_input() -> bytes:
        data = bytearray(seeds[int(chance() * len(seeds))])
        while True:
            if data:
                changes[int(chance() * len(changes))](data)
            else:
                insert(data)
            if chance() < 0.5:
                break
        return bytes(data[:LARGEST_BYTES])

    return next_input


_NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 20,
    1 << 31,
    (1 << 31) - 1,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
)
_FLOATS = (0.0, -1.0, 1e308, 5e-324, float("inf"), float("nan"))
_WORDS = (
    "",
    "x",
    "x" * 300,
    "../..",
    "/",
    "/tmp/../etc",
    "\0",
    "é",
    "float32",
    "object",
    "client-0",
)


def of_trees(
    rng: random.Random,
    seeds: list[bytes],
    part: Callable[[Any], list[Any]] = lambda tree: tree,
    skipped: int = 0,
    more_numbers: Sequence[int] = (),
) -> Callable[[], bytes]:
    """Return a function that returns a msgpack message with some of its values changed.

    Most of the results have the right types, so they pass the decoder and reach a handler.

    Args:
        rng: decides all changes.
        seeds: the messages.
        part: the part of a message that is changed, a list.
        skipped: how many of its first values stay as they are.
        more_numbers: numbers to put in, beside those of the seeds.
    """
    chance, choice = rng.random, rng.choice
    decode, encode = msgspec.msgpack.Decoder().decode, msgspec.msgpack.Encoder().encode
    numbers = list(more_numbers)
    texts: list[str] = []
    blobs: list[bytes] = []

    def collect(node: Any) -> None:
        if isinstance(node, list):
            for one in node:
                collect(one)
        elif type(node) is int:
            numbers.append(node)
        elif isinstance(node, str):
            texts.append(node)
        elif isinstance(node, bytes):
            blobs.append(node)

    for seed in seeds:
        collect(decode(seed))

    def changed(value: Any) -> Any:
        if type(value) is int:
            kind = chance()
            if kind < 0.4:
                return choice(numbers)
            if kind < 0.6:
                return max(-(1 << 63), min(value + choice((-1, 1)), (1 << 64) - 1))
            return choice(_NUMBERS)
        if isinstance(value, bool) or value is None:
            return choice((None, True, False, 0, "", []))
        if isinstance(value, float):
            return choice(_FLOATS)
        if isinstance(value, str):
            return choice(texts) if chance() < 0.5 else choice(_WORDS)
        if isinstance(value, bytes):
            kind = chance()
            if kind < 0.3 and blobs:
                return choice(blobs)
            if kind < 0.6:
                return value[: int(chance() * len(value))]
            if kind < 0.8 and value:
                data = bytearray(value)
                data[int(chance() * len(data))] ^= 1 << int(chance() * 8)
                return bytes(data)
            return value * choice((0, 2, 100))
        return choice((None, 0, [], ""))

    def places(node: Any, found: list[tuple[list[Any], int]], first: int = 0) -> None:
        for index in range(first, len(node)):
            found.append((node, index))
            if type(node[index]) is list:
                places(node[index], found)

    def change(tree: Any) -> None:
        found: list[tuple[list[Any], int]] = []
        places(tree, found, skipped)
        if not found:
            return
        holder, index = found[int(chance() * len(found))]
        value = holder[index]
        if type(value) is not list:
            holder[index] = changed(value)
            return
        kind = chance()
        if not value or kind < 0.1:
            other, at = found[int(chance() * len(found))]
            if type(other[at]) is not list:
                holder[index] = other[at]
        elif kind < 0.4:
            del value[int(chance() * len(value))]
        elif kind < 0.8:
            again = value[int(chance() * len(value))]
            value[len(value) :] = [again] * (1 + int(chance() ** 6 * 300))
        else:
            rng.shuffle(value)

    def next_input() -> bytes:
        tree = decode(seeds[int(chance() * len(seeds))])
        while True:
            change(part(tree))
            if chance() < 0.5:
                break
        data = encode(tree)
        return data if len(data) <= LARGEST_BYTES else b""

    return next_input
