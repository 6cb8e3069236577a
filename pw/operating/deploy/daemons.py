"""Makes the command lines of a cluster's daemons from its description: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pw.core.errors import Error
from pw.operating.deploy.cluster_file import ClusterFile, Machine, Value, machines_of
from pw.transport.endpoints import tcp_endpoint

CONTROLLER = "controller"
CONTROLLER_MODULE, WORKER_MODULE = "pw.cli.controller", "pw.cli.worker"


@dataclass(frozen=True)
class DaemonCommand:
    """A daemon of a cluster, and where it runs."""

    name: str
    """`controller`, or the name of the host: its island, and its number there."""
    machine: Machine
    command: tuple[str, ...]
    """Runs in the folder that has its credentials."""
    island: str = ""
    """Name of the island; empty for the controller."""

    @property
    def credentials(self) -> str:
        """The file of its credentials, in its folder."""
        return f"{self.name}.pem"


def address_of(file: ClusterFile) -> str:
    """Return the controller's address on the machine that the file names."""
    return tcp_endpoint(file.controller_machine().host, file.controller.port)


def host_names(file: ClusterFile, island: str) -> list[str]:
    """Return the names of an island's hosts, its spares last."""
    return [f"{island}-{number}" for number in range(file.islands[island].workers)]


def daemons(file: ClusterFile) -> list[DaemonCommand]:
    """Return the daemons of a cluster on machines that the file names, the controller first.

    Raises:
        Error: the file does not name a machine for each.
    """
    address, machine = address_of(file), file.controller_machine()
    command = controller_command(file, address, f"{CONTROLLER}.pem")
    placed = [DaemonCommand(CONTROLLER, machine, tuple(command))]
    for island, described in file.islands.items():
        for number, at in enumerate(machines_of(island, described)):
            name = f"{island}-{number}"
            bind = tcp_endpoint(at.host, 0).removesuffix("0") + described.ports
            command = worker_command(
                file, island, address, name, bind, f"{name}.pem", spare=number >= described.size
            )
            placed.append(DaemonCommand(name, at, tuple(command), island))
    return placed


def named(file: ClusterFile, names: Sequence[str]) -> list[DaemonCommand]:
    """Return the daemons of these names. Raises Error if there is no such daemon."""
    by_name = {daemon.name: daemon for daemon in daemons(file)}
    for name in names:
        if name not in by_name:
            raise Error(f"the cluster has no {name!r}; it has {', '.join(by_name)}")
    return [by_name[name] for name in names]


def controller_command(file: ClusterFile, bind: str, credentials: str) -> list[str]:
    """Return the command of the controller."""
    return [
        *(file.python, "-m", CONTROLLER_MODULE, "--bind", bind),
        *("--islands", str(len(file.islands))),
        *_security(file, credentials),
        *_options(file.controller.options),
    ]


def worker_command(
    file: ClusterFile,
    island: str,
    controller: str,
    name: str,
    bind: str,
    credentials: str,
    *,
    spare: bool = False,
    drain_s: int = 0,
) -> list[str]:
    """Return the command of a worker; arguments may have what the engine replaces.

    Args:
        drain_s: seconds in which it may move its data to other hosts when it is told to end.
    """
    described = file.islands[island]
    return [
        *(file.python, "-m", WORKER_MODULE, "--controller", controller, "--island", island),
        *("--island-hosts", str(described.size), "--devices", str(described.devices)),
        *("--platform", described.platform, "--name", name, "--bind", bind),
        *(["--spare"] if spare else []),
        *(["--drain", str(drain_s)] if drain_s else []),
        *_security(file, credentials),
        *_options(described.options),
    ]


def _security(file: ClusterFile, credentials: str) -> list[str]:
    return ["--insecure"] if file.insecure else ["--credentials", credentials]


def _options(options: Mapping[str, Value]) -> Iterator[str]:
    for name, value in options.items():
        if value is True:
            yield f"--{name}"
        elif value is not False:
            yield from (f"--{name}", str(value))
