"""Frames of the control plane, with every kind of message."""

from __future__ import annotations

from pw.transport.links import codec
from tests.fuzz import mutation
from tests.fuzz.target import Target
from tests.fuzz.values import frames


def run(data: bytes) -> None:
    """A frame that decodes can be sent again: messages are passed on."""
    frame = codec.decode(data)
    for envelope in frame.envelopes:
        codec.encode_message(envelope[2])


TARGETS = [
    Target("frames", lambda: frames(3), run, allowed=(codec.MalformedFrame,), weight=46.5),
    Target(
        "frames-of-right-types",
        lambda: frames(3),
        run,
        allowed=(codec.MalformedFrame,),
        weight=3,
        mutate=mutation.of_trees,
    ),
]
