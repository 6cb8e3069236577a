"""The program of a test: training on hosts in network namespaces of their own, between which packets get lost.

All links are TLS: each process has credentials.

It runs in a user, mount and network namespace of its own (`unshare -Urnm`), in which it is root. Controller
and client are at the bridge, each worker is behind a link of its own. A packet is lost when its neighbour's
address is a wrong one, which needs no traffic control in the kernel, and works one way.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from tests.stages.daemons import until
from tests.stages.machines import build, run

BRIDGE = "10.9.0.1"
HOSTS = {"one": "10.9.0.2", "two": "10.9.0.3"}
NOWHERE = "02:00:00:00:00:99"
LOST_S = 4.5
"""How long packets get lost: longer than it takes to notice."""


def lose(source: str, address: str) -> None:
    """From now on nothing that `source` sends to `address` comes there."""
    entry = (address, "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
    run("ip", "-n", source, "neigh", "replace", *entry)


def find(source: str, address: str) -> None:
    run("ip", "-n", source, "neigh", "del", address, "dev", "eth0")


def delay(source: str, delay_ms: int) -> bool:
    where = ("netns", "exec", source, "tc", "qdisc", "add", "dev", "eth0", "root")
    return run("ip", *where, "netem", "delay", f"{delay_ms}ms", needed=False)


def fetch_from(island: str) -> None:
    """A value that is too large for a message comes back from hosts on another machine."""
    import numpy as np

    import pw

    devices = pw.make_virtual_device_set().add_slice(1, island=island).devices
    given = np.arange(100_000)
    doubled = pw.jit(lambda x: x * 2, mesh=pw.Mesh(devices, ("x",)))(given)
    assert np.array_equal(np.asarray(doubled), 2 * given)
    print("fetched", flush=True)


def main() -> None:
    build(HOSTS, BRIDGE)
    import pw
    from pw.core.messages.roles import Role
    from pw.processes.daemons import LocalDaemon
    from pw.transport.access.authority import Authority
    from tests.cli.test_survival import Training, members

    authority = Authority.create()

    def issue(role: Role, name: str) -> str:
        file = Path(f"{name}.pem")
        file.touch(0o600)
        file.write_bytes(authority.issue(role, name))
        return str(file)

    python = (sys.executable, "-m")
    where = ["--bind", f"tcp://{BRIDGE}:0", "--credentials", issue(Role.CONTROLLER, "main")]
    controller = LocalDaemon("pw.cli.controller", [*where, "--log-level", "error"])
    endpoint = controller.address(60)
    workers = []
    try:
        for name, address in HOSTS.items():
            worker = ["ip", "netns", "exec", name, *python, "pw.cli.worker"]
            worker += ["--controller", endpoint, "--island", name]
            listens_at = address if name == "one" else "*"
            worker += ["--bind", f"tcp://{listens_at}:0", "--name", name]
            worker += ["--credentials", issue(Role.WORKER, name)]
            workers.append(subprocess.Popen([*worker, "--log-level", "error"]))
        pw.connect(endpoint, credentials=issue(Role.CLIENT, "laptop"))
        until(lambda: all(members(name) for name in HOSTS), "the islands")
        fetch_from("two")
        training = Training("one", 1, via="two")
        for what, source, address in (
            ("one host to another", "one", HOSTS["two"]),
            ("a host to the controller and the client", "two", BRIDGE),
        ):
            begun_s = time.monotonic()
            lose(source, address)
            time.sleep(LOST_S)
            find(source, address)
            training.go_on()
            print(f"{what}: went on after {time.monotonic() - begun_s:.1f} s", flush=True)
        if delay("one", 100):
            training.go_on()
            print("with delay: went on", flush=True)
        training.stop()
        print("all as expected", flush=True)
    finally:
        pw.disconnect()
        for worker in workers:
            worker.terminate()
            worker.wait(60)
        controller.stop()


if __name__ == "__main__":
    main()
