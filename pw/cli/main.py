"""`pw`: look at a cluster, and run scripts on one.

Neither command imports jax: the answer to "is it up?" should not take a second.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
import sys
from typing import Annotated

import typer

from pw.cli.process import configure_logging, run_app
from pw.core.errors import Error

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at a pw cluster, and run scripts on one. See also pw-controller and pw-worker.",
)

Address = Annotated[
    str, typer.Option(envvar="PW_ADDRESS", help="The controller's address, tcp://host:port.")
]


@app.command()
def status(
    address: Address = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds within which the controller must answer.")
    ] = 3.0,
) -> None:
    """Show the islands, hosts and clients of a cluster.

    Exit codes: 0; 1 if there is no address or nobody answers there, said in one line on standard error.
    """
    from pw.cli import status as report

    if not address:
        raise Error("which cluster? Give its --address, or set PW_ADDRESS")
    described = report.describe(address, timeout)
    if as_json:
        typer.echo(json.dumps(described, indent=2))
    else:
        report.show(described)


@app.command(context_settings={"allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The Python script, run as the main module.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's own arguments.")] = None,
    address: Address = "",
    islands: Annotated[
        int | None, typer.Option(min=1, help="Islands of the local cluster. By default 1.")
    ] = None,
    hosts_per_island: Annotated[
        int | None, typer.Option(min=1, help="Hosts of each island. By default 1.")
    ] = None,
    devices_per_host: Annotated[
        int | None, typer.Option(min=1, help="CPU devices of each host. By default 8.")
    ] = None,
) -> None:
    """Run a script on a cluster: the one at --address, else a local one that ends with the script.

    The script finds the cluster in PW_ADDRESS. Asking for islands, hosts or devices asks for a local
    cluster, whatever PW_ADDRESS says. Signals are passed on to the script.

    Exit codes: the script's own, or 128 + n if signal n ended it; 1 also if there is no such script or
    cluster, said in one line on standard error.
    """
    from pw.cli.script import run_script

    if not os.path.isfile(script):
        raise Error(f"there is no script {script!r}")
    command = [sys.executable, script, *(args or ())]
    shape = (islands, hosts_per_island, devices_per_host)
    if address and not any(shape):
        raise SystemExit(run_script(command, address))
    source = context.get_parameter_source("address")
    if source is not None and source.name == "COMMANDLINE":
        raise Error(
            "a cluster at an --address has its own islands; leave out --islands, --hosts-per-island "
            "and --devices-per-host, or --address"
        )
    from pw.client.cluster import LocalCluster

    with LocalCluster(
        islands or 1, hosts_per_island or 1, devices_per_host or DEVICES, connect=False
    ) as cluster:
        code = run_script(command, cluster.address)
    raise SystemExit(code)


DEVICES = 8
"""As many as an embedded cluster has, so that a script finds the same either way."""


@app.command()
def version() -> None:
    """Show what is installed. Only the same versions of pw and jax talk to each other."""
    from pw.transport.link import Versions

    typer.echo(f"{Versions.installed()}, Python {python_platform.python_version()}")


def main() -> None:
    """Entry point of `pw`."""
    configure_logging("error")
    run_app("pw", app)


if __name__ == "__main__":
    main()
