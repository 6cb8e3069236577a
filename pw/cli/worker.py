"""`pw-worker`: runs one host of a cluster (`pw.cli.supervisor`)."""

from __future__ import annotations

import os
import socket
from typing import Annotated

import typer

from pw.cli.host_options import HostOptions
from pw.cli.process import (
    LEAST_HEARTBEAT_S,
    LEAST_LEASE_S,
    LOG_LEVELS,
    STALL_HELP,
    Credentials,
    Insecure,
    PrivateAddress,
    Revoked,
    Version,
    check_bind,
    check_log_level,
    check_private,
    check_reachable,
    command,
    configure_logging,
    size_of,
)
from pw.cli.supervisor import Supervisor
from pw.core.actors.watchdog import STALL_S
from pw.core.errors import Error
from pw.core.ids import NAME_CHARACTERS
from pw.core.messages.roles import Role
from pw.core.platforms import PLATFORMS
from pw.transport.access.private import PrivateFolder, free_endpoint
from pw.transport.access.security import Security
from pw.transport.links.admission import not_the_name

COMPILE_BYTES = 8 << 30
"""Host memory that one compilation may take, by default."""


def serve(
    controller: Annotated[str, typer.Option(help="The controller's address, tcp://host:port.")],
    island: Annotated[
        str, typer.Option(help="Name of the island to join; optional for a spare.")
    ] = "",
    island_hosts: Annotated[
        int,
        typer.Option(min=1, help="How many hosts the island has; it is formed when all are here."),
    ] = 1,
    devices: Annotated[
        int, typer.Option(min=1, help="Devices of this host; on cpu, how many to make.")
    ] = 1,
    platform: Annotated[
        str, typer.Option(help=f"What the devices are: {', '.join(PLATFORMS)}.")
    ] = "cpu",
    device_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device that runs may use, as in 4GiB; by default what the device says that it "
            "has, which CPU devices do not.",
        ),
    ] = "",
    spare: Annotated[
        bool,
        typer.Option(
            "--spare",
            help="Only take the place of a host that is lost, in --island or, without it, in any.",
        ),
    ] = False,
    name: Annotated[
        str,
        typer.Option(
            help="Unique name of this host in the cluster. With credentials it is the name in the certificate, "
            "which is the default, or that name, a '/' and more; else it is made up by default."
        ),
    ] = "",
    bind: Annotated[
        str,
        typer.Option(
            help="Where other hosts and clients reach this one, with one port for all; a range, as in "
            "tcp://*:7000-7100, takes its first free one. By default a free port of the loopback, or "
            "beside the unix socket of the controller."
        ),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where others dial this host, if that is not where it listens, as behind a port mapping.",
        ),
    ] = "",
    private_address: PrivateAddress = "",
    credentials: Credentials = "",
    revoked: Revoked = "",
    insecure: Insecure = False,
    heartbeat: Annotated[
        float,
        typer.Option(
            min=LEAST_HEARTBEAT_S,
            help="Seconds between heartbeats; a host that misses three of them counts as lost.",
        ),
    ] = 1.0,
    lease: Annotated[
        float,
        typer.Option(
            min=LEAST_LEASE_S,
            help="Seconds after which a silent client, or the controller, counts as lost.",
        ),
    ] = 10.0,
    connect_timeout: Annotated[
        float, typer.Option(min=0.5, help="Seconds within which the controller must answer.")
    ] = 8.0,
    reconnect: Annotated[
        float,
        typer.Option(min=0, help="Seconds to look for a lost controller."),
    ] = 60.0,
    allow_python: Annotated[
        bool,
        typer.Option(
            "--allow-python",
            help="Run Python functions that clients send (pw.host_function): each client can then do here "
            "what this process can.",
        ),
    ] = False,
    python_tenants: Annotated[
        str,
        typer.Option(
            metavar="TENANT,...",
            help="Run Python functions of these tenants only, and not of all. It implies --allow-python.",
        ),
    ] = "",
    python_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory that each process with clients' Python functions may take; by default any.",
        ),
    ] = "",
    compile_cache: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder for compiled computations, which outlive restarts and serve all workers that see it; "
            "by default ~/.cache/pw/executables, and '' keeps nothing.",
        ),
    ] = None,
    checkpoint_root: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Write and read checkpoints in this folder only, whatever paths clients ask for; by default "
            "wherever this process may.",
        ),
    ] = "",
    compile_timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds that compiling one function of a client may take."),
    ] = 600.0,
    compile_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="Host memory that compiling one function of a client may take."
        ),
    ] = "8GiB",
    stall_after: Annotated[float, typer.Option(min=0.1, help=STALL_HELP)] = STALL_S,
    log_level: Annotated[
        str, typer.Option(help=f"How much to say: {', '.join(LOG_LEVELS)}.")
    ] = "info",
    version: Version = False,
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    alone: Annotated[bool, typer.Option("--alone", hidden=True)] = False,
) -> None:
    """Run one host of a pw cluster until SIGTERM, or until it has been drained.

    Exit codes: 0 after SIGTERM or Ctrl-C, or when drained; 1 after an error, which is one line on
    standard error. A worker whose credentials are revoked or refused does not end: it says so, and tries again.
    """
    if not alone and not hasattr(os, "memfd_create"):  # parcels are such files
        raise Error(
            "workers run on Linux only; on this system, call pw.connect() without an address, which starts "
            "a cluster beside the script"
        )
    if platform not in PLATFORMS:
        raise typer.BadParameter(f"no platform {platform!r}; there are {', '.join(PLATFORMS)}")
    if not island and not spare:
        raise typer.BadParameter("a host needs the name of its --island, unless it is a --spare")
    check_log_level(log_level)
    if max(len(name), len(island)) > NAME_CHARACTERS:
        raise typer.BadParameter(f"names have {NAME_CHARACTERS} characters at most")
    if checkpoint_root and not os.path.isdir(checkpoint_root):
        raise typer.BadParameter(f"there is no folder {checkpoint_root} (--checkpoint-root)")
    bound_bytes = size_of(device_memory)
    compile_bytes = size_of(compile_memory, "--compile-memory")
    python_bytes = size_of(python_memory, "--python-memory")
    if not controller.startswith(("tcp://", "ipc://")):
        raise typer.BadParameter(f"{controller!r} is no address; it looks like tcp://host:port")
    folder = PrivateFolder.of(controller)
    bind = bind or free_endpoint(folder.path if folder else None, "host")
    configure_logging(log_level)
    # Its errors come before anything is started.
    security = Security.of(
        controller, credentials, insecure=insecure, revoked=revoked, role=Role.WORKER
    )
    check_bind(bind, security)
    check_reachable(controller, f"tcp://{advertise}:0" if advertise else bind)
    check_private(private_address)
    if security.credentials is not None:
        own = security.credentials.own
        name = name or own.name
        if not own.may_be(name):
            raise Error(not_the_name(name, own))
        if island and not own.may_join(island):
            raise Error(
                f"the certificate of {own} does not allow the island {island!r}, only "
                f"{', '.join(own.islands)}; use another --island, or issue a certificate for it"
            )
    name = name or f"{island or 'spare'}-{socket.gethostname()}-{os.getpid()}"
    options = HostOptions(
        controller=controller,
        island=island,
        name=name,
        island_hosts=0 if spare else island_hosts,
        devices=devices,
        platform=platform,
        device_memory=bound_bytes or 0,
        bind=bind,
        heartbeat=heartbeat,
        lease=lease,
        connect_timeout=connect_timeout,
        reconnect=reconnect,
        allow_python=allow_python or bool(python_tenants),
        python_tenants=python_tenants,
        python_memory=python_bytes or 0,
        compile_cache=compile_cache,
        checkpoint_root=os.path.realpath(checkpoint_root) if checkpoint_root else "",
        compile_timeout=compile_timeout,
        compile_memory=compile_bytes or COMPILE_BYTES,
        stall_after=stall_after,
        credentials=credentials,
        revoked=revoked,
        insecure=insecure,
        advertise=advertise,
        private_address=private_address,
        log_level=log_level,
    )
    if alone:
        from pw.cli import host

        host.run(options, parent_fd=parent_fd)
    supervisor = Supervisor(options, spare, parent_fd)
    try:
        code = supervisor.run()
    finally:
        if folder is not None:
            folder.leave()
    raise SystemExit(code)


def main() -> None:
    """Entry point of `pw-worker`."""
    command("pw-worker", serve)


if __name__ == "__main__":
    main()
