"""`python -m tests.kills`: processes of a cluster die at random while clients wait for each result.

An island of two hosts; one client that stays and one that comes and goes, on both hosts or on one. What they
compute, with integers and a collective, is compared with numpy, value by value. Runtimes, whole workers,
the controller and clients are killed, and those that ended are started again. With `--device-memory 32KiB`
the client gets its memory in parts; with `--tenants` all processes have certificates, and clients are of two
tenants. With `--many` there are up to eight clients of three kinds, under the policy `share`: they call without
a pause, at random times, or in bursts. With `--moves` there is a second island: clients are suspended and go
on, or move to it and back, and workers are told to end, and have a folder for what they leave. It prints what
happened, and ends with 1 at the first wrong value, when a client makes no step for two minutes, or if the
cluster has anything left when all clients were killed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import CREDENTIALS
from tests.stages.daemons import Program, send, start_module

ROWS, COLUMNS = 4, 64
PRIME = 8191
SAID_EVERY = 50
CHECKPOINT_EVERY = 100
MOVE_EVERY = 150
"""Mean number of steps between two moves of a client."""
STUCK_S = 120.0


class Kind(StrEnum):
    """When a client calls."""

    TRAINING = "training"
    """Without a pause."""
    SERVING = "serving"
    """At random times."""
    NOTEBOOK = "notebook"
    """In bursts."""


BURST = 25
"""Calls of a burst."""


def move(draw: random.Random, slice: Any) -> None:
    """Leave the devices for a while, or go to another island, if that is possible now."""
    import pw

    try:
        if draw.random() < 0.5:
            pw.migrate(slice, island=draw.choice(("island", "west")))
        else:
            pw.suspend()
            time.sleep(draw.choice((0.0, 0.05, 0.5)))
            pw.resume()
    except pw.Error as error:
        print(f"not moved: {type(error).__name__}: {error}", flush=True)


def client(seed: int, devices: int, kind: str, moves: bool) -> None:
    """Call and wait, again and again; say how many steps were right, and how many were leased."""
    from jax.sharding import PartitionSpec as P

    import pw
    from pw.client.connection import current

    mesh = None
    while mesh is None:
        try:
            slice = pw.make_virtual_device_set().add_slice(devices)
            mesh = pw.Mesh(slice.devices, ("x",))
        except pw.InsufficientDevices:  # its island is not there at the moment
            time.sleep(0.2)
    rows = P("x")

    @pw.jit(mesh=mesh, in_shardings=rows, out_shardings=(rows, P()), donate_argnums=0)
    def step(state: Any) -> Any:
        state = (state * 3 + state.sum() % PRIME + 1) % PRIME
        return state, state.sum() % PRIME

    known = np.random.default_rng(seed).integers(0, PRIME, (ROWS, COLUMNS), np.int32)
    state: Any = pw.put(known, sharding=pw.NamedSharding(mesh, rows))
    known = known.astype(np.int64)
    steps, said_s, draw = 0, time.monotonic(), random.Random(seed)
    while True:
        if kind == Kind.SERVING:
            time.sleep(draw.expovariate(20.0))
        elif kind == Kind.NOTEBOOK and steps % BURST == 0:
            time.sleep(draw.uniform(0.0, 2.0))
        state, probe = step(state)
        if steps % 3 == 0:
            pw.block_until_ready(probe)
        if steps % CHECKPOINT_EVERY == 0:
            pw.checkpoint(state)
        if moves and draw.random() < 1 / MOVE_EVERY:
            move(draw, slice)
        known = (known * 3 + known.sum() % PRIME + 1) % PRIME
        value, right = int(np.asarray(probe)), int(known.sum() % PRIME)
        if value != right:
            print(f"wrong: step {steps} is {value}, not {right}", flush=True)
            sys.exit(1)
        steps += 1
        if steps % SAID_EVERY == 0 or time.monotonic() > said_s + 1:
            said_s = time.monotonic()
            counters = current.runtime().thread.counters()
            print(f"steps {steps} leased {counters.get('leased_launches', 0)}", flush=True)


def look_for_leftovers() -> None:
    """Wait until the cluster has nothing of any other client, and say so."""
    import pw

    left: dict[str, int] = {}
    until_s = time.monotonic() + STUCK_S
    while time.monotonic() < until_s:
        status, stats = pw.status(), pw.stats()
        left = {"clients": len(status.clients) + status.hidden_clients - 1}
        for process, counts in stats.items():
            for name in ("live_arrays", "live_bytes", "programs", "installed", "runs_in_flight"):
                if process != "client" and counts.get(name):
                    left[f"{name} of {process}"] = counts[name]
        if not any(left.values()):
            print("nothing left", flush=True)
            return
        time.sleep(0.2)
    print(f"left: {left}", flush=True)


ACTS = ("comes", "comes", "goes", "client", "runtime", "runtime", "worker", "controller")
"""Kinds of what may happen."""


class Client:
    """A client as a process of its own."""

    def __init__(
        self,
        folder: Path,
        address: str,
        seed: int,
        devices: int,
        kind: Kind = Kind.TRAINING,
        variables: Mapping[str, str] = MappingProxyType({}),
        *,
        moves: bool = False,
    ) -> None:
        body = f"from tests.kills import client; client({seed}, {devices}, '{kind}', {moves})"
        self.program = Program(folder, ["-c", body], PW_ADDRESS=address, **variables)
        self.since_s = time.monotonic()
        self.leased = self.steps = 0

    def look(self) -> None:
        """Raises AssertionError if it is wrong, has ended, or makes no steps."""
        said = self.program.out
        assert "wrong" not in said, said[-300:]
        assert self.program.process.poll() is None, self.program.err[-3000:]
        lines = [line.split() for line in said.splitlines() if line.startswith("steps")]
        if lines and int(lines[-1][1]) != self.steps:
            self.since_s = time.monotonic()
            self.steps, self.leased = int(lines[-1][1]), int(lines[-1][3])
        assert time.monotonic() < self.since_s + STUCK_S, f"stuck at step {self.steps}"


class Cluster:
    """A controller and two workers that are started again."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        device_memory: str,
        *,
        tenants: bool = False,
        many: bool = False,
        moves: bool = False,
    ) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.kinds = tuple(Kind) if many else (Kind.TRAINING,)
        self.most, self.policy = (8, "share") if many else (2, "fifo")
        self.moves = moves
        self.acts = ACTS + ("notice", "notice") * moves
        self.memory = ("--device-memory", device_memory) if device_memory else ()
        self.authority = Authority.create() if tenants else None
        self.controller = self.start_controller("tcp://127.0.0.1:0")
        self.controller.until_says("tcp://")
        self.address = next(w for w in self.controller.out.split() if w.startswith("tcp://"))
        self.workers = [self.worker(at) for at in range(3 if moves else 2)]
        self.clients: list[Client] = []
        self.seeds = 0
        self.done: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()

    def credentials(self, role: Role, name: str, tenant: str = "") -> dict[str, str]:
        """Return the variable with the certificate of a name; nothing if processes need none."""
        if self.authority is None:
            return {}
        file = self.folder / f"{role}-{name}.pem"
        if not file.exists():
            file.touch(0o600)
            file.write_bytes(self.authority.issue(role, name, tenant))
        return {CREDENTIALS: str(file)}

    def start_controller(self, bind: str) -> Program:
        mine = self.credentials(Role.CONTROLLER, "controller")
        options = ("--bind", bind, "--policy", self.policy)
        return start_module("pw.cli.controller", *options, folder=self.folder, **mine)

    def worker(self, at: int) -> Program:
        where = ("--island", "island", "--island-hosts", 2)
        if at == 2:
            where = ("--island", "west", "--devices", 2)
        options = ("--controller", self.address, *where, "--name", f"host-{at}", *self.memory)
        if self.moves:
            options += ("--drain", 20, "--keep-files", self.folder / "left")
        mine = self.credentials(Role.WORKER, f"host-{at}")
        return start_module("pw.cli.worker", *options, folder=self.folder, **mine)

    def join(self, devices: int) -> None:
        self.seeds += 1
        tenant = ("research", "rivals")[self.seeds % 2]
        mine = self.credentials(Role.CLIENT, f"client-{self.seeds}", tenant)
        kind = self.kinds[self.seeds % len(self.kinds)]
        self.clients.append(
            Client(self.folder, self.address, self.seeds, devices, kind, mine, moves=self.moves)
        )

    def leave(self, at: int) -> None:
        one = self.clients.pop(at)
        self.steps["steps"] += one.steps
        self.steps["leased"] += one.leased
        one.program.kill()

    def act(self) -> str:
        """Let something happen; return what."""
        what = self.random.choice(self.acts)
        if what == "comes" and len(self.clients) < self.most:
            self.join(self.random.choice((1, 2)))
        elif what == "goes" and len(self.clients) > self.most // 2:
            self.leave(self.random.randrange(1, len(self.clients)))
        elif what == "client":
            self.leave(0)
            self.join(2)
            self.clients.reverse()
        elif what == "runtime":
            worker = self.random.choice(self.workers)
            pids = sorted(worker.family() - {worker.process.pid})
            if not pids:
                return "nothing"
            send(self.random.choice(pids), signal.SIGKILL)
        elif what == "notice":
            at = self.random.randrange(len(self.workers))
            send(self.workers[at].process.pid, signal.SIGTERM)
            self.workers[at].end()
            self.workers[at] = self.worker(at)
        elif what == "worker":
            at = self.random.randrange(len(self.workers))
            self.workers[at].kill()
            self.workers[at] = self.worker(at)
            self.until_checkpoints()  # a slice waits for devices for a while only
        elif what == "controller":
            self.controller.kill()
            self.controller = self.start_controller(self.address)
            self.until_checkpoints()
        else:
            return "nothing"
        self.done[what] += 1
        return what

    def until_checkpoints(self) -> None:
        """How arrays were made is known again after a checkpoint; without it a lost host is too much."""
        wanted = [(one, one.steps + 2 * CHECKPOINT_EVERY) for one in self.clients]
        while any(one.steps < steps for one, steps in wanted):
            self.watch(0.2)

    def watch(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            for one in self.clients:
                one.look()
            for at, worker in enumerate(self.workers):
                if worker.process.poll() is not None:
                    self.workers[at] = self.worker(at)
                    self.done["worker ended"] += 1
            time.sleep(0.05)

    def check_leftovers(self) -> None:
        """Raises AssertionError if the cluster has anything of clients, all of which were killed."""
        body = "from tests.kills import look_for_leftovers; look_for_leftovers()"
        mine = self.credentials(Role.CLIENT, "looker", "research")
        looker = Program(self.folder, ["-c", body], PW_ADDRESS=self.address, **mine)
        try:
            looker.end(2 * STUCK_S)
            assert "nothing left" in looker.out, looker.out + looker.err
        finally:
            looker.kill()

    def close(self) -> None:
        for program in (*(one.program for one in self.clients), *self.workers, self.controller):
            program.kill()


def main() -> None:
    """Run until the time is over."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--device-memory", default="", help="limits it, so leases have room for some launches only"
    )
    parser.add_argument("--tenants", action="store_true", help="clients of two tenants, over TLS")
    parser.add_argument("--moves", action="store_true", help="clients and workers move, too")
    parser.add_argument("--many", action="store_true", help="up to eight clients of three kinds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pw-kills-") as name:
        cluster = Cluster(
            Path(name),
            arguments.seed,
            arguments.device_memory,
            tenants=arguments.tenants,
            many=arguments.many,
            moves=arguments.moves,
        )
        try:
            for _ in range(cluster.most // 2):
                cluster.join(2)
            cluster.watch(10)
            until_s = time.monotonic() + arguments.minutes * 60
            while time.monotonic() < until_s:
                happened = cluster.act()
                said = [(one.steps, one.leased) for one in cluster.clients]
                print(f"{until_s - time.monotonic():6.1f} s left: {happened} {said}", flush=True)
                cluster.watch(cluster.random.choice((0.3, 2.0, 4.0, 8.0)))
            cluster.watch(15)
            while cluster.clients:
                cluster.leave(0)
            cluster.check_leftovers()
            print(f"all values right: {dict(cluster.steps)}, {dict(cluster.done)}", flush=True)
        finally:
            cluster.close()


if __name__ == "__main__":
    main()
