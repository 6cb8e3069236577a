"""`pw`: show a cluster, explain what holds it up, run scripts on one, and simulate one.

No command imports jax, so each answers in less than a second.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from pw.cli import dashboard, deploy, keys, questions, run
from pw.cli.process import (
    Credentials,
    Insecure,
    Version,
    configure_logging,
    run_app,
    versions,
    warn_in_lines,
)
from pw.cli.target import Address
from pw.core import installed
from pw.core.errors import Error
from pw.core.variables import warn_of_misspelt
from pw.transport.access.joined import default_address

app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at a pw cluster, run scripts on one, simulate one. See also pw-controller and pw-worker.",
)


@app.callback()
def options(version: Version = False) -> None:
    """Take the options before the command."""


LOOK, USE, OPERATE, ACCESS, MORE = (
    "Look at a cluster",
    "Use a cluster",
    "Operate a cluster",
    "Access",
    "More",
)
"""The groups of commands in the help, in its order."""


def _add(group: str, *commands: Callable[..., None], **settings: Any) -> None:
    for one in commands:
        app.command(rich_help_panel=group, **settings)(one)


_OF_A_SCRIPT = {"allow_interspersed_args": False}
"""Settings of commands that run a script: arguments behind its name are its own."""

_add(LOOK, questions.status, questions.why, questions.memory, questions.names, questions.plan)
_add(LOOK, questions.events, questions.trace, questions.top)
_add(LOOK, dashboard.serve, name="dashboard")
_add(USE, run.run, context_settings=_OF_A_SCRIPT)
_add(USE, questions.cancel)
_add(OPERATE, deploy.up, deploy.down, deploy.logs, deploy.doctor, questions.drain)
_add(OPERATE, questions.suspend, questions.resume, questions.migrate, questions.rebalance)
_add(OPERATE, deploy.k8s, deploy.systemd)
_add(OPERATE, deploy.slurm, context_settings=_OF_A_SCRIPT)
_add(ACCESS, keys.join)
app.add_typer(keys.app, name="keys", rich_help_panel=ACCESS)


@app.command(rich_help_panel=USE)
def gateway(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    bind: Annotated[
        str,
        typer.Option(help="Where JAX connects: tcp://host:port, or ipc:///path for a unix socket."),
    ] = "tcp://127.0.0.1:29000",
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices that JAX sees. By default all.")
    ] = None,
    islands: Annotated[
        str,
        typer.Option(
            help="Islands of the devices: how many, or names with commas. By default all."
        ),
    ] = "",
    share: Annotated[
        float, typer.Option(min=0.001, help="Weight of each client under --policy share.")
    ] = 1.0,
    priority: Annotated[int, typer.Option(help="Importance under --policy priority.")] = 0,
) -> None:
    """Serve JAX's remote protocol: scripts for Pathways on Cloud run on the cluster unchanged.

    Without an address or a joined cluster it starts a small cluster, which ends with it.

    A script uses it with JAX_PLATFORMS=proxy and JAX_BACKEND_TARGET=grpc://host:port. Scripts on this machine
    need no gateway: `pw run --jax script.py`, or JAX_PLATFORMS=pw.

    Exit codes: 0 after SIGTERM or Ctrl-C; 1, with one line on standard error, after an error.
    """
    installed.check_extra("jax", "hpack", "google.protobuf")
    from pw.cli.gateway import serve

    serve(
        address or default_address(),
        bind,
        devices or 0,
        islands or "",
        share,
        priority,
        credentials,
        insecure=insecure,
    )


@app.command(rich_help_panel=MORE)
def sim(
    seeds: Annotated[str, typer.Option(help="Seeds to run: first:end, or how many.")] = "0:100",
    seed: Annotated[int | None, typer.Option(help="Run this seed only.")] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="The faults: calm, tenants, divided, slow, clients, memory, devices, network, drains, "
            "crashes, slices, restarts, events, chaos, or all of them one after the other."
        ),
    ] = "chaos",
    hosts: Annotated[int | None, typer.Option(min=1, help="Hosts of the cluster.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Clients at a time.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs of all clients together.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the seeds.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="End after so many minutes; all profiles share them."),
    ] = None,
    without: Annotated[
        str, typer.Option(help="Kinds of faults to leave out, separated by commas.")
    ] = "",
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print every event.")] = False,
    smallest: Annotated[
        bool, typer.Option("--shrink", help="With --seed: find the smallest case that still fails.")
    ] = False,
    digest: Annotated[
        bool,
        typer.Option(
            "--digest", help="Print a digest of all messages, to compare two versions of the code."
        ),
    ] = False,
) -> None:
    """Run the real scheduler, hosts and clients on simulated time, with faults.

    The seed decides all acts of clients and all faults. --seed replays one, event for event.

    Exit codes: 0; 1 if a seed violates a promise, with the last events before.
    """
    from pw.cli import sim as simulation

    chosen = simulation.chosen_profiles(profile, hosts, clients, runs, without)
    if seed is not None:
        if len(chosen) > 1:
            raise Error("--seed replays one --profile, not all")
        fine = simulation.replay(seed, chosen[0], trace=trace, smallest=smallest)
    elif digest:
        results = [
            simulation.print_digest(simulation.seeds_of(seeds), each, jobs) for each in chosen
        ]
        fine = all(results)
    else:
        limit_s = float("inf") if minutes is None else 60 * minutes
        fine = simulation.search_all(simulation.seeds_of(seeds), chosen, jobs, limit_s)
    raise SystemExit(0 if fine else 1)


@app.command(rich_help_panel=MORE)
def version() -> None:
    """Show the installed versions. A cluster has one version of jax, and one series of pw, as 0.1."""
    typer.echo(versions())


def main() -> None:
    """Entry point of `pw`."""
    configure_logging("error")
    warn_in_lines("pw")
    warn_of_misspelt(os.environ)
    run_app("pw", app)


if __name__ == "__main__":
    main()
