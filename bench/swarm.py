"""The modelled hosts and the client of `bench.modelled`, all in one process.

    python -m bench.swarm ADDRESS HOSTS DEVICES

Each host has a connection, registers, joins, "compiles", and takes launches. The leader of the gang
reports the end of a launch when a modelled device would have ended it. The client sends the
messages of `pw.jit`: for `x = f(x)` one `Run` and one `Delete` a call. Standard input has one
request a line; the answers are lines of standard output.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
import time
from collections import deque
from typing import Any

import msgspec
import uvloop

from pw.core import messages
from pw.core.actors.actor import Actor, Env, handles
from pw.core.compact import Compact
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.transport.endpoints import parse
from pw.transport.links import codec
from pw.transport.links.connection import StreamConnection
from pw.transport.links.link import Versions, incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node as ActorNode

HEARTBEAT_S = 1.0
BEATS = 50
"""Hosts begin at different times, so their heartbeats come in so many parts."""
ARTIFACT = b"a computation that is never compiled"
WINDOW = 512


_ENVELOPES = msgspec.msgpack.Decoder(tuple[int, list[tuple[str, str, msgspec.Raw]]])
_MESSAGE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(messages.Message)
_INSTALL = msgspec.msgpack.Decoder(
    tuple[int, int, int, int, msgspec.Raw, msgspec.Raw, msgspec.Raw, int, str]
)
"""Of an `Install`, what a modelled host reads."""
_FORM, _INSTALLS = (kind.__struct_config__.tag for kind in (messages.FormIsland, messages.Install))
_HEARD = {
    kind.__struct_config__.tag for kind in (messages.Hello, messages.Launch, messages.GangOrder)
}


def _tag_of(body: memoryview) -> int:
    """Return the tag of an encoded message: the first element of a short array."""
    return body[2] if body[1] == 0xCC else body[1]


class ModelledHost:
    """One host: its connection to the controller, and its answers.

    Of the hosts to which the scheduler sends launches, only the first and the last decode them. The others
    drop frames, and no host decodes what it does not answer, so that thousands of hosts cost less than the
    controller. They pass nothing on to each other.
    """

    def __init__(self, swarm: Swarm, rank: int) -> None:
        self.swarm = swarm
        self.name = f"host-{rank:04d}"
        self.is_quiet = self.is_last = False
        self._rank = rank
        self._sent = 0
        self._epoch = 0
        self._finished: list[messages.Finished] = []
        self._connection = StreamConnection(swarm.loop, self, parse(swarm.address))
        self.send("", "", messages.Hello(*Versions.installed(), self.name, incarnation()))

    def send(self, receiver: str, sender: str, message: Any) -> None:
        """Send one message to an actor of the controller, or to its node."""
        self._connection.send(codec.encode_frame(self._sent, [(receiver, sender, message)]))
        self._sent += 1

    def ended(self, connection: StreamConnection, reason: str) -> None:
        """Nothing to do: the benchmark ends the swarm too."""

    def refused(self, connection: StreamConnection, reason: str) -> None:
        """Never called: neither end has credentials."""

    def turn_away(self, connection: StreamConnection) -> None:
        """Never called: this host listens nowhere."""

    take_chunks = staticmethod(lambda stream, head: stream.close())
    take = staticmethod(lambda read: read())

    def received(self, connection: StreamConnection, parts: list[bytes]) -> None:
        """Answer the messages of a frame."""
        if self.is_quiet:
            return
        hosts, devices = self.swarm.host_count, self.swarm.devices
        for _, sender, body in _ENVELOPES.decode(parts[0])[1]:
            tag = _tag_of(memoryview(body))
            if tag == _FORM:  # all hosts get the same, and it names all hosts
                message = self.swarm.form = self.swarm.form or _MESSAGE.decode(body)
            elif tag == _INSTALLS:
                _, _, _, program, *_, install, _ = _INSTALL.decode(body)
                installed = messages.Installed(self._epoch, program, None, install=install)
                self.send(sender, "executor", installed)
                continue
            elif tag in _HEARD:
                message = _MESSAGE.decode(body)
            else:
                continue
            match message:
                case messages.Hello():
                    endpoint = f"tcp://127.0.0.2:{1024 + self._rank}"
                    answer = messages.RegisterHost(
                        "island-0", hosts, devices, "cpu", endpoint, os.getpid()
                    )
                    self.send("resources", "executor", answer)
                case messages.FormIsland(island, epoch):
                    self._epoch = epoch
                    joined = messages.IslandJoined(island, epoch, "modelled", devices, None)
                    self.send("resources", "executor", joined)
                case messages.Launch(report=True):
                    self.swarm.lead(self, sender, message.run, message.sequence)
                case messages.Launch() if self.is_last:
                    self.swarm.followed(message.run)
                case messages.GangOrder(order=messages.Launch(run=run)):
                    _, number = messages.at_position(message.spans, 0)
                    if self is self.swarm.hosts[0]:
                        self.swarm.lead(self, sender, run, number)
                    elif self.is_last:
                        self.swarm.followed(run)

    def report(self, scheduler: str, sequence: int, device_us: float) -> None:
        """Report the end of a launch; one message reports all ends of a turn of the loop."""
        self._finished.append(messages.Finished(sequence, round(device_us)))
        if len(self._finished) == 1:
            self.swarm.loop.call_soon(self._send_progress, scheduler)

    def _send_progress(self, scheduler: str) -> None:
        finished, self._finished = tuple(self._finished), []
        self.send(scheduler, "executor", messages.Progress(self._epoch, finished))


class ModelledClient(Actor):
    """A client that calls one function, as `x = f(x)`, on all devices of its slice."""

    def __init__(self, env: Env, loop: asyncio.AbstractEventLoop, hosts: int) -> None:
        super().__init__(env)
        self._loop = loop
        self._hosts = hosts
        self._serial = self._number = self._members = 0
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when the client is admitted and the island is formed."""
        self._answer: asyncio.Future[Any] = loop.create_future()
        self._left = self._unsettled = 0
        self._keep = False
        self.function = 0
        """The program that takes and makes arrays."""
        self.held: tuple[int, ...] = ()

    @handles(messages.Attached)
    def _attached(self, sender: Address, message: messages.Attached) -> None:
        self._number = message.client
        self._check_ready()

    @handles(messages.Directory)
    def _directory(self, sender: Address, message: messages.Directory) -> None:
        self._members = sum(peer.member for peer in message.peers)
        self._check_ready()

    def _check_ready(self) -> None:
        if self._number and self._members == self._hosts and not self.ready.done():
            self.ready.set_result(None)

    @handles(messages.ForgetRuns)
    def _forget_runs(self, sender: Address, message: object) -> None:
        """Nothing to do: this client keeps no runs."""

    @handles(messages.RunFailed, messages.SliceRefused)
    def _failed(self, sender: Address, message: object) -> None:
        print(f"the controller refuses: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # an exception would only end this turn of the loop

    @handles(messages.SliceBound, messages.Stats)
    def _answered(self, sender: Address, message: object) -> None:
        self._answer.set_result(message)

    @handles(messages.RunsSettled)
    def _settled(self, sender: Address, message: messages.RunsSettled) -> None:
        self._unsettled -= message.count
        self._launch(message.count)
        if not self._unsettled:
            self._answer.set_result(message)

    def _id(self) -> int:
        self._serial += 1
        return client_id(self._number, self._serial)

    async def ask(self, message: Any) -> Any:
        """Send a request to the controller and return the answer."""
        self._answer = self._loop.create_future()
        self.env.send(CONTROL, message)
        return await self._answer

    async def register(self, devices: int, arrays: int, nodes: int = 1) -> None:
        """Allocate a slice, register the function of `nodes` computations, and make its first arguments."""
        number = self._id()
        await self.ask(messages.AllocateSlice(number, devices, None, None, None))
        placement = Placement(number, tuple(range(devices)))
        sharding = Sharding(("data",), (devices,), (("data",),))
        spec = ArraySpec((devices,), "float32", sharding, placement)
        specs = (spec,) * arrays
        make = self._program(placement, (), specs)
        self.function = self._program(placement, specs, specs, nodes)
        self.held = tuple(self._id() for _ in specs)
        self._unsettled = 1
        await self.ask(messages.Run(self._id(), make, (), self.held))

    def _program(
        self,
        placement: Placement,
        inputs: tuple[ArraySpec, ...],
        specs: tuple[ArraySpec, ...],
        nodes: int = 1,
    ) -> int:
        """Register a program of a computation that runs `nodes` times in a row; returns its id."""
        digest = hashlib.sha256(ARTIFACT).digest()
        step = Computation("step", digest, placement, inputs, specs)
        chain = tuple(
            Node(0, tuple(ValueRef(at - 1, index) for index in range(len(inputs))))
            for at in range(nodes)
        )
        outputs = tuple(
            Output(ValueRef(nodes - 1, index), spec) for index, spec in enumerate(specs)
        )
        body = Compact.of(Program("step", (step,), chain, inputs, outputs))
        program = self._id()
        artifacts = (messages.Artifact(digest, ARTIFACT),)
        self.env.send(CONTROL, messages.RegisterProgram(program, body, artifacts))
        return program

    async def call(self, count: int, window: int, *, keep: bool) -> None:
        """Call the function `count` times, with at most `window` calls in flight."""
        self._left = self._unsettled = count
        self._keep = keep
        self._answer = self._loop.create_future()
        self._launch(window)
        await self._answer

    def _launch(self, room: int) -> None:
        count = min(room, self._left)
        self._left -= count
        for _ in range(count):
            results = tuple(self._id() for _ in self.held)
            self.env.send(CONTROL, messages.Run(self._id(), self.function, self.held, results))
            if not self._keep:
                self.env.send(CONTROL, messages.Delete(self.held))
            self.held = results


class Swarm:
    """All modelled hosts and the client, on one event loop, which serves standard input."""

    def __init__(self, address: str, hosts: int, devices: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.address = address
        self.host_count = hosts
        self.devices = devices
        self.hosts: list[ModelledHost] = []
        self.form: Any = None
        """What the first host has been told of its island."""
        self._led: deque[tuple[ModelledHost, str, int, int]] = deque()
        self._newest_run = 0
        self._is_alone = hosts == 1
        """Whether gangs consist of the first host only."""
        self._device_s = 0.0
        self._ends_s = [0.0]
        """The times at which the devices, which run one launch after the other, end launches."""
        self._due: deque[tuple[float, ModelledHost, str, int]] = deque()
        network = StreamNetwork(self.loop, "client-modelled", incarnation())
        network.introduce(CONTROLLER, address)
        self._node = ActorNode("client-modelled", self.loop, network)
        self.client = self._node.add("session", lambda env: ModelledClient(env, self.loop, hosts))

    async def serve(self) -> None:
        """Serve requests until standard input ends."""
        requests = asyncio.StreamReader()
        await self.loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(requests), sys.stdin.buffer
        )
        self._beat()
        for rank in range(self.host_count):
            self.hosts.append(ModelledHost(self, rank))
            await asyncio.sleep(0)  # or thousands would connect, and greet too late
        fan, over = messages.TREES.fan, messages.TREES.over
        self.hosts[fan - 1 if self.host_count > over else -1].is_last = True
        self.client.env.send(CONTROL, messages.Attach("modelled", 1.0, 0))
        await self.client.ready
        print("{}", flush=True)
        while line := await requests.readline():
            request = json.loads(line)
            answer = await self._answers(request.pop("do"), **request)
            print(json.dumps(answer), flush=True)
        os._exit(0)  # without closing hundreds of connections

    def _beat(self, part: int = 0) -> None:
        self.loop.call_later(HEARTBEAT_S / BEATS, self._beat, (part + 1) % BEATS)
        for host in self.hosts[part::BEATS]:
            host.send("", "", messages.Heartbeat())

    async def _answers(
        self,
        what: str,
        devices: int = 1,
        arrays: int = 1,
        nodes: int = 1,
        count: int = 0,
        window: int = WINDOW,
        device_us: float = 0.0,
    ) -> dict[str, object]:
        match what:
            case "register":
                await self.client.register(devices, arrays, nodes)
                for host in self.hosts[1:]:
                    host.is_quiet = not host.is_last
            case "launch":
                self._device_s, self._ends_s = device_us * 1e-6, [0.0]
                await self.client.call(count, window, keep=False)
                return {"busy": self._busy()}
            case "hold":
                before = self._is_alone, self.client.function, self.client.held
                self._is_alone = True
                await self.client.register(1, 1)
                await self.client.call(count, window, keep=True)
                self._is_alone, self.client.function, self.client.held = before
            case "stats":
                return {"counters": (await self.client.ask(messages.GetStats(1))).counters}
        return {}

    def _busy(self) -> float:
        """The part of the time in which devices are busy, without the first quarter of launches."""
        ends_s = self._ends_s[len(self._ends_s) // 4 :]
        whole_s = ends_s[-1] - ends_s[0]
        return (len(ends_s) - 1) * self._device_s / whole_s if whole_s else 0.0

    # --- the gang --------------------------------------------------------------------------------

    def lead(self, host: ModelledHost, scheduler: str, run: int, number: int) -> None:
        """Handle a launch on the first host of its gang, which has this number there."""
        self._led.append((host, scheduler, run, number))
        self._begin()

    def followed(self, run: int) -> None:
        """Handle a run on the last host that the scheduler sends it to."""
        self._newest_run = run
        self._begin()

    def _begin(self) -> None:
        while self._led:
            host, scheduler, run, number = self._led[0]
            if run > self._newest_run and not self._is_alone:
                return
            self._led.popleft()
            if not self._device_s:
                host.report(scheduler, number, 10.0)
                continue
            end_s = max(self._ends_s[-1], time.perf_counter()) + self._device_s
            self._ends_s.append(end_s)
            self._due.append((end_s, host, scheduler, number))
            if len(self._due) == 1:
                self._wake(end_s)

    def _wake(self, at_s: float) -> None:
        self.loop.call_later(max(0.0, at_s - time.perf_counter()), self._finish)

    def _finish(self) -> None:
        now_s = time.perf_counter()
        while self._due and self._due[0][0] <= now_s:
            _, host, scheduler, sequence = self._due.popleft()
            host.report(scheduler, sequence, self._device_s * 1e6)
        if self._due:
            self._wake(self._due[0][0])


async def main() -> None:
    """Serve the requests of `bench.modelled`."""
    address, hosts, devices = sys.argv[1:]
    await Swarm(address, int(hosts), int(devices)).serve()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
