"""Messages between two processes: arrays, descriptors, and what comes from a process that is not trusted."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from pw.processes.channel import Channel


class Said(msgspec.Struct, frozen=True, array_like=True):
    words: str


@pytest.fixture
def ends() -> Iterator[tuple[Channel[Said], Channel[Said]]]:
    ours, theirs = (
        Channel[Said](end, Said, np.empty, descriptors=1) for end in socket.socketpair()
    )
    yield ours, theirs
    ours.close()
    theirs.close()


def in_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


ARRAYS = [
    np.arange(2 << 20, dtype=np.int32).reshape(2, -1).T,
    np.array(3.5),
    np.zeros((0, 3)),
    np.array([1, 2.5, -3], ml_dtypes.bfloat16),
    np.array([True, False]),
    np.array([1, 3], ml_dtypes.int4),
]


def test_arrays_of_any_layout_come_with_their_message(
    ends: tuple[Channel[Said], Channel[Said]],
) -> None:
    ours, theirs = ends
    sending = in_thread(lambda: (ours.send(Said("these"), ARRAYS), ours.send(Said("none"))))
    message, arrays, descriptors = theirs.receive()
    assert (message, descriptors) == (Said("these"), [])
    for array, copy in zip(ARRAYS, arrays, strict=True):
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(copy, array)
    assert theirs.receive()[:2] == (Said("none"), [])
    sending.join()


def test_an_array_of_objects_is_refused_before_anything_is_sent(
    ends: tuple[Channel[Said], Channel[Said]],
) -> None:
    ours, theirs = ends
    with pytest.raises(TypeError):
        ours.send(Said("these"), [np.arange(3), np.array([object()])])
    assert list(theirs.arrived()) == []


def test_messages_of_several_threads_do_not_mix(ends: tuple[Channel[Said], Channel[Said]]) -> None:
    ours, theirs = ends
    array = np.arange(1 << 18)
    threads = [in_thread(lambda n=n: ours.send(Said(f"{n}" * 9), [array + n])) for n in range(8)]  # type: ignore[misc]
    for _ in threads:
        message, (copy,), _ = theirs.receive()
        np.testing.assert_array_equal(copy, array + int(message.words[0]))
    for thread in threads:
        thread.join()


def test_a_descriptor_belongs_to_its_message_and_is_not_inherited(
    ends: tuple[Channel[Said], Channel[Said]],
) -> None:
    ours, theirs = ends
    read, write = os.pipe()
    ours.send(Said("before"))
    ours.send(Said("with"), descriptors=[write])
    ours.send(Said("after"))
    os.close(write)
    received = [len(descriptors) for _, _, descriptors in theirs.arrived()]
    assert received == [0, 1, 0]
    theirs.send(Said("too many"), descriptors=[read, read, read])
    (_, _, (copy,)) = ours.receive()
    assert not os.get_inheritable(copy)
    os.close(copy)
    os.close(read)


def test_what_has_arrived_is_read_without_waiting_until_the_other_side_ends(
    ends: tuple[Channel[Said], Channel[Said]],
) -> None:
    ours, theirs = ends
    assert list(ours.arrived()) == []
    theirs.send(Said("last"))
    ours.send(Said("never read"))
    theirs.close()
    assert [received.message for received in ours.arrived()] == [Said("last")]
    assert ours.ended
    with pytest.raises(OSError):
        ours.send(Said("late"))


def test_a_side_that_does_not_read_holds_up_only_those_who_wait(
    ends: tuple[Channel[Said], Channel[Said]],
) -> None:
    ours, theirs = ends
    with pytest.raises(BlockingIOError):
        while True:
            ours.send(Said("x"), wait=False)
    assert next(iter(theirs.arrived())).message == Said("x")


def test_an_event_loop_may_make_an_end_not_wait(ends: tuple[Channel[Said], Channel[Said]]) -> None:
    for end in ends:
        os.set_blocking(end.fileno(), False)  # as uvloop does
    ours, theirs = ends
    sending = in_thread(lambda: ours.send(Said("large"), ARRAYS))
    assert theirs.is_readable(30)
    _, arrays, _ = theirs.receive()
    np.testing.assert_array_equal(arrays[0], ARRAYS[0])
    sending.join()


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(8, "little") + body


@pytest.mark.parametrize(
    "data",
    [
        _framed(b"\xc1"),
        _framed(msgspec.msgpack.encode(([1], ()))),
        _framed(msgspec.msgpack.encode((["unexpected arrays"], [("uint8", (1 << 50,))]))),
    ],
)
def test_a_message_that_cannot_be_read_is_an_error_in_words(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        with pytest.raises(msgspec.MsgspecError):
            Channel[Said](ours, Said).receive()


def test_a_length_takes_no_memory_before_the_bytes_come() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(((1 << 63) - 1).to_bytes(8, "little") + b"x")
        theirs.close()
        with pytest.raises(EOFError):
            Channel[Said](ours, Said).receive()


def test_descriptors_may_be_many(ends: tuple[Channel[Said], Channel[Said]]) -> None:
    """A host has one for each larger array, and starts compilers nevertheless."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip("this system does not let a process have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    taken = [os.dup(0) for _ in range(1100)]
    try:
        first, second = (Channel[Said](end, Said) for end in socket.socketpair())
        assert first.fileno() > 1024
        assert not first.is_readable(0.0)
        second.send(Said("here"))
        assert first.is_readable(1.0)
        first.close()
        second.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
