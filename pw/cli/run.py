"""`pw run`: a script on a cluster, with a page if it is asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from pw.cli.process import Credentials, Insecure, size_of
from pw.cli.target import Address
from pw.core import installed
from pw.core.errors import Error
from pw.transport.access.joined import default_address
from pw.transport.access.security import address_in, use_tcp

DEVICES = 8
"""Devices of a host, as in an embedded cluster, so that a script finds the same devices either way."""


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The Python script, run as the main module.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    islands: Annotated[
        int | None, typer.Option(min=1, help="Islands of the local cluster. By default 1.")
    ] = None,
    hosts_per_island: Annotated[
        int | None, typer.Option(min=1, help="Hosts of each island. By default 1.")
    ] = None,
    devices_per_host: Annotated[
        int | None,
        typer.Option(min=1, help="Devices of each host. By default 8, or 1 with --platform."),
    ] = None,
    platform: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Platform of the local cluster's devices: cpu, cuda or tpu. By default cpu.",
        ),
    ] = "",
    device_memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Memory of each device of the local cluster, as in 4GiB. By default unlimited.",
        ),
    ] = "",
    dashboard: Annotated[
        bool, typer.Option("--dashboard", help="Show the cluster on a page, and print its link.")
    ] = False,
    jax: Annotated[
        bool, typer.Option("--jax", help="The script's JAX uses the cluster (JAX_PLATFORMS=pw).")
    ] = False,
) -> None:
    """Run a script on a cluster: at --address, else the joined one, else a local one that ends with the script.

    The script finds the cluster in PW_ADDRESS. With --jax the script is plain JAX: `jax.devices()` are virtual
    devices of the cluster. Asking for islands, hosts, devices, their memory or their platform asks for a local
    cluster, whatever PW_ADDRESS says. Signals are passed on to the script.

    Exit codes: the script's own, or 128 + n if signal n ended it; 1 also, with one line on standard error, if
    there is no such script or cluster.
    """
    from pw.cli.script import run_script

    if not os.path.isfile(script):
        raise Error(f"there is no script {script!r}")
    command = [sys.executable, script, *(args or ())]
    memory = size_of(device_memory)
    local = any((islands, hosts_per_island, devices_per_host, memory, platform))
    environment = {"JAX_PLATFORMS": "pw"} if jax else {}
    use_tcp(credentials, insecure=insecure)
    address = address or ("" if local else address_in() or default_address())
    if dashboard:
        installed.check_extra("dashboard", *installed.DASHBOARD)
    if address and not local:
        with _page_of(address) if dashboard else nullcontext():
            raise SystemExit(run_script(command, address, environment))
    source = context.get_parameter_source("address")
    if source is not None and source.name == "COMMANDLINE":
        raise Error(
            "a cluster at an --address has its own islands; leave out --islands, --hosts-per-island, "
            "--devices-per-host, --device-memory and --platform, or --address"
        )
    from pw.operating.deploy.local_cluster import LocalCluster

    with LocalCluster(
        islands or 1,
        hosts_per_island or 1,
        devices_per_host or (1 if platform else DEVICES),
        platform=platform or "cpu",
        device_memory=device_memory or None,
        connect=False,
        dashboard=dashboard,
    ) as cluster:
        if dashboard:
            typer.echo(f"pw dashboard: {cluster.dashboard}", err=True)
        code = run_script(command, cluster.address, environment)
    raise SystemExit(code)


@contextmanager
def _page_of(address: str) -> Iterator[None]:
    """Show a cluster on a page during a block, and print its link."""
    from pw.processes.daemons import start_dashboard

    page = start_dashboard(address)
    try:
        typer.echo(f"pw dashboard: {page.address(30.0)}", err=True)
        yield
    finally:
        page.terminate()
        page.stop()
