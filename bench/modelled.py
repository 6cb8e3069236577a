"""The controller daemon as it ships, with hundreds of modelled hosts.

One machine can measure the cost of a controller with 512 hosts if the hosts cost next to nothing.
`pw-controller` runs unchanged, in a process of its own, on its own sockets. One other process, the
*swarm* (`bench.swarm`), acts as all hosts and as a client.

The processor time of the daemon's threads is read from outside (/proc), in nanoseconds, so the
measurement adds nothing to it. Linux only.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pw.processes.daemons import LocalDaemon

START_S = 60.0
ANSWER_S = 120.0


@dataclass(frozen=True)
class Usage:
    """The daemon's processor time and traffic since it was started."""

    loop_s: float
    """Processor time of its event loop: controller, schedulers, and the transport's Python."""
    other_s: float
    """Processor time of its other threads."""
    messages_sent: int
    frames_sent: int
    bytes_sent: int

    def since(self, before: Usage) -> Usage:
        """The difference between two readings."""
        mine, theirs = vars(self), vars(before)
        return Usage(**{name: mine[name] - theirs[name] for name in mine})


class ModelledCluster:
    """A daemon with `hosts` modelled hosts of `devices` devices each, as one island.

    The function of its client takes and returns `arrays` arrays, each sharded over all devices. It is a
    chain of `nodes` computations.

    Raises RuntimeError or ConnectionFailed if the daemon or the swarm ends or is not ready in time.
    """

    def __init__(self, hosts: int, devices: int, arrays: int = 1, nodes: int = 1) -> None:
        self.hosts = hosts
        self.devices = devices
        arguments = ["--bind", "tcp://127.0.0.1:0", "--log-level", "error"]
        self._controller = LocalDaemon("pw.cli.controller", arguments)
        self._swarm: subprocess.Popen[str] | None = None
        try:
            address = self._controller.address(START_S)
            self._swarm = subprocess.Popen(
                [sys.executable, "-m", "bench.swarm", address, str(hosts), str(devices)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self._read()
            before_s = self._threads_s()[self._controller.pid]
            self._ask(do="register", devices=hosts * devices, arrays=arrays, nodes=nodes)
            self.install_s = self._threads_s()[self._controller.pid] - before_s
        except BaseException:
            self.close()
            raise

    def launch(self, count: int, *, window: int = 512) -> None:
        """Let the client call a function on all devices `count` times, `window` calls in flight.

        The devices take no time.
        """
        self._ask(do="launch", count=count, window=window, device_us=0.0)

    def busy(self, count: int, device_us: float) -> float:
        """Launch with devices that take `device_us`; returns the part of the time they are busy.

        The first quarter of the launches, which begin on idle hosts, is not counted.
        """
        answer = self._ask(do="launch", count=count, window=512, device_us=device_us)
        return float(answer["busy"])

    def hold(self, count: int) -> None:
        """Let the client compute `count` arrays on one device, each from the last; it keeps all."""
        self._ask(do="hold", count=count)

    def usage(self) -> Usage:
        """The daemon's usage so far."""
        counters = self._ask(do="stats")["counters"]
        threads = self._threads_s()
        loop_s = threads.pop(self._controller.pid)
        return Usage(
            loop_s,
            sum(threads.values()),
            counters["messages_sent"],
            counters["frames_sent"],
            counters["control_bytes_sent"],
        )

    def resident_bytes(self) -> int:
        """Resident memory of the daemon's process."""
        status = Path(f"/proc/{self._controller.pid}/status").read_text().splitlines()
        line = next(line for line in status if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    def _threads_s(self) -> dict[int, float]:
        """Processor time of each thread of the daemon; its event loop is the main thread."""
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
        # Without a limit, a benchmark that is interrupted while it starts clusters would hang.
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

    def __exit__(self, *exception: object) -> None:
        self.close()
