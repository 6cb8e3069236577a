"""Clients of a gateway that err, break off or die: words for them, nothing left, no harm to others."""

from __future__ import annotations

import gc
import random
import struct
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from pw.client.connection import current
from pw.gateway.protocol import protos
from pw.gateway.protocol.statuses import CODES
from tests.gateway.gateway_cases import numbers, over
from tests.stages.daemons import until
from tests.stages.gateway_client import PROXY, Talker, Wire
from tests.stages.gateway_stage import Stage

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture
def talker(stage: Stage) -> Iterator[Talker]:
    """A client that speaks the protocol; afterwards nothing of it is left."""
    with Talker(stage.address) as talker:
        yield talker
    stage.until_alone()


@pytest.fixture
def neighbour(stage: Stage) -> Iterator[None]:
    """Another client of the same gateway, which works before and after the test."""
    devices = stage.neighbour()
    kept = jax.device_put(numbers(8), over(devices[:4], "x")) + 1
    yield
    np.testing.assert_array_equal(np.asarray(kept * 2), (numbers(8) + 1) * 2)


# --- connections -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "most"), [(1, 3), (900, 901)])
def test_a_client_with_another_protocol_is_told_which_version_to_install(
    least: int, most: int, stage: Stage
) -> None:
    asked = protos.message(PROXY + "GrpcGetVersionRequest")()
    asked.min_version.protocol_version, asked.max_version.protocol_version = least, most
    with Wire(stage.address) as wire:
        stream = wire.open("GetVersion")
        wire.message(stream, asked.SerializeToString(), last=True)
        code, words = wire.ending(stream)
    assert code == "9"
    assert f"versions {least} to {most} of JAX's remote protocol" in words
    assert "the same version of jaxlib" in words


GARBAGE = {
    "no HTTP/2": lambda wire: wire.raw(b"GET / HTTP/1.1\r\n\r\n" * 4),
    "a frame that is too large": lambda wire: wire.raw(b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"),
    "headers that are none": lambda wire: wire.frame(1, 4, 1, b"\xff" * 40),
    "headers without an end": lambda wire: [wire.frame(1, 0, 1, b""), wire.frame(0, 0, 1, b"x")],
    "bytes in the middle of headers": lambda wire: [
        wire.frame(1, 0, 1, b""),
        wire.raw(b"\0\0\x05\0\0\0\0\0\x01x"),
    ],
    "a window of three bytes": lambda wire: wire.frame(8, 0, 0, b"abc"),
    "a pushed stream": lambda wire: wire.frame(5, 4, 2, b"\x00" * 8),
    "more padding than bytes": lambda wire: wire.frame(1, 4 | 8, 1, b"\x09ab"),
    "noise": lambda wire: wire.raw(random.Random(7).randbytes(4096)),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_a_connection_that_is_no_gRPC_is_closed(what: str, stage: Stage, neighbour: None) -> None:
    with Wire(stage.address) as wire:
        GARBAGE[what](wire)
        assert wire.is_closed()


def test_a_method_that_there_is_not_is_refused(stage: Stage) -> None:
    with Wire(stage.address) as wire:
        assert wire.ending(wire.open("Nonsense"))[0] == "12"


@pytest.mark.parametrize("data", [b"\xff" * 20, b"\x0a\xff\xff\xff\xff\x0f", b"\x12"])
def test_a_request_that_cannot_be_read_ends_the_session(data: bytes, stage: Stage) -> None:
    with Talker(stage.address) as talker:
        talker.message(talker.stream, data)
        code, words = talker.ending(talker.stream)
        assert (code, "cannot be read" in words) == ("3", True)
    stage.until_alone()


@pytest.mark.parametrize(
    ("prefix", "code"), [(b"\x00\xff\xff\xff\xff", "8"), (b"\x01\x00\x00\x00\x01x", "12")]
)
def test_a_message_that_is_too_large_or_compressed_ends_the_session(
    prefix: bytes, code: str, stage: Stage
) -> None:
    with Talker(stage.address) as talker:
        talker.frame(0, 0, talker.stream, prefix)
        assert talker.ending(talker.stream)[0] == code
        stage.until_alone()


# --- requests ----------------------------------------------------------------------------------------


UNKNOWN = 0xDEAD
ABOUT_HANDLES = {
    "check_value_ready_request": {"value_handles": [UNKNOWN]},
    "copy_to_host_buffer_request": {"array_handle": UNKNOWN, "host_buffer_handle": 3},
    "copy_arrays_request": {"array_handles": [UNKNOWN], "device_ids": [0], "result_handles": [4]},
    "disassemble_into_single_device_arrays_request": {"array_handle": UNKNOWN},
    "fully_replicated_shard_request": {"array_handle": UNKNOWN, "result_handle": 4},
    "is_array_deleted_request": {"array_handle": UNKNOWN},
    "assemble_array_from_single_device_arrays_request": {"single_device_array_handles": [UNKNOWN]},
    "remap_arrays_request": {"array_handles": [UNKNOWN], "result_handles": [4]},
    "loaded_executable_metadata_request": {"loaded_executable_handle": UNKNOWN},
    "loaded_executable_execute_request": {
        "loaded_executable_handle": UNKNOWN,
        "result_array_handle": [4],
    },
    "loaded_executable_cost_analysis_request": {"loaded_executable_handle": UNKNOWN},
    "loaded_executable_human_readable_program_text_request": {"loaded_executable_handle": UNKNOWN},
    "loaded_executable_fetch_execute_result_request": {"result_status_handle": UNKNOWN},
}


def test_a_handle_that_does_not_exist_is_not_found(talker: Talker) -> None:
    for kind, fields in ABOUT_HANDLES.items():
        code, words = talker.refusal(kind, **fields)
        assert code == CODES["NOT_FOUND"], (kind, code, words)
        assert hex(UNKNOWN) in words, kind
    # What was to be made by a refused request has its error.
    assert talker.refusal("check_value_ready_request", value_handles=[4])[0] == CODES["NOT_FOUND"]
    for kind in ("delete_array_request", "destruct_array_request"):
        assert talker.refusal(kind, array_handle=[UNKNOWN])[0] == 0
    assert talker.refusal("loaded_executable_destruct_request", loaded_executable_handle=9)[0] == 0


def test_a_deleted_array_is_refused_as_jax_says_it(talker: Talker) -> None:
    put(talker, array=1)
    assert talker.ask("delete_array_request", array_handle=[1]).response_metadata.status.code == 0
    asked = talker.ask("is_array_deleted_request", array_handle=1)
    assert asked.is_array_deleted_response.deleted
    code, words = talker.refusal("check_value_ready_request", value_handles=[1])
    assert (code, "Array has been deleted" in words) == (CODES["INVALID_ARGUMENT"], True)
    talker.ask("destruct_array_request", array_handle=[1])
    assert talker.refusal("is_array_deleted_request", array_handle=1)[0] == CODES["NOT_FOUND"]


def test_requests_with_impossible_contents_are_refused(talker: Talker) -> None:
    put(talker, array=1)
    copy = talker.refusal("copy_arrays_request", array_handles=[1], device_ids=[77])
    assert (copy[0], "there is no device 77" in copy[1]) == (CODES["NOT_FOUND"], True)
    assert talker.refusal("compile_request")[0] == CODES["UNIMPLEMENTED"]
    assignment = {"num_replicas": 100, "num_partitions": 1}
    words = talker.refusal("get_default_device_assignment_request", **assignment)[1]
    assert "100 devices are asked for, and there are 8" in words
    for request in (
        talker.array_request(buffer=5, array=2, size=10, device=99),  # no such device
        talker.array_request(buffer=6, array=3, size=1 << 40),  # larger than its bytes
        talker.array_request(buffer=7, array=4, size=-1),
    ):
        body = request.make_array_from_host_buffer_request
        store(talker, body.host_buffer_handle, numbers(10))
        reply = talker.reply(talker.send(request))
        assert reply.response_metadata.status.code != 0, body
        assert "Traceback" not in reply.response_metadata.status.message
        used = talker.refusal("check_value_ready_request", value_handles=[body.array_handle])
        assert used[1] == reply.response_metadata.status.message
    unknown = talker.request("init_request")
    unknown.ClearField("init_request")
    assert (
        talker.reply(talker.send(unknown)).response_metadata.status.code == CODES["UNIMPLEMENTED"]
    )


def test_random_requests_are_answered_or_end_the_session(stage: Stage, neighbour: None) -> None:
    """Fields of real requests with random bytes: the session ends, or all requests are answered."""
    rng = random.Random(7)
    for _ in range(12):
        with Talker(stage.address) as talker:
            request = bytearray(talker.array_request(1, 2, 10).SerializeToString())
            store(talker, 1, numbers(10))
            for _ in range(3):
                request[rng.randrange(len(request))] = rng.randrange(256)
            talker.message(talker.stream, bytes(request))
            last = talker.request("check_future_request")
            talker.message(talker.stream, last.SerializeToString(), last=True)
            while talker.answer(talker.stream) is not None:
                pass
            assert talker.ending(talker.stream)[0] in ("0", "3")
    stage.until_alone()


# --- host buffers ------------------------------------------------------------------------------------


def store(talker: Talker, handle: int, value: Any) -> None:
    stream = talker.store(handle, value.nbytes)
    talker.chunk(stream, value.tobytes(), last=True)
    assert talker.ending(stream) == ("0", "")


def put(talker: Talker, array: int, buffer: int = 100, size: int = 10) -> None:
    store(talker, buffer, numbers(size))
    reply = talker.reply(talker.send(talker.array_request(buffer, array, size)))
    assert reply.response_metadata.status.code == 0


@pytest.mark.parametrize(
    ("sent", "words"),
    [(48, "has more than the 40 bytes announced"), (36, "ended after 36 of 40 bytes")],
)
def test_a_host_buffer_of_the_wrong_size_is_the_error_of_its_array(
    sent: int, words: str, talker: Talker
) -> None:
    operation = talker.send(talker.array_request(buffer=8, array=2, size=10))
    stream = talker.store(8, 40)
    talker.chunk(stream, b"x" * sent, last=True)
    code, said = talker.ending(stream)
    assert (code, words in said) == ("15", True)
    assert words in talker.reply(operation).response_metadata.status.message
    assert words in talker.refusal("check_value_ready_request", value_handles=[2])[1]
    put(talker, array=3)  # the session goes on


def test_a_client_that_leaves_without_a_host_buffer_has_its_requests_failed(stage: Stage) -> None:
    """The bytes of one are on their way when it leaves; those of two others never come."""
    with Talker(stage.address) as talker:
        stream = talker.store(8, 40)
        operations = [
            talker.send(talker.array_request(buffer=buffer, array=buffer, size=10))
            for buffer in (8, 9, 10)
        ]
        talker.frame(0, 1, talker.stream, b"")
        talker.chunk(stream, numbers(10).tobytes(), last=True)
        sent, *missing = [talker.reply(one).response_metadata.status for one in operations]
        assert sent.code == 0
        for status in missing:
            assert status.code == CODES["UNAVAILABLE"]
            assert "the client left without sending this host buffer" in status.message
        assert talker.ending(talker.stream) == ("0", "")
    stage.until_alone()


def test_a_request_for_a_host_buffer_that_is_deleted_fails(talker: Talker) -> None:
    operation = talker.send(talker.array_request(buffer=8, array=2, size=10))
    deleted = protos.message(PROXY + "GrpcHostBufferDeleteRequest")(
        session_id=talker.session, handle=8
    )
    stream = talker.open("HostBufferDelete")
    talker.message(stream, deleted.SerializeToString(), last=True)
    status = talker.reply(operation).response_metadata.status
    assert status.code == CODES["UNAVAILABLE"]
    assert "the client has deleted this host buffer" in status.message
    put(talker, array=3)  # the session goes on


@pytest.mark.parametrize("size", [-1, 1 << 50])
def test_a_host_buffer_that_is_too_large_is_refused(size: int, talker: Talker) -> None:
    code, words = talker.ending(talker.store(9, size))
    assert (code, f"a host buffer of {size} bytes" in words) == ("8", True)


def test_a_host_buffer_of_no_session_is_refused(stage: Stage) -> None:
    with Wire(stage.address) as wire:
        said = protos.message(PROXY + "GrpcHostBufferStoreMetadata")(session_id=4711, handle=1)
        name = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
        stream = wire.open("HostBufferStore", {name: said.SerializeToString()})
        assert wire.ending(stream) == ("5", "there is no such session")
        assert wire.ending(wire.open("HostBufferStore"))[0] == "3"
        lookup = protos.message(PROXY + "GrpcHostBufferLookupRequest")(session_id=4711, handle=1)
        stream = wire.open("HostBufferLookup")
        wire.message(stream, lookup.SerializeToString(), last=True)
        assert wire.ending(stream)[0] == "5"


def test_a_client_that_dies_in_a_host_buffer_leaves_nothing(stage: Stage, neighbour: None) -> None:
    """Other arrays of it lie on hosts; one waits for bytes, and one read for its array."""
    with Talker(stage.address) as talker:
        put(talker, array=1, size=100_000)
        talker.ask("check_value_ready_request", value_handles=[1])
        talker.send(talker.array_request(buffer=8, array=2, size=1000))
        read = {"array_handle": 2, "host_buffer_handle": 9}
        talker.send(talker.request("copy_to_host_buffer_request", **read))
        stream = talker.store(8, 4000)
        talker.frame(0, 0, stream, struct.pack(">BI", 0, 2003) + b"\x0a\xd0\x0f" + b"x" * 500)
        until(lambda: sum(one.arrays for one in stage.others()) >= 2, "the array on its host")
    stage.until_alone()


# --- growth ------------------------------------------------------------------------------------------


def live(stage: Stage) -> dict[str, int]:
    """Return what hosts, the controller and the clients of the gateway have now."""
    found = {}
    # JAX's client tells of what it has released with its next request. So small a value stays here.
    jax.block_until_ready(jax.device_put(numbers(1), stage.neighbour()[0]))
    told = current.runtime().ask.stats(20.0)
    for node, counters in ((node, one.counters) for node, one in told.items()):
        for name in LIVE:
            if name in counters:
                found[f"{node} {name}"] = counters[name]
    for name in ("arrays", "programs", "slices", "runs"):
        found[name] = sum(getattr(one, name) for one in stage.others())
    return found


def test_a_result_that_is_read_now_and_then_is_donated_nevertheless(stage: Stage) -> None:
    step = jax.jit(lambda count: (count + 1, count * 2), donate_argnums=0)
    first = jax.device_put(np.float32(0), stage.neighbour()[0])
    count, _ = step(first)
    before = live(stage)["programs"]
    read = []
    for at in range(30):
        count, double = step(count)
        if at % 3 == 0:
            read.append((float(count), float(double)))
    assert read == [(at + 2.0, 2.0 * (at + 1)) for at in range(0, 30, 3)]
    assert live(stage)["programs"] == before  # no second one, which would not donate


LIVE = ("live_arrays", "live_bytes", "programs", "runs_in_flight", "requests_waiting")


def test_arrays_that_are_dropped_at_once_leave_no_memory_behind(stage: Stage) -> None:
    """In a loop that does not wait: what the C library keeps for the next arrays is given back."""
    value = np.zeros(1 << 18, np.float32)
    device = stage.neighbour()[0]
    before = stage.gateway_bytes()
    for at in range(400):
        made = jax.device_put(value + at, device)
    made.block_until_ready()
    del made
    until(
        lambda: stage.gateway_bytes() - before < 100 << 20,
        "a gateway that keeps less than a quarter of what came",
    )


@pytest.mark.long
def test_many_arrays_and_executables_leave_nothing_behind(stage: Stage) -> None:
    devices = stage.neighbour()
    split = over(devices[:4], "x")
    jax.clear_caches()
    gc.collect()
    before: dict[str, int] = {}

    def nothing_lives() -> bool:
        before.update(live(stage))
        return before["arrays"] == before["programs"] == 0

    until(nothing_lives, "no arrays and programs of earlier tests")
    grown = []
    for turn in range(3):
        arrays = [jax.device_put(numbers(4) + at, split) + 1 for at in range(110)]
        scales = range(4 * turn, 4 * turn + 4)
        functions = [jax.jit(lambda x, by=by: x * by) for by in scales]
        made = [function(array) for function, array in zip(functions, arrays, strict=False)]
        jax.block_until_ready([arrays, made])
        now = live(stage)
        assert now["arrays"] >= before["arrays"] + 114
        assert now["programs"] >= before["programs"] + 4
        del arrays, made, functions
        jax.clear_caches()
        gc.collect()
        until(
            lambda: all(count <= before[what] for what, count in live(stage).items()),
            f"no more than {before}",
        )
        grown.append(stage.gateway_bytes())
    assert grown[2] < grown[1] * 1.05
