"""Reads `cluster.yaml`: the machines of a cluster, its islands, and how its daemons run."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from pw.core.errors import Error
from pw.core.installed import check_extra
from pw.core.platforms import installed_platform, platform_names
from pw.operating.deploy.located import mistakes, parsed
from pw.transport.access.joined import config_folder

Value = str | int | float | bool
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
"""Names of clusters and islands: they are also names of objects of Kubernetes, jobs and files."""
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Names of environment variables."""
SET_BY_PW = {"bind", "controller", "credentials", "island", "island-hosts", "insecure", "name"}
SET_BY_PW |= {
    "devices",
    "platform",
    "spare",
    "parent-fd",
    "drain",
    "alone",
    "version",
    "private-address",
}


class _Described(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the file; a key that it does not know is an error."""


class Machine(_Described, frozen=True):
    """A machine that ssh reaches."""

    ssh: str
    """Destination of ssh, as in ann@gpu1, or a Host of ~/.ssh/config."""
    address: str = ""
    """Address of the machine for the others, by default what follows the @ in `ssh`."""

    @property
    def host(self) -> str:
        """The address of the machine for the other machines."""
        return self.address or self.ssh.rpartition("@")[2]


class ControllerEntry(_Described, frozen=True):
    """The controller: where it runs, and the options of `pw-controller`."""

    machine: str | Machine = ""
    port: int = 7777
    options: dict[str, Value] = {}


class IslandEntry(_Described, frozen=True):
    """An island: its hosts, and the options of their `pw-worker`s."""

    machines: list[str | Machine] = []
    """Machines of the island, one for each host; a machine may be named several times."""
    hosts: int = 0
    """Number of hosts, for engines that choose the machines; by default that of machines."""
    spares: int = 0
    """Number of further hosts that only replace lost ones; with `machines`, the last of these."""
    devices: int = 1
    platform: str = "cpu"
    ports: str = "0"
    """Port of each worker, or a range as in 7000-7100; 0 takes a free one."""
    options: dict[str, Value] = {}

    @property
    def size(self) -> int:
        """Return the number of the island's hosts, without spares."""
        return self.hosts or len(self.machines) - self.spares

    @property
    def workers(self) -> int:
        """Return the number of the island's workers, with spares."""
        return self.size + self.spares


class Slurm(_Described, frozen=True):
    """The settings that only `pw slurm` needs."""

    folder: str = ""
    """Folder that all nodes see, for scripts, credentials and logs. By default pw-NAME here."""
    sbatch: dict[str, Value] = {}
    """Options of sbatch, as in `partition: gpu`, `time: "4:00:00"`."""
    notice: int = 60
    """Seconds before the end of the allocation at which hosts are drained."""


class Kubernetes(_Described, frozen=True):
    """The settings that only `pw k8s` needs."""

    image: str = ""
    namespace: str = "default"
    issuer: str = "pw-authority"
    """Issuer of cert-manager, of the kind `issuer_kind`."""
    issuer_kind: str = "Issuer"
    trust_domain: str = "pw"
    grace: int = 120
    """Seconds in which a pod that is deleted or evicted moves its data to other hosts."""
    resources: dict[str, Any] = {}
    """Resources of each worker: `requests` and `limits`."""
    node_selector: dict[str, str] = {}
    tolerations: list[dict[str, Any]] = []


class ClusterFile(_Described, frozen=True):
    """The description of a cluster."""

    islands: dict[str, IslandEntry] = {}
    name: str = "pw"
    controller: ControllerEntry = ControllerEntry()
    python: str = "python3"
    """Interpreter on each machine, with pw installed."""
    folder: str = ""
    """Folder on each machine, from the home folder. By default .pw/NAME."""
    keys: str = ""
    """Folder of the authority on this machine. By default ~/.config/pw/clusters/NAME."""
    insecure: bool = False
    """Whether the daemons use tcp without certificates."""
    environment: dict[str, str] = {}
    """Environment variables of the daemons."""
    ssh: list[str] = []
    """Further options of ssh, as in [-p, "2222"]."""
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()

    @property
    def keys_folder(self) -> Path:
        """The folder of the authority on this machine."""
        return (
            Path(self.keys).expanduser() if self.keys else config_folder() / "clusters" / self.name
        )

    @property
    def machines_folder(self) -> str:
        """The folder on each machine, from the home folder unless it is absolute."""
        return self.folder.removeprefix("~/") or f".pw/{self.name}"

    def controller_machine(self) -> Machine:
        """The machine of the controller. Raises Error if the file names none."""
        return _machine(
            self.controller.machine,
            "the controller has no machine; add to the file: controller: {machine: 10.0.0.1}",
        )


def _machine(written: str | Machine, objection: str) -> Machine:
    if not written:
        raise Error(objection)
    return written if isinstance(written, Machine) else Machine(ssh=written)


def machines_of(name: str, island: IslandEntry) -> list[Machine]:
    """Return the machine of each worker of an island. Raises Error if the file does not name them all."""
    if len(island.machines) != island.workers:
        raise Error(
            f"island {name} has {island.workers} workers and {len(island.machines)} machines; name a machine "
            f"for each worker, spares last, as in machines: [10.0.0.2, 10.0.0.3]"
        )
    return [_machine(one, f"island {name} has a machine without a name") for one in island.machines]


def read(path: Path, worker: Collection[str] = (), controller: Collection[str] = ()) -> ClusterFile:
    """Read a cluster file.

    Args:
        path: of the file.
        worker: names of the options of `pw-worker`; empty to check none.
        controller: names of the options of `pw-controller`.

    Raises:
        Error: the file cannot be read, or says something that is not possible.
    """
    check_extra("deploy", "yaml")
    try:
        text = path.read_bytes()
    except OSError as error:
        raise Error(
            f"{path} cannot be read: {error.strerror}; docs/deploy.md shows a cluster file"
        ) from error
    try:
        node = parsed(text)
        value = {} if node is None else msgspec.yaml.decode(text)
        for mistake in () if node is None else mistakes(node, value, ClusterFile):
            raise Error(f"{path}: {mistake}; docs/deploy.md has all keys")
        file = msgspec.convert(value, ClusterFile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Error(f"{path}: {' '.join(str(error).split())}") from error
    objections = [*_objections(file), *_unknown("controller", file.controller.options, controller)]
    for name, island in file.islands.items():
        objections.extend(_unknown(f"island {name}", island.options, worker))
    if objections:
        raise Error(f"{path}: {objections[0]}")
    return file


def _unknown(where: str, options: Mapping[str, Value], allowed: Collection[str]) -> Iterator[str]:
    for option in options:
        if option in SET_BY_PW:
            yield f"{where}: the option {option} is set by pw from the other parts of the file; leave it out"
        elif allowed and option not in allowed:
            there = ", ".join(sorted(set(allowed) - SET_BY_PW))
            yield f"{where}: there is no option {option}; there are {there}"


def _objections(file: ClusterFile) -> Iterator[str]:
    if not file.islands:
        yield "a cluster needs an island, as in islands: {east: {machines: [10.0.0.2], devices: 4}}"
    for name in (file.name, *file.islands):
        if not NAME.fullmatch(name):
            yield f"{name!r} is no name: use up to 40 small letters, digits and '-', a letter first"
    if "controller" in file.islands or "client" in file.islands:
        yield "an island cannot be called controller or client: files of credentials have these names"
    for name, island in file.islands.items():
        if island.hosts < 0 or island.spares < 0 or island.devices < 1 or island.size < 1:
            yield (
                f"island {name} needs at least one host and one device; name its machines, or give hosts: 1"
            )
        if installed_platform(island.platform) is None:
            yield f"island {name}: no platform {island.platform!r}; there are {', '.join(platform_names())}"
        if not re.fullmatch(r"\d{1,5}(-\d{1,5})?", island.ports):
            yield f"island {name}: ports {island.ports!r} is neither a port nor a range as in 7000-7100"
    for variable in {"PW_CREDENTIALS", "PW_INSECURE", "PW_ADDRESS"} & set(file.environment):
        yield f"environment: {variable} is set by pw from the other parts of the file; leave it out"
    for variable in file.environment:
        if not VARIABLE.fullmatch(variable):
            yield (
                f"environment: {variable!r} is no name of a variable; use letters, digits and '_', no digit "
                "first"
            )
    hosts = [one.host for one in _all_machines(file)]
    if len(set(hosts)) > 1:
        for host in filter(_is_loopback, hosts):
            yield (
                f"{host} is reached by its own machine only, and the cluster has several machines; "
                "use the address by which the others reach it"
            )


def _all_machines(file: ClusterFile) -> Iterator[Machine]:
    named = [file.controller.machine, *(m for one in file.islands.values() for m in one.machines)]
    yield from (m if isinstance(m, Machine) else Machine(ssh=m) for m in named if m)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
