"""Frames: every message survives the wire, and nothing that comes off it can do harm."""

from __future__ import annotations

import ast
import contextlib
import enum
import functools
import math
import operator
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.core import messages
from pw.core.compact import Compact, Ranges
from pw.core.errors import ProtocolError
from pw.transport.links import codec
from tests.stages.programs import ROOT
from tests.stages.samples import examples

KINDS = messages.REMOTE
ENVELOPE = b"\x93\xa0\xa0"


@functools.cache
def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """All values of a type that messages are made of."""
    simple = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
        types.NoneType: st.none(),
    }
    if kind in simple:
        return simple[kind]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind, include_extras=True)
        fields = {name: values_of(hints[name]) for name in kind.__struct_fields__}
        return st.builds(kind, **fields)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return within(args[0], args[1:])
    if isinstance(origin, type) and issubclass(origin, Compact):
        return st.builds(Compact, values_of(args[0]), st.lists(values_of(Ranges)).map(tuple))
    if origin in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(values_of, args))
    if origin is tuple and args[1:] == (...,):
        return st.lists(values_of(args[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=2)
    raise AssertionError(f"no strategy for {kind}")


def within(kind: Any, marks: tuple[object, ...]) -> st.SearchStrategy[Any]:
    """Values of a type that are within bounds; lengths of 2 and strings of 8 always are."""
    bounds = [mark for mark in marks if isinstance(mark, msgspec.Meta)]
    least = [b.ge if b.gt is None else b.gt + 1 for b in bounds if (b.ge, b.gt) != (None, None)]
    most = [bound.le for bound in bounds if bound.le is not None]
    if least or most:
        if kind is float:
            return st.floats(max(least, default=-math.inf), min(most, default=math.inf))
        return st.integers(max(least, default=-(2**63)), min(most, default=2**63 - 1))
    return values_of(kind)


envelopes = st.lists(
    st.tuples(st.text(max_size=8), st.text(max_size=8), st.sampled_from(KINDS).flatmap(values_of)),
    max_size=3,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(15))
@given(data=st.data())
def test_every_message_comes_back_as_it_was(kind: type, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    frame = codec.decode(codec.encode_frame(7, [("to", "from", message)]))
    assert frame == codec.Frame(7, [("to", "from", message)])
    assert type(frame.envelopes[0][2]) is kind


@given(st.integers(-1, 2**63), envelopes)
def test_a_frame_comes_back_in_order(sequence: int, sent: list[Any]) -> None:
    assert codec.decode(codec.encode_frame(sequence, sent)) == codec.Frame(sequence, sent)


@settings(max_examples=examples(500))
@given(st.binary(max_size=200))
def test_random_bytes_are_malformed(data: bytes) -> None:
    decode_or_malformed(data)


@given(envelopes, st.data())
def test_damaged_frames_are_malformed_or_frames(sent: list[Any], data: st.DataObject) -> None:
    frame = bytearray(codec.encode_frame(1, sent))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    decode_or_malformed(bytes(frame))


@given(envelopes, st.data())
def test_truncated_frames_are_malformed(sent: list[Any], data: st.DataObject) -> None:
    frame = codec.encode_frame(1, sent)
    with pytest.raises(codec.MalformedFrame):
        codec.decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92\x00",
        b"\x92\x00\x90trailing",
        b"\x92\xc2\x90",  # a boolean as sequence
        b"\x92\x00\x91" + ENVELOPE + b"\x92\xcc\xc8\x00",  # an unknown tag
        b"\x92\x00\x91" + ENVELOPE + b"\x92\x28\xa3abc",  # a field of the wrong type
        b"\x92\x00\x91\x93\xa1\xff\xa0\x91\x03",  # a name that is not UTF-8
        b"\x92\x00\xdd\xff\xff\xff\xff",  # four billion envelopes, it says
        b"\x92\x00" + b"\x91" * 100_000,  # nested beyond any sense
        b"\x92\x00\x91" + ENVELOPE + b"\x93\x2e" + b"\x91" * 100_000,
    ],
)
def test_hostile_frames_are_malformed(data: bytes) -> None:
    with pytest.raises(codec.MalformedFrame):
        codec.decode(data)


@pytest.mark.parametrize(("extra", "refused"), [(-10, False), (1, True)])
def test_a_frame_holds_a_bounded_number_of_objects(extra: int, refused: bool) -> None:
    count = codec.MAX_OBJECTS + extra
    numbers = b"\xcc\xff" * count  # two bytes each, so that the size alone says nothing
    data = b"\x92\x00\x91" + ENVELOPE + b"\x92\x2e" + b"\xdd" + count.to_bytes(4, "big") + numbers
    if refused:
        with pytest.raises(codec.MalformedFrame, match="objects"):
            codec.decode(data)
    else:
        ((_, _, message),) = codec.decode(data).envelopes
        assert message == messages.Delete((255,) * count)


def test_the_bound_on_objects_does_not_bound_blobs() -> None:
    artifact = messages.EdgeData(1, 2, bytes(codec.MAX_OBJECTS * 2))
    frame = codec.encode_frame(0, [("a", "b", artifact)] * 3)
    assert codec.decode(frame).envelopes == [("a", "b", artifact)] * 3


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=300),
    st.binary(max_size=300),
    st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=300)),
)
trees = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner),
    max_leaves=30,
)


@settings(max_examples=examples(200))
@given(trees)
def test_objects_are_counted_right(value: Any) -> None:
    def objects(value: Any) -> int:
        if isinstance(value, list):
            return 1 + sum(map(objects, value))
        if isinstance(value, dict):
            return 1 + len(value) + sum(map(objects, value.values()))
        return 1

    data = msgspec.msgpack.encode(value)
    assert not codec.exceeds_objects(data, objects(value))
    assert codec.exceeds_objects(data, objects(value) - 1)


def test_what_no_frame_can_hold_is_refused_before_it_is_sent() -> None:
    with pytest.raises(codec.MessageTooLarge, match="bytes"):
        codec.encode_message(messages.EdgeData(1, 1, bytes(codec.MAX_FRAME_BYTES)))
    with pytest.raises(codec.MessageTooLarge, match="objects"):
        codec.encode_message(messages.Delete((255,) * (codec.MAX_OBJECTS + 1)))
    with pytest.raises(codec.MalformedFrame, match="bytes"):
        codec.decode(bytes(codec.MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize(
    "message",
    [
        messages.PeerLost("h0", "a local note"),
        messages.UploadEnded(1),
        "a string",
        messages.Ready(2**64),
        messages.Ready(object()),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_message_is_refused_before_it_is_sent(message: object) -> None:
    with pytest.raises(ProtocolError):
        codec.encode_message(message)


def decode_or_malformed(data: bytes) -> None:
    with contextlib.suppress(codec.MalformedFrame):
        assert isinstance(codec.decode(data), codec.Frame)


def test_decoders_of_types_are_made_by_imports() -> None:
    """Two threads that make the first decoder of a type at once crash: msgspec publishes it unfinished."""
    found = []
    for path in (ROOT / "pw").rglob("*.py"):
        if path.name == "channel.py":
            continue  # makes one at a time, of types that nothing else decodes
        source = path.read_text()
        if "msgspec." not in source:
            continue
        for function in ast.walk(ast.parse(source)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                found += [
                    f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call) and makes_a_decoder(call)
                ]
    assert not found, "make a module's own `Decoder(kind).decode`:\n" + "\n".join(found)


def makes_a_decoder(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    typed = any(keyword.arg == "type" for keyword in call.keywords)
    return name.startswith("msgspec.") and (name.endswith(".Decoder") or typed)
