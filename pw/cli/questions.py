"""The commands of `pw` that ask a running cluster, or have its controller do something."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from pw.cli.process import Credentials, Insecure
from pw.cli.target import Address, Timeout, address_of
from pw.core.coordinates import parse_times
from pw.core.errors import ArgumentError


def status(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of tables.")
    ] = False,
    tenants: Annotated[
        bool, typer.Option("--tenants", help="Show what tenants have, may have and have used.")
    ] = False,
    timeout: Timeout = 3.0,
) -> None:
    """Show the islands, hosts, clients and runs of a cluster.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli import requests

    where = address_of(address, credentials, insecure)
    requests.status(where, timeout, by_tenant=tenants).show(as_json=as_json)


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

    requests.memory(address_of(address, credentials, insecure), timeout).show(as_json=as_json)


def names(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document instead of a table; sizes in bytes.")
    ] = False,
    timeout: Timeout = 3.0,
) -> None:
    """Show what is published under names: versions, bytes, readers, and how long each name stays.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli import requests

    requests.names(address_of(address, credentials, insecure), timeout).show(as_json=as_json)


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
    endpoint = reader.endpoint_of(address_of(address, credentials, insecure), timeout)
    reader.show(endpoint, topics or (), as_json=as_json, limit=limit)


def why(
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON document with all reports.")
    ] = False,
    queue: Annotated[
        bool,
        typer.Option(
            "--queue", help="A table instead: who waits for whom, since when, and when it goes on."
        ),
    ] = False,
    timeout: Timeout = 5.0,
) -> None:
    """Explain what holds up the cluster: the most likely cause first, then the report of every host.

    It names the run, the computation, the host that others wait for, since when, and where its threads are in
    the code.

    With --queue it lists all that waits, on each island in the order in which it will go on. The time is an
    estimate from what is in front and how long such work took before; it is "-" where that is not known.

    Exit codes: 0; 1, with one line on standard error, if there is no address or no controller answers.
    """
    from pw.cli import requests

    ask = requests.queue if queue else requests.explanation
    ask(address_of(address, credentials, insecure), timeout).show(as_json=as_json)


def plan(
    program: Annotated[
        str, typer.Argument(help="A program's name, or a run in flight as `pw status` shows it.")
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

    requests.plan(address_of(address, credentials, insecure), program, timeout).show(
        as_json=as_json
    )


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

    for line in requests.trace(
        address_of(address, credentials, insecure), output, seconds, timeout
    ):
        typer.echo(line)


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

    show(address_of(address, credentials, insecure), timeout)


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

    requests.cancel(address_of(address, credentials, insecure), what, timeout)


class CopyPlace(StrEnum):
    """Where the arrays of suspended clients may go."""

    MEMORY = "memory"
    FILES = "files"


_CLIENT = typer.Argument(help="The client's number, as in `pw status`.")
_TENANT = typer.Option(help="All clients of this tenant.")


def suspend(
    client: Annotated[int | None, _CLIENT] = None,
    tenant: Annotated[str, _TENANT] = "",
    island: Annotated[str, typer.Option(help="All clients with devices on this island.")] = "",
    to: Annotated[
        CopyPlace,
        typer.Option(
            help="Where arrays go: `memory` of hosts, or `files` of workers with `--spill-files`."
        ),
    ] = CopyPlace.MEMORY,
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait; the suspension goes on afterwards.")
    ] = 120.0,
) -> None:
    """Have clients leave their devices, with all that they have there, until `pw resume`.

    What was launched ends, what is queued stays. Arrays go to the memory of hosts, or to their files. The
    clients' scripts wait.

    Exit codes: 0 when the devices are free; 1, with one line on standard error, if there is no such client,
    the tenant may not suspend it, or it took longer.
    """
    from pw.cli import requests

    at, to_files = address_of(address, credentials, insecure), to is CopyPlace.FILES
    lines = requests.suspend(at, client, tenant, island, timeout, to_files=to_files)
    typer.echo("\n".join(lines) or "no client had devices to leave")


def resume(
    client: Annotated[int | None, _CLIENT] = None,
    tenant: Annotated[str, _TENANT] = "",
    island: Annotated[str, typer.Option(help="All clients that had devices on this island.")] = "",
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Timeout = 3.0,
) -> None:
    """Have suspended clients go on, as soon as there are devices for them.

    Exit codes: 0; 1, with one line on standard error, if there is no such client, or the tenant may not.
    """
    from pw.cli import requests

    at = address_of(address, credentials, insecure)
    lines = requests.resume(at, client, tenant, island, timeout)
    typer.echo("\n".join(lines) or "no client waits for devices")


def migrate(
    client: Annotated[int, _CLIENT],
    island: Annotated[str, typer.Option(help="The island's name, as in pw status.")],
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait; the client moves nevertheless.")
    ] = 120.0,
) -> None:
    """Have a client go on, with all it has, on another island; it pauses for a moment.

    Exit codes: 0 when it has left its devices; 1, with one line on standard error, if there is no such client
    or island, the island is too small, the tenant may not move it, or it took longer.
    """
    from pw.cli import requests

    requests.migrate(address_of(address, credentials, insecure), client, island, timeout)
    typer.echo(f"client {client} has left its devices, and goes on on island {island} (pw status)")


def rebalance(
    devices: Annotated[
        int, typer.Option(min=0, help="Number of devices of a new slice that is to have room.")
    ] = 0,
    topology: Annotated[
        str, typer.Option(help="Devices along each axis of its block, such as 2x4.")
    ] = "",
    island: Annotated[str, typer.Option(help="Its island; any by default.")] = "",
    exclusive: Annotated[
        bool, typer.Option("--exclusive", help="It is to share its devices with no other slice.")
    ] = False,
    memory: Annotated[
        str, typer.Option(help="Bytes that it is to have on each device, such as 24GiB.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would move, and move nothing.")
    ] = False,
    address: Address = "",
    credentials: Credentials = "",
    insecure: Insecure = False,
    timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds to wait for each move, which goes on afterwards."),
    ] = 120.0,
) -> None:
    """Move slices of clients to less loaded devices, as after islands have joined; or out of the way.

    With `--devices` or `--topology`, the slices with the fewest bytes move that make room for such a slice. The
    moves are shown first; then one client after the other pauses, as with `pw migrate`.

    Exit codes: 0 when all have left their devices, or nothing has to move; 1, with one line on standard error,
    if no moves make room, or one took longer.
    """
    from pw.cli import requests
    from pw.client.rebalancing import plan_request

    try:
        shape = parse_times(topology) or None
    except ValueError as error:
        raise ArgumentError(f"--topology: {error}") from None
    wanted = plan_request(devices or None, shape, island or None, exclusive, memory or None)
    where = address_of(address, credentials, insecure)
    requests.rebalance(where, wanted, dry_run, timeout, lambda moves: typer.echo(f"{moves}"))


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

    requests.drain(address_of(address, credentials, insecure), host, timeout)
    typer.echo(f"{host} is drained, and its worker ends")
