"""`pw up`, `down`, `logs` and `doctor`; `pw slurm`, `k8s` and `systemd`: clusters from a cluster file."""

from __future__ import annotations

import inspect
import os
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pw.cli.process import Credentials, Insecure
from pw.cli.target import address_of
from pw.core.errors import Error
from pw.transport.access.credentials import CREDENTIALS
from pw.transport.access.joined import default_address, joined_address, joined_file

if TYPE_CHECKING:  # reading a cluster file loads more than other commands need
    from pw.operating.deploy.cluster_file import ClusterFile

File = Annotated[
    Path, typer.Argument(metavar="CLUSTER.YAML", help="The description of the cluster.")
]


def read(path: Path) -> ClusterFile:
    """Read a cluster file, and check the options of the daemons in it. Raises Error."""
    from pw.cli import controller
    from pw.cli.host_options import HostOptions
    from pw.operating.deploy import cluster_file

    worker = [one.name.replace("_", "-") for one in fields(HostOptions)]
    options = [name.replace("_", "-") for name in inspect.signature(controller.serve).parameters]
    return cluster_file.read(path, worker, options)


def up(
    file: File = Path("cluster.yaml"),
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Restart the daemons one after the other, with the options of the file: each worker, then the "
            "controller.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the hosts; 0 not to wait.")
    ] = 60.0,
) -> None:
    """Start a cluster on machines that ssh reaches; a daemon that runs is left as it is.

    The first time it makes an authority and credentials, and copies them. docs/deploy.md shows a cluster file.

    Exit codes: 0 if all daemons run and all hosts are there; 1, with a line for each machine or host that is
    not.
    """
    from pw.operating.deploy import daemons
    from pw.operating.deploy.credentials import Keys
    from pw.operating.deploy.ssh import Cluster
    from pw.transport.access.security import use_tcp

    described = read(file)
    cluster, keys = Cluster(described, typer.echo), Keys.of(described)
    address = daemons.address_of(described)
    client = str(keys.client_file(address)) if keys is not None else ""
    use_tcp(client, insecure=described.insecure)
    hosts = {daemon.name for daemon in cluster.placed if daemon.island}
    if restart:
        cluster.restart(
            keys, partial(_drain, address, timeout), partial(_absent, address, hosts, timeout)
        )
    elif cluster.up(keys) and timeout:
        cluster.wrong += _absent(address, hosts, timeout)
    _end(cluster.wrong)
    shown = f"PW_CREDENTIALS={client}" if client else f"PW_INSECURE=1 PW_ADDRESS={address}"
    typer.echo(f"the cluster is at {address}; use it with: {shown} python script.py")


def _drain(address: str, timeout_s: float, host: str) -> None:
    """Move all data off a host; leave it as it is if no other host can take it."""
    from pw.cli import requests

    try:
        requests.drain(address, host, timeout_s)
    except Error as error:
        typer.echo(f"{host}: not drained: {error}")


def _absent(address: str, hosts: set[str], timeout_s: float) -> list[str]:
    """Wait until all hosts are in formed islands, or are spares; return a line for each that is not."""
    from pw.cli import requests

    end_s = time.monotonic() + timeout_s
    while True:
        reason, ready = "it has not registered", set[str]()
        try:
            with requests.connected(address, 3.0) as session:
                status = session.ask.status(3.0)
            ready = {host.name for one in status.islands if one.formed for host in one.hosts}
            ready |= {host.name for host in status.other_hosts if host.state == "spare"}
        except (Error, TimeoutError) as error:
            reason = str(error)
        missing = sorted(hosts - ready)
        if not missing or time.monotonic() > end_s:
            return [f"{name} has not joined: {reason}; see pw logs {name}" for name in missing]
        time.sleep(0.3)


def _end(wrong: list[str]) -> None:
    """Exit with code 1 and these lines on standard error, if there are any."""
    for line in wrong:
        typer.echo(f"pw: error: {line}", err=True)
    if wrong:
        raise typer.Exit(1)


def down(
    file: File = Path("cluster.yaml"),
    name: Annotated[
        list[str] | None, typer.Option(help="Only this daemon, as in east-0; again for more.")
    ] = None,
) -> None:
    """End the daemons of a cluster, the workers first; each may first move its data to other hosts.

    Exit codes: 0 if none runs; 1, with a line for each machine that does not answer.
    """
    from pw.operating.deploy.ssh import Cluster

    cluster = Cluster(read(file), typer.echo)
    cluster.down(name or ())
    _end(cluster.wrong)


def logs(
    name: Annotated[
        list[str] | None, typer.Argument(help="Daemons, as controller or east-0. By default all.")
    ] = None,
    file: Annotated[Path, typer.Option(metavar="CLUSTER.YAML")] = Path("cluster.yaml"),
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Lines of each.")] = 20,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print one daemon's log while it grows.")
    ] = False,
) -> None:
    """Print the last lines of the logs of a cluster's daemons.

    Exit codes: 0; 1, with a line for each machine that does not answer.
    """
    from pw.operating.deploy.ssh import Cluster

    cluster = Cluster(read(file), typer.echo)
    if follow:
        if len(name or ()) != 1:
            raise Error("--follow follows one daemon, as in: pw logs east-0 --follow")
        raise typer.Exit(cluster.follow((name or [""])[0]))
    cluster.logs(name or (), lines)
    _end(cluster.wrong)


def doctor(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLUSTER.YAML", help="Check the machines of this file, and not this one."
        ),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            envvar="PW_ADDRESS",
            help="The controller's address, to try its port; by default that of the joined cluster.",
        ),
    ] = "",
    credentials: Credentials = "",
    folder: Annotated[
        list[str] | None, typer.Option(help="A folder that all machines see; again for more.")
    ] = None,
    devices: Annotated[
        bool,
        typer.Option(
            "--devices",
            help="Test the devices of the running cluster instead: whether they compute the right bits, and "
            "how fast. Work goes on beside it. It needs the right to drain hosts.",
        ),
    ] = False,
    island: Annotated[str, typer.Option(help="With --devices: of this island only.")] = "",
    insecure: Insecure = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check versions, names, ports, clocks, certificates, folders and limits, and say what to do.

    With --devices it tests the devices of a running cluster, which takes at most 10 s.

    Exit codes: 0 if nothing keeps a cluster from working; 1 if something does, or a device failed.
    """
    import msgspec

    if devices:
        if file is not None:
            raise Error("--devices asks a running cluster; give its --address, and no cluster file")
        _test_devices(address_of(address, credentials, insecure), island, as_json=as_json)
        return
    if island:
        raise Error("--island goes with --devices")

    from pw.operating.deploy import doctor as checks

    if file is not None:
        findings = checks.examine_cluster(read(file))
    else:
        address = address or default_address()
        credentials = credentials or os.environ.get(CREDENTIALS, "")
        if address and not credentials and address == joined_address():
            credentials = str(joined_file())
        report = checks.examine(address, credentials, folder or ())
        if as_json:
            typer.echo(msgspec.json.encode(report))
            return
        findings = [("", finding) for finding in report.findings]
    if as_json:
        rows = [{"machine": where} | msgspec.structs.asdict(one) for where, one in findings]
        typer.echo(msgspec.json.encode(rows))
    else:
        for where, finding in findings:
            typer.echo(f"{where + ': ' if where else ''}{finding}")
    raise typer.Exit(any(finding.level == checks.ERROR for _, finding in findings))


def _test_devices(address: str, island: str, *, as_json: bool) -> None:
    """Print what each device did; exit with code 1 if one failed."""
    import msgspec

    from pw.cli import requests
    from pw.client.display import tables

    tests = requests.test_devices(address, island)
    if as_json:
        rows = [
            {"island": row.island, "host": row.host} | msgspec.structs.asdict(row.test)
            for row in tests.rows
        ]
        typer.echo(msgspec.json.encode({"devices": rows, "skipped": tests.skipped}))
    else:
        tables.show(tests)
    raise typer.Exit(bool(tests.failed))


def k8s(
    file: File = Path("cluster.yaml"),
    container_file: Annotated[
        bool, typer.Option("--container-file", help="Print the Containerfile of an image instead.")
    ] = False,
) -> None:
    """Print the objects of Kubernetes for a cluster, for kubectl apply -f -.

    Exit codes: 0; 1, with one line on standard error, if the file has an error.
    """
    from pw.core.installed import DISTRIBUTION, version
    from pw.operating.deploy import kubernetes

    described = read(file)
    if container_file:
        platforms = {island.platform for island in described.islands.values()}
        which = "cuda" if "cuda" in platforms else "cpu"
        typer.echo(
            kubernetes.container_file(version(DISTRIBUTION), version("jax"), which), nl=False
        )
    else:
        typer.echo(kubernetes.rendered(described), nl=False)


def slurm(
    file: File = Path("cluster.yaml"),
    script: Annotated[
        list[str] | None,
        typer.Argument(help="A Python script and its arguments; the job ends with it."),
    ] = None,
    submit: Annotated[
        bool, typer.Option("--submit/--no-submit", help="Submit the job, or only write its folder.")
    ] = True,
) -> None:
    """Run a cluster in a job of Slurm: one worker a node, the controller and the script on the first node.

    Exit codes: 0; 1, with one line on standard error, if the file has an error or Slurm does not take the job.
    """
    from pw.operating.deploy import slurm as engine

    described = read(file)
    if script and not os.path.isfile(script[0]):
        raise Error(f"there is no script {script[0]!r}")
    path = engine.write(described, script or ())
    if not submit:
        typer.echo(f"wrote {path}; submit it with: sbatch {path}")
        return
    number = engine.submit(path)
    typer.echo(f"submitted job {number}; its output is in {path.parent / 'job.log'}")
    if not script:
        where = f"PW_ADDRESS=$(cat {path.parent}/address) PW_CREDENTIALS={path.parent}/client.pem"
        typer.echo(f"use it with: {where} python script.py")


def systemd(
    name: Annotated[str, typer.Argument(help="The daemon, as controller or east-0.")],
    file: Annotated[Path, typer.Option(metavar="CLUSTER.YAML")] = Path("cluster.yaml"),
) -> None:
    """Print a unit of systemd for a daemon of a cluster, for /etc/systemd/system on its machine.

    Exit codes: 0; 1, with one line on standard error, if the file has an error or no such daemon.
    """
    from pw.operating.deploy.daemons import named
    from pw.operating.deploy.systemd import unit

    described = read(file)
    (daemon,) = named(described, [name])
    typer.echo(unit(described, daemon), nl=False)
