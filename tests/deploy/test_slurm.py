"""`pw slurm` with a real Slurm of one machine: Debian's slurm-wlm, started for the test."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pw.cli.deploy import read
from pw.core.errors import Error
from pw.operating.deploy import slurm as engine
from tests.deploy.engines import ROOT, TRAIN, environment, free_port, write_cluster
from tests.stages.daemons import until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CryptoType=crypto/munge
SlurmdUser=root
SlurmctldPort={port}
SlurmdPort={second}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=10
JobRequeue=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores}
PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE OverSubscribe=YES
"""

SAVES = """
import pathlib, signal, sys
import pw, numpy as np
count = pathlib.Path(sys.argv[1])
begun = count.read_text() if count.exists() else ""
count.write_text(begun + "begun\\n")
devices = pw.make_virtual_device_set()
mesh = pw.Mesh(devices.add_slice(devices=1).devices, ("x",))
x = pw.jit(lambda x: x + 1, mesh=mesh)(np.ones(4, np.float32))
x.block_until_ready()
if begun:
    print("the second start computes", np.asarray(x)[0], flush=True)
    raise SystemExit(0)
def save(number, frame):
    print("saved after the notice", flush=True)
    raise SystemExit(3)
signal.signal(signal.SIGTERM, save)
print("waits for the notice", flush=True)
signal.pause()
"""


def test_the_nodes_are_divided_among_islands(tmp_path: Path) -> None:
    islands = {"east": {"hosts": 2, "spares": 1}, "west": {"hosts": 1, "devices": 4}}
    slurm = {"folder": str(tmp_path / "job"), "sbatch": {"partition": "gpu", "exclusive": True}}
    file = read(write_cluster(tmp_path, islands=islands, slurm=slurm))
    script = tmp_path / "train.py"
    text = engine.write(file, [str(script), "10 steps"]).read_text()
    for line in ("--nodes=4", "--partition=gpu", "--exclusive", "--requeue", "--signal=B:TERM@60"):
        assert f"#SBATCH {line}\n" in text
    for lines in ("1,2", "3,3", "4,4"):
        assert f"sed -n '{lines}p'" in text
    assert f"{script} '10 steps'" in text
    spare = (tmp_path / "job" / "east-spare.sh").read_text()
    assert "number=$((SLURM_PROCID + 2))" in spare
    assert "--name east-${number}" in spare
    assert "--spare --drain 50" in spare
    assert (tmp_path / "job" / "east-2.pem").stat().st_mode & 0o077 == 0


def words_of(line: str) -> list[str]:
    """Split a line of options as sbatch does: a backslash is special in both kinds of quotes."""
    lexer = shlex.shlex(line.removeprefix("#SBATCH"), posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.escapedquotes = True, "'\""
    return list(lexer)


VALUES = [
    "two words",
    "a#b",
    'say "hi"',
    "it's",
    "back\\slash",
    "$(date)",
    "`date`",
    "gpu[1-4]",
    "",
]


def test_values_reach_sbatch_and_the_script_as_they_are(tmp_path: Path) -> None:
    options = {f"option-{at}": value for at, value in enumerate(VALUES)}
    variables = {f"VARIABLE_{at}": f"{value}\nmore" for at, value in enumerate(VALUES)}
    slurm = {"folder": str(tmp_path / "a job"), "sbatch": options}
    islands = {"east": {"hosts": 1}}
    file = read(write_cluster(tmp_path, islands=islands, slurm=slurm, environment=variables))
    text = engine.write(file, ()).read_text()
    lines = [words_of(line) for line in text.splitlines() if line.startswith("#SBATCH")]
    for name, value in (options | {"chdir": str(tmp_path / "a job")}).items():
        assert [f"--{name}={value}"] in lines
    exports = text[text.index("export ") : text.index("umask")]
    shown = [f'printf "%s\\0" "${name}"' for name in variables]
    done = subprocess.run(["sh", "-c", exports + "\n".join(shown)], capture_output=True, check=True)
    assert done.stdout.decode().split("\0")[:-1] == list(variables.values())


@pytest.mark.parametrize("mask", [0, 0o022])
def test_only_their_user_can_read_the_files_of_a_job(tmp_path: Path, mask: int) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    folder.chmod(0o755)
    slurm = {"folder": str(folder)}
    islands = {"east": {"hosts": 1, "spares": 1}}
    variables = {"WANDB_API_KEY": "secret"}
    file = read(write_cluster(tmp_path, islands=islands, slurm=slurm, environment=variables))
    before = os.umask(mask)
    try:
        engine.write(file, ())
    finally:
        os.umask(before)
    assert "secret" in (folder / "job.sh").read_text()
    assert {path.name: path.stat().st_mode & 0o077 for path in folder.iterdir()} == dict.fromkeys(
        (path.name for path in folder.iterdir()), 0
    )


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("p", "gpu\ndate", "option p of sbatch must be one line"),
        ("comment\ndate #", "x", "is no option of sbatch; write a long one"),
        ("--partition", "gpu", "'--partition' is no option of sbatch"),
        ("time=1 --nodes", "3", "is no option of sbatch"),
    ],
)
def test_options_that_are_none_are_refused(
    tmp_path: Path, option: str, value: str, words: str
) -> None:
    slurm = {"folder": str(tmp_path / "job"), "sbatch": {option: value}}
    file = read(write_cluster(tmp_path, islands={"east": {"hosts": 1}}, slurm=slurm))
    with pytest.raises(Error, match=words):
        engine.write(file, ())


def test_options_that_pw_sets_are_refused(tmp_path: Path) -> None:
    slurm = {"folder": str(tmp_path / "job"), "sbatch": {"nodes": 3}}
    file = read(write_cluster(tmp_path, islands={"east": {"hosts": 1}}, slurm=slurm))
    with pytest.raises(Error, match="the option nodes of sbatch is set by pw"):
        engine.write(file, ())


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables with which commands reach a Slurm of this machine."""
    missing = [name for name in NEEDED if shutil.which(name, path=PATH) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: apt-get install slurm-wlm munge")
    if os.getuid():
        pytest.skip("needs root: slurmd starts jobs of users")
    folder = tmp_path_factory.mktemp("slurm")
    for part in ("state", "spool"):
        (folder / part).mkdir()
    configuration = folder / "slurm.conf"
    ports = {"port": free_port(), "second": free_port()}
    configuration.write_text(
        CONFIGURATION.format(
            folder=folder, host=socket.gethostname(), cores=os.cpu_count(), **ports
        )
    )
    (folder / "cgroup.conf").write_text(
        f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/cgroup\n"
    )
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    variables = os.environ | {"SLURM_CONF": str(configuration), "PATH": PATH}
    names = {
        name: str(folder / f"munge{end}") for name, end in (("socket", ""), ("pid-file", ".pid"))
    }
    names |= {"log-file": str(folder / "munge.log"), "seed-file": str(folder / "munge.seed")}
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--{name}={path}" for name, path in names.items()]
    started = []

    def start(*command: str) -> None:
        with (folder / f"{command[0]}.out").open("wb") as out:
            started.append(subprocess.Popen(command, env=variables, stdout=out, stderr=out))

    def state() -> str:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=variables, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    try:
        start(*munged)
        until((folder / "munge").exists, "munged listens")
        start("slurmctld", "-D")
        start("slurmd", "-D")
        until(lambda: state() == "idle", f"Slurm's node is idle, see {folder}", 60)
        yield variables
    finally:
        subprocess.run(["scancel", "--name=pw-test"], env=variables, check=False)
        queue = ["squeue", "-h"]
        until(lambda: not subprocess.check_output(queue, env=variables), "jobs have ended", 40)
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.wait(20)


def submitted(
    folder: Path, slurm: dict[str, str], script: str, *arguments: object
) -> tuple[str, str]:
    """Run a script in a job; return what `pw slurm` printed, and the job's number."""
    file = write_cluster(
        folder,
        controller={"port": free_port()},
        islands={"east": {"hosts": 1, "devices": 2}},
        slurm={"folder": str(folder / "job"), "sbatch": {"time": "0:05:00"}},
    )
    path = folder / "script.py"
    path.write_text(script)
    command = [
        sys.executable,
        "-m",
        "pw.cli.main",
        "slurm",
        str(file),
        str(path),
        *map(str, arguments),
    ]
    done = subprocess.run(
        command, env=slurm | environment(), capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    number = done.stdout.split("submitted job ")[1].split(";")[0]
    return done.stdout, number


def ended(slurm: dict[str, str], number: str) -> bool:
    done = subprocess.run(
        ["squeue", "-h", "-j", number, "-o", "%T"],
        env=slurm,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() in ("", "COMPLETED", "FAILED", "CANCELLED")


@pytest.mark.long
@pytest.mark.processes
def test_a_job_trains(tmp_path: Path, slurm: dict[str, str]) -> None:
    printed, number = submitted(tmp_path, slurm, TRAIN)
    log = tmp_path / "job" / "job.log"
    until(lambda: ended(slurm, number), "end of the job", 90)
    said = log.read_text()
    print(printed + said)
    assert "trained: loss" in said
    assert f"job {number}, start 1, on {socket.gethostname()}" in said
    assert "island=east" in (tmp_path / "job" / "east-0.log").read_text()


@pytest.mark.long
@pytest.mark.processes
def test_a_job_that_is_told_to_end_saves_and_begins_again(
    tmp_path: Path, slurm: dict[str, str]
) -> None:
    _, number = submitted(tmp_path, slurm, SAVES, tmp_path / "count")
    log = tmp_path / "job" / "job.log"
    until(
        lambda: log.exists() and "waits for the notice" in log.read_text(), "the script waits", 60
    )
    notice = ["scancel", "--batch", "--signal=TERM", number]
    subprocess.run(notice, env=slurm, check=True)
    begun_s = time.monotonic()
    until(lambda: "begins again" in log.read_text(), "the job is queued again", 60)
    # Slurm holds a job back for two minutes before it starts it again.
    until(lambda: "second start computes 2.0" in log.read_text(), "its second start", 200)
    print(log.read_text(), f"the second start computed after {time.monotonic() - begun_s:.0f} s")
    assert "saved after the notice" in log.read_text()
    assert "start 2, on" in log.read_text()
    until(lambda: ended(slurm, number), "end of the job", 60)
