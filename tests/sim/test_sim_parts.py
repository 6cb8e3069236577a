"""The parts of the cluster simulator: links, the bulk plane, digests, the oracle, the census."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from pw.cli import sim
from pw.cli.main import app
from pw.cli.sim import replay
from pw.core.actors.actor import Actor, Env
from pw.core.actors.watchdog import LookForStall
from pw.core.errors import ComputationFailed, HostLost, NotOwner, TransferFailed
from pw.core.ids import Address
from pw.core.messages import HoldsNoMore, PeerLost, Ready
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.devices.host.replica_memory import Replica
from pw.testing.sim.bulk import SimBulk
from pw.testing.sim.census import held
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.digests import compute
from pw.testing.sim.ledger import Ledger
from pw.testing.sim.node import SimNode
from pw.testing.sim.oracle import Oracle
from pw.testing.sim.profiles import PROFILES, SimProfile
from pw.testing.sim.trace import Trace, describe
from pw.testing.sim.world import Streams, World
from tests.sim.mutations import __main__ as mutations
from tests.sim.mutations.table import MUTATIONS

QUIET = SimProfile("quiet")
LOSSY = SimProfile("lossy", frame_loss=1.0)


class Recorder(Actor):
    """Keeps what it receives, and when."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.received: list[tuple[float, Any]] = []

    def receive(self, sender: Address, message: object) -> None:
        self.received.append((self.env.now_s(), message))

    @property
    def numbers(self) -> list[int]:
        return [message.request for _, message in self.received if isinstance(message, Ready)]

    @property
    def lost(self) -> list[tuple[str, str]]:
        lost = [message for _, message in self.received if isinstance(message, PeerLost)]
        return [(message.node, message.reason) for message in lost]


class Stage:
    """Two nodes that know each other."""

    def __init__(self, profile: SimProfile = QUIET, seed: int = 0) -> None:
        self.world = World(seed, profile, Trace())
        self.a, self.b = self.node("a"), self.node("b")
        self.left: Recorder = self.a.add("session", Recorder)
        self.right: Recorder = self.b.add("session", Recorder)

    def node(self, name: str, incarnation: int = 1) -> SimNode:
        node = SimNode(self.world, name, incarnation, name)
        for other in "ab":
            node.network.introduce(other, other)
        return node

    def send(self, *numbers: int) -> None:
        for number in numbers:
            self.left.env.send(Address("b", "session"), Ready(number))

    def run(self, seconds: float) -> None:
        self.world.run(self.world.now_s + seconds, 10_000, lambda: False)


def test_messages_arrive_in_order() -> None:
    stage = Stage()
    for number in range(50):
        stage.world.at(number * 1e-5, stage.send, number)
    stage.run(1.0)
    assert stage.right.numbers == list(range(50))


def test_a_lost_frame_ends_the_link_on_both_sides() -> None:
    stage = Stage()
    stage.send(1)
    stage.run(0.01)
    stage.world.profile = LOSSY
    stage.send(2)
    stage.world.run(stage.world.now_s, 10, lambda: False)
    stage.world.profile = QUIET
    stage.run(3.0)
    assert stage.right.numbers == [1]
    assert [node for node, _ in stage.right.lost] == ["a"]
    assert [node for node, _ in stage.left.lost] == ["b"]
    stage.send(3)
    stage.run(1.0)
    assert stage.right.numbers == [1, 3]


def test_a_doubled_frame_does_not_double_a_message() -> None:
    stage = Stage()
    stage.send(1)
    stage.run(0.01)
    stage.world.profile = SimProfile("twice", frame_duplicate=1.0)
    stage.send(2)
    stage.run(0.01)
    assert stage.right.numbers == [1, 2]
    assert "frames lost (expected 3, got 2)" in stage.right.lost[0][1]


@pytest.mark.parametrize(("length_s", "survives"), [(1.0, True), (10.0, False)])
def test_a_partition_holds_frames_back_and_is_noticed_by_silence(
    length_s: float, survives: bool
) -> None:
    stage = Stage()
    stage.send(1)
    stage.run(0.01)
    until_s = stage.world.now_s + length_s
    for pair in (("a", "b"), ("b", "a")):
        stage.world.blocked[pair] = until_s
        stage.world.after(0.5, stage.world.nodes[pair[1]].network.probe, pair[0])
    stage.send(2)
    stage.run(8.0)
    assert bool(stage.right.lost) is not survives
    assert bool(stage.left.lost) is not survives
    stage.run(10.0)
    assert stage.right.numbers == ([1, 2] if survives else [1])


def test_a_paused_node_handles_everything_when_it_wakes() -> None:
    stage = Stage()
    stage.b.paused_until_s = 2.0
    stage.send(1, 2)
    stage.run(1.0)
    assert stage.right.numbers == []
    stage.run(2.0)
    assert stage.right.numbers == [1, 2]
    assert all(at >= 2.0 for at, _ in stage.right.received)


def test_a_newer_incarnation_ends_the_link() -> None:
    stage = Stage()
    stage.send(1)
    stage.run(0.01)
    stage.a.die(seen=False)
    newer = stage.node("a", 2).add("session", Recorder)
    newer.env.send(Address("b", "session"), Ready(2))
    stage.run(0.1)
    assert stage.right.lost == [("a", "replaced by a newer incarnation")]
    assert stage.right.numbers == [1, 2]


def test_nodes_that_dial_each_other_at_once_have_one_link() -> None:
    stage = Stage()
    for number in range(10):
        stage.send(number)
        stage.right.env.send(Address("a", "session"), Ready(number))
    stage.run(20.0)
    assert stage.left.numbers == stage.right.numbers == list(range(10))
    assert stage.left.lost == stage.right.lost == []


def test_a_process_that_ends_is_lost_at_once_and_after_its_last_words() -> None:
    stage = Stage()
    stage.send(1)
    stage.run(0.01)
    stage.send(2)
    stage.a.close()
    stage.run(0.01)
    assert stage.right.numbers == [1, 2]
    assert stage.right.lost == [("a", "closed")]


def test_a_machine_that_dies_is_noticed_by_its_silence() -> None:
    stage = Stage()
    stage.send(1)
    stage.run(0.01)
    stage.a.die(seen=False)
    stage.run(2.0)
    assert not stage.right.lost
    stage.run(4.0)
    assert stage.right.lost == [("a", "unanswered for 3 s")]


def test_a_peer_that_is_not_there_is_lost_in_time() -> None:
    stage = Stage()
    stage.b.die(seen=False)
    stage.send(1)
    stage.run(7.0)
    assert not stage.left.lost
    stage.run(3.0)
    assert stage.left.lost == [("b", "could not be reached at b")]


def test_clocks_run_as_they_like() -> None:
    stage = Stage()
    stage.b.clock_rate, stage.b.clock_offset_s = 2.0, 100.0
    stage.right.env.call_later(1.0, Ready(1))
    stage.run(0.6)
    assert [(round(at, 3), m) for at, m in stage.right.received] == [(101.0, Ready(1))]


def test_a_transfer_arrives_once_or_fails() -> None:
    stage = Stage()
    planes: dict[int, SimBulk] = {}
    source, target = SimBulk(stage.a, planes), SimBulk(stage.b, planes)
    got: list[bytes] = []
    ends: list[Exception | None] = []
    take: Callable[[Any], None] = lambda buffer: got.append(buffer.tobytes())  # noqa: E731
    data = np.arange(4, dtype=np.uint8)
    source.push(target.land(8, take), [(2, data)], ends.append)
    gone = target.land(8, take)
    stage.run(1.0)
    assert (got, ends) == ([bytes((0, 0, 0, 1, 2, 3, 0, 0))], [None])
    stage.b.die(seen=False)
    source.push(gone, [(0, data)], ends.append)
    stage.run(1.0)
    assert str(ends[-1]) == "b is gone"
    assert len(got) == 1


@pytest.mark.parametrize("machine", [False, True])
def test_a_supervisor_keeps_what_was_handed_over_until_more_is(machine: bool) -> None:
    world = World(0, QUIET, Trace())
    host = SimCluster(world).hosts[0]
    host.start()
    host.hand_over([Replica(1, ((0, 4),), np.arange(4, dtype=np.uint8))])
    host.stop_supervisor(1.0)
    for _ in range(2):  # children that have handed over nothing themselves
        host.crash(machine=machine)
        host.start()
        while host.node is None:
            assert world.step()
        assert [one.array for one in host.store.replicas.memory.all()] == ([] if machine else [1])


def test_a_trace_names_messages_that_say_nothing_more() -> None:
    assert describe(HoldsNoMore()) == "HoldsNoMore()"
    assert describe(LookForStall()) == "LookForStall()"


# --- values ------------------------------------------------------------------------------------------

SPEC = ArraySpec((4, 8), "uint16", Sharding(("x",), (2,), (("x",),)), Placement(7, (0, 1)))


def test_every_byte_of_every_input_matters() -> None:
    inputs = [bytes(64), bytes(64)]
    (reference,) = compute(b"computes f", inputs, (SPEC,))
    assert reference.shape == (4, 8)
    changed = [b"\x01" + bytes(63), bytes(64)]
    others = [
        compute(b"computes f", changed, (SPEC,))[0],
        compute(b"computes f", changed[::-1], (SPEC,))[0],
        compute(b"computes f", [bytes(128)], (SPEC,))[0],
        compute(b"computes g", inputs, (SPEC,))[0],
        compute(b"computes f", inputs, (SPEC, SPEC))[1],
    ]
    whole = [array.tobytes() for array in (reference, *others)]
    assert len(set(whole)) == len(whole)
    assert len({array.tobytes() for array in np.split(reference, 4)}) == 4


def test_the_oracle_knows_right_from_wrong() -> None:
    ledger = Ledger()
    oracle = Oracle("client", False, ledger, lambda number: ("controller", f"host of {number}"))
    value = np.arange(32, dtype=np.uint16).reshape(4, 8)
    oracle.put(1, SPEC, value)
    box = ((0, 4), (0, 8))
    assert oracle.check_value(1, [(box, value)]) is None
    assert "wrong value" in str(oracle.check_value(1, [(box, value + 1)]))
    assert "16 of 32 elements" in str(oracle.check_value(1, [(((0, 2), (0, 8)), value[:2])]))
    assert "no fault excuses" in str(oracle.check_error(1, HostLost("gone")))
    ledger.note("crash", "host of 8")
    assert "no fault excuses" in str(oracle.check_error(1, HostLost("gone")))
    ledger.note("crash", "host of 7")
    assert oracle.check_error(1, HostLost("gone")) is None
    assert oracle.check_error(1, NotOwner("whose?")) is not None
    assert oracle.check_error(1, ComputationFailed("it raised")) is not None
    assert oracle.check_error(1, KeyError("what")) is not None


def test_what_can_be_made_again_is_not_lost() -> None:
    ledger = Ledger()
    oracle = Oracle("client", True, ledger, lambda number: ("host",))
    oracle.put(1, SPEC, np.zeros((4, 8), np.uint16))
    ledger.note("crash", "host")
    assert "could be made again" in str(oracle.check_error(1, HostLost("gone")))
    assert oracle.check_error(1, TransferFailed("client has no room for 64 bytes")) is None


def test_what_a_checkpoint_has_a_part_in_is_lost_only_with_machines() -> None:
    ledger = Ledger()
    oracle = Oracle("client", True, ledger, lambda number: ("host",))
    oracle.put(1, SPEC, np.zeros((4, 8), np.uint16))
    oracle.put(2, SPEC, np.zeros((4, 8), np.uint16))
    oracle.checkpoint((1,))
    ledger.note("crash", "host")
    assert "could be made again" in str(oracle.check_error(1, HostLost("gone")))
    ledger.note("machine crash", "host")
    assert "could be made again" in str(oracle.check_error(1, HostLost("gone")))
    ledger.note("machine crash", "host")
    assert oracle.check_error(1, HostLost("gone")) is None
    assert "could be made again" in str(oracle.check_error(2, HostLost("gone")))


# --- instruments -------------------------------------------------------------------------------------


def test_streams_do_not_disturb_each_other() -> None:
    alone = [Streams(3)("link a").random() for _ in range(1)]
    streams = Streams(3)
    streams("link b").random()
    assert [streams("link a").random()] == alone
    assert Streams(4)("link a").random() != alone[0]


def test_the_census_finds_what_nobody_has_named() -> None:
    recorder = Stage().left
    assert not held("a", recorder)
    recorder.received.append((0.0, None))
    assert held("a", recorder) == {"a.received": 1}


# --- pw sim ------------------------------------------------------------------------------------------


def test_the_command_reports_what_it_did() -> None:
    done = CliRunner().invoke(app, ["sim", "--seeds", "0:3", "--profile", "calm", "--runs", "12"])
    assert done.exit_code == 0, done.output
    assert "3 seeds of profile 'calm': 6 hosts, 3 clients, 12 runs a seed" in done.output
    assert "injected   nothing" in done.output
    assert "simulated hours a minute" in done.output
    assert "violated   nothing" in done.output


def test_the_command_ends_after_its_time() -> None:
    many = ["--seeds", "7:1000007", "--profile", "calm", "--runs", "12", "--minutes", "0"]
    done = CliRunner().invoke(app, ["sim", *many])
    assert done.exit_code == 0, done.output
    assert "1 seeds of profile 'calm'" in done.output


def test_profiles_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, shares = 0.0, []

    def search(seeds: range, profile: SimProfile, pool: None, share_s: float) -> list[object]:
        nonlocal now_s
        shares.append(share_s)
        now_s += 2 * share_s if not shares[1:] else share_s  # the first one is late
        return []

    monkeypatch.setattr(sim, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(sim, "search", search)
    assert sim.search_all(range(9), [PROFILES["calm"]] * 4, 1, 40.0)
    assert shares == pytest.approx([10, 20 / 3, 20 / 3, 20 / 3])


def test_the_command_replays_a_failure() -> None:
    done = CliRunner().invoke(mutations.app, ["lose-a-discard", "--seed", "0"])
    assert done.exit_code == 1
    assert "seed 0 violates 'epochs last'" in done.output
    assert "events:" in done.output
    assert "pw sim --profile calm --hosts 6 --clients 3 --runs 40 --seed 0 --trace" in done.output
    traced = CliRunner().invoke(mutations.app, ["lose-a-discard", "--seed", "0", "--trace"])
    assert len(traced.output.splitlines()) > 100


def test_the_command_finds_the_least_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    install = MUTATIONS["lose-a-discard"].install
    assert not replay(0, PROFILES["slow"], trace=False, smallest=True, alter=install)
    last = capsys.readouterr().out.splitlines()[-1]
    assert "--without latency_spike,silences,slow_hosts,clock_skew" in last
    runs = int(last.split("--runs ")[1].split()[0])
    assert runs < 10


@pytest.mark.parametrize(
    "wrong", [["--profile", "sunny"], ["--seeds", "many"], ["--without", "rain"]]
)
def test_the_command_says_what_it_takes(wrong: list[str]) -> None:
    done = CliRunner().invoke(app, ["sim", *wrong])
    assert done.exit_code != 0
