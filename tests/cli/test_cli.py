"""The commands as a user meets them: what they say, how they end, and what they survive."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pw.cli import requests
from pw.cli.host import DESCRIPTORS, take_descriptors
from pw.client.connection import threads
from pw.client.connection.runtime import Runtime
from pw.client.connection.script import process_name
from pw.client.connection.threads import remote
from pw.core.errors import ConnectionFailed, InsufficientDevices
from pw.core.messages import SliceBound
from pw.core.programs.program import Node, Output, ValueRef
from pw.core.programs.program import Program as Graph
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing import InProcessCluster
from tests.devices.test_jax_backend import export
from tests.stages.daemons import BOUND_S, Program, send, start_module, until
from tests.stages.daemons import process_name as name_of
from tests.stages.samples import long

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]

Start = Callable[..., Program]


def starter(folder: Path) -> Iterator[Start]:
    started: list[Program] = []

    def start(module: str, *arguments: object, **variables: str) -> Program:
        one = start_module(module, *arguments, folder=folder, **variables)
        started.append(one)
        return one

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs that end with the test."""
    yield from starter(tmp_path)


class Cluster:
    """A controller, and workers that are told apart by their names."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.controller = start("pw.cli.controller", "--bind", "tcp://127.0.0.1:0")
        self.controller.until_says("listens at")
        self.address = re.findall(r"listens at (\S+)", self.controller.out)[0]
        self.workers: dict[str, Program] = {}

    def worker(self, name: str, island: str, *more: object, **variables: str) -> Program:
        self.workers[name] = self.start(
            "pw.cli.worker",
            *("--controller", self.address, "--island", island, "--name", name),
            *more,
            **variables,
        )
        return self.workers[name]

    def pair(self, island: str) -> None:
        """An island of two hosts of one device."""
        for number in range(2):
            self.worker(f"{island}-{number}", island, "--island-hosts", 2)

    def session(self) -> Runtime:
        return Runtime(remote(self.address), 1.0, 0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose island `pair` is ready."""
    for start in starter(tmp_path_factory.mktemp("cluster")):
        made = Cluster(start)
        made.pair("pair")
        session = made.session()
        until_ready(session, "pair")
        session.close()
        yield made


@pytest.fixture(scope="module", autouse=True)
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Program, Program]]:
    """Two workers that will give up while other tests run: one never had a controller, one lost it."""
    for start in starter(tmp_path_factory.mktemp("lonely")):
        never = start(
            "pw.cli.worker",
            *("--controller", "tcp://127.0.0.1:9", "--island", "i", "--connect-timeout", 0.5),
            *("--log-level", "error"),
        )
        made = Cluster(start)
        lost = made.worker("lost", "lost", "--connect-timeout", 1, "--reconnect", 0)
        session = made.session()
        until_ready(session, "lost")
        session.close()
        made.controller.process.kill()
        yield never, lost


def test_requests_wait_for_the_islands_of_a_cluster_that_starts(start: Start) -> None:
    controller = start("pw.cli.controller", "--bind", "tcp://127.0.0.1:0", "--islands", 2)
    controller.until_says("listens at")
    address = re.findall(r"listens at (\S+)", controller.out)[0]
    session = Runtime(remote(address), 1.0, 0)
    assert session.ask.status().awaited_islands == 2
    with ThreadPoolExecutor(2) as pool:
        named = pool.submit(session.allocate_slice, 1, None, "late")
        both = pool.submit(session.allocate_slice, 2)
        start("pw.cli.worker", "--controller", address, "--island", "early")
        until_ready(session, "early")
        assert session.ask.status().awaited_islands == 1
        assert not named.done()
        assert not both.done()
        start("pw.cli.worker", "--controller", address, "--island", "late", "--devices", 2)
        assert named.result(90).island == both.result(90).island == "late"
    with pytest.raises(
        InsufficientDevices, match=r"no island has 9 devices for one slice. There are: early"
    ):
        session.allocate_slice(9)
    session.close()


def until_ready(session: Runtime, name: str, epoch: int = 1) -> dict[str, int]:
    """Wait for an island; returns the process ids of its hosts' runtimes by name."""

    def island() -> Any:
        for one in session.ask.status().islands:
            if one.name == name and one.state == "ready" and one.formed >= epoch:
                return one
        return None

    until(island, f"{name} ready under epoch {epoch}")
    return {host.name: host.pid for host in island().hosts}


class AllReduce:
    """A program whose two devices wait for each other."""

    def __init__(self, session: Runtime, slice: SliceBound) -> None:
        self._session = session
        sharding = Sharding(("x",), (2,), (("x",),))
        self.spec = spec = ArraySpec((2,), "float32", sharding, Placement(slice.slice, (0, 1)))
        computation, artifact = export(lambda x: (x + jnp.sum(x),), (spec,), (spec,))
        output = Output(ValueRef(0, 0), spec)
        node = Node(0, (ValueRef(-1, 0),))
        graph = Graph("all-reduce", (computation,), (node,), (spec,), (output,))
        self._number = session.register_program(graph, {computation.artifact: artifact})

    def run(self) -> int:
        """Start a run on [1, 2]; returns the id of its result."""
        return self._session.run(self._number, [np.array([1, 2], np.float32).tobytes()], 1)[0]


def fails(one: Program, who: str, words: str) -> None:
    """It ends with exit code 1 and one line that says `words`."""
    assert one.end() == 1, one.err
    assert one.err.startswith(f"{who}: error: "), one.err
    assert one.err.count("\n") == 1, one.err
    assert re.search(words, one.err), one.err
    one.until_alone()


# --- what they say -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "arguments", "options"),
    [
        ("controller", (), "bind policy lease credentials revoked insecure log-level"),
        ("worker", (), "controller island island-hosts devices platform name bind lease reconnect"),
        ("worker", (), "spare heartbeat credentials revoked insecure"),
        ("main", ("status",), "address json timeout credentials insecure"),
        ("main", ("why",), "address json timeout"),
        ("main", ("run",), "address islands hosts-per-island devices-per-host"),
    ],
)
def test_help_lists_the_options_and_the_exit_codes(
    module: str, arguments: tuple[str, ...], options: str, start: Start
) -> None:
    one = start(f"pw.cli.{module}", *arguments, "--help")
    assert one.end() == 0
    for option in options.split():
        assert f" --{option} " in one.out
    assert "Exit codes: 0" in one.out.replace("the script's own", "0")
    assert "-fd" not in one.out
    assert one.err == ""


def test_commands_and_options_are_in_groups(start: Start) -> None:
    every, one = start("pw.cli.main", "--help"), start("pw.cli.main", "status", "--help")
    assert (every.end(), one.end()) == (0, 0)
    groups = ["Look at a cluster", "Use a cluster", "Operate a cluster", "Access", "More"]
    places = [every.out.index(f" {group} ") for group in groups]
    assert places == sorted(places)
    assert " Commands " not in every.out, "each command has a group"
    assert one.out.index(" --json ") < one.out.index(" Connection ") < one.out.index(" --address ")


def test_a_misspelt_variable_is_named(start: Start) -> None:
    one = start("pw.cli.main", "version", PW_ADRESS="tcp://127.0.0.1:9", PW_OF_MY_OWN="1")
    assert one.end() == 0
    said = "pw: warning: pw reads no environment variable PW_ADRESS; did you mean PW_ADDRESS?\n"
    assert one.err == said


def test_the_shell_completes_commands(start: Start) -> None:
    asked = {"_PW_COMPLETE": "complete_bash", "COMP_WORDS": "pw dr", "COMP_CWORD": "1"}
    completing = start("pw.cli.main", **asked)
    assert completing.end() == 0, completing.err
    assert completing.out.split() == ["drain"]


MISTAKES = {
    "policy": ("controller", "--policy random", "no policy 'random'; there are fifo, share"),
    "bind": ("controller", "--bind nonsense", "cannot listen on 'nonsense'; it looks like tcp://"),
    "address": (
        "controller",
        "--bind tcp://192.0.2.1:1 --insecure --log-level error",
        "cannot listen on tcp://192",
    ),
    "a wildcard": ("controller", "--bind tcp://0.0.0.0:0", "give --credentials .* or --insecure"),
    "prefix": ("controller", "--bind tcp://127.example.com:0", "--insecure if"),
    "both": ("controller", "--credentials x --insecure", "exclude each other"),
    "credentials": ("controller", "--credentials x", "x cannot be read: No such file"),
    "lease": ("controller", "--lease 0.1", "--lease"),
    "number": ("main", "status --timeout x", "Invalid value for '--timeout': it is no number; see"),
    "count": ("main", "sim --hosts x", "'--hosts': it is no whole number; see pw sim --help"),
    "bounds": ("main", "sim --hosts 0", "'--hosts': it must be at least 1; see"),
    "loudness": ("controller", "--log-level loud", "no log level 'loud'"),
    "platform": ("worker", "--controller tcp://h:1 --island i --platform abacus", "'abacus'"),
    "controller": ("worker", "--controller nonsense --island i", "looks like tcp://host:port"),
    "checkpoint root": (
        "worker",
        "--controller tcp://h:1 --island i --checkpoint-root /nowhere",
        "no folder /nowhere",
    ),
    "long name": (
        "worker",
        f"--controller tcp://h:1 --island i --name {'x' * 257}",
        "256 characters at most",
    ),
    "no island": ("worker", "--controller tcp://h:1", "--island"),
    "worker bind": ("worker", "--controller tcp://h:1 --island i --bind nonsense", "cannot listen"),
    "worker port": (
        "worker",
        "--controller tcp://127.0.0.1:9 --island i --bind tcp://127.0.0.1:*",
        "cannot listen on 'tcp://127.0.0.1:.'; it looks like",
    ),
    "worker open": (
        "worker",
        "--controller tcp://h:1 --island i --bind tcp://0.0.0.0:0",
        "give --credentials PATH",
    ),
    "heartbeat": ("worker", "--controller tcp://h:1 --island i --heartbeat 0", "--heartbeat"),
    "no command": ("main", "", "Missing command"),
    "no cluster": ("main", "status", "Give its --address, or set PW_ADDRESS"),
    "no controller": (
        "main",
        "status --address tcp://127.0.0.1:9 --timeout 0.3",
        "nothing listens there .*; check the address, and that pw-controller is running there",
    ),
    "no address": ("main", "status --address nonsense", "looks like tcp://host:port"),
    "no credentials": (
        "main",
        "status --address tcp://192.0.2.1:9",
        "another machine, and without credentials .* --credentials .* --insecure",
    ),
    "no script": ("main", "run missing.py", "there is no script 'missing.py'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_one_line(mistake: str, start: Start) -> None:
    module, arguments, words = MISTAKES[mistake]
    who = "pw" if module == "main" else f"pw-{module}"
    fails(start(f"pw.cli.{module}", *arguments.split()), who, words)


def test_a_worker_on_another_system_says_what_works_there(tmp_path: Path) -> None:
    body = "import os; del os.memfd_create; from pw.cli.worker import main; main()"
    one = Program(tmp_path, ["-c", body, "--controller", "tcp://127.0.0.1:9", "--island", "i"])
    try:
        fails(one, "pw-worker", "workers run on Linux only")
    finally:
        one.kill()


def test_two_controllers_cannot_share_a_port(cluster: Cluster, start: Start) -> None:
    taken = start("pw.cli.controller", "--bind", cluster.address)
    fails(taken, "pw-controller", f"cannot listen on {cluster.address}: Address already in use")


REFUSALS = {
    "is one too many": (("--island-hosts", 2), "already has all its 2 hosts"),
    "counts the hosts differently": (("--island-hosts", 3), "start it with --island-hosts 2"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_worker_is_refused_that(why: str, cluster: Cluster) -> None:
    options, words = REFUSALS[why]
    fails(cluster.worker(why, "pair", *options, "--log-level", "error"), "pw-worker", words)


def test_a_worker_whose_devices_are_unlike_those_of_its_island_is_refused(cluster: Cluster) -> None:
    first = cluster.worker("like", "unlike", "--island-hosts", 2)
    cluster.controller.until_says("host=like")
    second = cluster.worker(
        "other", "unlike", "--island-hosts", 2, "--devices", 2, "--log-level", "error"
    )
    fails(second, "pw-worker", "has 2 cpu devices; all hosts of an island must be alike")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0


def test_a_worker_without_the_devices_it_promised_says_so(cluster: Cluster) -> None:
    """There is no GPU here, or not a thousand of them."""
    worker = cluster.worker(
        "many", "many", "--platform", "cuda", "--devices", 1000, "--log-level", "error"
    )
    assert worker.end() == 1
    assert re.search(
        "pw-worker: error: .*(JAX cannot open|could not be opened|start it with --devices)",
        worker.err,
    )
    assert "Traceback" not in worker.err
    worker.until_alone()


@pytest.mark.parametrize(("package", "said"), [("openpathways", "pw"), long("jax", "jax")])
def test_another_version_is_refused(
    package: str, said: str, cluster: Cluster, tmp_path: Path
) -> None:
    """The worker believes what is installed, so something else is, earlier on its path."""
    folder = tmp_path / "other" / f"{package}-0.0.7.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.7\n")
    path = os.pathsep.join([str(folder.parent), str(Path(__file__).parents[2])])
    status = cluster.start("pw.cli.main", "status", PYTHONPATH=path, PW_ADDRESS=cluster.address)
    worker = cluster.worker(f"old-{package}", "old", "--log-level", "error", PYTHONPATH=path)
    words = f"{said} 0.0.7.*install the same versions"
    fails(worker, "pw-worker", words)
    fails(status, "pw", words)


def test_a_worker_does_not_wait_for_ever_for_a_controller(lonely: tuple[Program, Program]) -> None:
    worker, _ = lonely
    fails(worker, "pw-worker", "the controller could not be reached at tcp://127.0.0.1:9")


def test_what_is_in_the_way_of_the_controller_is_said(start: Start) -> None:
    nothing, here = r"nothing listens there \(Connection refused\); check", "tcp://127.0.0.1:9"
    unknown = r"the name of its host cannot be looked up \("
    closed = "without credentials this process reaches only .* --credentials"
    with socket.create_server(("127.0.0.1", 0)) as other:
        other_address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        cases = (
            (here, "1", f"within 1 s: {nothing}"),
            (here, "0", f"within 1 s: {nothing}"),
            ("tcp://nowhere.invalid:9", "1", unknown),
            (other_address, "0", closed),
        )
        how = ("pw.cli.main", "status", "--timeout", 1)
        asked = [start(*how, "--address", where, PW_INSECURE=flag) for where, flag, _ in cases]
        for status, (_, _, words) in zip(asked, cases, strict=True):
            fails(status, "pw", words)
            assert "check the address" not in status.err or words != closed


def test_an_address_where_nothing_listens_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "StreamNetwork", partial(threads.StreamNetwork, connect_s=600.0))
    with pytest.raises(ConnectionFailed, match=r"tcp://127\.0\.0\.1:9: nothing listens there"):
        Runtime(remote("tcp://127.0.0.1:9", absent_s=0.1), 1.0, 0)


def test_a_controller_that_is_just_starting_is_waited_for(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    start("pw.cli.controller", "--bind", address)
    Runtime(remote(address), 1.0, 0).close()


def test_a_gateway_says_that_its_port_is_taken(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        gateway = start("pw.cli.main", "gateway", "--bind", f"tcp://127.0.0.1:{port}")
        fails(
            gateway, "pw", f":{port}: Address already in use; stop what uses it, or choose another"
        )


# --- pw status, pw version -----------------------------------------------------------------------------


def test_status_is_a_document_or_tables(cluster: Cluster, start: Start) -> None:
    session = cluster.session()
    program = AllReduce(session, session.allocate_slice(2, island="pair"))
    session.wait([(program.run(), program.spec)]).result(BOUND_S)
    document = start("pw.cli.main", "status", "--json", PW_ADDRESS=cluster.address)
    assert document.end() == 0, document.err
    tables = start("pw.cli.main", "status", "--address", cluster.address)
    assert tables.end() == 0, tables.err
    session.close()

    status = json.loads(document.out)
    assert status["address"] == cluster.address
    (pair,) = [island for island in status["islands"] if island["island"] == "pair"]
    assert (pair["state"], pair["platform"], pair["slices"]) == ("ready", "cpu", 1)
    assert [host["node"] for host in pair["hosts"]] == ["pair-0", "pair-1"]
    for host in pair["hosts"]:
        assert host["process"] in cluster.workers[host["node"]].family()
        assert host["endpoint"].startswith("tcp://127.0.0.1:")
    (client,) = [client for client in status["clients"] if client["arrays"]]
    assert (client["name"], client["arrays"], client["programs"]) == (process_name(), 1, 1)
    assert (
        f"pid {document.process.pid}" not in document.out
    )  # the asking process was not asked about
    for word in ("pair", "ready", "pair-0", str(pair["hosts"][0]["process"]), client["name"]):
        assert word in tables.out


def test_looking_at_a_cluster_does_not_load_jax(cluster: Cluster, tmp_path: Path) -> None:
    body = (
        "import sys\nfrom pw.cli.main import main\n"
        f"sys.argv = ['pw', 'status', '--address', {cluster.address!r}]\n"
        "try:\n    main()\nfinally:\n    print([name for name in sys.modules if name.startswith('jax')])"
    )
    one = Program(tmp_path, ["-c", body], new_interpreter=True)
    assert one.end() == 0, one.err
    assert one.out.endswith("\n[]\n")


def test_a_drain_that_waits_for_a_host_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with InProcessCluster(islands=1, devices_per_island=1) as cluster:
        session = cluster.client()
        requests.say_if_absent(session, "host-0")
        assert capsys.readouterr().err == ""
        requests.say_if_absent(session, "nosuch")
        assert re.match("pw: no host nosuch is here; the controller waits", capsys.readouterr().err)


def test_version(start: Start) -> None:
    one = start("pw.cli.main", "version")
    assert one.end() == 0
    assert re.fullmatch(r"pw \S+ with jax \S+ \(protocol \d+\), Python 3\.\S+\n", one.out)
    for module in ("main", "controller", "worker"):
        as_option = start(f"pw.cli.{module}", "--version")
        assert (as_option.end(), as_option.out) == (0, one.out), as_option.err


@pytest.mark.parametrize(
    ("soft", "hard", "taken"),
    [
        (1024, 4096, [4096]),
        (1024, resource.RLIM_INFINITY, [DESCRIPTORS]),
        (1024, 1 << 30, [DESCRIPTORS]),
        (4096, 4096, []),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
    ],
)
def test_a_host_takes_as_many_descriptors_as_it_may(
    soft: int, hard: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limits: given.append(limits))
    take_descriptors()
    assert given == [(count, hard) for count in taken]


# --- pw run --------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys
from pw.client.connection import current
islands = current.connect().ask.status().islands
print(__name__, sys.argv[1:], [(i.name, i.devices) for i in islands], flush=True)
if "wait" in sys.argv:
    signal.pause()
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_run_gives_a_script_a_cluster_which_ends_with_it(script: str, start: Start) -> None:
    one = start(
        "pw.cli.main",
        *("run", "--islands", 2, "--devices-per-host", 3, script, "--islands", "wait"),
        PW_ADDRESS="tcp://127.0.0.1:9",
    )
    one.until_says("__main__")
    assert one.out == "__main__ ['--islands', 'wait'] [('island-0', 3), ('island-1', 3)]\n"
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 128 + signal.SIGTERM, one.err
    assert one.err == ""
    one.until_alone()


def test_run_uses_a_cluster_that_is_there(cluster: Cluster, script: str, start: Start) -> None:
    one = start("pw.cli.main", "run", "--address", cluster.address, script)
    both = start("pw.cli.main", "run", "--address", cluster.address, "--islands", 2, script)
    assert one.end() == 7, one.err
    assert "('pair', 2)" in one.out
    fails(both, "pw", "has its own islands")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_the_script_ends_with_run(
    number: signal.Signals, code: int, cluster: Cluster, script: str, start: Start
) -> None:
    one = start("pw.cli.main", "run", script, "wait", PW_ADDRESS=cluster.address)
    one.until_says("__main__")
    os.killpg(one.process.pid, number)
    assert one.end() == code, one.err
    one.until_alone()
    assert one.err.count("KeyboardInterrupt") == (number == signal.SIGINT)


# --- what they survive ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_runtime_that_ends_or_hangs_is_replaced_and_its_island_usable_again(
    number: signal.Signals, cluster: Cluster
) -> None:
    session = cluster.session()
    (before,) = [i.formed for i in session.ask.status().islands if i.name == "pair"]
    processes = until_ready(session, "pair")
    send(processes["pair-1"], number)
    again = until_ready(session, "pair", before + 1)
    assert set(again.values()).isdisjoint(processes.values())
    program = AllReduce(session, session.allocate_slice(2, island="pair"))
    summed = session.fetch(program.run(), program.spec).result(BOUND_S)
    np.testing.assert_array_equal(summed, [4, 5])
    session.close()


def test_sigterm_ends_workers_stuck_in_a_collective_and_the_controller(start: Start) -> None:
    """One host's peer is stopped in the middle of an all-reduce; then the stopped one is ended too."""
    cluster = Cluster(start)
    cluster.pair("stuck")
    session = cluster.session()
    processes = until_ready(session, "stuck")
    program = AllReduce(session, session.allocate_slice(2))
    session.wait([(program.run(), program.spec)]).result(BOUND_S)
    send(processes["stuck-1"], signal.SIGSTOP)
    program.run()
    until(lambda: session.ask.status().islands[0].launched > 0, "the all-reduce is launched")
    for name in ("stuck-0", "stuck-1"):
        worker = cluster.workers[name]
        worker.process.send_signal(signal.SIGTERM)
        assert worker.end() == 0, worker.err
        worker.until_alone()
    session.close()
    cluster.controller.process.send_signal(signal.SIGTERM)
    assert cluster.controller.end() == 0, cluster.controller.err
    cluster.controller.until_alone()


def test_nothing_outlives_a_killed_supervisor(cluster: Cluster) -> None:
    """Neither the runtime nor a fork server."""
    worker = cluster.worker("orphan", "orphan")
    until(lambda: "pw-runtime" in map(name_of, worker.family()), "a runtime runs")
    worker.process.kill()
    worker.until_alone()  # they look when they have imported all that they need
    assert "Traceback" not in worker.err


def test_workers_end_by_themselves_when_their_controller_is_gone(
    lonely: tuple[Program, Program],
) -> None:
    _, worker = lonely
    assert worker.end() == 1
    assert worker.err.endswith("pw-worker: error: the controller did not come back; giving up\n")
    worker.until_alone()
