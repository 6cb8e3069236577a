"""Looks for what keeps a cluster from working on a machine, and says what to do: `pw doctor`."""

from __future__ import annotations

import os
import platform
import resource
import select
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from pw.core import installed
from pw.core.errors import AccessRefused, ConnectionFailed, Error
from pw.core.messages.roles import Role
from pw.operating.deploy.cluster_file import ClusterFile, Machine
from pw.operating.deploy.daemons import CONTROLLER, DaemonCommand, address_of, daemons
from pw.operating.deploy.ssh import Ssh, by_machine, on_each
from pw.transport.access.credentials import Credentials
from pw.transport.access.identity import date_text
from pw.transport.endpoints import look_up, parse
from pw.transport.streams.tls_stream import TlsStream

OK, LATER, WARNING, ERROR = "ok", "later", "warning", "error"
ANSWER_S = 3.0
WARN_DAYS = 9.0
DESCRIPTORS = 65_536
SHARED_BYTES = 1 << 30
CLOCK_S = 2.0
"""Clocks that differ by less are fine: certificates and logs need no more."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that was checked."""

    level: str
    subject: str
    says: str
    remedy: str = ""
    before_up: bool = False
    """Whether it is also so on each machine of a cluster that `pw up` has not started yet."""

    def __str__(self) -> str:
        return f"{self.level:<8}{self.subject}: {self.says}" + (
            f"; {self.remedy}" * bool(self.remedy)
        )


class Report(msgspec.Struct, frozen=True):
    """The findings of one machine about itself."""

    findings: list[Finding]
    versions: str
    """Versions of pw and jax."""
    time: float
    """Time on the machine's clock, in seconds since 1970."""
    folders: dict[str, str] = {}
    """Mark of each folder, by which two machines tell whether they see the same one."""


def examine(address: str = "", credentials: str = "", folders: Sequence[str] = ()) -> Report:
    """Check this machine.

    Args:
        address: the controller's; empty to check no connection.
        credentials: a file or folder of credentials, with which to connect; empty to check none.
        folders: that all machines of the cluster must see, such as that of checkpoints.
    """
    findings = [*_versions(), *_names(), *_limits()]
    own: Credentials | None = None
    if credentials:
        try:
            own = Credentials.read(credentials)
            findings.append(_certificate(own))
        except Error as error:
            remedy = "issue another: `pw keys issue`, or `pw up`"
            is_missing = not Path(credentials).exists()
            findings.append(Finding(ERROR, "certificate", str(error), remedy, is_missing))
    if address:
        findings += _port(address, own)
    seen: dict[str, str] = {}
    for folder in folders:
        findings += _folder(folder, seen)
    here = f"pw {installed.version(installed.DISTRIBUTION)}, jax {installed.version('jax')}"
    return Report(findings, here, time.time(), seen)


def _versions() -> Iterator[Finding]:
    try:
        installed.check()
    except Error as error:
        yield Finding(ERROR, "versions", str(error))
        return
    words = (
        f"pw {installed.version(installed.DISTRIBUTION)}, jax {installed.version('jax')}, Python "
    )
    yield Finding(OK, "versions", words + platform.python_version())
    if sys.platform != "linux":
        yield Finding(
            WARNING,
            "system",
            f"{sys.platform} has no workers",
            "run workers on Linux; clients run here",
        )


def _names() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
        yield Finding(OK, "name", f"this machine is called {name}")
    except OSError as error:
        yield Finding(
            WARNING,
            "name",
            f"this machine's name {name} has no address ({error.strerror})",
            "add it to /etc/hosts, or use numeric addresses",
        )


def _port(address: str, credentials: Credentials | None) -> Iterator[Finding]:
    try:
        where = look_up(parse(address))
        begun_s = time.monotonic()
        with socket.socket(where.family, socket.SOCK_STREAM) as dialled:
            dialled.settimeout(ANSWER_S)
            dialled.connect(where.address)
            took_ms = 1000 * (time.monotonic() - begun_s)
            yield Finding(OK, "port", f"{address} takes connections, after {took_ms:.1f} ms")
            if credentials is not None and where.family != socket.AF_UNIX:
                yield _handshake(address, dialled, credentials)
    except ConnectionRefusedError:
        yield Finding(
            ERROR,
            "port",
            f"no process listens at {address}",
            "start pw-controller there, or `pw up`",
            before_up=True,
        )
    except TimeoutError:
        yield Finding(
            ERROR,
            "port",
            f"no answer from {address} in {ANSWER_S:g} s",
            "open this port in the firewall between the machines, or correct the address",
        )
    except (ConnectionFailed, OSError) as error:
        yield Finding(ERROR, "port", f"{address} cannot be reached: {error}", "correct the address")


def _handshake(address: str, dialled: socket.socket, credentials: Credentials) -> Finding:
    """Show the controller the certificate, and look at its own, as every process of the cluster does."""
    stream = TlsStream(dialled, credentials, dialled=True, role=Role.CONTROLLER)
    end_s = time.monotonic() + ANSWER_S
    try:
        while not stream.shake():
            select.select([dialled], [], [], max(0.0, end_s - time.monotonic()))
            if time.monotonic() >= end_s:
                raise TimeoutError(f"it does not answer within {ANSWER_S:g} s")
    except (AccessRefused, OSError) as error:
        remedy = "use credentials that the authority of this cluster has issued: `pw keys issue`"
        return Finding(ERROR, "access", f"{address} and {credentials.own}: {error}", remedy)
    return Finding(OK, "access", f"{address} takes {credentials.own}")


def _certificate(credentials: Credentials) -> Finding:
    own = credentials.own
    days = (own.expires - time.time()) / 86400
    level, remedy = (
        (OK, "") if days > WARN_DAYS else (WARNING, "issue another now: `pw keys issue`")
    )
    return Finding(level, "certificate", f"{own}, until {date_text(own.expires)}", remedy)


def _folder(folder: str, seen: dict[str, str]) -> Iterator[Finding]:
    path = Path(folder).expanduser()
    if not path.is_dir():
        yield Finding(
            ERROR,
            "folder",
            f"there is no folder {folder}",
            "make it, or mount the shared one there",
        )
        return
    status = path.stat()
    seen[folder] = f"{status.st_ino}/{status.st_mtime_ns}"
    if not os.access(path, os.W_OK | os.X_OK):
        yield Finding(
            ERROR, "folder", f"this user may not write to {folder}", "change its owner or its mode"
        )
        return
    free = shutil.disk_usage(path).free
    level, remedy = (
        (OK, "") if free > SHARED_BYTES else (WARNING, "make room, or name another folder")
    )
    yield Finding(level, "folder", f"{folder} has {free / (1 << 30):.1f} GiB free", remedy)


def _limits() -> Iterator[Finding]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < DESCRIPTORS:
        yield Finding(
            WARNING,
            "limits",
            f"a process may open {hard} files, and each larger array needs one",
            f"raise the limit to {DESCRIPTORS}: LimitNOFILE= of systemd, or /etc/security/limits.conf",
        )
    for kind, name in ((resource.RLIMIT_AS, "ulimit -v"), (resource.RLIMIT_DATA, "ulimit -d")):
        bound = resource.getrlimit(kind)[0]
        if bound != resource.RLIM_INFINITY:
            yield Finding(
                WARNING,
                "limits",
                f"{name} bounds the address space of a process to {bound >> 20} MiB, and JAX maps much more "
                "than it uses",
                f"set {name} unlimited; bound memory by cgroups",
            )
    shared = Path("/dev/shm")
    if shared.is_dir() and (free := shutil.disk_usage(shared).free) < SHARED_BYTES:
        yield Finding(
            WARNING,
            "memory",
            f"/dev/shm has {free >> 20} MiB free, and arrays between processes of a machine lie there",
            "give it more: docker run --shm-size, an emptyDir with medium: Memory, or mount -o remount,size=",
        )
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = _cgroup_bytes()
    words = f"{total / (1 << 30):.1f} GiB in this machine"
    if group is not None and group < total:
        words += f", of which this process's group may use {group / (1 << 30):.1f} GiB"
    yield Finding(OK, "memory", words)


def _cgroup_bytes() -> int | None:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            written = Path(name).read_text().strip()
        except OSError:
            continue
        return int(written) if written.isdecimal() else None
    return None


_read = msgspec.json.Decoder(Report).decode


def examine_cluster(file: ClusterFile) -> list[tuple[str, Finding]]:
    """Check all machines of a cluster file at the same time, over ssh, and compare them.

    Returns:
        what was found, each with its machine.
    """
    ssh, findings = Ssh(file), list[tuple[str, Finding]]()
    reports: dict[str, tuple[Report, float]] = {}

    def ask(machine: Machine, group: list[DaemonCommand]) -> list[str]:
        begun_s = time.time()
        done = ssh.run(machine, _question(file, group))
        ended_s = time.time()
        try:
            report = _read(done.stdout)
        except (msgspec.MsgspecError, ValueError):
            lines = (done.stderr or done.stdout).strip().splitlines() or ["it printed nothing"]
            wheel = installed.wheel(installed.version(installed.DISTRIBUTION))
            raise Error(
                f"{machine.ssh}: {file.python} cannot run pw there ({lines[-1]}); copy {wheel}, which `make "
                f"wheel` builds, and run there: {file.python} -m pip install {wheel}; or correct `python:` in "
                "the cluster file"
            ) from None
        # Its clock was read at the end of the script.
        early, late = begun_s - report.time, ended_s - report.time
        offset_s = 0.0 if early <= 0 <= late else min(early, late, key=abs)
        reports[machine.ssh] = report, offset_s
        return []

    _, wrong = on_each(by_machine(daemons(file)), ask)
    findings += [("", Finding(ERROR, "machine", line)) for line in wrong]
    findings += before_up({name: report.findings for name, (report, _) in reports.items()})
    return findings + list(compared(reports))


def before_up(findings: Mapping[str, Sequence[Finding]]) -> list[tuple[str, Finding]]:
    """Return what was found, with its machine; what is normal until `pw up` is no error until then.

    Until then no machine has credentials. Without certificates, a missing controller is an error at any time.
    """
    listed = [(name, one) for name, report in findings.items() for one in report]
    certificates = [one for _, one in listed if one.subject == "certificate"]
    if not certificates or not all(one.before_up for one in certificates):
        return listed
    return [
        (name, msgspec.structs.replace(one, level=LATER, remedy="`pw up` sees to it"))
        if one.before_up
        else (name, one)
        for name, one in listed
    ]


def _question(file: ClusterFile, group: Iterable[DaemonCommand]) -> str:
    daemon = min(group, key=lambda one: one.name != CONTROLLER)
    words = [file.python, "-m", "pw.cli.main", "doctor", "--json", "--address", address_of(file)]
    words += [] if file.insecure else ["--credentials", daemon.credentials]
    if daemon.island:
        root = file.islands[daemon.island].options.get("checkpoint-root")
        words += ["--folder", str(root)] if root else []
    settings = [f"{key}={value}" for key, value in file.environment.items()]
    return shlex.join(["env", *settings, *words]) + "\n"


def compared(reports: dict[str, tuple[Report, float]]) -> Iterator[tuple[str, Finding]]:
    """Compare machines: their versions, clocks and folders.

    Args:
        reports: of each machine, with how far its clock is behind this one's, in seconds.
    """
    if not reports:
        return
    first, (expected, _) = next(iter(reports.items()))
    for name, (report, offset_s) in reports.items():
        if report.versions != expected.versions:
            yield (
                name,
                Finding(
                    ERROR,
                    "versions",
                    f"{report.versions} here, and {expected.versions} on {first}",
                    "install the same versions on all machines",
                ),
            )
        if abs(offset_s) > CLOCK_S:
            yield (
                name,
                Finding(
                    ERROR,
                    "clock",
                    f"its clock is {abs(offset_s):.1f} s {'behind' if offset_s > 0 else 'ahead of'} this one's",
                    "start a time service there, such as chrony: certificates and timelines need it",
                ),
            )
        else:
            yield name, Finding(OK, "clock", f"agrees with this machine's within {CLOCK_S:g} s")
        for folder, mark in report.folders.items():
            if expected.folders.get(folder, mark) != mark:
                yield (
                    name,
                    Finding(
                        ERROR,
                        "folder",
                        f"{folder} is another folder than on {first}",
                        "mount the same file system on all machines: checkpoints have parts of all hosts",
                    ),
                )
