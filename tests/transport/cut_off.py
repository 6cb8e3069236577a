"""The program of a test: a node, and echo processes on a machine that is cut off from it.

It runs in a user, mount and network namespace of its own (`unshare -Urnm`). It prints, as JSON, for what
reasons the node has lost its peer: while that is stopped, when its machine is cut off then, and when the
machine of a running process is cut off.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import uvloop

from tests.stages.cluster import Cluster
from tests.stages.machines import build, run

BRIDGE, MACHINE = "10.9.0.1", "10.9.0.2"
LEASE_S = 1.0


def main() -> None:
    build({"far": MACHINE}, BRIDGE)
    cluster = Cluster(uvloop.new_event_loop(), "tcp", Path.cwd())
    a = cluster.node(
        "a", heartbeat_s=0.05, lease_s=LEASE_S, bind=f"tcp://{BRIDGE}:0", insecure=True
    )
    network = cluster.network(a)
    said: dict[str, list[str]] = {}

    def start(name: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "tests.transport.echo_process", name, network.endpoint]
        child = subprocess.Popen(["ip", "netns", "exec", "far", *words])
        cluster.until(lambda: any(sender.node == name for sender, _ in a.received))
        return child

    def reasons(name: str) -> list[str]:
        return [reason for node, reason in a.lost if node == name]

    stopped, running = start("stopped"), start("running")
    try:
        stopped.send_signal(signal.SIGSTOP)
        cluster.until(lambda: "stopped" in a.silent)
        # The silence of three leases, which its machine answers.
        cluster.until(lambda: (network.heard_s("stopped") or 3 * LEASE_S) >= 3 * LEASE_S)
        said["stopped"] = reasons("stopped")
        run("ip", "link", "set", "far", "down")
        cluster.until(lambda: len(a.lost) >= 2)
        said["stopped and cut off"] = reasons("stopped")
        said["cut off"] = reasons("running")
    finally:
        for child in (stopped, running):
            child.kill()
            child.wait()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
