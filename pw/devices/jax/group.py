"""Enters the group of an island's hosts (`jax.distributed`, as a client only).

The hosts of an island are one group of XLA's runtime, formed again under each epoch. The
coordination service runs in another process (`pw.devices.jax.coordination`), so any host may die.
A process enters one group, and leaves it when it ends.

Properties of the runtime that shape this file:

- A client that connects and waits in vain aborts the process. So a roll-call comes first: after it, only
  a death within milliseconds aborts.
- The public `jax.distributed.initialize` runs the service in rank 0 and cannot be undone. So the client is
  put into JAX's own state by hand.
- The end of the service aborts its clients. So the connection of the roll-call stays open as a lifeline
  until this process ends, and the service stays while there is a lifeline.
- Joining holds JAX's backend lock: any other use of JAX in the process waits for it.

JAX's plugins take the client, the rank and the number of hosts from the same state as its CPU devices. NCCL
keeps the communicators of a group until the process ends, another reason for one group a process.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import time
from functools import partial
from typing import Any

import jax
import jax.extend.backend

from pw.core.errors import Error
from pw.core.jax_private import distributed, runtime
from pw.core.platforms import jax_platform, platform_of
from pw.core.processors import processors

# XLA sizes its CPU pools from these, and divides matrices for so many threads.
POOL_VARIABLES = ("PJRT_NPROC", "NPROC")
# With too few threads, collectives that are enqueued back to back starve each other and abort the process.
COLLECTIVE_POOL = 64
# All hosts connect within milliseconds of the roll-call. If one dies just then, the runtime aborts the
# others after this time.
CONNECT_S = 15
# Asks Linux for the IPv4 address of a network interface (netdevice(7)).
SIOCGIFADDR = 0x8915

lifeline: list[socket.socket] = []
"""The connection of the roll-call, if this process is in a group."""


class GroupError(Error):
    """This host could not join its island's group."""


def prepare(platform: str, local_devices: int) -> None:
    """Configure JAX for a worker that is an island of its own.

    Call it before the process uses JAX for the first time; `join` adds what a larger island needs.

    Args:
        platform: the platform of the island's devices (`pw.core.platforms`).
        local_devices: number of devices of this host; on CPU, the number to make.

    Raises:
        GroupError: JAX was used before, so that the settings would come too late.
    """
    if runtime.is_started():
        raise GroupError("a worker must be prepared before its process uses JAX for the first time")
    set_pool(local_devices)
    # A worker must not narrow the types that a client has traced.
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", jax_platform(platform))
    # It would catch SIGTERM, with which the supervisor ends a worker.
    jax.config.update("jax_enable_preemption_service", False)
    for setting, value in platform_of(platform).settings(local_devices).items():
        jax.config.update(setting, value)


def join(
    address: str,
    rank: int,
    size: int,
    epoch: int,
    local_devices: int,
    timeout_s: float = 60.0,
    host: str = "127.0.0.1",
    platform: str = "cpu",
) -> list[jax.Device]:
    """Enter the island's group; blocks until every host has come.

    Args:
        address: address of the epoch's coordination service, `host:port`; unused for one host.
        rank: this host's position in the island, 0 <= rank < size.
        size: the number of hosts. With 1 there is no group, on any platform.
        epoch: the island's epoch.
        local_devices: number of devices of this host.
        timeout_s: how long to wait for the other hosts, in seconds. If one dies within milliseconds
            after all have come, it takes up to a minute more.
        host: the address of this machine at which the other hosts' collectives dial it.
        platform: the platform of the island's devices, as in `prepare`.

    Returns:
        The devices of the whole island, those of rank 0 first.

    Raises:
        GroupError: the group was not formed.
        RuntimeError: with one host, JAX cannot open its devices.
    """
    if not 0 <= rank < size:
        raise GroupError(f"rank {rank} is not in an island of {size} hosts")
    where = _described(address, rank, size, epoch)
    if size > 1:
        if runtime.is_started():
            raise GroupError(f"JAX is in use already, so this process cannot join {where}")
        set_pool(local_devices, size)
        enter(address, rank, size, epoch, timeout_s, host, platform)
    try:
        devices = list(jax.devices())
    except RuntimeError as error:
        if size == 1:
            raise
        raise GroupError(
            f"the devices of {where} could not be opened: {error}. A host that died meanwhile "
            "must be replaced under a new epoch"
        ) from error
    # Without a group, the rank of the only process may differ from ours.
    if size > 1 and {device.process_index for device in devices} != set(range(size)):
        raise GroupError(
            f"{where} shows only the devices of ranks "
            f"{sorted({device.process_index for device in devices})}: this platform formed no group"
        )
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def enter(
    address: str,
    rank: int,
    size: int,
    epoch: int,
    timeout_s: float = 60.0,
    host: str = "127.0.0.1",
    platform: str = "cpu",
) -> None:
    """Enter a group before JAX opens the devices; arguments and errors are those of `join`."""
    where = _described(address, rank, size, epoch)
    deadline_s = time.monotonic() + timeout_s
    lifeline.append(_answer_roll_call(address, rank, size, epoch, deadline_s, where))
    _connect(address, rank, size, where)
    _listen_at(host, platform)


def _described(address: str, rank: int, size: int, epoch: int) -> str:
    return f"epoch {epoch} at {address} as rank {rank} of {size}"


def set_pool(local_devices: int, hosts: int = 1) -> None:
    """Choose the number of XLA's threads, before the process opens its devices.

    Without collectives there are as many as plain JAX has.
    """
    alone = local_devices * hosts == 1
    threads = processors() if alone else max(COLLECTIVE_POOL, 2 * local_devices)
    for variable in POOL_VARIABLES:
        os.environ[variable] = str(threads)


def _connect(address: str, rank: int, size: int, where: str) -> None:
    try:
        client: Any = distributed.private_runtime().get_distributed_runtime_client(
            address,
            rank,
            init_timeout=CONNECT_S,
            # Otherwise its destructor would block, for example at exit.
            shutdown_on_destruction=False,
            use_compression=True,
        )
        client.connect()
    except RuntimeError as error:
        raise GroupError(f"could not join {where}: {error}") from error
    distributed.enter(client, rank, size, address)


def _listen_at(host: str, platform: str) -> None:
    """Have the collectives of a platform listen at `host`, unless the environment names an interface."""
    if variable := platform_of(platform).interface:
        if (name := interface_of(host)) is not None:
            os.environ.setdefault(variable, f"={name}")  # with "=", NCCL takes no longer name
        return
    jax.extend.backend.register_backend_factory(
        "cpu", partial(_make_cpu_client, host), priority=0, fail_quietly=False
    )


def interface_of(host: str) -> str | None:
    """Return the network interface whose first IPv4 address is `host`; None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking, SIOCGIFADDR, struct.pack("40s", name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == host:
                return name
    return None


def _make_cpu_client(host: str) -> Any:
    """JAX's CPU client, with Gloo listening at `host`.

    By default Gloo listens where this machine's name leads, such as the loopback or another
    network.
    """
    gloo = distributed.private_runtime().make_gloo_tcp_collectives(
        distributed_client=distributed.client(), hostname=host
    )
    return runtime.make_cpu_client(gloo)


def _answer_roll_call(
    address: str, rank: int, size: int, epoch: int, deadline_s: float, where: str
) -> socket.socket:
    """Wait until every host is there and the service is open; returns the lifeline."""
    host, _, port = address.rpartition(":")
    call = json.dumps({"epoch": epoch, "hosts": size, "rank": rank}).encode() + b"\n"
    answer = b""
    try:
        with contextlib.ExitStack() as unless_in:
            dialled = socket.create_connection((host.strip("[]"), int(port)), _left_s(deadline_s))
            line = unless_in.enter_context(dialled)
            line.sendall(call)
            while not answer.endswith(b"\n"):
                line.settimeout(_left_s(deadline_s))
                received = line.recv(4096)
                if not received:
                    raise GroupError(f"the roll-call of {where} broke off; is the epoch over?")
                answer += received
            heard = json.loads(answer)
            if "refused" in heard:
                raise GroupError(f"{where} was refused: {heard['refused']}")
            unless_in.pop_all()
            return line
    except TimeoutError as error:
        raise GroupError(f"not all hosts of {where} came in time; form a new epoch") from error
    except OSError as error:
        raise GroupError(f"no roll-call of {where} answers: {error}; is the epoch over?") from error
    except ValueError as error:
        raise GroupError(
            f"{where} is no roll-call (any more): the epoch was formed without this host"
        ) from error


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
