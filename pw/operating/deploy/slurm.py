"""Runs a cluster inside of a Slurm job: `pw slurm` writes the job's folder and submits its script.

The nodes of the allocation are divided among the islands in order, one worker a node; the controller runs
beside the script on the first one.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from pw.core.errors import Error
from pw.core.messages.roles import Role
from pw.operating.deploy.cluster_file import ClusterFile
from pw.operating.deploy.credentials import OPERATOR
from pw.operating.deploy.daemons import CONTROLLER, controller_command, host_names, worker_command
from pw.transport.access import private_files
from pw.transport.access.authority import Authority

SLACK_S = 10
"""Seconds of the notice that are left to end in."""
SET_BY_PW = {"nodes", "ntasks", "ntasks-per-node", "output", "job-name", "signal", "chdir"}
FUNCTIONS = """
address_of() {  # the address of a node, as Slurm knows it
    scontrol show node -o "$1" | tr ' ' '\\n' | sed -n 's/^NodeAddr=//p'
}
"""
BEGIN = """
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || exit 1
echo "job $SLURM_JOB_ID, start $((${{SLURM_RESTART_COUNT:-0}} + 1)), on $(echo $nodes)"
address=$(address_of "$(echo "$nodes" | head -n 1)")
export PW_ADDRESS="tcp://$address:{port}"
echo "$PW_ADDRESS" >address
{controller} >>controller.log 2>&1 &
started=$!
"""
ISLAND = """
srun --nodes={count} --ntasks={count} --ntasks-per-node=1 --overlap --kill-on-bad-exit=0 \\
    --nodelist="$(echo "$nodes" | sed -n '{first},{last}p' | paste -sd, -)" \\
    --output={name}-%t.log --open-mode=append sh {name}.sh &
started="$started $!"
"""
WORKER = """
address=$(address_of "$SLURMD_NODENAME")
number=$((SLURM_PROCID + {first}))
exec {command}
"""
END = """
child=${{started%% *}}  # the controller
{script}
# Before the allocation ends, or is taken, Slurm sends SIGTERM: the script saves what it has.
trap 'noticed=yes; kill -TERM "$child"' TERM
wait "$child"; code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
if [ -n "$noticed" ]; then
    echo "told to end: the script ended with $code; the job begins again"
    scontrol requeue "$SLURM_JOB_ID"
fi
kill $started 2>/dev/null
wait
exit "$code"
"""


def node_count(file: ClusterFile) -> int:
    """Return how many nodes the cluster needs."""
    return sum(island.workers for island in file.islands.values())


def folder_of(file: ClusterFile) -> Path:
    """Return the job's folder."""
    return Path(file.slurm.folder or f"pw-{file.name}").expanduser().absolute()


def write(file: ClusterFile, script: Sequence[str]) -> Path:
    """Write the job's folder: its scripts, and new credentials; return the script for sbatch.

    Args:
        file: the cluster.
        script: a Python script and its arguments, which the job runs; empty for a job that only has the
            cluster.

    Raises:
        Error: an option of sbatch is none, or is set from the other parts of the file.
    """
    for name, value in file.slurm.sbatch.items():
        _check_option(name, value)
    folder = folder_of(file)
    private_files.make_folder(folder)
    if not file.insecure:
        _write_credentials(file, folder)
    first_node = 1
    steps = ""
    for name, island in file.islands.items():
        for part, count, first, spare in (
            (name, island.size, 0, False),
            (f"{name}-spare", island.spares, island.size, True),
        ):
            if not count:
                continue
            command = worker_command(
                file,
                name,
                "@PW_ADDRESS@",
                f"{name}-@number@",
                f"tcp://@address@:{island.ports}",
                f"{name}-@number@.pem",
                spare=spare,
                drain_s=max(1, file.slurm.notice - SLACK_S),
            )
            text = FUNCTIONS + WORKER.format(first=first, command=_shell(command))
            private_files.write(folder / f"{part}.sh", text.encode())
            last = first_node + count - 1
            steps += ISLAND.format(name=part, count=count, first=first_node, last=last)
            first_node = last + 1
    path = folder / "job.sh"
    private_files.write(path, _job(file, folder, steps, script).encode())
    return path


def _job(file: ClusterFile, folder: Path, steps: str, script: Sequence[str]) -> str:
    options = {
        "job-name": f"pw-{file.name}",
        "nodes": node_count(file),
        "ntasks-per-node": 1,
        "chdir": folder,
        "output": folder / "job.log",
        "open-mode": "append",
        "signal": f"B:TERM@{file.slurm.notice}",
        "requeue": True,
        "no-kill": True,
    } | file.slurm.sbatch
    lines = ["#!/bin/sh"]
    for name, value in options.items():
        if value is not False:
            lines.append(f"#SBATCH --{name}" + (f"={_quoted(value)}" if value is not True else ""))
    lines += [f"export {key}={shlex.quote(value)}" for key, value in file.environment.items()]
    bind = f"tcp://@address@:{file.controller.port}"
    command = controller_command(file, bind, f"{CONTROLLER}.pem")
    begin = BEGIN.format(port=file.controller.port, controller=_shell(command))
    run = ""
    if script:
        where = Path(script[0]).absolute()
        words = shlex.join([file.python, str(where), *script[1:]])
        run = f"(cd {shlex.quote(str(Path.cwd()))} && exec {words}) &\nchild=$!"
    allowed = (
        "PW_INSECURE=1"
        if file.insecure
        else f"PW_CREDENTIALS={shlex.quote(str(folder / 'client.pem'))}"
    )
    return (
        "\n".join(lines)
        + f"\numask 077\n{FUNCTIONS}{begin}{steps}\nexport {allowed}"
        + END.format(script=run)
    )


def _check_option(name: str, value: object) -> None:
    if name in SET_BY_PW:
        raise Error(f"slurm: the option {name} of sbatch is set by pw; leave it out")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise Error(
            f"slurm: {name!r} is no option of sbatch; write a long one without --, as in partition: gpu"
        )
    if not str(value).isprintable():
        raise Error(f"slurm: the value of the option {name} of sbatch must be one line of text")


def _quoted(value: object) -> str:
    """Quote a value for sbatch, in whose quotes a backslash is still special."""
    text = str(value)
    if re.fullmatch(r"[\w@%+=:,./-]+", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _shell(command: Sequence[str]) -> str:
    """Quote a command for the shell, in which @NAME@ is the shell's variable of that name."""
    words = shlex.join(command)
    for name in ("PW_ADDRESS", "address", "number"):
        words = words.replace(f"@{name}@", f"${{{name}}}")
    return words


def _write_credentials(file: ClusterFile, folder: Path) -> None:
    authority = Authority.create()
    issued = {CONTROLLER: authority.issue(Role.CONTROLLER, CONTROLLER)}
    issued["client"] = authority.issue(Role.CLIENT, "slurm", OPERATOR)
    for island in file.islands:
        for name in host_names(file, island):
            issued[name] = authority.issue(Role.WORKER, name, islands=[island])
    for name, pem in issued.items():
        private_files.write(folder / f"{name}.pem", pem)


def submit(path: Path) -> str:
    """Submit a job's script; return the job's number. Raises Error if Slurm does not take it."""
    if shutil.which("sbatch") is None:
        raise Error(
            f"there is no sbatch on this machine; run where Slurm takes jobs: sbatch {path}"
        )
    done = subprocess.run(
        ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise Error(f"sbatch does not take {path}: {done.stderr.strip()}")
    return done.stdout.strip().partition(";")[0]
