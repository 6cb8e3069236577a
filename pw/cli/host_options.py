"""The options of `pw-worker`, as its command line, its supervisor and its runtime have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from pw.cli.process import (
    LEAST_HEARTBEAT_S,
    LEAST_LEASE_S,
    LOG_LEVELS,
    STALL_HELP,
    ClientTimeout,
    Credentials,
    Insecure,
    LogForm,
    PrivateAddress,
    Revoked,
    Version,
)
from pw.core.actors.watchdog import STALL_S
from pw.core.platforms import PLATFORMS
from pw.core.waits import CLIENT_TIMEOUT_S


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """The options of one host; times are in seconds."""

    controller: Annotated[str, typer.Option(help="The controller's address, tcp://host:port.")]
    island: Annotated[
        str, typer.Option(help="Name of the island to join; optional for a spare.")
    ] = ""
    island_hosts: Annotated[
        int,
        typer.Option(min=1, help="How many hosts the island has; it is formed when all are here."),
    ] = 1
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this host; on cpu, how many to make.")
    ] = 1
    platform: Annotated[
        str,
        typer.Option(
            help=f"What the devices are: {', '.join(PLATFORMS)}, or what another package adds."
        ),
    ] = "cpu"
    coords: Annotated[
        str,
        typer.Option(
            metavar="START:SHAPE",
            help="Coordinates of the devices on the interconnect of the island, as in 0,2:2x2: a block of 2x2 "
            "devices from (0, 2) on, the last axis first. With a ';' between several blocks. By default those "
            "that JAX has; without them, the number of the host and that of the device.",
        ),
    ] = ""
    wrap: Annotated[
        str,
        typer.Option(
            metavar="LENGTH,...",
            help="For each axis of --coords, after how many devices it wraps around; 0 if it does not. The "
            "same for all hosts of the island.",
        ),
    ] = ""
    device_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device that runs may use, as in 4GiB; by default what the device says that it "
            "has, which CPU devices do not.",
        ),
    ] = ""
    spill: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory for arrays that leave the devices when a run has no room there, as in 64GiB; "
            "by default they stay. It needs devices with a limit: accelerators, or --device-memory.",
        ),
    ] = ""
    spill_files: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Folder for arrays that leave this host memory when it is full, or when no run has read them "
            "for minutes; by default they stay. The worker has a folder of its own in there, and removes it.",
        ),
    ] = ""
    spare: Annotated[
        bool,
        typer.Option(
            "--spare",
            help="Only take the place of a host that is lost, in --island or, without it, in any.",
        ),
    ] = False
    name: Annotated[
        str,
        typer.Option(
            help="Unique name of this host in the cluster. With credentials it is the name in the certificate, "
            "which is the default, or that name, a '/' and more; else it is made up by default."
        ),
    ] = ""
    bind: Annotated[
        str,
        typer.Option(
            help="Where other hosts and clients reach this one, with one port for all; a range, as in "
            "tcp://*:7000-7100, takes its first free one. By default a free port of the loopback, or "
            "beside the unix socket of the controller."
        ),
    ] = ""
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where others dial this host, if that is not where it listens, as behind a port mapping.",
        ),
    ] = ""
    private_address: PrivateAddress = ""
    credentials: Credentials = ""
    revoked: Revoked = ""
    insecure: Insecure = False
    heartbeat: Annotated[
        float,
        typer.Option(
            min=LEAST_HEARTBEAT_S,
            help="Seconds between heartbeats. A host is lost if its machine does not answer three of them, "
            "and if it says nothing for 10 s, or for three of them.",
        ),
    ] = 1.0
    lease: Annotated[
        float,
        typer.Option(
            min=LEAST_LEASE_S,
            help="Seconds after which a client, or the controller, is lost if its machine does not answer.",
        ),
    ] = 10.0
    client_timeout: ClientTimeout = CLIENT_TIMEOUT_S
    connect_timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds within which the controller must answer.")
    ] = 8.0
    reconnect: Annotated[
        float, typer.Option(min=0, help="Seconds to look for a lost controller.")
    ] = 60.0
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds in which, when told to end (SIGTERM), it moves its work and data to other hosts "
            "first; where none can take the work, its clients are suspended until there is room. A second "
            "signal ends it at once. By default it ends at once.",
        ),
    ] = 0.0
    keep_files: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Folder in which a worker that ends leaves what no other host has; the next worker with this "
            "--name that sees the folder, within a day, begins with it. By default that is lost.",
        ),
    ] = ""
    allow_python: Annotated[
        bool,
        typer.Option(
            "--allow-python",
            help="Run Python functions that clients send (pw.host_function): each client can then do here "
            "what this process can.",
        ),
    ] = False
    python_tenants: Annotated[
        str,
        typer.Option(
            metavar="TENANT,...",
            help="Run Python functions of these tenants only, and not of all. It implies --allow-python.",
        ),
    ] = ""
    python_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory that each process with clients' Python functions may take; by default any.",
        ),
    ] = ""
    compile_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for compiled computations, which outlive restarts and serve all workers that see it; "
            "by default ~/.cache/pw/executables, and '' keeps nothing.",
        ),
    ] = None
    checkpoint_root: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Write and read checkpoints in this folder only, whatever paths clients ask for; by default "
            "wherever this process may.",
        ),
    ] = ""
    test_devices: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Test the devices as often, as in 1h, while nothing runs there; by default only after errors "
            "that name them, and for `pw doctor --devices`.",
        ),
    ] = ""
    compile_timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds that compiling one function of a client may take."),
    ] = 600.0
    compile_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Host memory that compiling one function of a client may take."
        ),
    ] = "8GiB"
    stall_after: Annotated[float, typer.Option(min=0.1, help=STALL_HELP)] = STALL_S
    log_level: Annotated[str, typer.Option(help=f"How much to say: {', '.join(LOG_LEVELS)}.")] = (
        "info"
    )
    log_format: LogForm = ""
    version: Version = False
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1
    """Descriptor of the channel to the parent; -1 without one. This process ends when the parent does."""
    alone: Annotated[bool, typer.Option("--alone", hidden=True)] = False
    """Whether the host has no supervisor, where the system has none."""
