"""The gateway in the user's own process: a thread beside the session's, and JAX's client of it.

JAX reaches it over a unix socket in a folder that only this user can enter. It uses the current
session of the process, so JAX's arrays and pw's are of one session.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import uvloop

from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.gateway import choosing
from pw.gateway.devices import Devices
from pw.gateway.server import Server
from pw.transport.private import PrivateFolder

_INSECURE = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_ERRORS, _FATAL = 2, 3
_STOP_S = 10.0


class Thread:
    """The gateway of this process."""

    def __init__(self, runtime: Runtime, devices: Devices) -> None:
        self.runtime = runtime
        self.devices = devices
        self._folder = PrivateFolder.make()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="pw-gateway", daemon=True)
        self._thread.start()
        self.address = f"unix:{self._folder.path / 'gateway'}"
        self._call(self._start())

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        done: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return done.result()

    async def _start(self) -> None:
        self._server = Server(self._connect)
        await self._server.start(self.address)

    async def _connect(self) -> tuple[Runtime, Devices, Callable[[], None]]:
        return self.runtime, self.devices, lambda: None

    def close(self) -> None:
        """End the server and its thread."""
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)
        self._folder.leave()


_here: Thread | None = None


def client(
    address: str | None,
    devices: int | None,
    islands: int | Sequence[str] | None,
    session: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Any:
    """Return JAX's client of this process's gateway; starts it, and connects to the cluster."""
    global _here
    from jax.extend.backend import ifrt_proxy

    runtime = current.connect(address, **session)
    slices = choosing.allocate(runtime, devices, islands, environment)
    if _here is not None:
        _close()
    _here = Thread(runtime, Devices(slices))
    os.environ[_INSECURE] = "true"
    if os.environ.get(_LOG_LEVEL, "1") == "1":  # JAX's default
        _log_from(_ERRORS)
    return ifrt_proxy.get_client(f"grpc://{_here.address}", ifrt_proxy.ClientConnectionOptions())


def _log_from(level: int) -> None:
    """Let JAX's native code log nothing below this level: it would warn of the socket, and of its end."""
    from jax._src.lib import utils

    utils.absl_set_min_log_level(level)


def _close() -> None:
    global _here
    if _here is not None:
        here, _here = _here, None
        here.close()


def _exit() -> None:
    if _here is not None:
        _log_from(_FATAL)
        _close()


atexit.register(_exit)
