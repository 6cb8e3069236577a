"""Renders units of systemd for the daemons of a cluster file: `pw systemd`."""

from __future__ import annotations

from pathlib import PurePosixPath

from pw.core.errors import Error
from pw.operating.deploy.cluster_file import ClusterFile
from pw.operating.deploy.daemons import DaemonCommand

DESCRIPTORS = 1 << 20
DRAIN_S, SLACK_S = 60, 15

UNIT = """\
# Written by pw systemd, for {machine}
[Unit]
Description=pw: {name} of the cluster {cluster}
Wants=network-online.target
After=network-online.target
# An error that would come again ends with 1; it is not tried for ever.
StartLimitIntervalSec=600
StartLimitBurst=10

[Service]
WorkingDirectory={folder}
{environment}ExecStart={command}
# A worker that was drained ends with 0, and is not started again.
Restart=on-failure
RestartSec=2
# The first signal goes to the daemon alone: it ends, or drains, its own processes.
KillMode=mixed
TimeoutStopSec={stop_s}
LimitNOFILE={descriptors}
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""


def unit(file: ClusterFile, daemon: DaemonCommand) -> str:
    """Return the unit of a daemon. Raises Error if the file has no absolute folder or interpreter."""
    for key, path, example in (
        ("folder", file.folder, "/var/lib/pw"),
        ("python", file.python, "/opt/pw/bin/python"),
    ):
        if not PurePosixPath(path).is_absolute():
            raise Error(
                f"a unit needs absolute paths; write in the cluster file, as in {key}: {example}"
            )
    drain = ["--drain", str(DRAIN_S)] if daemon.island else []
    words = [*daemon.command, *drain]
    settings = {"HOME": file.folder} | file.environment
    return UNIT.format(
        machine=daemon.machine.ssh,
        name=daemon.name,
        cluster=file.name,
        folder=_escaped(file.folder),
        environment="".join(f"Environment={_quoted(f'{k}={v}')}\n" for k, v in settings.items()),
        command=" ".join(_quoted(word) for word in words),
        stop_s=(DRAIN_S if drain else 0) + SLACK_S,
        descriptors=DESCRIPTORS,
    )


def _escaped(text: str) -> str:
    return text.replace("%", "%%")


def _quoted(word: str) -> str:
    """Quote a word for a unit, in which % and $ have meanings."""
    word = _escaped(word).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{word}"' if not word or any(c in word for c in " \t'\"\\;") else word
