"""The examples that the pages name run, and say what they should."""

from __future__ import annotations

import re

import pytest

from examples.feeding import learned_pairs, merged
from tests.stages.programs import run_python, without_address
from tests.stages.samples import long


def test_byte_pairs() -> None:
    pairs = learned_pairs(b"ababab" * 200 + bytes(range(256)))
    assert pairs[0] in {(97, 98), (98, 97)}
    assert merged([1, 2, 1, 2, 3], (1, 2), 256) == [256, 256, 3]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["examples.feeding"], r"restored at element 20\nlosses from there: equal bit for bit"),
        (["examples.ragged"], r"50 different labels\n8 batches of sentences: as numpy says"),
        (
            ["examples.offload"],
            r"(?s)pw\.jit, moments in device: 16\d+ bytes.*pw\.jit, moments in pinned_host: 58\d+ bytes"
            r".*jax\.jit, moments in pinned_host: .*20 losses, four times the same, bit for bit",
        ),
        (["examples.suspended"], r"went on on island-\d\nall 200 losses are the same, bit for bit"),
        (["examples.elastic"], r"on \[2, 1, 2\] islands; all 60 losses are\nthe same, bit for bit"),
        long(
            ["examples.moe", "--steps", "12"],
            r"5 losses: as in plain JAX .*\n4 experts, .* [34]\.\d+ nats a byte\none .* nats a byte",
        ),
        long(
            ["examples.branches"], "12 requests, 4 of them for the large model; all as in plain JAX"
        ),
        long(["examples.decoding"], "8 sequences of 1 to 33 tokens, in 34 steps; as in plain JAX"),
        long(
            ["examples.rollouts"],
            r"mean reward 0\.9\d after (\d+) .*\nplain JAX: 0\.9\d after \1\n",
        ),
        long(
            ["examples.shared_weights"],
            r"(?s)4 versions.*adapter: the weights take 0 B more\nadapter: loss 0\.[45]\d+ to 0\.[0-4]",
        ),
        long(["examples.serving", "--seconds", "1"], r"small +1 .* ms\nlarge +3 .* ms"),
    ],
)
def test_an_example(arguments: list[str], words: str) -> None:
    done = run_python(["-m", *arguments], environment=without_address())
    assert done.returncode == 0, done.stderr
    assert re.search(words, done.stdout), done.stdout
