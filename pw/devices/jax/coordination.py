"""The process that holds the coordination services of islands.

The hosts of an island find each other through a coordination service of XLA's runtime. When the
process of the service dies, all members abort, so it is no worker. In the controller, a crash of
jaxlib would end the controller. So the service runs here, in a small child of the controller.

Two properties of the runtime shape this file (jaxlib 0.10):

- A client that connects before all members are there, and waits in vain, *aborts its process*. So a
  **roll-call** comes first: each worker dials the port, sends its rank, and waits. When every rank
  is connected, the roll-call closes, the service opens on the same port, and all hear "go".
- The service reports no port, shares one silently with another service (`SO_REUSEPORT`), and kills the
  process when it cannot bind. So this process binds the port first, and a bad address is an
  ordinary error.

A worker keeps its connection while it is in the group: its **lifeline**. The service of an epoch
ends with the last lifeline, because members that are still in the group would abort. So hosts that
must leave have time to save their arrays, and islands survive a controller that was killed.

A worker sends `{"epoch": 3, "hosts": 2, "rank": 0}` and hears `{"go": true}` or
`{"refused": "..."}`. If the parent was killed (one that ends in order kills this process), roll-calls
are refused, and this process ends with the last lifeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from pw.core.jax_private.distributed import private_runtime
from pw.processes.channel import Channel
from pw.processes.child import parent

MODULE = "pw.devices.jax.coordination"
CALL_LIMIT_BYTES = 4096
# A machine without power closes no connection; this detects it within half a minute.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The parent wants the service of an island's epoch."""

    island: str
    epoch: int
    hosts: int
    """Number of hosts that will join."""
    bind: str
    """Numeric address to bind to."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The parent wants no roll-call of an island's epoch any more."""

    island: str
    epoch: int


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The answer to `Start`."""

    island: str
    epoch: int
    address: str
    error: str
    """Reason why there is no service; empty if there is one."""


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class IslandEpoch:
    """One epoch of an island: a roll-call, then the service on the same port, until the last lifeline ends.

    Args:
        epoch: the island's epoch.
        hosts: the number of hosts.
        bind: the numeric address to bind to.
        ended: called once, when the roll-call was stopped or the last member has hung up.

    Raises:
        ValueError: `hosts` or `bind` makes no sense.
        OSError: `bind` is no address of this machine.
    """

    def __init__(self, epoch: int, hosts: int, bind: str, ended: Callable[[], None]) -> None:
        if hosts < 1:
            raise ValueError(f"an island needs at least one host, not {hosts}")
        if ipaddress.ip_address(bind).is_unspecified:
            raise ValueError(f"workers cannot dial {bind}: bind to an address that they can reach")
        self.epoch = epoch
        self.hosts = hosts
        self._ended = ended
        self._lines: dict[int, asyncio.StreamWriter] = {}
        self._open = True
        self._roll_call: asyncio.Server | None = None
        self._service: Any = None
        # Keeps the port taken between the roll-call and the service.
        self._reserved = _bound_socket(bind, 0)
        self._bind = bind
        self._port: int = self._reserved.getsockname()[1]
        self.address = f"[{bind}]:{self._port}" if ":" in bind else f"{bind}:{self._port}"

    async def open(self) -> None:
        """Open the roll-call."""
        listening = _bound_socket(self._bind, self._port)
        self._roll_call = await asyncio.start_server(
            self._answer, sock=listening, limit=CALL_LIMIT_BYTES
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        rank: int | None = None
        _keep_alive(writer.get_extra_info("socket"))
        try:
            rank, refusal = self._admit(await reader.readline(), writer)
            if refusal:
                _say(writer, {"refused": refusal})
            else:
                if len(self._lines) == self.hosts:
                    self._go()
                await reader.read()
        except (OSError, ValueError):
            pass  # the caller has hung up, or sent something else
        finally:
            if rank is not None and self._lines.get(rank) is writer:
                del self._lines[rank]
            writer.close()
            if self._service is not None and not self._lines:
                self._end()

    def _admit(self, line: bytes, writer: asyncio.StreamWriter) -> tuple[int | None, str]:
        call = json.loads(line)
        if not isinstance(call, dict):
            return None, "this is the roll-call of an island of pw"
        rank, hosts, epoch = call.get("rank"), call.get("hosts"), call.get("epoch")
        if epoch != self.epoch:
            return None, f"this is the roll-call of epoch {self.epoch}, not of epoch {epoch}"
        if hosts != self.hosts:
            return None, f"this island has {self.hosts} hosts, not {hosts}"
        if not isinstance(rank, int) or not 0 <= rank < self.hosts:
            return None, f"rank {rank} is not in 0..{self.hosts - 1}"
        if rank in self._lines:
            return None, f"another host waits as rank {rank}"
        self._lines[rank] = writer
        return rank, ""

    def _go(self) -> None:
        assert self._roll_call is not None
        self._roll_call.close()
        answer: dict[str, Any] = {"go": True}
        try:
            # With a recoverable service, the others survive the death of a member.
            self._service = private_runtime().get_distributed_runtime_service(
                self.address, self.hosts, recoverable=True
            )
        except RuntimeError as error:
            answer = {"refused": f"the coordination service did not start: {error}"}
        self._reserved.close()
        for writer in self._lines.values():
            _say(writer, answer)

    def stop(self) -> None:
        """Stop the roll-call. A service that has begun ends when its members leave."""
        if self._service is None:
            for writer in self._lines.values():
                _say(writer, {"refused": f"epoch {self.epoch} was given up"})
                writer.close()
            self._end()

    def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        if self._roll_call is not None:
            self._roll_call.close()
        self._reserved.close()
        if self._service is not None:
            # On a thread, because the runtime may wait for its own callbacks.
            threading.Thread(target=self._service.shutdown, daemon=True).start()
        self._ended()


class Coordination:
    """Serves the parent and the members until both are gone."""

    def __init__(self, parent: Channel[Start | Stop]) -> None:
        self._parent = parent
        self._epochs: dict[tuple[str, int], IslandEpoch] = {}
        self._work: asyncio.Queue[Start | Stop] = asyncio.Queue()

    async def serve(self) -> NoReturn:
        """Answer requests in order."""
        asyncio.get_running_loop().add_reader(self._parent.fileno(), self._read)
        while True:
            request = await self._work.get()
            if isinstance(request, Start):
                await self._start(request)
            elif (epoch := self._epochs.get((request.island, request.epoch))) is not None:
                epoch.stop()

    def _read(self) -> None:
        for request, _, _ in self._parent.arrived():
            self._work.put_nowait(request)
        if self._parent.ended:
            asyncio.get_running_loop().remove_reader(self._parent.fileno())
            for epoch in list(self._epochs.values()):
                epoch.stop()
            self._end_if_useless()

    async def _start(self, request: Start) -> None:
        key = request.island, request.epoch
        address = error = ""

        def ended() -> None:
            self._epochs.pop(key, None)
            self._end_if_useless()

        try:
            if key in self._epochs:
                raise ValueError(
                    f"epoch {request.epoch} of island {request.island!r} was started before"
                )
            private_runtime()
            epoch = IslandEpoch(request.epoch, request.hosts, request.bind, ended)
            await epoch.open()
        except (OSError, RuntimeError, ValueError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        else:
            self._epochs[key] = epoch
            address = epoch.address
        with contextlib.suppress(OSError):  # `_read` notices that the parent is gone
            self._parent.send(Started(*key, address, error))
        if self._parent.ended and not error:
            epoch.stop()

    def _end_if_useless(self) -> None:
        if self._parent.ended and not self._epochs:
            # Not sys.exit, which would wait for a service that is shutting down.
            os._exit(0)


def _bound_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"cannot bind {host}: {error.strerror}") from error
    return bound


def _keep_alive(line: socket.socket) -> None:
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE.items():
        if hasattr(socket, option):  # not on every system
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _say(writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
    if not writer.is_closing():
        writer.write(json.dumps(answer).encode() + b"\n")


def main() -> NoReturn:
    """Serve the parent until it and all members are gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent ends this process

    async def serve() -> NoReturn:
        await Coordination(parent(Start | Stop)).serve()

    asyncio.run(serve())
    raise AssertionError("unreachable: the process ends in os._exit")


if __name__ == "__main__":
    main()
