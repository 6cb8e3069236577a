"""`pw-worker`: runs one host of a cluster (`pw.cli.supervisor`)."""

from __future__ import annotations

import inspect
import os
import socket
from dataclasses import replace
from typing import Any, get_type_hints

import typer

from pw.cli.host_options import HostOptions
from pw.cli.process import (
    check_bind,
    check_log_level,
    check_private,
    check_reachable,
    command,
    configure_logging,
    size_of,
    time_of,
)
from pw.cli.supervisor import Supervisor
from pw.core.coordinates import check_coordinates, parse_coordinates, parse_wraps
from pw.core.errors import Error
from pw.core.ids import NAME_CHARACTERS
from pw.core.messages.roles import Role
from pw.core.platforms import installed_platform, platform_names
from pw.devices.host.spill_files import check_folder
from pw.transport.access.private import PrivateFolder, free_endpoint
from pw.transport.access.security import Security
from pw.transport.links.admission import not_the_name


def serve(**values: Any) -> None:
    """Run one host of a pw cluster until SIGTERM, or until it has been drained.

    Exit codes: 0 after SIGTERM or Ctrl-C, or when drained; 1 after an error, which is one line on
    standard error. A worker whose credentials are revoked or refused does not end: it says so, and tries again.
    """
    options = HostOptions(**values)
    controller, name, island = options.controller, options.name, options.island
    if not options.alone and not hasattr(os, "memfd_create"):  # parcels are such files
        raise Error(
            "workers run on Linux only; on this system, call pw.connect() without an address, which starts "
            "a cluster beside the script"
        )
    if installed_platform(options.platform) is None:
        raise typer.BadParameter(
            f"no platform {options.platform!r}; there are {', '.join(platform_names())}"
        )
    if not island and not options.spare:
        raise typer.BadParameter("a host needs the name of its --island, unless it is a --spare")
    try:
        coords = parse_coordinates(options.coords, options.devices)
        check_coordinates(coords, parse_wraps(options.wrap), options.devices)
    except Error as error:
        raise typer.BadParameter(str(error), param_hint="--coords") from None
    if coords and not island:
        raise typer.BadParameter("--coords are coordinates in the grid of an --island")
    check_log_level(options.log_level)
    if max(len(name), len(island)) > NAME_CHARACTERS:
        raise typer.BadParameter(f"names have {NAME_CHARACTERS} characters at most")
    if options.checkpoint_root and not os.path.isdir(options.checkpoint_root):
        raise typer.BadParameter(
            f"there is no folder {options.checkpoint_root} (--checkpoint-root)"
        )
    size_of(options.device_memory)
    spill = size_of(options.spill, "--spill")
    if options.spill_files and not spill:
        raise typer.BadParameter(
            "--spill-files is for arrays that leave the host memory of --spill; give that a size, too"
        )
    if options.keep_files and not options.drain:
        raise typer.BadParameter(
            "--keep-files is for what a worker leaves when it drains at its end; give --drain, too"
        )
    if options.keep_files and not (name or options.credentials):
        raise typer.BadParameter(
            "--keep-files is for the next worker with the same name; give a --name, too"
        )
    time_of(options.test_devices, "--test-devices")
    size_of(options.compile_memory, "--compile-memory")
    size_of(options.python_memory, "--python-memory")
    if not controller.startswith(("tcp://", "ipc://")):
        raise typer.BadParameter(f"{controller!r} is no address; it looks like tcp://host:port")
    folder = PrivateFolder.of(controller)
    bind = options.bind or free_endpoint(folder.path if folder else None, "host")
    configure_logging(options.log_level, options.log_format)
    # Its errors come before anything is started.
    security = Security.of(
        controller,
        options.credentials,
        insecure=options.insecure,
        revoked=options.revoked,
        role=Role.WORKER,
    )
    check_bind(bind, security)
    check_reachable(controller, f"tcp://{options.advertise}:0" if options.advertise else bind)
    check_private(options.private_address)
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
    root = options.checkpoint_root
    if options.spill_files:
        check_folder(options.spill_files)
    options = replace(
        options,
        name=name or f"{island or 'spare'}-{socket.gethostname()}-{os.getpid()}",
        bind=bind,
        checkpoint_root=os.path.realpath(root) if root else "",
        spill_files=os.path.realpath(options.spill_files) if options.spill_files else "",
    )
    if options.alone:
        from pw.cli import host

        host.run(options)
    supervisor = Supervisor(options)
    try:
        code = supervisor.run()
    finally:
        if folder is not None:
            folder.leave()
    raise SystemExit(code)


# The options of the command are the fields of the dataclass.
serve.__signature__ = inspect.signature(HostOptions, eval_str=True)  # type: ignore[attr-defined]
serve.__annotations__ = get_type_hints(HostOptions, include_extras=True)


def main() -> None:
    """Entry point of `pw-worker`."""
    command("pw-worker", serve)


if __name__ == "__main__":
    main()
