"""A cluster of processes with credentials: all links over TLS, and scripts that get in or do not."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from pw.transport.access.credentials import Credentials
from pw.transport.access.security import Security
from tests.stages.daemons import Program, start_module, until

pytestmark = pytest.mark.processes

SCRIPT = """
import sys, numpy as np, pw
from tests.stages.daemons import until
runtime = pw.connect(*sys.argv[1:2], **({"credentials": sys.argv[2]} if sys.argv[2:] else {}))
until(lambda: any(island.formed for island in runtime.ask.status(20.0).islands), "an island")
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
x = np.arange(100_000.0, dtype=np.float32)
assert np.array_equal(np.asarray(pw.jit(lambda x: 2 * x, mesh=mesh)(x)), 2 * x)
print("computed", flush=True)
"""

SHARES = """
import sys, pw
asked, allowed = map(float, sys.argv[1:])
try:
    runtime = pw.connect(share=asked)
except pw.QuotaExceeded as error:
    print(f"refused: {error}", flush=True)
    runtime = pw.connect(share=allowed)
(me,) = (client for client in runtime.ask.status(60.0).clients if client.is_me)
print(f"{me.share:g} of the {me.tenant_share:g} of {me.tenant}", flush=True)
"""


class Closed(NamedTuple):
    """A cluster with credentials."""

    address: str
    folder: Path
    authority: Authority
    controller: Program
    start: Callable[..., Program]

    def issue(self, role: Role, name: str, tenant: str = "", **how: Any) -> Path:
        return issue(self.authority, self.folder / f"{role}-{name}.pem", role, name, tenant, **how)

    def script(self, *arguments: object, **variables: str) -> Program:
        variables |= {"JAX_PLATFORMS": "cpu"}
        return Program(self.folder, ["-c", SCRIPT, *map(str, arguments)], **variables)


def issue(
    authority: Authority, file: Path, role: Role, name: str, tenant: str = "", **how: Any
) -> Path:
    file.touch(0o600)
    file.write_bytes(authority.issue(role, name, tenant, **how))
    return file


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Closed]:
    folder, authority = tmp_path_factory.mktemp("closed"), Authority.create()
    started: list[Program] = []

    def start(module: str, *arguments: object, **variables: str) -> Program:
        started.append(start_module(module, *arguments, folder=folder, **variables))
        return started[-1]

    keys = issue(authority, folder / "controller.pem", Role.CONTROLLER, "one")
    rules = ("--policy", "share", "--max-share", 8, "--tenant-shares", "research=2,rivals=1")
    bind = ("--bind", "tcp://127.0.0.1:0")
    controller = start("pw.cli.controller", *bind, *rules, "--credentials", keys)
    controller.until_says("listens at")
    address = re.findall(r"listens at (\S+)", controller.out)[0]
    keys = issue(authority, folder / "worker.pem", Role.WORKER, "h")
    worker = start(
        "pw.cli.worker", *("--controller", address, "--island", "i"), PW_CREDENTIALS=str(keys)
    )
    try:
        worker.until_says("island=i")
        yield Closed(address, folder, authority, controller, start)
    finally:
        for one in reversed(started):
            one.kill()


def test_a_script_with_credentials_computes(cluster: Closed) -> None:
    keys = cluster.issue(Role.CLIENT, "laptop", "research", address=cluster.address)
    for script in (
        cluster.script(cluster.address, keys),
        cluster.script(PW_CREDENTIALS=str(keys)),  # the file names the address
    ):
        assert script.end() == 0, script.err
        assert "computed" in script.out
    log = cluster.controller.err
    assert "tenant=research name=spiffe://pw/pw/client/research/laptop" in log
    assert re.search(r"client attached .*name='python -c, pid \d+, research/laptop'", log)


def test_a_tenant_that_asks_for_all_gets_its_own_share(cluster: Closed) -> None:
    def client(name: str, tenant: str, asked: float, allowed: float) -> Program:
        keys = cluster.issue(Role.CLIENT, name, tenant, address=cluster.address)
        arguments = ["-c", SHARES, str(asked), str(allowed)]
        return Program(cluster.folder, arguments, PW_CREDENTIALS=str(keys))

    fair, greedy = client("ann", "research", 1, 1), client("eve", "rivals", 1e6, 8)
    assert (fair.end(), greedy.end()) == (0, 0), fair.err + greedy.err
    assert fair.out == "1 of the 2 of research\n"
    refused, shares = greedy.out.splitlines()
    assert "refused: share=1e+06 is more than" in refused
    assert "share=8 or less (pw-controller --max-share," in refused
    assert shares == "8 of the 1 of rivals"


def test_a_command_uses_credentials(cluster: Closed) -> None:
    keys = cluster.issue(Role.CLIENT, "admin", "operator", address=cluster.address)
    status = cluster.start("pw.cli.main", "status", "--credentials", keys)
    assert status.end() == 0, status.err
    assert "h" in status.out


@pytest.mark.parametrize("how", ["none", "insecure", "foreign", "worker", "expired"])
def test_a_script_without_the_right_credentials_is_told_why(cluster: Closed, how: str) -> None:
    authority, variables, words = cluster.authority, {}, "AccessRefused.*"
    role, days = Role.CLIENT, 1.0
    if how == "foreign":
        authority, words = Authority.create(), words + "of another cluster"
    elif how == "worker":
        role, words = (
            Role.WORKER,
            "is for the worker me, and a client needs the certificate of a client",
        )
    elif how == "expired":
        days, words = -1.0, "has expired, on .* issue a new one"
    file = cluster.folder / f"{how}.pem"
    file.touch(0o600)
    file.write_bytes(authority.issue(role, "me", days=days))
    arguments: list[object] = [cluster.address, file]
    if how == "none":
        arguments, words = [cluster.address], "no process of this user listens there.*--credentials"
    elif how == "insecure":
        arguments, variables = [cluster.address], {"PW_INSECURE": "1"}
        words += "it uses TLS, and this process does not"
    script = cluster.script(*arguments, **variables)
    assert script.end() == 1
    assert re.search(words, script.err.replace("\n", " ")), script.err
    assert "computed" not in script.out


def test_a_daemon_wants_the_certificate_of_its_role(cluster: Closed) -> None:
    keys = cluster.issue(Role.CLIENT, "me")
    for module, arguments in (
        ("controller", ("--bind", "tcp://127.0.0.1:0")),
        ("worker", ("--controller", cluster.address, "--island", "i")),
    ):
        one = cluster.start(f"pw.cli.{module}", *arguments, "--credentials", keys)
        assert one.end() == 1
        assert f"needs the certificate of a {module}" in one.err
        assert one.err.count("\n") == 1


def test_an_insecure_controller_says_what_that_means(cluster: Closed) -> None:
    for arguments, variables in ((["--insecure"], {}), ([], {"PW_INSECURE": "1"})):
        one = cluster.start(
            "pw.cli.controller", "--bind", "tcp://0.0.0.0:0", *arguments, **variables
        )
        one.until_says("listens at")
        assert "insecure node=controller" in one.err
        assert "neither encrypted nor authenticated" in one.err
        one.kill()


STAY = """
import contextlib, threading, numpy as np, pw
runtime = pw.connect()
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
def secret_step(x):
    return x + 1
secret = pw.jit(secret_step, mesh=mesh)
secret(np.ones(1)).block_until_ready()
print("here", flush=True)
while not threading.Event().wait(0.02):
    with contextlib.suppress(pw.Error):
        secret(np.ones(1)).block_until_ready()
"""


def test_tenants_do_not_see_or_touch_each_other_and_operators_do(cluster: Closed) -> None:
    def keys(name: str, tenant: str) -> str:
        return str(cluster.issue(Role.CLIENT, name, tenant, address=cluster.address))

    def command(keys: str, *arguments: object) -> Program:
        return cluster.start("pw.cli.main", *arguments, "--credentials", keys)

    def session(keys: str) -> Runtime:
        security = Security.of(cluster.address, keys, role=Role.CLIENT)
        return Runtime(remote(cluster.address, security=security), 1.0, 0)

    def clients(keys: str) -> tuple[dict[str, int], int]:
        with closing(session(keys)) as asking:
            told = asking.ask.status(60.0)
        by_tenant = {one.tenant: one.number for one in told.clients if not one.is_me}
        return by_tenant, told.hidden_clients

    red, blue, operator = keys("r", "red"), keys("b", "blue"), keys("o", "operator")
    stays = Program(cluster.folder, ["-c", STAY], PW_CREDENTIALS=red, JAX_PLATFORMS="cpu")
    try:
        stays.until_says("here")
        seen, hidden = clients(operator)
        number = seen["red"]
        assert hidden == 0
        assert clients(red) == ({"red": number}, 0)
        assert clients(blue) == ({}, 1)
        refusals = {
            "cancel": ([number], "may not cancel runs of client"),
            "drain": (["h"], "may not drain host h; the tenant 'operator' may"),
        }
        for name, (arguments, words) in refusals.items():
            refused = command(blue, name, *arguments)
            assert refused.end() == 1
            assert f"tenant 'blue' {words}" in refused.err.replace("\n", " ")
        for asker, sees in ((red, True), (blue, False)):
            file = cluster.folder / "trace.json"

            def has_steps(asker: str = asker, file: Path = file) -> bool:
                traced = command(asker, "trace", "--seconds", 0.3, "-o", file)
                assert traced.end() == 0, traced.err
                events = json.loads(file.read_text())["traceEvents"]
                return any(
                    e["name"].startswith(("a computation [", "secret_step [")) for e in events
                )

            until(has_steps, "steps in the time that is traced")
            assert ("secret_step" in file.read_text()) is sees
            assert f"client {number}" in file.read_text()
        cancelled = command(red, "cancel", number)
        assert cancelled.end() == 0, cancelled.err
        with closing(session(operator)) as asking:
            asking.ask.cancel_runs(number).result(60.0)
        log = cluster.controller.err
        assert "refused tenant=blue" in log
        assert re.search(rf"cancel tenant=red name=\S.* client={number} of=red run=all", log)
    finally:
        stays.kill()


def test_credentials_without_an_address_are_not_ignored(cluster: Closed) -> None:
    """A script that was meant for a cluster would compute on an embedded one."""
    keys = cluster.issue(Role.CLIENT, "homeless")
    body = "import pw; pw.connect()"
    script = Program(cluster.folder, ["-c", body], PW_CREDENTIALS=str(keys))
    assert script.end() == 1
    assert "no address of a controller" in script.err
    script = Program(cluster.folder, ["-c", body], PW_CREDENTIALS=str(keys), PW_ADDRESS="")
    assert script.end() == 0, script.err


LANDS_ELSEWHERE = """
import sys, msgspec, numpy as np, pw
from pw.transport.bulk.plane import BulkPlane
pw.connect()
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
call, x = pw.jit(lambda x: x + 1, mesh=mesh), np.ones(1 << 20, np.float32)
land = BulkPlane.land
for endpoint in sys.argv[1:]:
    BulkPlane.land = lambda *about: msgspec.structs.replace(land(*about), endpoint=endpoint, plane="")
    try:
        np.asarray(call(x))
    except pw.Error as error:
        print(error, flush=True)
BulkPlane.land = land
assert np.asarray(call(x))[0] == 2
"""


def test_a_client_has_its_values_sent_to_nothing_but_itself(cluster: Closed) -> None:
    keys = cluster.issue(Role.CLIENT, "mallory", "rivals", address=cluster.address)
    path = cluster.folder / "victim"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(path))
        for victim in (tcp, unix):
            victim.listen()
            victim.setblocking(False)
        where = [f"tcp://127.0.0.1:{tcp.getsockname()[1]}", f"ipc://{path}"]
        arguments = ["-c", LANDS_ELSEWHERE, *where]
        script = Program(cluster.folder, arguments, PW_CREDENTIALS=str(keys), JAX_PLATFORMS="cpu")
        assert script.end() == 0, script.err
        for endpoint in where:
            assert f"a client cannot have its values sent to {endpoint}" in script.out
        for victim in (tcp, unix):
            with pytest.raises(BlockingIOError):
                victim.accept()


# --- names of workers -------------------------------------------------------------------------------------

WORKER_THAT_LIES = """
from pw.cli.worker import main
from pw.transport.access.identity import Identity
Identity.may_be = Identity.may_join = lambda self, what: True  # it does not check itself
main()
"""


def test_a_worker_takes_no_name_and_seat_of_another_one_that_is_away(cluster: Closed) -> None:
    def worker(
        keys: Path, *arguments: str, code: tuple[str, ...] = ("-m", "pw.cli.worker")
    ) -> Program:
        options = ["--controller", cluster.address, "--island", "seats", "--credentials", str(keys)]
        return Program(cluster.folder, [*code, *options, *arguments], JAX_PLATFORMS="cpu")

    own, other = cluster.issue(Role.WORKER, "w1"), cluster.issue(Role.WORKER, "w2")
    first = worker(own)
    first.until_says("joined")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0
    honest = worker(other, "--name", "w1")
    assert honest.end() == 1
    assert "w1 is not the name of its certificate, which is that of worker w2" in honest.err
    thief = worker(other, "--name", "w1", code=("-c", WORKER_THAT_LIES))
    second = None
    try:
        thief.until_says("refused")
        assert "w1 is not the name of its certificate" in thief.err
        second = worker(own)
        second.until_says("joined")
        assert "joined node=w1" in second.err
        assert "joined" not in thief.err
        assert thief.process.poll() is None, "its supervisor tries again"
    finally:
        thief.kill()
        if second is not None:
            second.kill()


def test_a_certificate_bounds_the_islands_of_a_worker(cluster: Closed) -> None:
    keys = cluster.issue(Role.WORKER, "w3", islands=["east", "west"])
    arguments = ("--controller", cluster.address, "--credentials", str(keys), "--island")
    words = "does not allow the island 'north', only east, west"
    told = cluster.start("pw.cli.worker", *arguments, "north")
    assert told.end() == 1
    assert words in told.err
    thief = Program(cluster.folder, ["-c", WORKER_THAT_LIES, *arguments, "north"])
    try:
        thief.until_says("tries again")
        assert words in thief.err
    finally:
        thief.kill()
    good = cluster.start("pw.cli.worker", *arguments, "west")
    good.until_says("joined")
    good.kill()


def test_a_revoked_worker_comes_back_when_it_has_new_credentials(tmp_path: Path) -> None:
    authority, lists = Authority.create(), tmp_path / "crl.pem"
    lists.write_bytes(authority.revoke())
    started: list[Program] = []

    def start(module: str, *arguments: object) -> Program:
        secrets = ("--credentials", arguments[0], "--revoked", lists)
        started.append(start_module(module, *arguments[1:], *secrets, folder=tmp_path))
        return started[-1]

    keys = issue(authority, tmp_path / "c.pem", Role.CONTROLLER, "c")
    try:
        controller = start("pw.cli.controller", keys, "--bind", "tcp://127.0.0.1:0")
        controller.until_says("listens at")
        address = re.findall(r"listens at (\S+)", controller.out)[0]
        keys = issue(authority, tmp_path / "w.pem", Role.WORKER, "w")
        worker = start("pw.cli.worker", keys, "--controller", address, "--island", "i")
        worker.until_says("joined")
        serial = Credentials.read(keys).own.serial
        new = tmp_path / "crl.new"
        new.write_bytes(authority.revoke(serial))
        new.rename(lists)
        worker.until_says("tries again")
        assert "is revoked" in worker.err
        joined = worker.err.count("joined")
        issue(authority, tmp_path / "new.pem", Role.WORKER, "w").rename(keys)
        until(lambda: worker.err.count("joined") > joined, "the worker is back")
        assert worker.process.poll() is None
    finally:
        for one in reversed(started):
            one.kill()


PUBLISHES = """
import signal, numpy as np, pw
x = pw.put(np.arange(1000.0, dtype=np.float32))
pw.publish("open", {"x": x}, to="all").result(60)
pw.publish("ours", {"x": x}, to=["friends"]).result(60)
print("published", flush=True)
signal.pause()
"""

LOOKS_UP = """
import numpy as np, pw
from tests.stages.daemons import until
until(lambda: "research/open" in pw.names(), "the name")
y = pw.lookup("research/open")["x"]
assert np.array_equal(np.asarray(y), np.arange(1000.0, dtype=np.float32))
mesh = y.sharding.mesh
assert float(pw.jit(lambda y: y.sum(), mesh=mesh)(y)) == 499500.0
assert [one.name for one in pw.names().names] == ["open"], pw.names()
for name in ("research/ours", "open"):
    try:
        pw.lookup(name)
    except pw.NameNotFound as error:
        print(error, flush=True)
    else:
        raise AssertionError(name)
try:
    pw.unpublish("research/open")
except pw.AccessRefused as error:
    print("refused:", error, flush=True)
"""


def test_a_name_is_for_the_tenants_that_its_publisher_says(cluster: Closed) -> None:
    keys = {
        tenant: cluster.issue(Role.CLIENT, f"names-{tenant}", tenant, address=cluster.address)
        for tenant in ("research", "rivals")
    }
    maker = Program(cluster.folder, ["-c", PUBLISHES], PW_CREDENTIALS=str(keys["research"]))
    try:
        maker.until_says("published")
        reader = Program(cluster.folder, ["-c", LOOKS_UP], PW_CREDENTIALS=str(keys["rivals"]))
        assert reader.end() == 0, reader.err
        assert reader.out.count("nothing is published as") == 2
        assert "refused: tenant 'rivals' may not unpublish" in reader.out
    finally:
        maker.kill()
