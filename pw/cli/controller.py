"""`pw-controller`: the daemon that admits clients, owns the islands and schedules their work."""

from __future__ import annotations

import os
import secrets
from typing import Annotated

import typer
import uvloop

from pw.cli.assembly import add_controller
from pw.cli.process import EXIT_ERROR, LOG_LEVELS, Daemon, configure_logging, fail
from pw.client.threads import incarnation
from pw.core.errors import Error
from pw.core.ids import CONTROLLER
from pw.sched.policy import POLICIES
from pw.transport.node import Node
from pw.transport.zmq_network import ZmqNetwork

LOOPBACK = ("127.", "localhost", "[::1]")


def serve(
    bind: Annotated[
        str, typer.Option(help="Where to listen; port 0 takes a free one.")
    ] = "tcp://127.0.0.1:7777",
    policy: Annotated[
        str, typer.Option(help=f"Which client goes next on an island: {', '.join(POLICIES)}.")
    ] = "fifo",
    lease: Annotated[
        float, typer.Option(help="Seconds after which a silent client or host is given up.")
    ] = 10.0,
    allow_remote: Annotated[
        bool,
        typer.Option(
            "--allow-remote",
            help="Listen off the loopback. Links are neither authenticated nor encrypted: only do so "
            "on a network that you trust.",
        ),
    ] = False,
    log_level: Annotated[str, typer.Option(help=", ".join(LOG_LEVELS))] = "info",
    announce_fd: Annotated[int, typer.Option(hidden=True)] = -1,
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Run the controller of a pw cluster until SIGTERM."""
    if policy not in POLICIES:
        raise typer.BadParameter(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    if log_level not in LOG_LEVELS:
        raise typer.BadParameter(f"no log level {log_level!r}; there are {', '.join(LOG_LEVELS)}")
    host = bind.removeprefix("tcp://").rpartition(":")[0]
    if bind.startswith("tcp://") and not host.startswith(LOOPBACK) and not allow_remote:
        fail(
            "pw-controller",
            f"{bind} can be reached from other machines, and links are not authenticated; add "
            "--allow-remote if the network is trusted",
        )
        raise SystemExit(EXIT_ERROR)
    configure_logging(log_level)
    loop = uvloop.new_event_loop()
    daemon = Daemon(loop, parent_fd)
    try:
        network = ZmqNetwork(loop, CONTROLLER, incarnation(), bind=bind, silence_s=lease)
    except Error as error:
        fail("pw-controller", str(error))
        raise SystemExit(EXIT_ERROR) from None
    node = Node(CONTROLLER, loop, network)
    bind_host = "127.0.0.1" if host.startswith(LOOPBACK) or not host else host
    services = add_controller(
        node, loop, secret=secrets.token_bytes(32), policy=policy, bind_host=bind_host
    )
    if announce_fd >= 0:
        os.write(announce_fd, f"{network.endpoint}\n".encode())
        os.close(announce_fd)
    else:
        typer.echo(f"pw-controller listens at {network.endpoint}")

    def teardown() -> None:
        node.close()
        services.close()

    raise SystemExit(daemon.run(teardown))


def main() -> None:
    """Entry point of `pw-controller`."""
    typer.run(serve)


if __name__ == "__main__":
    main()
