"""Machines of a test: network namespaces behind a bridge, each with a shell of a user of its own.

All of it needs a user, mount and network namespace in which the process is root: `unshare -Urnm`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.stages.daemons import Program, until

IMPOSSIBLE = 77
USER = "ann"
SSH_PORT = 2222
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_END = "the command has ended: "


def run(*command: str, needed: bool = True) -> bool:
    """Run a command of the system. Ends this process with a message if it fails and is needed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and needed:
        print(f"cannot be done here: {' '.join(command)}: {done.stderr.strip()}", flush=True)
        sys.exit(IMPOSSIBLE)
    return not done.returncode


def build(addresses: Mapping[str, str], bridge: str = "") -> None:
    """Make a namespace for each name, with its address; the bridge has an address if one is given."""
    run("mount", "-t", "tmpfs", "none", "/run")
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "bridge", "type", "bridge")
    if bridge:
        run("ip", "addr", "add", f"{bridge}/24", "dev", "bridge")
    run("ip", "link", "set", "bridge", "up")
    for name, address in addresses.items():
        run("ip", "netns", "add", name)
        run("ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", name, "master", "bridge", "up")
        run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "link", "set", "eth0", "up")


def run_inside(module: str, *arguments: str, folder: Path, bound_s: float = 110.0) -> str:
    """Run `python -m module` where it may call `build`; return what it prints. Skips the test if it cannot."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("needs the commands unshare and ip")
    words = ["unshare", "-Urnm", sys.executable, "-m", module, *arguments]
    program = Program(folder, ["-c", f"import os; os.execvp('unshare', {words!r})"])
    try:
        code = program.end(bound_s)
        if code and ("cannot be done here" in program.out or "unshare" in program.err):
            pytest.skip(f"no network namespaces here: {program.out} {program.err}")
        assert code == 0, program.out + program.err
        program.until_alone()
        return program.out
    finally:
        program.kill()


class Machine:
    """A shell on a machine, as a user that is not root, in a home of its own.

    Args:
        name: of its namespace.
        home: an empty folder.
        variables: of the shell, besides PATH and HOME.
    """

    def __init__(self, name: str, home: Path, variables: Mapping[str, str]) -> None:
        self.name, self.home = name, home
        users = home.with_suffix(".passwd")
        users.write_text(f"{USER}:x:1000:1000::{home}:/bin/bash\n")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {"HOME": str(home), "USER": USER, "PATH": path, "COLUMNS": "120", **variables}
        become = f"mount --bind {users} /etc/passwd && cd {home} && exec unshare -U"
        become += ' --map-user=1000 --map-group=1000 "$@"'
        self._enter = ("ip", "netns", "exec", name, "sh", "-c", become, "sh")
        self._environment = environment
        self._shell = subprocess.Popen(
            (*self._enter, "bash", "--norc"),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def type(self, line: str) -> tuple[int, str]:
        """Type a line; return the exit code and what is printed until it ends."""
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(
            f"eval {shlex.quote(line)} < /dev/null\ncode=$?; echo; echo '{_END}'$code\n"
        )
        self._shell.stdin.flush()
        printed = ""
        for got in self._shell.stdout:
            if got.startswith(_END):
                return int(got.removeprefix(_END)), printed.removesuffix("\n")
            printed += got
        raise AssertionError(f"the shell on {self.name} has ended: {printed}")

    def serve_ssh(self, client: Machine, address: str) -> subprocess.Popen[bytes]:
        """Run sshd here, which takes the key of the user on another machine."""
        assert SSHD is not None
        ours, theirs = self.home / ".ssh", client.home / ".ssh"
        for folder, key in ((ours, "host"), (theirs, "id_ed25519")):
            folder.mkdir(mode=0o700)
            new = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(new, check=True)
        shutil.copy(theirs / "id_ed25519.pub", ours / "authorized_keys")
        host_key = (ours / "host.pub").read_text()
        (theirs / "known_hosts").write_text(f"[{address}]:{SSH_PORT} {host_key}")
        (theirs / "config").write_text(f"Host {address}\n  Port {SSH_PORT}\n")
        options = {
            "Port": str(SSH_PORT),
            "HostKey": str(ours / "host"),
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "Subsystem": "sftp internal-sftp",
        }
        (ours / "sshd_config").write_text("".join(f"{k} {v}\n" for k, v in options.items()))
        command = (*self._enter, SSHD, "-D", "-e", "-f", str(ours / "sshd_config"))
        with (ours / "log").open("wb") as log:
            serving = subprocess.Popen(command, env=self._environment, stderr=log)
        until(lambda: "listening" in (ours / "log").read_text(), "sshd listens")
        return serving

    def close(self) -> None:
        """End the shell, and what it has started."""
        assert self._shell.stdin is not None
        self.type('jobs=$(jobs -p); [ -z "$jobs" ] || kill $jobs; wait')
        self._shell.stdin.close()
        self._shell.wait(20)
