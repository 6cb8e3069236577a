"""`pw`: look at a cluster, ask why it does not go on, run scripts on one, and simulate one.

None of the commands imports jax: the answer to "is it up?" should not take a second.
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
    help="Look at a pw cluster, run scripts on one, simulate one. See also pw-controller and pw-worker.",
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
    """Show the islands, hosts, clients and runs of a cluster.

    Exit codes: 0; 1 if there is no address or nobody answers there, said in one line on standard error.
    """
    from pw.cli import status as report

    if not address:
        raise Error("which cluster? Give its --address, or set PW_ADDRESS")
    answer = report.ask(address, timeout)
    if as_json:
        typer.echo(json.dumps(report.document(address, *answer), indent=2))
    else:
        report.show(address, *answer)


@app.command()
def why(
    address: Address = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document with all that was found out.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds within which the controller must answer.")
    ] = 5.0,
) -> None:
    """Say why it does not go on: the most likely culprit first, then what every host says.

    Names the run, the computation, the host that has not delivered, enqueued or finished, since when, and
    where its threads are in the code.

    Exit codes: 0; 1 if there is no address or nobody answers there, said in one line on standard error.
    """
    from pw.cli import why as report

    if not address:
        raise Error("which cluster? Give its --address, or set PW_ADDRESS")
    explanation = report.explain(address, timeout)
    typer.echo(json.dumps(report.document(explanation), indent=2) if as_json else explanation.text)


@app.command()
def cancel(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Runs, as `pw status` shows them (client.number), or clients: all theirs."
        ),
    ],
    address: Address = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds within which the controller must answer.")
    ] = 3.0,
) -> None:
    """Give up runs of any client: their results, and what needs them, fail with `Cancelled`.

    What is queued never starts. What has started has a second to end by itself; then its island is formed
    anew, which keeps what others have there.

    Exit codes: 0; 1 if there is no such run or client, or nobody answers, said in one line on standard error.
    """
    from pw.cli.cancel import cancel as cancel_runs

    if not address:
        raise Error("which cluster? Give its --address, or set PW_ADDRESS")
    cancel_runs(address, what, timeout)


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="The host's name, as in pw status.")],
    address: Address = "",
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait; the drain goes on afterwards.")
    ] = 120.0,
) -> None:
    """Move all work and data off a host, and end its worker; nobody notices but by a pause.

    Exit codes: 0 when it holds nothing any more; 1 if there is no such host, nothing that could take its
    place, or it took longer, said in one line on standard error.
    """
    from pw.cli.drain import drain_host

    if not address:
        raise Error("which cluster? Give its --address, or set PW_ADDRESS")
    drain_host(address, host, timeout)
    typer.echo(f"{host} is drained, and its worker ends")


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
    from pw.client.connection.cluster import LocalCluster

    with LocalCluster(
        islands or 1, hosts_per_island or 1, devices_per_host or DEVICES, connect=False
    ) as cluster:
        code = run_script(command, cluster.address)
    raise SystemExit(code)


DEVICES = 8
"""As many as an embedded cluster has, so that a script finds the same either way."""


@app.command()
def sim(
    seeds: Annotated[str, typer.Option(help="Seeds to run: first:end, or how many.")] = "0:100",
    seed: Annotated[int | None, typer.Option(help="Run this seed only.")] = None,
    profile: Annotated[
        str,
        typer.Option(
            help="What goes wrong: calm, tenants, slow, clients, memory, devices, network, drains, crashes, "
            "slices, restarts, chaos, or all of them one after the other."
        ),
    ] = "chaos",
    hosts: Annotated[int | None, typer.Option(min=1, help="Hosts of the cluster.")] = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Clients at a time.")] = None,
    runs: Annotated[int | None, typer.Option(min=1, help="Runs of all clients together.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the seeds.")] = 1,
    without: Annotated[
        str, typer.Option(help="Kinds of faults to leave out, separated by commas.")
    ] = "",
    trace: Annotated[bool, typer.Option("--trace", help="With --seed: print every event.")] = False,
    smallest: Annotated[
        bool, typer.Option("--shrink", help="With --seed: look for the least that still fails.")
    ] = False,
    mutation: Annotated[
        str | None, typer.Option(help="With --seed: break one promise on purpose.")
    ] = None,
    digest: Annotated[
        bool,
        typer.Option(
            "--digest", help="Print a digest of all messages, to compare two versions of the code."
        ),
    ] = False,
) -> None:
    """Run the real scheduler, hosts and clients on simulated time, and let things go wrong.

    A seed decides everything: what clients do, what fails and when. What is found can be replayed with
    --seed, event for event.

    Exit codes: 0; 1 if a seed violated what must always hold, said with the last events before.
    """
    from pw.cli import sim as simulation

    chosen = simulation.chosen_profiles(profile, hosts, clients, runs, without)
    if seed is not None:
        if len(chosen) > 1:
            raise Error("--seed replays one --profile, not all")
        fine = simulation.replay(seed, chosen[0], trace=trace, smallest=smallest, mutation=mutation)
    else:
        run = simulation.print_digest if digest else simulation.search
        results = [run(simulation.seeds_of(seeds), each, jobs) for each in chosen]
        fine = all(results)
    raise SystemExit(0 if fine else 1)


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
