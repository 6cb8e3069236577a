"""Names that a peer chooses are short, wherever they go."""

from __future__ import annotations

import logging

import pytest

from pw.core.ids import NAME_CHARACTERS, RESOURCES, Address
from pw.core.messages import Hello, HostRejected, RegisterHost
from pw.transport.links import codec
from pw.transport.links.link import Versions
from pw.transport.log import FIELD_CHARACTERS, TRACEBACK_CHARACTERS, log
from tests.stages.actors import FakeHost, Recorder, World


@pytest.mark.parametrize("field", ["pw_version", "jax_version", "node"])
def test_a_hello_with_a_long_name_does_not_decode(field: str) -> None:
    said = {"protocol": 3, "pw_version": "1", "jax_version": "1", "node": "n", "incarnation": 1}
    for characters in (NAME_CHARACTERS, NAME_CHARACTERS + 1, 20_000_000):
        hello = Hello(**(said | {field: "x" * characters}))  # type: ignore[arg-type]
        frame = codec.encode_frame(0, [("", "", hello)])
        if characters == NAME_CHARACTERS:
            assert codec.decode(frame).envelopes[0][2] == hello
            continue
        with pytest.raises(codec.MalformedFrame) as raised:
            codec.decode(frame)
        assert len(str(raised.value)) < 1000
    assert len(str(Versions.installed())) < NAME_CHARACTERS


REGISTRATION: dict[str, object] = {
    "island": "i",
    "island_hosts": 1,
    "local_devices": 1,
    "platform": "cpu",
    "endpoint": "",
    "process": 1,
}


@pytest.mark.parametrize(
    "said",
    [
        {"island": "x" * 20_000_000},
        {"platform": "x" * 20_000_000},
        {"endpoint": "x" * 20_000_000},
        {"members": ("x" * 20_000_000,)},
        {"members": tuple(f"h{number}" for number in range(200_000)), "epoch": 1},
        {"island_hosts": 1 << 60},
        {"island_hosts": -1},
        {"local_devices": 1 << 60},
        {"local_devices": 0},
        {"local_devices": -1},
        {"epoch": -1},
    ],
    ids=[str(number) for number in range(11)],
)
def test_a_host_that_cannot_be_stops_and_its_message_does_not_decode(
    said: dict[str, object],
) -> None:
    registration = RegisterHost(**(REGISTRATION | said))  # type: ignore[arg-type]
    with pytest.raises(codec.MalformedFrame) as raised:
        codec.decode(codec.encode_frame(1, [("resources", "executor", registration)]))
    assert len(str(raised.value)) < 1000
    world = World()
    world.controller()
    host = FakeHost(world, "h", registration)
    host.executor.register()
    world.settle()
    assert host.stopped == ["rejected"]
    assert not world.to(RESOURCES, RegisterHost)


def test_a_host_that_names_a_member_twice_is_rejected() -> None:
    world = World()
    world.controller()
    host = world.add(Address("h", "executor"), Recorder)
    host.env.send(RESOURCES, RegisterHost(**REGISTRATION, epoch=1, members=("a", "a")))  # type: ignore[arg-type]
    world.settle()
    (rejected,) = host.of(HostRejected)
    assert len(rejected.error.message) < 1000
    assert not world.resources.inventory.islands


def test_fields_of_log_lines_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="pw"):
        log("info", "something", "x" * 20_000_000, "y" * 20_000_000, name="z" * 20_000_000)
        log("info", "something", "node", traceback="a" * 20_000_000 + "the end")
    first, second = (record.getMessage() for record in caplog.records)
    assert len(first) < 4 * FIELD_CHARACTERS
    assert len(second) < 2 * TRACEBACK_CHARACTERS
    assert second.endswith(("the end'", "the end"))
