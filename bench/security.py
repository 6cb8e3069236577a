"""What TLS costs on the control plane: beside plain tcp, over the loopback; the paper has no such table.

A node sends small messages to a node in another process, which sends them back: one at a time, or
many in flight. A handshake is that of both ends with their certificates, without sockets: its
reading is the processor time of the two together, which is more than that of either.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import uvloop

from bench import echo, measure, report, secure_bulk
from bench.baselines.peer import ROOT, environment
from pw.core.actors.actor import Actor, Env, handles
from pw.core.ids import Address
from pw.core.messages import Ready
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.access.tls import TlsEnd
from pw.transport.links.node import Node

TLS, PLAIN = "TLS", "plain tcp"
IN_FLIGHT = 64
HANDSHAKES = 20
SLOWER, RATE, HANDSHAKE_MS = 1.15, 0.9, 5.0
"""The bars: a round trip and a rate, beside plain tcp, and a handshake."""


class Asker(Actor):
    """Sends messages, and waits until as many have come back."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self._to_send = self._to_come = 0
        self._done: asyncio.Future[None]
        self._peer = Address("", "")

    def ask(self, peer: Address, count: int, in_flight: int) -> asyncio.Future[None]:
        """Begin; the future is done when all answers have come."""
        self._done = asyncio.get_running_loop().create_future()
        self._peer, self._to_send, self._to_come = peer, count, count
        for _ in range(min(in_flight, count)):
            self._send()
        return self._done

    def _send(self) -> None:
        if self._to_send:
            self._to_send -= 1
            self.env.send(self._peer, Ready(self._to_send))

    @handles(Ready)
    def _ready(self, sender: Address, message: Ready) -> None:
        self._to_come -= 1
        self._send()
        if not self._to_come:
            self._done.set_result(None)


def run(quick: bool) -> report.Result:
    """Measure round trips, a rate and handshakes; quick: one round of few."""
    rounds, warm_up, reading_s = (1, 0, 0.02) if quick else (41, 2, 0.2)
    result = report.Result("security", "round trips per second over TLS and over plain tcp")
    authority = Authority.create()
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = (issue(authority, Path(folder, name)) for name in ("asker", "echo"))
        command = [sys.executable, "-m", "bench.echo", str(theirs)]
        peer = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(),
            text=True,
        )
        loop = uvloop.new_event_loop()
        try:
            assert peer.stdout is not None
            endpoints = [peer.stdout.readline().strip() for _ in range(2)]
            credentials = Credentials.read(ours)
            each = {
                in_flight: measure.alternate(
                    {
                        name: _case(loop, node, endpoint, keys, in_flight, reading_s)
                        for name, node, endpoint, keys in zip(
                            (TLS, PLAIN),
                            ("tls", "plain"),
                            endpoints,
                            (credentials, None),
                            strict=True,
                        )
                    },
                    rounds=rounds,
                    warm_up=warm_up,
                )
                for in_flight in (1, IN_FLIGHT)
            }
        finally:
            loop.close()
            peer.communicate()
        handshake = measure.alternate(
            {"handshake": lambda: _handshake(credentials)}, rounds=3 if quick else 11
        )["handshake"]
        secure_bulk.add_rows(result, ours, theirs, quick)
    for in_flight, samples in each.items():
        result.compare(
            samples, unit="round trips/s", baseline=PLAIN, params={"in flight": in_flight}
        )
    result.at_most(SLOWER, each[1][PLAIN].over(each[1][TLS]).median, "a round trip, × plain tcp")
    pipelined = each[IN_FLIGHT]
    result.at_least(
        RATE, pipelined[TLS].over(pipelined[PLAIN]).median, f"{IN_FLIGHT} in flight, × plain tcp"
    )
    result.at_most(HANDSHAKE_MS, handshake.median, "a handshake, ms of processor time of both ends")
    return result


def issue(authority: Authority, file: Path, role: Role = Role.WORKER) -> Path:
    """Write a certificate into a new file, whose name it has."""
    file.touch(0o600)
    file.write_bytes(authority.issue(role, file.name))
    return file


def _case(
    loop: asyncio.AbstractEventLoop,
    name: str,
    endpoint: str,
    credentials: Credentials | None,
    in_flight: int,
    reading_s: float,
) -> Callable[[], float]:
    """A case: round trips per second."""
    node = Node(
        f"ask-{name}-{in_flight}",
        loop,
        echo.network(loop, f"ask-{name}-{in_flight}", credentials, None),
    )
    asker = node.add(echo.ACTOR, Asker)
    asker.env.introduce(name, endpoint)

    async def ask(count: int) -> None:
        await asker.ask(Address(name, echo.ACTOR), count, in_flight)

    loop.run_until_complete(ask(1))
    timed = measure.timed(lambda count: loop.run_until_complete(ask(count)))
    return measure.sized(timed, reading_s=reading_s)


def _handshake(credentials: Credentials) -> float:
    """The milliseconds of processor time of one handshake, both ends together."""
    begun_s = time.process_time()
    for _ in range(HANDSHAKES):
        dialler = TlsEnd(credentials.connect(), listens=False)
        listener = TlsEnd(credentials.accept(), listens=True)
        while not listener.is_open:
            listener.feed_handshake(dialler.output())
            if not dialler.is_open:
                dialler.feed_handshake(listener.output())
        for end in (dialler, listener):
            credentials.identify(end.certificate)
    return (time.process_time() - begun_s) * 1e3 / HANDSHAKES
