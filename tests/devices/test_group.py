"""Hosts form a group, leave it, lose a member and form the next one: real processes, real Gloo."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pw.devices.jax.coordination_service import CoordinationServices
from tests.stages.programs import ROOT, start

PATIENCE_S = 60.0
LISTENS = 10  # a state in the kernel's table of tcp sockets

pytestmark = pytest.mark.processes

# Reads one request a line and answers each with one line; joins in a thread when asked to.
WORKER = """
import concurrent.futures, gc, json, os, sys, weakref
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # Gloo prints to stdout
from jax._src import distributed, xla_bridge
from pw.devices.jax import group
group.prepare("cpu", int(sys.argv[1]))
import jax, jax.extend.backend, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def join(thread=False, **how):
    how["local_devices"] = int(sys.argv[1])
    if thread:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            devices = pool.submit(group.join, **how).result()
    else:
        devices = group.join(**how)
    return [device.process_index for device in devices]

def psum():
    mesh = Mesh(np.array(jax.devices()), ("hosts",))
    size = mesh.devices.size
    sharded = NamedSharding(mesh, P("hosts"))
    whole = np.arange(1.0, size + 1.0)
    x = jax.make_array_from_callback((size,), sharded, lambda index: whole[index])
    total = jax.jit(jax.shard_map(lambda v: jax.lax.psum(v, "hosts") + 1,
                                  mesh=mesh, in_specs=P("hosts"), out_specs=P("hosts")))(x)
    return [float(shard.data[0]) for shard in total.addressable_shards]

def threads():
    jax.block_until_ready(jax.numpy.ones(8) + 1)
    tasks = "/proc/self/task"
    return sum("XLAEigen" in open(f"{tasks}/{task}/comm").read() for task in os.listdir(tasks))

def leave():
    # As the end of a process does; this one can join the next epoch.
    backend = weakref.ref(jax.devices()[0].client)
    state = distributed.global_state
    client, state.client = state.client, None
    state.process_id, state.num_processes, state.coordinator_address = 0, 1, None
    if client is not None:
        client.shutdown()
    while group.lifeline:
        group.lifeline.pop().close()
    jax.extend.backend.clear_backends()
    jax.extend.backend.register_backend_factory(
        "cpu", xla_bridge.make_cpu_client, priority=0, fail_quietly=False)
    gc.collect()
    return "freed" if backend() is None else "kept"

for line in sys.stdin:
    request = json.loads(line)
    try:
        answer = {"ok": globals()[request.pop("do")](**request)}
    except group.GroupError as error:
        answer = {"group_error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
"""

# A controller in miniature: starts one service, says where it is, and waits to be killed.
PARENT = """
import asyncio
from pw.devices.jax.coordination_service import CoordinationServices
from tests.stages.programs import ROOT, start
loop = asyncio.new_event_loop()
services = CoordinationServices(loop)
services.start("east", 1, 2, lambda address, error: print(address or error, flush=True))
loop.run_forever()
"""


class Script:
    """A child process that is spoken to in lines, each answer awaited with a bound."""

    def __init__(self, source: str, *arguments: str) -> None:
        (theirs_in, self._in), (self._out, theirs_out) = os.pipe(), os.pipe()
        self.errors, theirs_errors = os.pipe() if source == PARENT else (-1, os.dup(2))
        theirs = (theirs_in, theirs_out, theirs_errors)
        try:
            self.process = start(["-c", source, *arguments], dict(os.environ), ROOT, theirs)
        finally:
            for end in theirs:
                os.close(end)
        self._unread = b""

    def tell(self, **request: Any) -> None:
        os.write(self._in, json.dumps(request).encode() + b"\n")

    def hear_line(self) -> str:
        deadline_s = time.monotonic() + PATIENCE_S
        while b"\n" not in self._unread:
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, _, _ = select.select([self._out], [], [], left_s)
            assert ready, "no answer"
            read = os.read(self._out, 65536)
            assert read, f"the process ended with {self.process.wait(PATIENCE_S)}"
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def hear(self) -> Any:
        answer = json.loads(self.hear_line())
        assert "ok" in answer, answer
        return answer["ok"]

    def ask(self, **request: Any) -> Any:
        self.tell(**request)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for end in (self._in, self._out, self.errors):
            if end >= 0:
                os.close(end)


@contextmanager
def workers(count: int, devices: int = 1) -> Iterator[list[Script]]:
    started: list[Script] = []
    try:
        for _ in range(count):
            started.append(Script(WORKER, str(devices)))
        yield started
    finally:
        for worker in started:
            worker.end()


class Services:
    """`CoordinationServices` on a loop that runs only while an answer is awaited."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.services = CoordinationServices(self.loop, **options)

    def start(self, epoch: int, hosts: int = 2, island: str = "east") -> tuple[Any, Any]:
        answer: asyncio.Future[tuple[Any, Any]] = self.loop.create_future()
        self.services.start(island, epoch, hosts, lambda *done: answer.set_result(done))
        return self.loop.run_until_complete(asyncio.wait_for(answer, PATIENCE_S))

    def address(self, epoch: int, hosts: int = 2, island: str = "east") -> str:
        address, error = self.start(epoch, hosts, island)
        assert error is None
        return str(address)


@contextmanager
def coordination(**options: Any) -> Iterator[Services]:
    services = Services(**options)
    try:
        yield services
    finally:
        services.services.close()
        services.services.close()
        services.loop.close()


@pytest.fixture
def services() -> Iterator[Services]:
    with coordination() as started:
        yield started


def form(members: list[Script], address: str, epoch: int, **how: Any) -> list[Any]:
    """Let all members join, and return what each of them sees."""
    for rank, member in enumerate(members):
        member.tell(do="join", address=address, rank=rank, size=len(members), epoch=epoch, **how)
    return [member.hear() for member in members]


def sums(members: list[Script]) -> list[Any]:
    for member in members:
        member.tell(do="psum")
    return [member.hear() for member in members]


def dials(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), PATIENCE_S).close()
    except (ConnectionRefusedError, ConnectionResetError):  # it is gone, or just going
        return False
    return True


def test_two_hosts_add_up_leave_and_do_it_again_in_the_next_epoch(services: Services) -> None:
    with workers(2, devices=2) as pair:
        for epoch, thread in ((1, False), (2, True)):
            address = services.address(epoch)
            assert form(pair, address, epoch, thread=thread) == [[0, 0, 1, 1]] * 2
            assert sums(pair) == [[11.0, 11.0]] * 2
            for member in pair:
                assert member.ask(do="leave") == "freed"
            services.services.stop("east", epoch)


def listens_at(process: int) -> set[str]:
    """The addresses at which a process of this machine listens."""
    descriptors = set()
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            descriptors.add(os.readlink(descriptor))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if int(state, 16) == LISTENS and f"socket:[{inode}]" in descriptors:
            found.add(socket.inet_ntoa(struct.pack("=I", int(local.partition(":")[0], 16))))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_a_host_listens_where_the_others_dial_it(services: Services) -> None:
    """And not where the name of the machine leads, in no epoch."""
    with workers(2) as pair:
        for epoch, host in ((1, "127.0.0.3"), (2, "127.0.0.4")):
            form(pair, services.address(epoch), epoch, host=host)
            assert sums(pair) == [[4.0], [4.0]]
            for member in pair:
                assert listens_at(member.process.pid) == {host}
            for member in pair:
                assert member.ask(do="leave") == "freed"
            services.services.stop("east", epoch)
        assert pair[0].ask(do="join", address="", rank=0, size=1, epoch=3) == [0]
        assert pair[0].ask(do="psum") == [2.0]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_an_island_of_one_device_computes_with_as_many_threads_as_processors() -> None:
    """More would divide each matrix into too many pieces; collectives need them."""
    with workers(1) as (alone,), workers(1, devices=2) as (pair,):
        for host, threads in ((alone, len(os.sched_getaffinity(0))), (pair, 64)):
            host.ask(do="join", address="", rank=0, size=1, epoch=1)
            assert host.ask(do="threads") == threads


def test_a_killed_host_is_replaced_in_the_next_epoch(services: Services) -> None:
    with workers(3) as (survivor, victim, spare):
        first = services.address(1)
        form([survivor, victim], first, 1)
        spare.tell(do="join", address=first, rank=0, size=2, epoch=1)
        assert "is the epoch over" in json.loads(spare.hear_line())["group_error"]
        assert sums([survivor, victim]) == [[4.0], [4.0]]
        victim.process.send_signal(signal.SIGKILL)
        victim.process.wait(PATIENCE_S)
        assert survivor.ask(do="leave") == "freed"
        services.services.stop("east", 1)
        # The spare leads now: ranks are given anew under each epoch.
        assert form([spare, survivor], services.address(2), 2) == [[0, 1]] * 2
        assert sums([spare, survivor]) == [[4.0], [4.0]]


def test_a_host_that_waits_in_vain_is_told_and_lives_on(services: Services) -> None:
    address = services.address(7)
    with workers(1) as (alone,):
        for request, words in (
            ({"size": 2, "epoch": 7, "timeout_s": 0.2}, "not all hosts"),
            ({"size": 2, "epoch": 6}, "roll-call of epoch 7, not of epoch 6"),
            ({"size": 3, "epoch": 7}, "2 hosts, not 3"),
            ({"size": 2, "epoch": 7, "address": "127.0.0.1:1"}, "no roll-call of"),
        ):
            alone.tell(**{"do": "join", "address": address, "rank": 0, **request})
            assert words in json.loads(alone.hear_line())["group_error"]
        # An island of one host needs no service at all.
        assert alone.ask(do="join", address="", rank=0, size=1, epoch=8) == [0]
        assert alone.ask(do="psum") == [2.0]


def test_giving_up_an_epoch_releases_the_hosts_that_wait(services: Services) -> None:
    host, port = services.address(1).split(":")
    lines = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(2)]
    try:
        for line in lines:
            line.sendall(b'{"epoch": 1, "hosts": 2, "rank": 0}\n')
        # Two hosts with one rank: whichever was first waits once the other one is refused.
        refused, _, _ = select.select(lines, [], [], PATIENCE_S)
        assert len(refused) == 1
        assert b"another host waits as rank 0" in refused[0].recv(4096)
        services.services.stop("east", 1)
        (waiting,) = (line for line in lines if line is not refused[0])
        assert b"epoch 1 was given up" in waiting.recv(4096)
    finally:
        for line in lines:
            line.close()


def test_services_are_started_once_and_again_after_their_process_died(services: Services) -> None:
    east, west = services.address(1), services.address(1, island="west")
    assert east != west
    assert services.start(1) == (None, "ValueError: epoch 1 of island 'east' was started before")
    pid = services.services.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert dials(east)
    os.kill(pid, signal.SIGKILL)
    while services.services.pid == pid:
        _, error = services.start(2)
        assert error is None or "ended" in error or "reached" in error
        services.services.stop("east", 2)
    assert dials(services.address(3))
    assert not dials(west)


@pytest.mark.parametrize(
    ("bind_host", "words"), [("203.0.113.9", "cannot bind"), ("0.0.0.0", "cannot dial")]
)
def test_an_address_that_cannot_serve_is_an_error_in_words(bind_host: str, words: str) -> None:
    with coordination(bind_host=bind_host) as started:
        address, error = started.start(1)
        assert address is None
        assert words in error


def test_nothing_is_left_when_the_parent_is_killed() -> None:
    parent = Script(PARENT)
    try:
        address = parent.hear_line()
        assert dials(address)
        parent.process.send_signal(signal.SIGKILL)
        # The child holds the other end of the inherited stderr: it closes when the child is gone.
        ready, _, _ = select.select([parent.errors], [], [], PATIENCE_S)
        assert ready
        assert os.read(parent.errors, 1) == b""
        assert not dials(address)
    finally:
        parent.end()


def call_the_roll(address: str) -> list[socket.socket]:
    """Two hosts without JAX: they hold their lifelines and nothing else."""
    host, port = address.split(":")
    lines = [socket.create_connection((host, int(port)), PATIENCE_S) for _ in range(2)]
    for rank, line in enumerate(lines):
        line.sendall(json.dumps({"epoch": 1, "hosts": 2, "rank": rank}).encode() + b"\n")
    for line in lines:
        assert line.recv(4096) == b'{"go": true}\n'
    return lines


def until_gone(address: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while dials(address):
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize("stopped", [False, True], ids=["deserted", "stopped"])
def test_the_service_of_an_epoch_ends_with_its_last_member(
    services: Services, stopped: bool
) -> None:
    """Members would abort without it, so one that still saves what it holds is not disturbed."""
    address = services.address(1)
    last, first = call_the_roll(address)
    if stopped:
        services.services.stop("east", 1)
    first.close()
    # What was asked before has been done by the time the next answer comes.
    other = services.address(2)
    assert dials(address)
    last.close()
    until_gone(address)
    assert dials(other)


def test_members_survive_a_killed_parent_and_the_service_ends_with_them() -> None:
    parent = Script(PARENT)
    try:
        address = parent.hear_line()
        with workers(2) as pair:
            form(pair, address, 1)
            parent.process.send_signal(signal.SIGKILL)
            parent.process.wait(PATIENCE_S)
            assert sums(pair) == [[4.0], [4.0]]
            pair[1].process.send_signal(signal.SIGKILL)
            pair[1].process.wait(PATIENCE_S)
            assert dials(address)
            assert pair[0].ask(do="leave") == "freed"
            # The child holds the other end of the inherited stderr: it closes when the child is gone.
            # Before that, the service may say that it misses the member that was killed.
            said = parent.errors
            while select.select([said], [], [], PATIENCE_S)[0] and os.read(said, 4096):
                continue
            assert not dials(address)
    finally:
        parent.end()
