"""The controller daemon as it ships, and hundreds of hosts that only pretend to have devices.

What a controller costs at 512 hosts can be measured on one machine if the hosts cost next to nothing. So
`pw-controller` runs here unchanged, in a process of its own, over its own sockets; and one other process, the
*swarm*, speaks for all hosts and for a client. Each host has a connection, registers, joins, "compiles", and
takes launches; the leader of the gang reports each as ended when a modelled device would have finished it.
The client sends what `pw.jit` makes a client send: for `x = f(x)` one `Run` and one `Delete` a call.

How long the daemon's threads have been on a processor is read from outside (/proc), to the nanosecond, so
nothing is added to what is measured. Linux only.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import select
import subprocess
import sys
import time
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import uvloop

from pw.client.connection.children import Child, read_announcement
from pw.client.connection.threads import incarnation
from pw.core.actor import Actor, Env, handles
from pw.core.compact import Compact
from pw.core.ids import CONTROL, CONTROLLER, Address, client_id
from pw.core.messages import (
    AllocateSlice,
    Artifact,
    Attach,
    Attached,
    Delete,
    Directory,
    Finished,
    ForgetRuns,
    FormIsland,
    GetStats,
    Heartbeat,
    Hello,
    Install,
    Installed,
    IslandJoined,
    Launch,
    Progress,
    RegisterHost,
    RegisterProgram,
    Run,
    RunFailed,
    RunsSettled,
    SliceBound,
    SliceRefused,
    Stats,
)
from pw.core.program import Computation, Node, Output, Program, Value
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.transport import codec
from pw.transport.connection import Connection
from pw.transport.endpoints import parse
from pw.transport.link import Versions
from pw.transport.node import Node as ActorNode
from pw.transport.stream_network import StreamNetwork

START_S = 60.0
ANSWER_S = 120.0
HEARTBEAT_S = 1.0
ARTIFACT = b"a computation that is never compiled"


# --- what benchmarks use ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Usage:
    """What the daemon has used and sent since it was started."""

    loop_s: float
    """Processor time of its event loop: controller, schedulers, and the transport's Python."""
    other_s: float
    """Of its other threads: libzmq's input and output."""
    launches: int
    messages_sent: int
    frames_sent: int
    bytes_sent: int
    messages_received: int

    def since(self, before: Usage) -> Usage:
        """What was used between two readings."""
        mine, theirs = vars(self), vars(before)
        return Usage(**{name: mine[name] - theirs[name] for name in mine})


class ModelledCluster:
    """A running daemon with `hosts` modelled hosts of `devices` devices each, as one island.

    The function that is called takes and returns `arrays` arrays, each sharded over all devices.

    Raises whatever the daemon or the swarm ends with, and ConnectionFailed if either is not ready in time.
    """

    def __init__(self, hosts: int, devices: int, arrays: int = 1) -> None:
        self.hosts = hosts
        self.devices = devices
        self.arrays = arrays
        read, write = os.pipe()
        try:
            arguments = ["--bind", "tcp://127.0.0.1:0", "--log-level", "error"]
            self._controller = Child(
                "pw.cli.controller", [*arguments, "--announce-fd", str(write)], [write]
            )
        finally:
            os.close(write)
        self._swarm: subprocess.Popen[str] | None = None
        try:
            address = read_announcement(self._controller, read, START_S)
            self._swarm = subprocess.Popen(
                [sys.executable, "-m", "bench.modelled", address, str(hosts), str(devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._read()
            self.install_s = self._installed()
        except BaseException:
            self.close()
            raise

    def _installed(self) -> float:
        before = self.loop_s()
        self._ask(do="register", devices=self.hosts * self.devices, arrays=self.arrays)
        return self.loop_s() - before

    def launch(self, count: int, *, window: int = 512) -> float:
        """Have the client call a function on all devices `count` times, `window` calls in flight.

        Returns the seconds from the first call until the last is settled; the devices take no time.
        """
        return float(self._ask(do="launch", count=count, window=window, device_us=0.0)["seconds"])

    def busy(self, count: int, device_us: float) -> float:
        """The same with devices that take `device_us` a launch: the part of the time in which they work.

        Taken over the later three quarters of the launches: during the first ones all hosts are idle.
        """
        answer = self._ask(do="launch", count=count, window=512, device_us=device_us)
        return float(answer["busy"])

    def hold(self, count: int) -> None:
        """Have the client make `count` arrays on one device, each from the one before, and keep them all."""
        self._ask(do="hold", count=count)

    def usage(self) -> Usage:
        """What the daemon has used so far."""
        counters = self._ask(do="stats")["counters"]
        threads = self._threads_s()
        loop_s = threads.pop(self._controller.pid)
        return Usage(
            loop_s,
            sum(threads.values()),
            counters.get("launches", 0),
            counters["messages_sent"],
            counters["frames_sent"],
            counters["control_bytes_sent"],
            counters["messages_received"],
        )

    def loop_s(self) -> float:
        """Processor time of the daemon's event loop so far."""
        return self._threads_s()[self._controller.pid]

    def resident_bytes(self) -> int:
        """Memory of the daemon's process, as the kernel counts it."""
        status = Path(f"/proc/{self._controller.pid}/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def _threads_s(self) -> dict[int, float]:
        tasks = Path(f"/proc/{self._controller.pid}/task")
        return {
            int(task.name): int((task / "schedstat").read_text().split()[0]) / 1e9
            for task in tasks.iterdir()
        }

    def _ask(self, **request: object) -> dict[str, Any]:
        assert self._swarm is not None
        assert self._swarm.stdin is not None
        self._swarm.stdin.write(json.dumps(request) + "\n")
        self._swarm.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._swarm is not None
        assert self._swarm.stdout is not None
        # Without a bound, a benchmark that is interrupted while threads start clusters would wait for ever.
        ready = select.select([self._swarm.stdout], [], [], ANSWER_S)[0]
        line = self._swarm.stdout.readline() if ready else ""
        if not line:
            raise RuntimeError("the modelled hosts ended, or do not answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End both processes. Idempotent."""
        swarm, self._swarm = self._swarm, None
        if swarm is not None:
            swarm.kill()
            swarm.communicate()
        self._controller.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


# --- the swarm: modelled hosts ------------------------------------------------------------------------


class Devices:
    """When the devices of an island, which do one computation after the other, will have ended a launch."""

    def __init__(self) -> None:
        self.device_s = 0.0
        self._ends_s = [0.0]

    def start(self, device_s: float) -> None:
        """From now on a computation takes so long."""
        self.device_s = device_s
        self._ends_s = [0.0]

    def take(self, come_s: float) -> float:
        """A launch has come to all hosts: when will it have ended?"""
        end_s = max(self._ends_s[-1], come_s) + self.device_s
        self._ends_s.append(end_s)
        return end_s

    def busy(self) -> float:
        """The part of the time in which they worked, without the first quarter of the launches."""
        ends_s = self._ends_s[len(self._ends_s) // 4 :]
        whole_s = ends_s[-1] - ends_s[0]
        return (len(ends_s) - 1) * self.device_s / whole_s if whole_s else 0.0


class ModelledHost:
    """One host: its connection to the controller, and what it answers.

    Only the first and the last host of a gang look into the launches that come; the others count frames, so
    that 512 of them cost less than the controller that is measured.
    """

    def __init__(self, swarm: Swarm, rank: int) -> None:
        self.swarm = swarm
        self.name = f"host-{rank:04d}"
        self.is_quiet = False
        self._sent = 0
        self._received = 0
        self._epoch = 0
        self._finished: list[Finished] = []
        self._connection = Connection(swarm.loop, self, parse(swarm.address))
        self._send(("", "", Hello(*Versions.installed(), self.name, incarnation())))

    def register(self) -> None:
        """Ask for a place in the island."""
        swarm = self.swarm
        endpoint = f"tcp://127.0.0.2:{1024 + int(self.name[-4:])}"
        message = RegisterHost(
            "island-0", swarm.hosts_expected, swarm.devices, "cpu", endpoint, os.getpid()
        )
        self._send(("resources", "executor", message))

    def beat(self) -> None:
        """Give a sign of life."""
        self._send(("", "", Heartbeat()))

    def _send(self, *envelopes: tuple[str, str, Any]) -> None:
        self._connection.send(codec.encode_frame(self._sent, list(envelopes)))
        self._sent += 1

    def ended(self, connection: Connection, reason: str) -> None:
        """The controller has ended, and ends the swarm as well."""

    def refused(self, connection: Connection, reason: str) -> None:
        """Never: neither end has a secret."""

    def is_behind(self) -> bool:
        """Never: what comes is handled at once."""
        return False

    def received(self, connection: Connection, parts: list[bytes]) -> None:
        """A frame has come."""
        if self.is_quiet:
            return
        for _, sender, message in codec.decode(parts[0]).envelopes:
            if isinstance(message, Hello):
                self.register()
            elif isinstance(message, FormIsland):
                self._epoch = message.epoch
                joined = IslandJoined(
                    message.island, message.epoch, "modelled", self.swarm.devices, None
                )
                self._send(("resources", "executor", joined))
            elif isinstance(message, Install):
                said = Installed(self._epoch, message.program, None, install=message.install)
                self._send((sender, "executor", said))
            elif isinstance(message, Launch):
                self._launched(sender, message)

    def _launched(self, scheduler: str, launch: Launch) -> None:
        if launch.report:
            self.swarm.lead(self, scheduler, launch)
        elif self is self.swarm.hosts[-1]:
            self.swarm.followed(launch.run)

    def report(self, scheduler: str, sequence: int, device_us: float) -> None:
        """A launch has ended; all that end in one turn of the loop are told of in one message."""
        self._finished.append(Finished(sequence, round(device_us)))
        if len(self._finished) == 1:
            self.swarm.loop.call_soon(self._tell, scheduler)

    def _tell(self, scheduler: str) -> None:
        finished, self._finished = tuple(self._finished), []
        self._send((scheduler, "executor", Progress(self._epoch, finished)))


class ModelledClient(Actor):
    """A client that does what it is told on standard input."""

    def __init__(self, env: Env, swarm: Swarm) -> None:
        super().__init__(env)
        self._swarm = swarm
        self._serial = 0
        self._number = 0
        self._members = 0
        self._is_ready = False
        self._stats: Callable[[dict[str, int]], None] | None = None
        self.settled: Callable[[int], None] | None = None
        self._bound: Callable[[], None] | None = None
        self.makes = self.takes = 0
        """Programs that make arrays, and take them."""
        self.held: tuple[int, ...] = ()

    def attach(self) -> None:
        """Ask to be let in."""
        self.env.send(CONTROL, Attach("modelled", 1.0, 0))

    @handles(Attached)
    def _attached(self, sender: Address, message: Attached) -> None:
        self._number = message.client
        self._look()

    @handles(Directory)
    def _directory(self, sender: Address, message: Directory) -> None:
        self._members = sum(peer.member for peer in message.peers)
        self._look()

    def _look(self) -> None:
        """Ready when let in and the island is formed: before, there is no slice to be had."""
        if self._number and self._members == self._swarm.hosts_expected and not self._is_ready:
            self._is_ready = True
            self._swarm.answer()

    @handles(ForgetRuns)
    def _not_needed(self, sender: Address, message: object) -> None:
        """A real client keeps accounts of it."""

    @handles(RunFailed, SliceRefused)
    def _failed(self, sender: Address, message: RunFailed | SliceRefused) -> None:
        print(f"the controller refuses: {message}", file=sys.stderr, flush=True)
        os._exit(1)  # an exception would only end this turn of the loop

    @handles(SliceBound)
    def _is_bound(self, sender: Address, message: SliceBound) -> None:
        assert self._bound is not None
        self._bound()

    @handles(RunsSettled)
    def _runs_settled(self, sender: Address, message: RunsSettled) -> None:
        if self.settled is not None:
            self.settled(message.count)

    @handles(Stats)
    def _have_stats(self, sender: Address, message: Stats) -> None:
        assert self._stats is not None
        self._stats(message.counters)

    def _id(self) -> int:
        self._serial += 1
        return client_id(self._number, self._serial)

    def _ids(self, count: int) -> tuple[int, ...]:
        return tuple(self._id() for _ in range(count))

    def stats(self, then: Callable[[dict[str, int]], None]) -> None:
        """Ask the controller for its counters."""
        self._stats = then
        self.env.send(CONTROL, GetStats(1))

    def register(self, devices: int, arrays: int, then: Callable[[], None]) -> None:
        """Allocate a slice, bring a program that makes arrays on it and one that takes them; run the first."""
        number = self._id()
        self._bound = lambda: self._programs(number, devices, arrays, then)
        self.env.send(CONTROL, AllocateSlice(number, devices, None, None, None))

    def _programs(self, number: int, devices: int, arrays: int, then: Callable[[], None]) -> None:
        placement = Placement(number, tuple(range(devices)))
        sharding = Sharding(("data",), (devices,), (("data",),))
        spec = ArraySpec((devices,), "float32", sharding, placement)
        digest = hashlib.sha256(ARTIFACT).digest()
        specs = (spec,) * arrays
        for inputs in ((), specs):
            step = Computation("step", digest, placement, inputs, specs)
            node = Node(0, tuple(Value(-1, index) for index in range(len(inputs))))
            outputs = tuple(Output(Value(0, index), spec) for index in range(arrays))
            body = Program("step", (step,), (node,), inputs, outputs)
            program = self._id()
            message = RegisterProgram(program, Compact.of(body), (Artifact(digest, ARTIFACT),))
            self.env.send(CONTROL, message)
            self.makes, self.takes = (self.makes, program) if inputs else (program, self.takes)
        self.held = self._ids(arrays)
        self.env.send(CONTROL, Run(self._id(), self.makes, (), self.held))
        self.settled = lambda count: then()

    def call(self, count: int, window: int, *, keep: bool, then: Callable[[], None]) -> None:
        """Call `x = f(x)` `count` times, with at most `window` calls in flight."""
        left, settled = count, 0

        def more(room: int) -> None:
            nonlocal left
            for _ in range(min(room, left)):
                results = self._ids(len(self.held))
                self.env.send(CONTROL, Run(self._id(), self.takes, self.held, results))
                if not keep:
                    self.env.send(CONTROL, Delete(self.held))
                self.held = results
                left -= 1

        def ended(more_settled: int) -> None:
            nonlocal settled
            settled += more_settled
            more(more_settled)
            if settled == count:
                self.settled = None
                then()

        self.settled = ended
        more(window)


class Swarm:
    """All modelled hosts and the client, on one event loop; does what standard input says, line by line."""

    def __init__(self, address: str, hosts: int, devices: int) -> None:
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self.address = address
        self.hosts_expected = hosts
        self.devices = devices
        self.model = Devices()
        self.hosts: list[ModelledHost] = []
        self._led: deque[tuple[ModelledHost, str, Launch]] = deque()
        self._newest_run = 0
        self._is_alone = hosts == 1
        """Gangs consist of the first host only."""
        self._due: deque[tuple[float, ModelledHost, str, int]] = deque()
        network = StreamNetwork(self.loop, "client-modelled", incarnation())
        network.introduce(CONTROLLER, address)
        self._node = ActorNode("client-modelled", self.loop, network)
        self.client = self._node.add("session", lambda env: ModelledClient(env, self))
        self._began_s = 0.0

    def run(self) -> None:
        """Until standard input ends."""
        self.hosts = [ModelledHost(self, rank) for rank in range(self.hosts_expected)]
        self.loop.call_later(HEARTBEAT_S, self._beat)
        self.loop.call_soon(self.client.attach)
        os.set_blocking(0, False)
        self.loop.add_reader(0, self._command)
        self.loop.run_forever()
        os._exit(0)  # nothing that is left has anything to say any more

    def answer(self, **fields: object) -> None:
        """One line on standard output."""
        print(json.dumps(fields), flush=True)

    def _beat(self) -> None:
        self.loop.call_later(HEARTBEAT_S, self._beat)
        for host in self.hosts:
            host.beat()

    def _command(self) -> None:
        line = sys.stdin.readline()
        if not line:
            self.loop.stop()
            return
        request = json.loads(line)
        what = request.pop("do")
        if what == "register":
            self.client.register(request["devices"], request["arrays"], self._registered)
        elif what == "launch":
            self.model.start(request["device_us"] * 1e-6)
            self._began_s = time.perf_counter()
            self.client.call(request["count"], request["window"], keep=False, then=self._ended)
        elif what == "hold":
            self._is_alone = True
            kept = self.client.takes, self.client.held
            self.client.register(1, 1, functools.partial(self._hold, request["count"], kept))
        else:
            self.client.stats(lambda counters: self.answer(counters=counters))

    def _registered(self) -> None:
        for host in self.hosts[1:-1]:
            host.is_quiet = True
        self.client.settled = None
        self.answer()

    def _hold(self, count: int, kept: tuple[int, tuple[int, ...]]) -> None:
        def held() -> None:
            self.client.takes, self.client.held = kept
            self._is_alone = self.hosts_expected == 1
            self._registered()

        self.client.call(count, 512, keep=True, then=held)

    def _ended(self) -> None:
        self.answer(seconds=time.perf_counter() - self._began_s, busy=self.model.busy())

    # --- the gang --------------------------------------------------------------------------------------

    def lead(self, host: ModelledHost, scheduler: str, launch: Launch) -> None:
        """A launch has come to the first host of its gang."""
        self._led.append((host, scheduler, launch))
        self._begin()

    def followed(self, run: int) -> None:
        """A run has come to the last host, which hears of each last."""
        self._newest_run = run
        self._begin()

    def _begin(self) -> None:
        while self._led:
            host, scheduler, launch = self._led[0]
            if launch.run > self._newest_run and not self._is_alone:
                return
            self._led.popleft()
            if not self.model.device_s:
                host.report(scheduler, launch.sequence, 10.0)
                continue
            at_s = self.model.take(time.perf_counter())
            self._due.append((at_s, host, scheduler, launch.sequence))
            if len(self._due) == 1:
                self._wake(at_s)

    def _wake(self, at_s: float) -> None:
        self.loop.call_later(max(0.0, at_s - time.perf_counter()), self._finish)

    def _finish(self) -> None:
        now_s = time.perf_counter()
        device_us = self.model.device_s * 1e6
        while self._due and self._due[0][0] <= now_s:
            _, host, scheduler, sequence = self._due.popleft()
            host.report(scheduler, sequence, device_us)
        if self._due:
            self._wake(self._due[0][0])


if __name__ == "__main__":
    Swarm(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).run()
