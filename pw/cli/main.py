"""`pw`: show a cluster, explain what holds it up, run scripts on one, and simulate one.

No command imports jax, so each answers in less than a second.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated

import typer

from pw.cli import deploy, keys
from pw.cli.process import (
    Credentials,
    Insecure,
    MetricsEndpoint,
    Version,
    configure_logging,
    run_app,
    size_of,
    versions,
)
from pw.core import installed
from pw.core.errors import Error
from pw.transport.access.joined import default_address
from pw.transport.access.security import address_in, use_tcp

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Look at a pw cluster, run scripts on one, simulate one. See also pw-controller and pw-worker.",
)

Address = Annotated[
    str,
    typer.Option(
        envvar="PW_ADDRESS",
        help="The controller's address, tcp://host:port; by default that of the joined cluster (`pw join`).",
    ),
]

Timeout = Annotated[
    float, typer.Option(min=0.1, help="Seconds within which the controller must answer.")
]


def _known(address: str, credentials: str, insecure: bool) -> str:
    """Return the address, else that in the credentials or of the joined cluster, and use tcp so.

    Raises:
        Error: there is none, or the credentials cannot be used.
    """
    use_tcp(credentials, insecure=insecure)
    address = address or address_in() or default_address()
    if not address:
        raise Error(
            "which cluster? Give its --address, or set PW_ADDRESS, or join one with `pw join`"
        )
    return address


@app.callback()
def options(version: Version = False) -> None:
    """Take the options before the command."""


@app.command()
def status(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
    slow: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=60.0,
            help="Compare the hosts of gangs for so many seconds, and name slow ones.",
        ),
    ] = 0.0,
    timeout: Timeout = 3.0,
) -> None:
    """Show the islands, hosts, clients and runs of a cluster.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli import requests

    requests.status(_known(address, credentials, insecure), timeout, slow).show(as_json=as_json)


@app.command()
def memory(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables; sizes in bytes.")
    ] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Show the memory of each device: what lies there, whose it is, what is reserved, the largest arrays.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli import requests

    requests.memory(_known(address, credentials, insecure), timeout).show(as_json=as_json)


@app.command()
def events(
    topics: Annotated[
        list[str] | None, typer.Argument(help="Topics, as run or host. By default all.")
    ] = None,
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="End after so many events. By default never.")
    ] = None,
    timeout: Timeout = 3.0,
) -> None:
    """Print what happens in a cluster, while it happens, until Ctrl-C.

    The controller must publish events (pw-controller --events). A line with "lost" says that this command was
    too slow, and how many events it has not got.

    Exit codes: 0; 1, with one line on standard error, if there is no address, no controller answers, or it
    publishes no events.
    """
    from pw.cli import events as reader

    reader.check_topics(topics or ())
    endpoint = reader.endpoint_of(_known(address, credentials, insecure), timeout)
    reader.show(endpoint, topics or (), as_json=as_json, limit=limit)


@app.command()
def why(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document with all reports.")
    ] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Explain what holds up the cluster: the most likely cause first, then the report of every host.

    It names the run, the computation, the host that others wait for, since when, and where its threads are in
    the code.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli import requests

    requests.explanation(_known(address, credentials, insecure), timeout).show(as_json=as_json)


@app.command()
def plan(
    program: Annotated[
        str,
        typer.Argument(help="A program's name, or a run in flight as `pw status` shows it."),
    ],
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="One JSON document; sizes in bytes, estimates in seconds."),
    ] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Show the plan of a program: its segments on each island, its edges, and the way of each edge.

    Exit codes: 0; 1, with one line on standard error, if there is no such program, no address or no controller
    answers.
    """
    from pw.cli import requests

    requests.plan(_known(address, credentials, insecure), program, timeout).show(as_json=as_json)


@app.command()
def trace(
    seconds: Annotated[float, typer.Option(min=0.01, max=600.0, help="How long to record.")] = 5.0,
    output: Annotated[
        str, typer.Option("--output", "-o", help="The file, for https://ui.perfetto.dev.")
    ] = "trace.json",
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Timeout = 3.0,
) -> None:
    """Record what all devices, transfers and schedulers do, and write it for Perfetto.

    It prints the file, how exact its times are, and what is missing. docs/tracing.md says what each row means.

    Exit codes: 0; 1, with one line on standard error, if there is no address, no controller answers, or the
    file cannot be written.
    """
    from pw.cli import requests

    for line in requests.trace(_known(address, credentials, insecure), output, seconds, timeout):
        typer.echo(line)


@app.command()
def top(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Timeout = 3.0,
) -> None:
    """Show islands, hosts, tenants and runs in the terminal, once a second, until Ctrl-C.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli.top import show

    show(_known(address, credentials, insecure), timeout)


@app.command()
def cancel(
    what: Annotated[
        list[str],
        typer.Argument(
            help="Runs, as `pw status` shows them (client.number), or clients: all theirs."
        ),
    ],
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Timeout = 3.0,
) -> None:
    """Cancel runs: their results, and all that needs them, fail with `Cancelled`.

    Only an operator may cancel runs of other tenants.

    Queued runs never start. Started runs have a second to end; then their island is formed again, and other
    clients keep their arrays there.

    Exit codes: 0; 1, with one line on standard error, if there is no such run, or no controller answers.
    """
    from pw.cli import requests

    requests.cancel(_known(address, credentials, insecure), what, timeout)


@app.command()
def drain(
    host: Annotated[str, typer.Argument(help="The host's name, as in pw status.")],
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait; the drain goes on afterwards.")
    ] = 120.0,
) -> None:
    """Move all work and data off a host, and end its worker; its island pauses for a moment.

    Exit codes: 0 when the host holds nothing any more; 1, with one line on standard error, if there is no such
    host, no other host can take its place, or it took longer.
    """
    from pw.cli import requests

    requests.drain(_known(address, credentials, insecure), host, timeout)
    typer.echo(f"{host} is drained, and its worker ends")


@app.command(context_settings={"allow_interspersed_args": False})
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
        int | None, typer.Option(min=1, help="CPU devices of each host. By default 8.")
    ] = None,
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
    devices of the cluster. Asking for islands, hosts or devices asks for a local
    cluster, whatever PW_ADDRESS says, and so does --device-memory. Signals are passed on to the script.

    Exit codes: the script's own, or 128 + n if signal n ended it; 1 also, with one line on standard error, if
    there is no such script or cluster.
    """
    from pw.cli.script import run_script

    if not os.path.isfile(script):
        raise Error(f"there is no script {script!r}")
    command = [sys.executable, script, *(args or ())]
    shape = (islands, hosts_per_island, devices_per_host, size_of(device_memory))
    environment = {"JAX_PLATFORMS": "pw"} if jax else {}
    use_tcp(credentials, insecure=insecure)
    address = address or ("" if any(shape) else address_in() or default_address())
    if dashboard:
        installed.check_extra("dashboard", *installed.DASHBOARD)
    if address and not any(shape):
        with _page_of(address) if dashboard else nullcontext():
            raise SystemExit(run_script(command, address, environment))
    source = context.get_parameter_source("address")
    if source is not None and source.name == "COMMANDLINE":
        raise Error(
            "a cluster at an --address has its own islands; leave out --islands, --hosts-per-island, "
            "--devices-per-host and --device-memory, or --address"
        )
    from pw.client.connection.cluster import LocalCluster

    with LocalCluster(
        islands or 1,
        hosts_per_island or 1,
        devices_per_host or DEVICES,
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
    from pw.client.connection.children import LocalDaemon, options

    page = LocalDaemon("pw.cli.dashboard", options(address=address))
    try:
        typer.echo(f"pw dashboard: {page.address(30.0)}", err=True)
        yield
    finally:
        page.terminate()
        page.stop()


DEVICES = 8
"""As in an embedded cluster, so that a script finds the same devices either way."""


@app.command()
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


@app.command()
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
    else:
        run = simulation.print_digest if digest else simulation.search
        results = [run(simulation.seeds_of(seeds), each, jobs) for each in chosen]
        fine = all(results)
    raise SystemExit(0 if fine else 1)


@app.command()
def version() -> None:
    """Show the installed versions. All processes of a cluster need the same versions of pw and jax."""
    typer.echo(versions())


@app.command()
def dashboard(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    bind: Annotated[
        str,
        typer.Option(help="Where browsers connect: tcp://host:port; `none` for no page."),
    ] = "tcp://127.0.0.1:8265-8365",
    metrics: MetricsEndpoint = "",
) -> None:
    """Show a cluster on a page in a browser, until Ctrl-C; it prints the link, which has a token.

    The page shows what the credentials may see. Off the loopback it needs them (TLS), or --insecure.

    Exit codes: 0 after SIGTERM or Ctrl-C; 1, with one line on standard error, after an error.
    """
    installed.check_extra("dashboard", *installed.DASHBOARD)
    from pw.cli.dashboard import serve

    serve(_known(address, credentials, insecure), bind, metrics, credentials, insecure)


app.add_typer(keys.app, name="keys")
app.command()(keys.join)
for one in (deploy.up, deploy.down, deploy.logs, deploy.doctor, deploy.k8s, deploy.systemd):
    app.command()(one)
app.command(context_settings={"allow_interspersed_args": False})(deploy.slurm)


def main() -> None:
    """Entry point of `pw`."""
    configure_logging("error")
    warnings.formatwarning = lambda message, *_args, **_kinds: f"pw: warning: {message}\n"
    run_app("pw", app)


if __name__ == "__main__":
    main()
