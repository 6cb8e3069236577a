"""Starts the daemons of a cluster on machines that ssh reaches: `pw up`, `pw down`, `pw logs`.

Each machine has a folder with the credentials, the log and the process id of each of its daemons. A daemon is
known by its variable PW_DAEMON, so a process id that another program has now is not taken for it. Scripts go to
the standard input of `sh` there: no command line shows credentials.
"""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from pw.core.errors import Error
from pw.operating.deploy.cluster_file import ClusterFile, Machine
from pw.operating.deploy.credentials import Keys
from pw.operating.deploy.daemons import CONTROLLER, DaemonCommand, daemons, named

REACH_S = 8
"""Seconds in which a machine must answer."""
ANSWER_S = 90.0
"""Seconds in which a script must end."""
END_S = 10
"""Seconds in which a daemon must end."""
UNREACHABLE = 255
"""The exit code of ssh if it could not connect."""

T = TypeVar("T")
Say = Callable[[str], None]

FUNCTIONS = """
pid_of() {
    pid=$(cat "$1.pid" 2>/dev/null) && [ -n "$pid" ] &&
        tr '\\0' '\\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF "PW_DAEMON=$PWD/$1" && echo "$pid"
}
"""
LOOK = """
for name in "$@"; do
    state=stopped; file=none
    [ -s "$name.pem" ] && file=credentials
    pid_of "$name" >/dev/null && state=running
    echo "$name $state $file $(cat "$name.command" 2>/dev/null)"
done
"""
STOP = """
for name in "$@"; do
    pid=$(pid_of "$name") || { echo "$name stopped"; continue; }
    kill "$pid" 2>/dev/null
    waited=0
    while pid_of "$name" >/dev/null && [ "$waited" -lt "$wait" ]; do
        sleep 0.2; waited=$((waited + 1))
    done
    if pid_of "$name" >/dev/null; then kill -9 "$pid"; echo "$name killed"; else echo "$name ended"; fi
    rm -f "$name.pid"
done
"""
STARTED = """
waited=0
while [ "$waited" -lt 100 ]; do
    grep -qz . "/proc/$!/environ" 2>/dev/null || {{ echo "{name} ended"; tail -n 3 {name}.log; exit 1; }}
    tail -c +"$from" {name}.log | grep -q listening && break
    sleep 0.2; waited=$((waited + 1))
done
"""


class Unreachable(Error):
    """A machine does not answer to ssh."""


@dataclass(frozen=True)
class State:
    """The state of a daemon, as its machine reports it."""

    running: bool
    has_credentials: bool
    digest: str
    """Digest of the command with which the daemon was started last; empty if never."""


@dataclass(frozen=True)
class Ssh:
    """The system's ssh, for the machines of a cluster."""

    file: ClusterFile

    def command(self, machine: Machine) -> list[str]:
        """Return the command that runs `sh` on a machine."""
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={REACH_S}"]
        return ["ssh", "-T", *options, *self.file.ssh, "--", machine.ssh, "exec", "sh", "-s"]

    def run(
        self, machine: Machine, script: str, *arguments: str, timeout_s: float = ANSWER_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a script in the folder of the cluster on a machine.

        Raises:
            Unreachable: the machine does not answer, or does not let this user in.
        """
        folder = self.file.machines_folder
        begin = f"set -- {shlex.join(arguments)}\numask 077\nmkdir -p {shlex.quote(folder)} && cd "
        begin += f"{shlex.quote(folder)} || exit 1\n{FUNCTIONS}"
        try:
            done = subprocess.run(
                self.command(machine),
                input=begin + script,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except FileNotFoundError:
            raise Error("there is no ssh on this machine; install OpenSSH's client") from None
        except subprocess.TimeoutExpired:
            raise Unreachable(self._says(machine, f"no answer in {timeout_s:g} s")) from None
        if done.returncode == UNREACHABLE:
            lines = done.stderr.strip().splitlines() or ["ssh could not connect"]
            raise Unreachable(self._says(machine, lines[-1]))
        return done

    def _says(self, machine: Machine, reason: str) -> str:
        shown = shlex.join(["ssh", *self.file.ssh, machine.ssh, "true"])
        return (
            f"{machine.ssh} is not reached ({reason}); this must work without a question: {shown}"
        )


def by_machine(placed: Iterable[DaemonCommand]) -> dict[Machine, list[DaemonCommand]]:
    """Return the daemons of each machine."""
    groups: dict[Machine, list[DaemonCommand]] = {}
    for daemon in placed:
        groups.setdefault(daemon.machine, []).append(daemon)
    return groups


def on_each(
    groups: Mapping[Machine, T], act: Callable[[Machine, T], list[str]]
) -> tuple[list[str], list[str]]:
    """Act on all machines at the same time.

    Returns:
        what was done, and what went wrong: one line each.
    """
    done: list[str] = []
    wrong: list[str] = []
    with ThreadPoolExecutor(max_workers=max(1, min(32, len(groups)))) as pool:
        futures = [pool.submit(act, machine, group) for machine, group in groups.items()]
    for future in futures:
        try:
            done += future.result()
        except Error as error:
            wrong.append(str(error))
    return done, wrong


@dataclass
class Cluster:
    """The daemons of a cluster file, on their machines."""

    file: ClusterFile
    say: Say
    wrong: list[str] = field(default_factory=list)
    """Errors so far, one line each."""

    def __post_init__(self) -> None:
        self.ssh = Ssh(self.file)
        self.placed = daemons(self.file)

    def chosen(self, names: Sequence[str]) -> list[DaemonCommand]:
        """Return the daemons of these names, by default all. Raises Error if there is no such daemon."""
        return named(self.file, names) if names else self.placed

    def up(self, keys: Keys | None) -> bool:
        """Start the daemons that do not run, the controller first; return whether all run."""
        first = [daemon for daemon in self.placed if daemon.name == CONTROLLER]
        for group in (first, [daemon for daemon in self.placed if daemon.name != CONTROLLER]):
            self._on_each(group, lambda machine, some: self._start(machine, some, keys))
            if self.wrong and group is first:
                return False  # workers would wait for it in vain
        return not self.wrong

    def restart(
        self, keys: Keys | None, drain: Callable[[str], None], absent: Callable[[], list[str]]
    ) -> bool:
        """Restart the daemons one after the other, the controller last; stop at the first that fails.

        Args:
            keys: for new credentials.
            drain: moves all data off a host, if any other can take it.
            absent: waits until all hosts are there, and returns a line for each that is not.
        """
        for daemon in sorted(self.placed, key=lambda one: one.name == CONTROLLER):
            begun_s = time.monotonic()
            if daemon.island:
                drain(daemon.name)
            self._on_each([daemon], self._stop)
            self._on_each([daemon], lambda machine, some: self._start(machine, some, keys))
            self.wrong += absent()
            if self.wrong:
                return False
            self.say(f"{daemon.name}: restarted in {time.monotonic() - begun_s:.1f} s")
        return True

    def down(self, names: Sequence[str] = ()) -> bool:
        """End the daemons, the workers first; return whether none runs."""
        chosen = self.chosen(names)
        controller = [daemon for daemon in chosen if daemon.name == CONTROLLER]
        self._on_each([daemon for daemon in chosen if daemon not in controller], self._stop)
        self._on_each(controller, self._stop)
        return not self.wrong

    def logs(self, names: Sequence[str], lines: int) -> bool:
        """Print the last lines of the daemons' logs."""

        def tail(machine: Machine, group: list[DaemonCommand]) -> list[str]:
            script = 'for name in "$@"; do\n'
            script += f'    tail -n {lines} "$name.log" 2>&1 | sed "s|^|$name: |"\ndone\n'
            return self.ssh.run(machine, script, *(one.name for one in group)).stdout.splitlines()

        self._on_each(self.chosen(names), tail)
        return not self.wrong

    def follow(self, name: str) -> int:
        """Print a daemon's log while it grows, until Ctrl-C."""
        (daemon,) = self.chosen([name])
        script = f"cd {shlex.quote(self.file.machines_folder)} && exec tail -n 20 -F {name}.log"
        command = [*self.ssh.command(daemon.machine)[:-3], script]
        return subprocess.run(command, check=False).returncode

    def _on_each(
        self, group: list[DaemonCommand], act: Callable[[Machine, list[DaemonCommand]], list[str]]
    ) -> None:
        done, wrong = on_each(by_machine(group), act)
        for line in done:
            self.say(line)
        self.wrong += wrong

    def _look(self, machine: Machine, group: list[DaemonCommand]) -> dict[str, State]:
        done = self.ssh.run(machine, LOOK, *(one.name for one in group))
        rows = [line.split(" ") for line in done.stdout.splitlines()]
        if done.returncode or len(rows) != len(group):
            output = (done.stderr or done.stdout).strip()
            raise Error(f"{machine.ssh}: {output or 'its shell says nothing'}")
        return {
            name: State(state == "running", has == "credentials", digest)
            for name, state, has, digest in rows
        }

    def _start(self, machine: Machine, group: list[DaemonCommand], keys: Keys | None) -> list[str]:
        states = self._look(machine, group)
        script, notes = "", []
        for daemon in group:
            state, digest = states[daemon.name], self._digest(daemon)
            new = None
            if keys is not None:
                where = f"{machine.ssh}:{self.file.machines_folder}/{daemon.credentials}"
                new = keys.missing_for(
                    daemon.name, daemon.island, where, has_file=state.has_credentials
                )
            if new is not None:
                script += copied(daemon.credentials, new)
                notes.append(f"{daemon.name}: new credentials on {machine.ssh}")
            if state.running:
                words = f"{daemon.name}: runs on {machine.ssh}"
                if state.digest != digest:
                    words += " with other options than the file's; `pw up --restart` uses those"
                notes.append(words)
                continue
            script += self._starting(daemon, digest)
            notes.append(f"{daemon.name}: started on {machine.ssh}")
        if script:
            done = self.ssh.run(machine, script)
            if done.returncode:
                lines = (done.stdout + done.stderr).strip().splitlines()
                raise Error(f"{machine.ssh}: {'; '.join(lines)}; see also pw logs")
        return notes

    def _starting(self, daemon: DaemonCommand, digest: str) -> str:
        name = daemon.name
        settings = [f"{key}={value}" for key, value in self.file.environment.items()]
        command = shlex.join([*settings, *daemon.command])
        return (
            f"from=$(($(cat {name}.log 2>/dev/null | wc -c) + 1))\n"
            f'setsid env PW_DAEMON="$PWD/{name}" {command} </dev/null >>{name}.log 2>&1 &\n'
            f"echo $! >{name}.pid\necho {digest} >{name}.command\n"
            + (STARTED.format(name=name) if name == CONTROLLER else "")
        )

    def _digest(self, daemon: DaemonCommand) -> str:
        words = [*daemon.command, *sorted(map(str, self.file.environment.items()))]
        return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]

    def _stop(self, machine: Machine, group: list[DaemonCommand]) -> list[str]:
        done = self.ssh.run(
            machine,
            f"wait={5 * END_S}\n{STOP}",
            *(one.name for one in group),
            timeout_s=len(group) * END_S + ANSWER_S,
        )
        return [": ".join(line.split(" ", 1)) for line in done.stdout.splitlines()]


def copied(name: str, content: bytes) -> str:
    """Return the script that puts a file there at once; the content is text, and no line of it is the mark."""
    return (
        f"cat >{name}.new <<'PW-END'\n{content.decode().rstrip()}\nPW-END\nmv {name}.new {name}\n"
    )
