"""How a worker enters and leaves the group of its island (`jax.distributed`, as a client only).

The hosts of an island are one group of XLA's runtime, formed anew under each epoch. The service
that introduces them to each other runs elsewhere (`pw.devices.jax.coordination`), so any host may
die: the others `leave` and `join` the next epoch in the same process. Device arrays do not
survive that; copy them to host memory first.

What the runtime does not forgive decides the order of things here:

- a client that connects and waits in vain aborts the process, so a roll-call comes before it: by
  then every member is known to be there, and only a death within the next milliseconds aborts;
- the public `jax.distributed.initialize` puts the service into rank 0 and offers no way back, so
  the client is put into JAX's own state by hand. These private names are used in this file only;
- the service's end aborts its clients: the connection of the roll-call stays open for as long as this
  host is in the group, and the service stays for as long as there is such a lifeline;
- nothing in here is tied to a thread, but joining holds JAX's backend lock: while it runs, any
  other use of JAX in the process waits for it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import time
from functools import partial
from typing import Any

import jax
import jax.extend.backend
from jax._src import distributed, xla_bridge

from pw.core.errors import Error
from pw.devices.jax.coordination import private_runtime

# XLA sizes its CPU pool from these; with fewer threads than device threads in flight, collectives
# enqueued back to back starve each other and abort the process.
POOL_VARIABLES = ("PJRT_NPROC", "NPROC")
MINIMUM_POOL = 64
# All hosts connect within milliseconds of the roll-call. If one of them died just then, this is
# how long the others wait before the runtime aborts them.
CONNECT_S = 15

_lifeline: list[socket.socket] = []
"""The connection of the roll-call, while this process is in a group; it ends with the process."""


class GroupError(Error):
    """This host could not join its island's group; the message says why and what to do."""


def prepare(platform: str, local_devices: int) -> None:
    """Configure JAX for a worker; call it before the process uses JAX for the first time.

    Args:
        platform: the platform of the island's devices: "cpu", "cuda", "tpu".
        local_devices: how many devices this host has; on CPU, how many to make.

    Raises:
        GroupError: JAX was used before, so that the settings would come too late.
    """
    if xla_bridge.backends_are_initialized():
        raise GroupError("a worker must be prepared before its process uses JAX for the first time")
    pool = str(max(MINIMUM_POOL, 2 * local_devices))
    for variable in POOL_VARIABLES:
        os.environ[variable] = pool
    # The client's types are kept as they are: narrowing is its decision, made when it traces.
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_platforms", platform)
    # It would catch SIGTERM, which is the supervisor's way to end a worker.
    jax.config.update("jax_enable_preemption_service", False)
    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", local_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        # The smallest bound there is on waiting for a host that died right after the roll-call.
        jax.config.update("jax_cpu_get_local_topology_timeout_minutes", 1)
        jax.config.update("jax_cpu_get_global_topology_timeout_minutes", 1)


def join(
    address: str,
    rank: int,
    size: int,
    epoch: int,
    timeout_s: float = 60.0,
    host: str = "127.0.0.1",
) -> list[jax.Device]:
    """Enter the island's group and see all its devices.

    It blocks until every host has come, so call it from no event loop; any thread will do.

    Args:
        address: where the epoch's coordination service is, `host:port`; unused for one host.
        rank: this host's position in the island, 0 <= rank < size.
        size: the number of hosts. With 1 there is no group, on any platform.
        epoch: the island's epoch.
        timeout_s: how long to wait for the other hosts, in seconds. Should one of them die within
            milliseconds after all have come, exchanging topologies may take a minute more.
        host: the address of this machine at which the other hosts' CPU collectives dial it.

    Returns:
        The devices of the whole island, those of rank 0 first. `jax.local_devices()` are ours.

    Raises:
        GroupError: the group was not formed. `leave()` makes this process ready for another try.
        RuntimeError: with one host, JAX cannot open its devices.
    """
    if not 0 <= rank < size:
        raise GroupError(f"rank {rank} is not in an island of {size} hosts")
    if distributed.global_state.client is not None:
        raise GroupError("this host is in a group already; leave it before joining the next one")
    where = f"epoch {epoch} at {address} as rank {rank} of {size}"
    if size > 1:
        if xla_bridge.backends_are_initialized():
            raise GroupError(f"JAX is in use without a group; call leave() before joining {where}")
        deadline_s = time.monotonic() + timeout_s
        line = _answer_roll_call(address, rank, size, epoch, deadline_s, where)
        _lifeline.append(line)
        _connect(address, rank, size, where)
        jax.extend.backend.register_backend_factory(
            "cpu", partial(_make_cpu_client, host), priority=0, fail_quietly=False
        )
    try:
        devices = list(jax.devices())
    except RuntimeError as error:
        if size == 1:
            raise
        raise GroupError(
            f"the devices of {where} could not be opened: {error}. A host that died meanwhile "
            "must be replaced under a new epoch"
        ) from error
    # Without a group the only process may still call itself something else than our rank.
    if size > 1 and {device.process_index for device in devices} != set(range(size)):
        raise GroupError(
            f"{where} shows only the devices of ranks "
            f"{sorted({device.process_index for device in devices})}: this platform formed no group"
        )
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def leave() -> None:
    """Leave the group and forget all devices, so that this process can join the next epoch.

    All device arrays of this process are lost. It is safe to call at any time outside a
    computation, in a group or not.
    """
    state = distributed.global_state
    client, state.client = state.client, None
    state.process_id = 0
    state.num_processes = 1
    state.coordinator_address = None
    try:
        if client is not None:
            client.shutdown()
    finally:
        while _lifeline:
            _lifeline.pop().close()
        jax.extend.backend.clear_backends()
        # The old backend sits in reference cycles, with all its threads and sockets: without this,
        # an island that re-forms often runs out of both before Python cares to collect them.
        gc.collect()


def _connect(address: str, rank: int, size: int, where: str) -> None:
    try:
        client: Any = private_runtime().get_distributed_runtime_client(
            address,
            rank,
            init_timeout=CONNECT_S,
            # Otherwise a client that nobody left, at exit say, would block in its destructor.
            shutdown_on_destruction=False,
            use_compression=True,
        )
        client.connect()
    except RuntimeError as error:
        raise GroupError(f"could not join {where}: {error}") from error
    state = distributed.global_state
    state.client = client
    state.process_id = rank
    state.num_processes = size
    state.coordinator_address = address


def _make_cpu_client(host: str) -> Any:
    """JAX's own CPU client, but for where Gloo listens.

    Left alone, that is wherever this machine's name leads: to the loopback on stock Debian, or to a network
    that nobody has allowed.
    """
    client = distributed.global_state.client
    if client is None:  # alone in its island, after an epoch in a larger one
        return xla_bridge.make_cpu_client()
    gloo = private_runtime().make_gloo_tcp_collectives(distributed_client=client, hostname=host)
    return xla_bridge.make_cpu_client(gloo)


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
        raise GroupError(
            f"nobody calls the roll of {where}: {error}; is the epoch over?"
        ) from error
    except ValueError as error:
        raise GroupError(
            f"{where} is no roll-call (any more): the epoch was formed without this host"
        ) from error


def _left_s(deadline_s: float) -> float:
    return max(0.001, deadline_s - time.monotonic())
