"""A client that a test drives message by message, and programs for it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, client_id, session_of, store_of
from pw.core.packing import pack
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.sharding import (
    ArraySpec,
    Placement,
    Sharding,
    box_bytes,
    box_shape,
    box_slices,
    dtype_of,
    host_boxes,
    packed_offsets,
)
from tests.stages.actors import Recorder, World
from tests.stages.fake_devices import FakeBulk

SMALL, LARGE = 8, 4096
"""Elements of arrays whose shards travel in messages, and over the bulk plane."""


def split(slice_: int, devices: int, elements: int = SMALL) -> ArraySpec:
    """A vector split over the first devices of a slice."""
    return ArraySpec(
        (elements,),
        "int64",
        Sharding(("x",), (devices,), (("x",),)),
        Placement(slice_, tuple(range(devices))),
    )


def digest(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()


def chain(specs: list[ArraySpec], blob: bytes = b"1", donated: tuple[int, ...] = ()) -> Program:
    """One input, then one computation after the other, each where its spec says; the last is returned."""
    computations = tuple(
        Computation(f"stage {index}", digest(blob), spec.placement, (spec,), (spec,))
        for index, spec in enumerate(specs)
    )
    nodes = tuple(Node(index, (ValueRef(index - 1, 0),)) for index in range(len(specs)))
    output = Output(ValueRef(len(specs) - 1, 0), specs[-1])
    return Program("chain", computations, nodes, (specs[0],), (output,), donated)


def copy(source: ArraySpec, destination: ArraySpec) -> Program:
    """No computation: an array as another spec wants it."""
    return Program("copy", (), (), (source,), (Output(ValueRef(-1, 0), destination),))


class Client(Recorder):
    """Sends what a session would send, when the test says so."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.number = 0
        self.serial = 0
        self.bound: dict[int, msg.SliceBound] = {}
        self.specs: dict[int, ArraySpec] = {}
        self.outputs: dict[int, tuple[ArraySpec, ...]] = {}
        self.failed: dict[int, ErrorReport] = {}
        self.uploads: dict[int, np.ndarray[Any, Any]] = {}
        self.credits = 0
        self.sent_runs = 0
        self.known: set[str] = set()
        self.bulk = FakeBulk(env.world, env.address.node)
        env.send(CONTROL, msg.Attach(env.address.node, getattr(env, "share", 1.0), 0))

    def receive(self, sender: Any, message: Any) -> None:
        super().receive(sender, message)
        if isinstance(message, msg.Attached):
            self.number, self.ticket = message.client, message.ticket
        elif isinstance(message, msg.SliceBound):
            self.bound[message.slice] = message
        elif isinstance(message, msg.RunFailed):
            self.failed.update(dict.fromkeys(message.results, message.error))
        elif isinstance(message, msg.RunsSettled):
            self.credits += message.count
            assert self.credits <= self.sent_runs, "more credits than runs"
        elif isinstance(message, msg.UploadLanding):
            value, devices = self.uploads[message.array], self.devices(self.specs[message.array])
            boxes = host_boxes(self.specs[message.array], devices, sender.node)
            offsets, _ = packed_offsets([value[box_slices(box)].nbytes for box, _ in boxes])
            parts = [
                (at, value[box_slices(box)]) for at, (box, _) in zip(offsets, boxes, strict=True)
            ]
            self.bulk.push(message.landing, parts, lambda error: None)

    def id(self) -> int:
        self.serial += 1
        return client_id(self.number, self.serial)

    def tell(self, message: Any) -> None:
        self.env.send(CONTROL, message)

    def tell_host(self, host: str, message: Any) -> None:
        if host not in self.known:
            self.known.add(host)
            self.env.send(store_of(host), msg.Identify(self.number, self.ticket))
        self.env.send(store_of(host), message)

    def slice(self, devices: int, island: str | None = None, hosts: tuple[str, ...] = ()) -> int:
        number = self.id()
        self.tell(msg.AllocateSlice(number, devices, None, island, None, hosts=hosts))
        return number

    def program(self, body: Program, blob: bytes = b"1") -> int:
        number = self.id()
        self.outputs[number] = tuple(output.spec for output in body.outputs)
        self.tell(
            msg.RegisterProgram(number, Compact.of(body), (msg.Artifact(digest(blob), blob),))
        )
        return number

    def release(self, program: int) -> None:
        self.tell(msg.ReleaseProgram(program))

    def run(self, program: int, *args: int | bytes | np.ndarray[Any, Any]) -> list[int]:
        made = []
        for spec in self.outputs[program]:
            made.append(self.id())
            self.specs[made[-1]] = spec
        given = tuple(a.tobytes() if isinstance(a, np.ndarray) else a for a in args)
        self.sent_runs += 1
        self.tell(msg.Run(self.id(), program, given, tuple(made)))
        return made

    def devices(self, spec: ArraySpec) -> tuple[Any, ...]:
        bound = self.bound[spec.placement.slice].devices
        return tuple(bound[index] for index in spec.placement.devices)

    def place(self, spec: ArraySpec) -> tuple[str, int]:
        """The island on which such an array lies, and its epoch."""
        bound = self.bound[spec.placement.slice]
        return bound.island, bound.epoch

    def upload(self, value: np.ndarray[Any, Any], spec: ArraySpec, inline: bool = True) -> int:
        array, devices = self.id(), self.devices(spec)
        self.specs[array], self.uploads[array] = spec, value
        bound = sum(m.slice == spec.placement.slice for m in self.of(msg.SliceBound))
        self.tell(msg.CreateArray(array, spec, bound))
        for host in dict.fromkeys(device.host for device in devices):
            boxes = host_boxes(spec, devices, host)
            data = pack([value[box_slices(box)] for box, _ in boxes]) if inline else None
            self.tell_host(host, msg.Upload(array, spec, devices, data, *self.place(spec)))
        return array

    def delete(self, *arrays: int) -> None:
        self.tell(msg.Delete(arrays))

    def fetch(self, array: int, landing: Any = None) -> dict[int, tuple[Any, ...]]:
        """Ask every holder for its shards; the requests with the boxes they will be answered with."""
        spec = self.specs[array]
        devices = self.devices(spec)
        asked: dict[int, tuple[Any, ...]] = {}
        for host in dict.fromkeys(device.host for device in devices):
            at = tuple(i for i, device in enumerate(devices) if device.host == host)
            number = self.id()
            asked[number] = tuple(spec.box(i) for i in at)
            self.tell_host(host, msg.Fetch(number, array, spec, devices, at, landing))
        return asked

    def answer(self, array: int, asked: dict[int, tuple[Any, ...]]) -> Any:
        """The fetched value, an ErrorReport, or None while an answer is missing."""
        if array in self.failed:
            return self.failed[array]
        spec = self.specs[array]
        whole = np.full(spec.shape, -1, dtype_of(spec.dtype))
        for number, boxes in asked.items():
            for failed in self.of(msg.RequestFailed):
                if failed.request == number:
                    return failed.error
            data = [m.data for m in self.of(msg.Fetched) if m.request == number]
            if not data:
                return None
            offsets, _ = packed_offsets([box_bytes(box, spec.dtype) for box in boxes])
            for offset, box in zip(offsets, boxes, strict=True):
                part = np.frombuffer(data[0], np.uint8, box_bytes(box, spec.dtype), offset)
                whole[box_slices(box)] = part.view(whole.dtype).reshape(box_shape(box))
        return whole

    def value(self, array: int) -> Any:
        """The value of an array once all has come to rest."""
        if array in self.failed:
            return self.failed[array]
        asked = self.fetch(array)
        self.env.world.settle()
        answer = self.answer(array, asked)
        assert answer is not None, "a fetch hangs"
        return answer


def join(world: World, name: str) -> Client:
    """A client that has attached."""
    client: Client = world.add(session_of(name), Client)
    world.settle()
    assert client.number
    return client
