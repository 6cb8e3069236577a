"""The file of tenants' rights and the file of accounts, with processes: over TLS, and without certificates."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pw.cli.accounts import AccountsFile
from pw.core.accounts import AccountEntry, FolderEntry, Spent
from pw.core.errors import ArgumentError
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from tests.cli.test_secure_cluster import issue
from tests.stages.daemons import Program, start_module, until

SCRIPTS = ("red", "blue", "green")  # the tenants whose scripts run

RIGHTS = """
[default]
devices = 1

[tenants.red]
share = 2
devices = 3
clients = 2
programs = 2
device_memory = "64MiB"
disk = "1MiB"
python = ["h"]

[tenants.green]
python = false
devices = 2
preemptible = true
"""

HOLD = """
import sys, numpy as np, pw
slices = pw.make_virtual_device_set()
for devices in map(int, sys.argv[1:]):
    mesh = pw.Mesh(slices.add_slice(devices=devices).devices, ("x",))
    print(f"has {devices}", flush=True)
x = np.arange(12.0, dtype=np.float32)
assert np.array_equal(np.asarray(pw.jit(lambda x: 2 * x, mesh=mesh)(x)), 2 * x)
print("computed", flush=True)
sys.stdin.read() if sys.stdin else None
import time
while True:
    time.sleep(1)
"""

TRY = """
import sys, pw
try:
    pw.make_virtual_device_set().add_slice(devices=int(sys.argv[1]))
except pw.QuotaExceeded as error:
    print(type(error).__name__, error, flush=True)
else:
    print("has", sys.argv[1], flush=True)
"""


WAIT = """
import sys, time, pw
slices = pw.make_virtual_device_set()
print("asks", flush=True)
try:
    slices.add_slice(devices=int(sys.argv[1]))
except KeyboardInterrupt:
    print("stopped", flush=True)
while True:
    time.sleep(1)
"""

LOOP = """
import sys, jax, numpy as np, pw
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=int(sys.argv[1])).devices, ("x",))

def turn(x):
    return jax.lax.fori_loop(0, int(sys.argv[2]), lambda i, x: 0.5 * x + 1.0, x)

f, x, results = pw.jit(turn, mesh=mesh), np.ones(12, np.float32), []
print("begins", flush=True)
while True:
    results.append(f(x))
    if len(results) == 3:
        pw.get(results.pop(0))
"""

CALL = """
import jax, numpy as np, pw

def double(x):
    return 2 * x

mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
function = pw.host_function(double, jax.ShapeDtypeStruct((3,), np.float32), mesh=mesh)
try:
    print(np.asarray(function(np.ones(3, np.float32))), flush=True)
except pw.PythonRefused as error:
    print("refused", error, flush=True)
"""


PUT = """
import gc, sys, jax.numpy as jnp, numpy as np, pw
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
there = list(mesh.devices.flat)
MIB = np.zeros(1 << 18, np.float32)
MAKE = pw.jit(lambda x: x + 1, mesh=mesh)
TRIPLE = pw.jit(lambda x: jnp.tile(x, 3), mesh=mesh)

def tries(what, work):
    try:
        print(what, float(np.asarray(work())[-1]), flush=True)
    except pw.QuotaExceeded as error:
        print(what, error, flush=True)

x = pw.put(np.tile(MIB, 30), there)
tries("first", lambda: x)
e, w = pw.put(np.tile(MIB, 10), there), pw.put(np.tile(MIB, 30), there)
tries("second", lambda: MAKE(w))
del e, w
gc.collect()
tries("result", lambda: MAKE(x))
y = MAKE(x)
tries("beside", lambda: y)
tries("too much", lambda: MAKE(x))
tries("never", lambda: TRIPLE(x))
del y
gc.collect()
for number in range(5):  # each waits until the one before it is gone
    z = MAKE(x)
    del z
tries("after", lambda: MAKE(x))
print("done", flush=True)
sys.stdin.read() if sys.stdin else None
import time
while True:
    time.sleep(1)
"""


MOVE = """
import numpy as np, pw
slices = pw.make_virtual_device_set()
here, there = (slices.add_slice(devices=1, island=one).devices for one in "ij")
x = pw.put(np.ones(1 << 18, np.float32), here)
print(float(np.asarray(pw.put(x, there)).sum()), flush=True)
"""


EXCLUSIVE = """
import sys, time, pw
try:
    slice = pw.make_virtual_device_set().add_slice(topology=(int(sys.argv[1]),), exclusive=True)
except pw.InsufficientDevices as error:
    print(type(error).__name__, error, flush=True)
else:
    print("has", slice.coords, flush=True)
    while True:
        time.sleep(1)
"""


TRAIN = """
import os, sys, time, jax.numpy as jnp, numpy as np, pw
pw.connect(priority=int(sys.argv[1]))
slice = pw.make_virtual_device_set().add_slice(topology=(int(sys.argv[2]),), exclusive=True)
mesh = pw.Mesh(slice.devices, ("x",))
split = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
step = pw.jit(lambda x: jnp.sin(x) + 0.5 * x, mesh=mesh, donate_argnums=0, out_shardings=split)
x = pw.put(np.linspace(0, 1, 12, dtype=np.float32), split)
print("begins", flush=True)
for number in range(1, 100):
    while not os.path.exists(f"go{number}"):
        time.sleep(0.02)
    for _ in range(20):
        x = step(x)
    print("values", np.asarray(x).tobytes().hex(), flush=True)
"""


SAVE = """
import os, shutil, sys, time, numpy as np, pw
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
there, old, new = list(mesh.devices.flat), *sys.argv[1:]

def save(path, kib):
    pw.checkpoint(pw.put(np.zeros(kib << 8, np.float32), there), path=path).result()
    print("saved", path, flush=True)

if new.endswith("b"):
    save(old, 600)
while True:  # what is deleted is noticed within a few seconds
    try:
        save(new, 600)
        break
    except pw.QuotaExceeded as error:
        if os.path.exists(old):
            print(error, flush=True)
            shutil.rmtree(old)
        time.sleep(0.5)
"""


class Cluster:
    """A controller with a file of rights and one of accounts, a host `h` of four devices, and certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, Authority.create()
        self.rights, self.accounts = folder / "tenants.toml", folder / "accounts.jsonl"
        self.rights.write_text(RIGHTS)
        self.started: list[Program] = []
        self.scripts: list[Program] = []
        self.keys = {
            name: str(issue(self.authority, folder / f"{name}.pem", role, name, tenant))
            for name, role, tenant in (
                ("controller", Role.CONTROLLER, ""),
                ("h", Role.WORKER, ""),
                *((one, Role.CLIENT, one) for one in (*SCRIPTS, "operator")),
            )
        }
        self.bind = "tcp://127.0.0.1:0"
        self.controller = self.start_controller()
        self.address = re.findall(r"listens at (\S+)", self.controller.out)[0]
        self.bind = self.address
        self.worker = self.start(
            "pw.cli.worker",
            *("--controller", self.address, "--island", "i", "--name", "h", "--devices", 4),
            "--allow-python",
            PW_CREDENTIALS=self.keys["h"],
        )
        self.worker.until_says("island=i")

    def start(self, module: str, *arguments: object, **variables: str) -> Program:
        self.started.append(start_module(module, *arguments, folder=self.folder, **variables))
        return self.started[-1]

    def start_controller(self) -> Program:
        controller = self.start(
            "pw.cli.controller",
            *("--bind", self.bind, "--policy", "share", "--credentials", self.keys["controller"]),
            *("--tenants", self.rights, "--accounts", self.accounts, "--preempt-after", 0.2),
        )
        controller.until_says("listens at")
        return controller

    def script(self, tenant: str, script: str, *arguments: object) -> Program:
        words = ["-c", script, *map(str, arguments)]
        at = {"PW_ADDRESS": self.address, "PW_CREDENTIALS": self.keys[tenant]}
        self.scripts.append(Program(self.folder, words, JAX_PLATFORMS="cpu", **at))
        self.started.append(self.scripts[-1])
        return self.scripts[-1]

    def end_scripts(self) -> None:
        """End the scripts that still run, and wait until the controller has taken back what they had."""
        for one in self.scripts:
            one.kill()
        self.scripts.clear()
        until(lambda: not self.has_clients(), "no client")

    def has_clients(self) -> bool:
        tenants = self.status()
        return any("clients" in tenants[one]["amounts"] for one in SCRIPTS if one in tenants)

    def status(self, tenant: str = "operator") -> dict[str, Any]:
        asked = self.start(
            "pw.cli.main",
            *("status", "--tenants", "--json", "--address", self.address),
            PW_CREDENTIALS=self.keys[tenant],
        )
        assert asked.end() == 0, asked.err
        return {one["tenant"]: one for one in json.loads(asked.out)["tenants"]}

    def ask(self, command: str, *arguments: object, tenant: str) -> Program:
        """Run a command of `pw` as a tenant."""
        return self.start(
            *("pw.cli.main", command, *arguments, "--address", self.address),
            PW_CREDENTIALS=self.keys[tenant],
        )

    def clients(self, tenant: str) -> list[dict[str, Any]]:
        """Return what `pw status` says of the clients of a tenant that run scripts."""
        asked = self.ask("status", "--json", tenant="operator")
        assert asked.end() == 0, asked.err
        clients = json.loads(asked.out)["clients"]
        return [one for one in clients if one.get("tenant") == tenant]

    def why(self) -> str:
        asked = self.start(
            *("pw.cli.main", "why", "--address", self.address), PW_CREDENTIALS=self.keys["operator"]
        )
        assert asked.end() == 0, asked.err
        return asked.out.replace("\n", " ")

    def waits(self, tenant: str = "operator") -> dict[str, Any]:
        """Return the document of `pw why --queue`, as a tenant sees it."""
        asked = self.start(
            *(
                "pw.cli.main",
                "why",
                "--queue",
                "--json",
                "--timeout",
                60,
                "--address",
                self.address,
            ),
            PW_CREDENTIALS=self.keys[tenant],
        )
        assert asked.end() == 0, asked.err
        return json.loads(asked.out)  # type: ignore[no-any-return]

    def entries(self) -> list[AccountEntry]:
        lines = [
            line for line in self.accounts.read_bytes().splitlines() if b'"stored"' not in line
        ]
        return [msgspec.json.decode(line, type=AccountEntry) for line in lines]


@pytest.fixture(scope="module")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("tenants"))
    try:
        yield cluster
    finally:
        for one in reversed(cluster.started):
            one.kill()


@pytest.fixture
def cluster(daemons: Cluster) -> Iterator[Cluster]:
    """The cluster of the module without clients; those that a test leaves end with it, also if it fails."""
    yield daemons
    daemons.end_scripts()


def _values(script: Program, count: int) -> list[str]:
    """Have a script do some steps for the `count`th time, and return its values after each time so far."""
    (script.folder / f"go{count}").touch()
    until(lambda: len(re.findall("values", script.out)) >= count, "its values")
    return re.findall(r"values (\S+)", script.out)


@pytest.mark.processes
def test_a_higher_priority_has_the_devices_for_a_while(cluster: Cluster) -> None:
    alone = cluster.script("green", TRAIN, 0, 2)
    alone.until_says("begins")
    expected = [_values(alone, count)[-1] for count in (1, 2)]
    cluster.end_scripts()
    low = cluster.script("green", TRAIN, 0, 2)
    low.until_says("begins")
    assert _values(low, 1) == expected[:1]
    high = cluster.script("red", TRAIN, 5, 3)
    high.until_says("begins")
    until(lambda: "it was suspended by client" in cluster.why(), "why tells of it")
    assert len(_values(high, 1)) == 1
    high.kill()
    assert _values(low, 2) == expected


@pytest.mark.processes
def test_only_its_tenant_and_operators_suspend_a_client(cluster: Cluster) -> None:
    script = cluster.script("green", TRAIN, 0, 2)
    script.until_says("begins")
    first = _values(script, 1)
    (number,) = [one["client"] for one in cluster.clients("green")]
    refused = cluster.ask("suspend", number, tenant="red")
    assert refused.end() == 1
    assert "tenant 'red' may not suspend client" in refused.err
    asked = cluster.ask("rebalance", "--dry-run", tenant="operator")
    assert asked.end() == 0
    assert "nothing has to move" in asked.out
    asked = cluster.ask("rebalance", "--topology", "2 by 4", tenant="red")
    assert asked.end() == 1
    assert "looks like 2x4, not like '2 by 4'" in asked.err
    asked = cluster.ask("rebalance", "--topology", "64x64", "--island", "east", tenant="red")
    assert asked.end() == 1
    assert "4096 devices" in asked.err
    assert "nothing that may move would make room" in asked.err
    for tenant in ("green", "operator"):
        assert cluster.ask("suspend", number, tenant=tenant).end() == 0
        assert "suspended, by client" in cluster.clients("green")[0]["suspended"]
        assert cluster.ask("resume", number, tenant=tenant).end() == 0
    assert _values(script, 2)[:1] == first
    assert cluster.ask("suspend", "--tenant", "green", tenant="operator").end() == 0
    assert cluster.ask("resume", "--tenant", "green", tenant="operator").end() == 0
    assert len(_values(script, 3)) == 3


@pytest.mark.processes
def test_tenants_wait_for_and_are_refused_what_they_may_not_have(cluster: Cluster) -> None:
    first = cluster.script("red", HOLD, 2, 1)
    first.until_says("computed")
    second = cluster.script("red", HOLD, 2)
    until(lambda: cluster.status()["red"]["amounts"].get("clients") == 2, "two clients of red")
    third = cluster.script("red", TRY, 1)
    assert "QuotaExceeded tenant 'red' has 2 clients and may have 2 clients" in _out(third)
    never = _out(cluster.script("blue", TRY, 2))
    assert "QuotaExceeded tenant 'blue' has 0 devices and may have 1 device; 2 dev" in never
    assert _out(cluster.script("blue", TRY, 1)) == "has 1\n"
    shown = cluster.status()
    assert shown["red"]["amounts"]["devices"] == 3
    assert shown["red"]["bounds"] == {
        "clients": 2,
        "devices": 3,
        "programs": 2,
        "device_memory": 64 << 20,
        "disk": 1 << 20,
    }
    assert "has 2" not in second.out
    first.kill()
    second.until_says("computed")
    second.kill()
    until(lambda: "clients" not in cluster.status()["red"]["amounts"], "red has left")
    assert not cluster.status()["red"]["amounts"].get("devices")


@pytest.mark.processes
def test_exclusive_devices_are_kept_from_other_tenants(cluster: Cluster) -> None:
    first = cluster.script("red", EXCLUSIVE, 3)
    first.until_says("has ((0, 0), (0, 1), (0, 2))")
    second = cluster.script("blue", EXCLUSIVE, 1)
    second.until_says("has ((0, 3),)")
    refused = _out(cluster.script("green", EXCLUSIVE, 1))
    assert "InsufficientDevices no island has 1 device" in refused
    assert (
        "i: 0 of 4 devices are free; in the block of 1 at (0, 0), slices have device 0 of h"
        in refused
    )
    assert not any(name in refused for name in ("red", "blue"))
    first.kill()
    until(lambda: "clients" not in cluster.status()["red"]["amounts"], "red has left")
    cluster.script("green", EXCLUSIVE, 1).until_says("has ((0, 0),)")


@pytest.mark.processes
def test_a_wait_that_is_interrupted_takes_no_devices_later(cluster: Cluster) -> None:
    first = cluster.script("red", HOLD, 2)
    first.until_says("computed")
    second = cluster.script("red", WAIT, 2)
    second.until_says("asks")
    until(lambda: "devices, until tenant 'red'" in cluster.why(), "a slice that waits")
    second.process.send_signal(signal.SIGINT)
    second.until_says("stopped")
    first.kill()
    until(lambda: cluster.status()["red"]["amounts"]["clients"] == 1, "one client of red")
    assert "devices" not in cluster.status()["red"]["amounts"]


@pytest.mark.processes
def test_tenants_see_their_place_and_no_names_of_others(cluster: Cluster) -> None:
    """The operator's script is on all devices, and takes its turns with that of blue."""
    scripts = [
        cluster.script("operator", LOOP, 4, 10_000_000),
        cluster.script("blue", LOOP, 1, 1000),
    ]
    for one in scripts:
        one.until_says("begins")
    rows: list[dict[str, Any]] = []

    def is_behind(front: str) -> bool:
        """Whether blue's launch waits behind another client's, and it is known for how long."""
        rows[:] = cluster.waits("blue" if front == "another tenant" else "operator")["waits"]
        return any(
            row["tenant"] == "blue"
            and row["kind"] == "launch"
            and row["left_s"] is not None
            and any(front in one["name"] for one in row["in_front"])
            for row in rows
        )

    until(lambda: is_behind("operator"), "blue's launch behind the operator's")
    until(lambda: is_behind("another tenant"), "the same, as blue sees it")
    for row in rows:
        assert (row["name"], row["client"]) == ("another tenant", 0) or row["tenant"] == "blue"
        assert "turn" in row["what"] or row["what"] == "a run on i"
        assert "operator" not in json.dumps(row)


@pytest.mark.processes
def test_who_waits_for_devices_of_its_tenant_sees_who_has_them(cluster: Cluster) -> None:
    first = cluster.script("red", HOLD, 3)
    first.until_says("computed")
    second = cluster.script("red", WAIT, 2)
    second.until_says("asks")
    until(lambda: cluster.waits()["waits"], "a slice that waits")
    (row,) = cluster.waits()["waits"]
    assert row["kind"] == "devices"
    assert row["what"] == "2 devices; tenant 'red' may have 3 and has 3"
    assert row["waited_s"] > 0.0
    assert [one["amount"] for one in row["in_front"]] == [3]
    assert (cluster.waits("blue")["waits"], cluster.waits("blue")["hidden"]) == ([], 1)
    first.kill()
    until(lambda: not cluster.waits()["waits"], "the slice")


@pytest.mark.processes
def test_python_functions_run_for_tenants_that_may(cluster: Cluster) -> None:
    red, green = cluster.script("red", CALL), cluster.script("green", CALL)
    assert _out(red) == "[2. 2. 2.]\n"
    assert "it may run none in this cluster (python in pw-controller --tenants)" in _out(green)


@pytest.mark.processes
def test_a_tenant_has_so_much_memory_on_a_device(cluster: Cluster) -> None:
    """On devices that have no limit of their own; blue has no bound."""
    red = cluster.script("red", PUT)
    red.until_says("done")
    lines = dict(
        line.split(" ", 1) for line in red.out.replace("too much", "more").splitlines()[:-1]
    )
    assert {name for name, words in lines.items() if "tenant 'red'" not in words} == {
        *("first", "result", "beside", "after")
    }
    assert "put there needs 30.00 MiB" in lines["second"]
    assert "has 40.00 MiB and may have 64.00 MiB" in lines["second"]
    assert "needs 30.00 MiB more on" in lines["more"]
    assert "pw memory" in lines["more"]
    assert "may have 64.00 MiB on each device" in lines["never"]
    shown = cluster.status()["red"]
    assert shown["amounts"]["device_memory"] == 30 << 20
    blue = cluster.script("blue", PUT)
    blue.until_says("done")
    assert "tenant" not in blue.out
    red.kill()
    until(lambda: "device_memory" not in cluster.status()["red"]["amounts"], "memory is given back")


@pytest.mark.processes
def test_rights_are_read_again_and_wrong_ones_are_refused(cluster: Cluster) -> None:
    def again(text: str, words: str) -> None:
        before = cluster.controller.err.count(words)
        cluster.rights.write_text(text)
        cluster.controller.process.send_signal(signal.SIGHUP)
        until(lambda: cluster.controller.err.count(words) > before, words)

    try:
        again(RIGHTS.replace("devices = 1\n", "devices = many\n"), "rights refused")
        assert "at line 3" in cluster.controller.err
        again(
            RIGHTS.replace("devices = 1\n", "devices = -1\n"), "line 3: devices = -1 is not a whole"
        )
        assert "QuotaExceeded" in _out(cluster.script("blue", TRY, 2))
        again(RIGHTS.replace("devices = 1\n", "devices = 2\n"), "rights read again")
        assert _out(cluster.script("blue", TRY, 2)) == "has 2\n"
    finally:
        again(RIGHTS, "rights read again")


@pytest.mark.processes
def test_accounts_go_on_after_a_restart(cluster: Cluster) -> None:
    def work() -> None:
        script = cluster.script("red", HOLD, 1)
        script.until_says("computed")
        script.kill()
        until(lambda: "clients" not in cluster.status()["red"]["amounts"], "red has left")

    work()
    before = cluster.status()["red"]["spent"]
    assert before["device_s"] > 0.0
    assert before["compile_s"] > 0.0
    assert before["launches"] >= 1
    assert any(entry.leaves and entry.tenant == "red" for entry in cluster.entries())
    cluster.controller.process.send_signal(signal.SIGTERM)
    assert cluster.controller.end() == 0
    written = sum(entry.launches for entry in cluster.entries() if entry.tenant == "red")
    assert written == before["launches"]
    cluster.controller = cluster.start_controller()
    shown = cluster.status()["red"]["spent"]
    assert shown["device_s"] == pytest.approx(before["device_s"], abs=1e-4)
    work()
    after = cluster.status()["red"]["spent"]
    assert after["launches"] > before["launches"]
    text = cluster.start(
        *("pw.cli.main", "status", "--tenants", "--address", cluster.address),
        PW_CREDENTIALS=cluster.keys["red"],
    )
    assert text.end() == 0, text.err
    assert re.search(r"red +2 +0 of 2|red +2 +1 of 2", text.out), text.out
    assert "blue" not in text.out


@pytest.mark.processes
def test_bytes_on_disk_are_bounded_and_what_is_deleted_is_noticed(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Also by a controller that was started again, which knows what is there from its accounts."""
    a, b, c = (str(tmp_path / name) for name in "abc")

    def words(has: str, path: str, largest: str) -> str:
        return (
            f"tenant 'red' has {has} on disk and may have 1.00 MiB on disk; the checkpoint {path} takes "
            f"600.00 KiB. Delete checkpoints of this tenant (the largest: {largest})"
        )

    out = _out(cluster.script("red", SAVE, a, b))
    assert words("600.00 KiB", b, f"{a}, 600.00 KiB") in out
    assert out.endswith(f"saved {b}\n")
    assert cluster.status()["red"]["amounts"]["disk"] == 600 << 10
    folders = [json.loads(one) for one in cluster.accounts.read_text().splitlines() if a in one]
    assert [(one["stored"], one["tenant"], one["bytes"], one["host"]) for one in folders] == [
        (a, "red", 600 << 10, "h"),
        (a, "red", 0, "h"),
    ]
    cluster.controller.process.send_signal(signal.SIGTERM)
    assert cluster.controller.end() == 0
    cluster.controller = cluster.start_controller()
    assert cluster.status()["red"]["amounts"]["disk"] == 600 << 10
    d = str(tmp_path / "d")
    assert _out(cluster.script("red", SAVE, b, c)).endswith(f"saved {c}\n")
    assert not Path(b).exists(), "it was refused first"
    assert _out(cluster.script("blue", SAVE, d, f"{d}b")).endswith(f"saved {d}b\n"), "no bound"
    assert "disk" not in cluster.status().get("blue", {"amounts": {}})["amounts"]


@pytest.mark.processes
def test_accounts_have_what_goes_from_host_to_host(cluster: Cluster) -> None:
    """Also if the script has ended before the hosts tell of it."""
    other = cluster.start(
        "pw.cli.worker",
        *("--controller", cluster.address, "--island", "j", "--name", "h/2"),
        PW_CREDENTIALS=cluster.keys["h"],
    )
    other.until_says("island=j")
    before = cluster.status().get("red", {"spent": {"moved_bytes": 0}})["spent"]["moved_bytes"]
    assert _out(cluster.script("red", MOVE)) == f"{float(1 << 18)}\n"
    sent = lambda: cluster.status()["red"]["spent"]["moved_bytes"] - before  # noqa: E731
    until(lambda: sent() == 4 << 18, "a MiB between hosts")
    other.kill()


@pytest.mark.processes
def test_a_host_does_not_say_again_whose_python_it_runs(cluster: Cluster) -> None:
    worker = cluster.start(
        "pw.cli.worker",
        *("--controller", cluster.address, "--island", "j", "--name", "h/2"),
        *("--python-tenants", "blue"),
        PW_CREDENTIALS=cluster.keys["h"],
    )
    worker.until_says("island=j")  # no right names it
    worker.kill()
    cluster.worker.kill()
    worker = cluster.start(
        "pw.cli.worker",
        *("--controller", cluster.address, "--island", "i", "--name", "h"),
        *("--python-tenants", "blue"),
        PW_CREDENTIALS=cluster.keys["h"],
    )
    assert worker.end() != 0
    assert "start it with --allow-python instead" in worker.err


def _out(program: Program) -> str:
    assert program.end() == 0, program.err
    return program.out


# --- without certificates -------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "text", "words"),
    [
        ((), "[default]\ndevices = x", "line 2"),
        (("--max-share", 2), "[default]\nmax_share = 3", "line 2: max_share is given here and by"),
        ((), "[tenants.red]\nshare = 3", "has shares, and they are for --policy share"),
    ],
)
def test_a_controller_with_wrong_rights_does_not_start(
    tmp_path: Path, arguments: Any, text: str, words: str
) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    bind = ("--bind", "tcp://127.0.0.1:0", "--tenants", file)
    controller = start_module("pw.cli.controller", *bind, *arguments, folder=tmp_path)
    assert controller.end() == 1
    assert words in controller.err


def test_the_file_of_accounts_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "accounts.jsonl"
    entry: Callable[..., AccountEntry] = lambda n: AccountEntry(  # noqa: E731
        tenant="red", client=n, name="ann", device_s=0.25, uploaded_bytes=3
    )
    file = AccountsFile(str(path))
    assert not file.sums()
    assert file.write([entry(1), entry(2)])
    file.close()
    assert path.stat().st_mode & 0o777 == 0o600
    with path.open("ab") as torn:
        torn.write(b'{"time": 3, "ten')
    file = AccountsFile(str(path))
    assert file.sums() == {"red": Spent(device_s=0.5, uploaded_bytes=6)}
    assert file.write([entry(3)])
    file.close()
    assert [json.loads(line)["client"] for line in path.read_text().splitlines()] == [1, 2, 3]
    folder = FolderEntry(path="/a", tenant="red", size_bytes=5, host="h")
    gone = FolderEntry(path="/b", tenant="red", size_bytes=0, host="h")
    file = AccountsFile(str(path))
    assert file.write_folders([folder, msgspec.structs.replace(gone, size_bytes=7), gone])
    file.close()
    file = AccountsFile(str(path))
    assert file.folders() == [folder]
    assert file.sums() == {"red": Spent(device_s=0.75, uploaded_bytes=9)}
    file.close()
    path.write_text('{"stored": 3}\n')
    with pytest.raises(ArgumentError, match="line 1 is no entry of an account"):
        AccountsFile(str(path))
    path.write_text("no entry\n")
    with pytest.raises(ArgumentError, match="line 1 is no entry of an account"):
        AccountsFile(str(path))


def test_entries_wait_for_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AccountsFile(str(tmp_path / "accounts.jsonl"))
    entry = AccountEntry(tenant="red", client=1, device_s=1.0)
    with open("/dev/full", "ab", buffering=0) as full:
        monkeypatch.setattr(file, "file", full)
        assert not file.write([entry])
        monkeypatch.undo()
    assert file.write([entry])
    file.close()
    with pytest.raises(ArgumentError, match="/dev/full cannot be used: it is no file"):
        AccountsFile("/dev/full")
