"""What TLS costs on the bulk plane, beside plain tcp, and what strangers cost: rows of `bench.security`.

A process pushes arrays into landings of this one over the loopback, several at a time. Strangers
are connections to the same port that send a part of a handshake, and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from bench import measure, report
from bench.sending_process import request
from pw.transport.access.credentials import Credentials
from pw.transport.bulk.plane import BulkPlane
from pw.transport.endpoints import parse

TLS, PLAIN, CROWDED = "TLS", "plain tcp", "TLS, 400 strangers"
SIZE_BYTES = 64 << 20
STRANGERS = 400
RATIO, GB_PER_S, SLOWER = 0.5, 1.5, 2.0
"""The bars: TLS beside plain tcp, one stream, and a transfer among strangers."""


class Ends:
    """The receiver of `bench.sending_process`: one plane with TLS, one without."""

    def __init__(self, ours: Path, theirs: Path, size_bytes: int) -> None:
        self._loop = uvloop.new_event_loop()
        self._planes = {
            "tls": BulkPlane(self._loop, channel="tcp", credentials=Credentials.read(ours)),
            "tcp": BulkPlane(self._loop, channel="tcp", insecure=True),
        }
        self._control, end = socket.socketpair()
        with end:
            command = [sys.executable, "-m", "bench.sending_process"]
            self._sender = subprocess.Popen(
                [*command, str(end.fileno()), str(size_bytes), str(theirs)],
                pass_fds=[end.fileno()],
                start_new_session=True,
            )

    def moved(self, channel: str, size_bytes: int, count: int) -> float:
        """GB/s of `count` transfers that are asked for at once."""
        plane = self._planes[channel]

        async def receive() -> None:
            arrivals = []
            for _ in range(count):
                arrival: asyncio.Future[Any] = self._loop.create_future()
                landing = plane.land(size_bytes, arrival.set_result)
                where = msgspec.to_builtins(landing)
                self._control.sendall(request("push", channel, size_bytes, where))
                arrivals.append(arrival)
            await asyncio.gather(*arrivals)

        begun_s = time.perf_counter()
        self._loop.run_until_complete(receive())
        return size_bytes * count / (time.perf_counter() - begun_s) / 1e9

    @contextlib.contextmanager
    def strangers(self) -> Iterator[None]:
        """Connections to the port of the plane with TLS that send a part of a handshake."""
        landing = self._planes["tls"].land(1, lambda _: None)
        self._planes["tls"].cancel(landing.transfer, unused=True)
        place = parse(landing.endpoint)
        with contextlib.ExitStack() as stack:
            for _ in range(STRANGERS):
                connection = stack.enter_context(socket.socket(place.family))
                connection.connect(place.address)
                connection.send(b"\x16\x03\x01")
            yield

    def close(self) -> None:
        """End the sender and the planes."""
        self._control.close()
        self._sender.wait()
        for plane in self._planes.values():
            plane.close()
        self._loop.close()


def add_rows(result: report.Result, ours: Path, theirs: Path, quick: bool) -> None:
    """Measure both planes in turn.

    Args:
        result: gets the rows and bars.
        ours, theirs: credentials of workers of one cluster.
        quick: one round of little.
    """
    size_bytes, count, rounds = (4 << 20, 1, 1) if quick else (SIZE_BYTES, 8, 11)
    ends = Ends(ours, theirs, size_bytes)

    def crowded() -> float:
        with ends.strangers():
            return ends.moved("tls", size_bytes, count)

    try:
        samples = measure.alternate(
            {
                TLS: lambda: ends.moved("tls", size_bytes, count),
                PLAIN: lambda: ends.moved("tcp", size_bytes, count),
                CROWDED: crowded,
            },
            rounds=rounds,
        )
    finally:
        ends.close()
    result.compare(samples, unit="GB/s", baseline=PLAIN, params={"bulk, MiB": size_bytes >> 20})
    result.at_least(RATIO, samples[TLS].over(samples[PLAIN]).median, "bulk: TLS, × plain tcp")
    result.at_least(GB_PER_S, samples[TLS].median, "bulk: GB/s of one stream with TLS")
    slower = samples[TLS].over(samples[CROWDED]).median
    result.at_most(SLOWER, slower, f"bulk: a transfer beside {STRANGERS} strangers, × without")
