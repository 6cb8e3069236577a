"""A cluster of two islands, and a gateway in front of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import jax
from jaxlib import utils

import pw
from pw.client.connection import current
from pw.core.messages import ClientInfo
from pw.processes.daemons import LocalDaemon
from tests.stages.daemons import until

FATAL = 3


class Stage:
    """The island `island-0` of two hosts and four devices, the island `single`, and a gateway.

    The test's process has a session, too.
    """

    def __init__(self) -> None:
        os.environ["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] = "true"
        self._ends = ExitStack()
        self._neighbour: Any = None
        try:
            self._start()
        except BaseException:
            self._ends.close()
            raise

    def _start(self) -> None:
        self.cluster = self._ends.enter_context(
            pw.LocalCluster(hosts_per_island=2, devices_per_host=2, allow_python=True)
        )
        self.single = self.worker("single", 4)
        until(lambda: len(self.status().islands) == 2, "the second island")
        self.gateway, self.address = self.start_gateway()

    def worker(self, island: str, devices: int, *more: str) -> LocalDaemon:
        """Start the worker of an island of one host; `more` are options for it."""
        where = ["--controller", self.cluster.address, "--island", island, "--log-level", "error"]
        worker = LocalDaemon("pw.cli.worker", [*where, "--devices", str(devices), *more])
        self._ends.callback(worker.stop)
        return worker

    def start_gateway(self, *arguments: str) -> tuple[LocalDaemon, str]:
        """Start a gateway to the cluster; returns it, and where it listens."""
        where = ["--address", self.cluster.address, "--bind", "tcp://127.0.0.1:0"]
        gateway = LocalDaemon("pw.cli.gateway", [*where, *arguments])
        self._ends.callback(gateway.stop)
        return gateway, gateway.address(60)

    def client(self, address: str = "") -> Any:
        """Return JAX's client of a gateway."""
        from jax.extend.backend import ifrt_proxy

        return ifrt_proxy.get_client(address or self.address, ifrt_proxy.ClientConnectionOptions())

    def neighbour(self) -> Sequence[Any]:
        """Return the devices of one client of JAX, the same one each time."""
        if self._neighbour is None:
            self._neighbour = self.client()
        return list(self._neighbour.devices())

    def status(self) -> Any:
        """Return the state of the cluster."""
        return current.runtime().ask.status(20.0)

    def others(self) -> Sequence[ClientInfo]:
        """Return the cluster's clients beside the test's process."""
        return [one for one in self.status().clients if not one.is_me]

    def until_alone(self) -> None:
        """Wait until the gateway has no client but the neighbour."""
        expected = 0 if self._neighbour is None else 1
        until(lambda: len(self.others()) == expected, f"the end of {self.others()}")

    def gateway_bytes(self) -> int:
        """Return the gateway's own memory, without the blocks that it shares with hosts."""
        status = Path(f"/proc/{self.gateway.pid}/status").read_text()
        said = next(line for line in status.splitlines() if line.startswith("RssAnon"))
        return int(said.split()[1]) << 10

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._neighbour = None
        jax.clear_caches()  # releases executables while the gateway is there
        gc.collect()
        utils.absl_set_min_log_level(FATAL)  # JAX's client logs that it has lost its server
        self._ends.close()
