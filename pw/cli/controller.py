"""`pw-controller`: the daemon that admits clients, owns the islands and schedules their work."""

from __future__ import annotations

import math
import secrets
import time
from typing import Annotated

import typer
import uvloop

from pw.cli.accounts import AccountsFile
from pw.cli.assembly import add_controller
from pw.cli.beside import Beside
from pw.cli.process import (
    LEAST_LEASE_S,
    LOG_LEVELS,
    STALL_HELP,
    ClientTimeout,
    Credentials,
    Daemon,
    Insecure,
    LogForm,
    MetricsEndpoint,
    PrivateAddress,
    Revoked,
    Version,
    check_bind,
    check_log_level,
    check_private,
    command,
    configure_logging,
    host_of,
)
from pw.cli.publisher import Publisher, check_events
from pw.cli.rights import RightsFile
from pw.core.actors.watchdog import STALL_S
from pw.core.errors import Error
from pw.core.ids import CONTROLLER
from pw.core.messages.roles import Role
from pw.core.rights import NewRights
from pw.core.tenants import NO_SECRET, Claims
from pw.core.waits import CLIENT_TIMEOUT_S, MOVE_S, PREEMPT_S, RECOVERY_S
from pw.processes.child import Announcement
from pw.sched.island.policy import POLICIES
from pw.transport.access.private import PrivateFolder
from pw.transport.access.security import Security
from pw.transport.links.link import incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from pw.transport.log import log

NUMBERS_PER_S = 1024
"""The rate of new clients from which numbers of an earlier start could repeat."""


def serve(
    bind: Annotated[
        str, typer.Option(help="Where to listen; port 0 takes a free one.")
    ] = "tcp://127.0.0.1:7777",
    policy: Annotated[
        str, typer.Option(help=f"Which client goes next on an island: {', '.join(POLICIES)}.")
    ] = "fifo",
    tenants: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Rights of tenants, as TOML; read again on SIGHUP. docs/tenants.md has the table.",
        ),
    ] = "",
    accounts: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Append what clients use to this file, one JSON line a minute for each client that used "
            "something; a later controller goes on from it.",
        ),
    ] = "",
    max_share: Annotated[
        float | None,
        typer.Option(min=1.0, help="The largest share that a client may ask for; by default any."),
    ] = None,
    max_priority: Annotated[
        int | None,
        typer.Option(min=0, help="The highest priority that a client may ask for; by default any."),
    ] = None,
    tenant_shares: Annotated[
        str,
        typer.Option(
            metavar="TENANT=SHARE,...",
            help="Under --policy share devices are divided among tenants first, by these shares (1 for the "
            "others), and then among the clients of each.",
        ),
    ] = "",
    lease: Annotated[
        float,
        typer.Option(
            min=LEAST_LEASE_S,
            help="Seconds after which a client is lost if its machine does not answer.",
        ),
    ] = 10.0,
    client_timeout: ClientTimeout = CLIENT_TIMEOUT_S,
    credentials: Credentials = "",
    revoked: Revoked = "",
    insecure: Insecure = False,
    private_address: PrivateAddress = "",
    islands: Annotated[
        int,
        typer.Option(
            min=0,
            help="How many islands the cluster is to have. Until so many have formed, requests for devices "
            "that no island has wait, for 5 minutes at most.",
        ),
    ] = 1,
    recovery_timeout: Annotated[
        float,
        typer.Option(
            min=1.0, help="Seconds that work waits for an island to come back, before it fails."
        ),
    ] = RECOVERY_S,
    move_after: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds after which slices of an island that does not come back move to one with room.",
        ),
    ] = MOVE_S,
    preempt_after: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="Seconds for which a slice waits for devices of clients of a lower priority whose tenants are "
            "preemptible; then one of them is suspended.",
        ),
    ] = PREEMPT_S,
    replace_stragglers: Annotated[
        float | None,
        typer.Option(
            min=1.2,
            metavar="FACTOR",
            help="Have a spare replace a host that makes its gangs slower by this factor, as 1.5, for 10 s "
            "and 50 launches. By default slow hosts are only named.",
        ),
    ] = None,
    events: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Publish events there: ipc:///path in a directory that only you can enter, or "
            "tcp://address:port, which every process that reaches it can read. By default nowhere.",
        ),
    ] = "",
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the cluster on a page, and print its link.")
    ] = False,
    metrics: MetricsEndpoint = "",
    dashboard_credentials: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Of a client, for --dashboard and --metrics of a cluster with credentials: they show what it "
            "may see.",
        ),
    ] = "",
    stall_after: Annotated[float, typer.Option(min=0.1, help=STALL_HELP)] = STALL_S,
    log_level: Annotated[
        str, typer.Option(help=f"How much to say: {', '.join(LOG_LEVELS)}.")
    ] = "info",
    log_format: LogForm = "",
    version: Version = False,
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Run the controller of a pw cluster until SIGTERM.

    It prints its address, which pw-worker and PW_ADDRESS want, and logs on standard error.

    Exit codes: 0 after SIGTERM or Ctrl-C; 1 after an error, which is one line on standard error.
    """
    if policy not in POLICIES:
        raise typer.BadParameter(f"no policy {policy!r}; there are {', '.join(POLICIES)}")
    rights_file = RightsFile(tenants, policy, max_share, max_priority, tenant_shares)
    try:
        rights = rights_file.read()
    except Error as error:
        raise typer.BadParameter(str(error)) from None
    check_log_level(log_level)
    configure_logging(log_level, log_format)
    security = Security.of(
        bind, credentials, insecure=insecure, revoked=revoked, role=Role.CONTROLLER
    )
    check_bind(bind, security)
    check_private(private_address)
    loop = uvloop.new_event_loop()
    daemon = Daemon(loop, parent_fd)
    if events:
        check_events(events, security)
    beside = Beside.of(dashboard, metrics, dashboard_credentials, security)
    if beside is not None:
        events = events or beside.events
    folder = PrivateFolder.of(bind)
    network = StreamNetwork(
        loop,
        CONTROLLER,
        incarnation(),
        bind=bind,
        lease_s=lease,
        patience_s=client_timeout,
        credentials=security.credentials,
        insecure=security.insecure,
    )
    accounts_file = AccountsFile(accounts) if accounts else None
    publisher = Publisher(loop, events) if events else None
    node = Node(CONTROLLER, loop, network)
    services = add_controller(
        node,
        loop,
        secret=secrets.token_bytes(32),
        claims=Claims(security.credentials.derived(b"claims"))
        if security.credentials
        else NO_SECRET,
        policy=policy,
        rights=rights,
        bind_host=private_address or host_of(network.endpoint),
        recovery_s=recovery_timeout,
        move_s=move_after,
        preempt_s=preempt_after,
        replace_factor=replace_stragglers or math.inf,
        stall_s=stall_after,
        first_client=time.time_ns() * NUMBERS_PER_S // 1_000_000_000,
        events=publisher,
        expected_islands=islands,
        account_sink=accounts_file,
    )
    log("info", "listening", CONTROLLER, endpoint=network.endpoint, policy=policy)
    if publisher is not None:
        log("info", "publishes events", CONTROLLER, endpoint=publisher.endpoint)
    if not daemon.announce(Announcement(network.endpoint)):
        typer.echo(f"pw-controller listens at {network.endpoint}")
    rights_file.follow(loop, lambda rights: node.post("controller", NewRights(rights)))
    if beside is not None:
        beside.start(network.endpoint, loop)

    def teardown() -> None:
        if beside is not None:
            beside.close()
        if accounts_file is not None:
            accounts_file.close()
        node.close()
        services.leave()
        if publisher is not None:
            publisher.close()
        if folder is not None:
            daemon.leave(folder)

    raise SystemExit(daemon.run(teardown))


def main() -> None:
    """Entry point of `pw-controller`."""
    command("pw-controller", serve)


if __name__ == "__main__":
    main()
