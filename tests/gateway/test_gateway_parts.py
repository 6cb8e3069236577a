"""The parts of the gateway that need no cluster: headers, descriptors, shardings, statuses, options."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pw.core import errors
from pw.core.messages import SliceBound
from pw.gateway.choosing import Wanted, allocate, are_slices
from pw.gateway.protocol import protos, shardings, statuses
from pw.gateway.protocol.dtypes import kind_of, name_of
from pw.gateway.protocol.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM
from pw.gateway.protocol.headers import HeaderDecoder
from pw.gateway.protocol.http2 import Http2Connection, Http2Stream
from pw.gateway.protocol.rpc import RpcCall
from tests.stages.gateway_client import framed

MESH = AbstractMesh((2, 2, 2), ("x", "y", "z"))
SPECS = (
    P(),
    P("x"),
    P(None, "y"),
    P("y", "x"),
    P(("x", "y"), None),
    P(("z", "x", "y")),
    P(("y", "z"), "x"),
    P(None, ("z", "y", "x")),
)
SHAPE = (16, 24)


# --- headers -----------------------------------------------------------------------------------------


def _plain(name: bytes, value: bytes) -> bytes:
    """Encode a header in plain bytes that do not go into the table."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.binary(max_size=9)), max_size=30)
)
def test_headers_are_those_that_hpack_decodes(blocks: list[tuple[int, int, bytes]]) -> None:
    encoder, decoder, reference = Encoder(), HeaderDecoder(1 << 16), Decoder()
    for same, new, binary in blocks:
        headers = [(b":path", b"/%d" % same), (b"te", b"trailers")]
        block = encoder.encode(headers * (new + 1), huffman=bool(same % 2))
        block += _plain(b"of-this-bin", binary) * new
        assert decoder.decode(block) == list(reference.decode(block, raw=True))


@pytest.mark.parametrize("cut", range(1, 14))
def test_headers_that_are_not_complete_are_refused(cut: int) -> None:
    decoder = HeaderDecoder(1 << 16)
    block = b"\x83" + _plain(b"name", b"value")
    assert decoder.decode(block) == [(b":method", b"POST"), (b"name", b"value")]
    for _ in range(2):
        if cut < len(block) - 1:
            with pytest.raises(HPACKError):
                decoder.decode(block[:-cut])
    assert decoder.decode(block[:1]) == [(b":method", b"POST")]


def test_a_place_of_several_bytes_is_no_plain_header() -> None:
    decoder, reference = HeaderDecoder(1 << 16), Decoder()
    encoder = Encoder()
    for at in range(80):
        block = encoder.encode([(b"n", b"%d" % at)])
        assert decoder.decode(block) == list(reference.decode(block, raw=True))
    block = b"\xff\x00"  # place 127
    assert decoder.decode(block) == list(reference.decode(block, raw=True))


# --- streams -----------------------------------------------------------------------------------------


class _Call(RpcCall):
    def message(self, data: bytes) -> None:
        pass

    def ended(self) -> None:
        self.end()


ENDS = {
    "its client has sent all": lambda wire: wire.data_received(framed(DATA, END_STREAM, 1)),
    "its client resets it": lambda wire: wire.data_received(framed(RST_STREAM, 0, 1, bytes(4))),
    "the connection is lost": lambda wire: wire.connection_lost(None),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_call_that_is_over_is_freed_at_once(end: str) -> None:
    """It may hold a host buffer, and the gateway rarely collects."""
    calls: list[Any] = []

    async def run() -> None:
        def opened(stream: Http2Stream, headers: list[tuple[bytes, bytes]]) -> None:
            calls.append(weakref.ref(_Call(stream, dict(headers))))

        wire = Http2Connection(opened, lambda connection: None)
        wire.connection_made(SimpleNamespace(write=bytes, writelines=list, close=int))
        wire.data_received(PREFACE + framed(HEADERS, END_HEADERS, 1, b"\x83"))
        assert calls[0]() is not None
        ENDS[end](wire)

    gc.disable()
    try:
        asyncio.run(run())
        assert [call() for call in calls] == [None]
    finally:
        gc.enable()


# --- descriptors -------------------------------------------------------------------------------------


@pytest.fixture
def other_protos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A copy of `protos` that reads another jaxlib, which the test writes to `tmp_path`."""
    spec: Any = protos.__spec__
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    (tmp_path / "__init__.py").touch()
    other = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: other)
    return copy


@pytest.mark.parametrize(
    "content", [None, b"no descriptors", b"\n\x0bxla/a.proto" * 9, b"\x00" * 99]
)
def test_a_jaxlib_without_the_descriptors_is_a_version_that_does_not_fit(
    content: bytes | None, other_protos: Any, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "libjax_common.so").write_bytes(content)
    with pytest.raises(errors.VersionMismatch, match=r"out of jaxlib .*Install the version of jax"):
        other_protos.message("xla.ifrt.proxy.IfrtRequest")


def test_a_message_that_jaxlib_lacks_is_named() -> None:
    with pytest.raises(errors.VersionMismatch, match=r"no message xla\.Unheard"):
        protos.message("xla.Unheard")
    with pytest.raises(errors.VersionMismatch, match=r"no enumeration xla\.Unheard"):
        protos.enum("xla.Unheard")


def test_dtypes_have_numbers_and_names() -> None:
    for name in ("bool", "int4", "uint64", "bfloat16", "float8_e4m3fn", "complex128"):
        assert name_of(kind_of(name)) == name
    with pytest.raises(errors.ArgumentError, match="number 9999"):
        name_of(9999)


# --- shardings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_partitions_are_those_of_jax(spec: P) -> None:
    sharding = NamedSharding(MESH, spec)
    hlo = sharding._to_xla_hlo_sharding(len(SHAPE))
    said = protos.message("xla.OpSharding").FromString(hlo.to_proto().SerializeToString())
    parts = shardings.partitions(said, len(SHAPE))
    assert shardings.divided(SHAPE, parts) == sharding.shard_shape(SHAPE)


@pytest.mark.parametrize("is_replicated", [False, True])
@pytest.mark.parametrize("devices", [(3,), (0, 2, 1)])
def test_what_is_written_is_read(devices: tuple[int, ...], is_replicated: bool) -> None:
    proto = protos.message("xla.ifrt.ShardingProto")()
    shard = SHAPE if is_replicated or len(devices) == 1 else (8, 24)
    how = {"is_replicated": is_replicated}
    shardings.write(proto, devices, "pinned_host", SHAPE, shard, **how)
    layout = shardings.read(proto, SHAPE)
    assert layout[:2] == (devices, "pinned_host")
    assert layout.is_replicated == (is_replicated or len(devices) == 1)
    assert layout.shard_shape == shard


def test_a_sharding_that_is_not_supported_is_named() -> None:
    proto = protos.message("xla.ifrt.ShardingProto")()
    proto.serialized_sharding.type_name = "xla::ifrt::Moebius"
    with pytest.raises((statuses.StatusError, errors.VersionMismatch), match="Moebius"):
        shardings.read(proto, SHAPE)


@pytest.mark.parametrize(
    ("data", "shape", "strides"),
    [
        (b"x" * 39, (10,), None),
        (b"x" * 40, (-1,), None),
        (b"x" * 40, (10, -1), None),
        (b"x" * 40, (1 << 62,), None),
        (b"x" * 40, (5, 2), (4, 24)),
        (b"x" * 40, (5, 2), (4,)),
        (b"x" * 40, (1 << 70,), None),
    ],
)
def test_bytes_that_are_no_array_are_refused(data: bytes, shape: Any, strides: Any) -> None:
    with pytest.raises(statuses.StatusError, match=f"a host buffer of {len(data)} bytes cannot be"):
        shardings.strided(data, np.dtype(np.float32), shape, strides)


# --- statuses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (statuses.StatusError("ABORTED", "words"), "ABORTED"),
        (errors.ArrayLost("words"), "DATA_LOSS"),
        (errors.HostLost("words"), "DATA_LOSS"),
        (errors.Disconnected("words"), "UNAVAILABLE"),
        (errors.ArgumentError("words"), "INVALID_ARGUMENT"),
        (errors.Cancelled("words"), "CANCELLED"),
        (CancelledError("words"), "CANCELLED"),
        (errors.Error("words"), "INTERNAL"),
        (errors.Error("XlaRuntimeError: RESOURCE_EXHAUSTED: words"), "RESOURCE_EXHAUSTED"),
    ],
)
def test_errors_have_the_codes_that_scripts_look_for(error: BaseException, code: str) -> None:
    number, words = statuses.status_of(error)
    assert (number, words) == (statuses.CODES[code], "words")
    again = statuses.received(number, words)
    assert (again.code, str(again)) == (code, "words")


# --- what is asked for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "islands", "environment", "expected"),
    [
        (None, "", {}, Wanted(None, None, None)),
        (None, "", {"PW_DEVICES": "8", "PW_ISLANDS": "2"}, Wanted(8, 2, None)),
        (4, "1", {"PW_DEVICES": "8", "PW_ISLANDS": "2"}, Wanted(4, 1, None)),
        (None, "a, b", {}, Wanted(None, 2, ("a", "b"))),
    ],
)
def test_options_come_before_the_environment(
    devices: int | None, islands: str, environment: dict[str, str], expected: Wanted
) -> None:
    assert Wanted.of(devices, islands, environment) == expected


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_number_of_devices_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(errors.Error, match="PW_DEVICES must be a number of 1 or more"):
        Wanted.of(None, "", {"PW_DEVICES": text})


def test_islands_are_one_slice_unless_that_is_asked_for() -> None:
    asked = [{}, {"PW_SLICES": "one"}, {"PW_SLICES": "islands"}]
    assert [are_slices(one) for one in asked] == [False, False, True]
    with pytest.raises(errors.Error, match="PW_SLICES must be one or islands, not 'two'"):
        are_slices({"PW_SLICES": "two"})


def test_devices_divide_over_islands() -> None:
    assert Wanted(6, 2, None).devices_each(2) == 3
    assert Wanted(None, 2, None).devices_each(2) is None
    with pytest.raises(errors.Error, match="5 devices do not divide over 2 islands"):
        Wanted(5, 2, None).devices_each(2)


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        (Wanted(None, None, None), [(None, ()), (None, (1,)), (None, (1, 2))]),
        (Wanted(None, 2, None), [(None, ()), (None, (1,))]),
        (Wanted(None, 2, ("b", "a")), [("b", ()), ("a", (1,))]),
    ],
)
def test_the_islands_of_a_cluster_that_starts_are_waited_for(wanted: Wanted, asked: Any) -> None:
    here, waits, released = (
        [SimpleNamespace(name="a", devices=4, exclusive=0, hosts=["h"], state="ready")],
        [],
        [],
    )

    def bind(devices: int, kind: None, island: str | None, topology: None, **how: Any) -> Any:
        if not how:  # the islands have come
            return SliceBound(0, island or "", "cpu", "kind", (), 1)
        waits.append((island, how["apart"]))
        if (name := "abc"[len(waits) - 1]) != "a":
            here.append(
                SimpleNamespace(name=name, devices=4, exclusive=0, hosts=["h"], state="ready")
            )
        return SimpleNamespace(slice=len(waits))

    def status() -> Any:
        return SimpleNamespace(islands=tuple(here), awaited_islands=3 - len(here))

    runtime: Any = SimpleNamespace(
        ask=SimpleNamespace(status=status),
        allocate_slice=bind,
        release_slice=released.append,
        alive=False,
    )
    slices = allocate(runtime, wanted)
    assert waits == asked
    assert released == list(range(1, len(asked) + 1))
    assert len(slices) == len(asked)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("wanted", [Wanted(None, None, None), Wanted(None, 1, ("a",))])
def test_an_island_without_hosts_is_waited_for(wanted: Wanted, others: int) -> None:
    """Another controller has begun, or the island forms again after a loss."""
    island = SimpleNamespace(
        name="a", devices=0, exclusive=0, hosts=[], state="waiting", is_late=False
    )
    ready = SimpleNamespace(
        name="b", devices=4, exclusive=0, hosts=["h"], state="ready", is_late=False
    )
    waits = []

    def bind(devices: int, kind: None, name: str | None, topology: None, **how: Any) -> Any:
        if how:
            waits.append(name)
            vars(island).update(devices=4, exclusive=0, hosts=["h"], state="ready")
        return SliceBound(devices, name or "a", "cpu", "kind", (), 1)

    slices = allocate(_runtime([island, *[ready] * others], bind), wanted)
    assert len(slices) == (1 if wanted.island_names else 1 + others)
    assert len(waits) == 1


def test_an_island_that_is_lost_or_does_not_come_is_left_out() -> None:
    states = {"a": "waiting", "b": "ready", "c": "waiting"}
    islands = [
        SimpleNamespace(
            name=name,
            devices=4,
            exclusive=0,
            hosts=["h"] if state == "ready" else [],
            state=state,
            is_late=name == "a",
        )
        for name, state in states.items()
    ]
    waits = []

    def bind(devices: int, kind: None, name: str | None, topology: None, **how: Any) -> Any:
        if how:
            waits.append(name)
            raise errors.InsufficientDevices("it has not come")
        return SliceBound(devices, name or "", "cpu", "kind", (), 1)

    assert len(allocate(_runtime(islands, bind), Wanted(None, None, None))) == 1
    assert waits == ["c"]


def _runtime(islands: list[Any], allocate_slice: Any) -> Any:
    """Return a runtime whose cluster has these islands, and no session."""

    def status() -> Any:
        copies = tuple(SimpleNamespace(**vars(island)) for island in islands)
        return SimpleNamespace(islands=copies, awaited_islands=0)

    return SimpleNamespace(
        ask=SimpleNamespace(status=status),
        allocate_slice=allocate_slice,
        release_slice=lambda number: None,
        alive=False,
    )


def test_too_many_devices_are_told_as_they_were_asked_for() -> None:
    def refuse(devices: int, *_: Any) -> int:
        raise errors.InsufficientDevices(f"no island has {devices} devices")

    islands = [
        SimpleNamespace(name=name, devices=4, exclusive=0, hosts=["a host"], state="ready")
        for name in "ab"
    ]
    runtime = _runtime(islands, refuse)
    words = "^64 devices are asked for, 32 on each of 2 islands: no island has 32 devices$"
    with pytest.raises(errors.InsufficientDevices, match=words):
        allocate(runtime, Wanted(64, None, None))
    with pytest.raises(errors.InsufficientDevices, match=r"^no island has 64 devices$"):
        allocate(runtime, Wanted(64, 1, None))
