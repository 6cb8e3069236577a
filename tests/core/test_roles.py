"""Which role may send which message to which actor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection.threads import LoopThread
from pw.core import messages as m
from pw.core.actors.actor import Actor, Env
from pw.core.errors import ErrorReport, PlacementError
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, Address, executor_of, scheduler_of
from pw.core.messages.roles import Role, role_of
from pw.core.messages.routes import permits
from pw.transport.links.link import incarnation
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from tests.stages.daemons import until

ERROR = ErrorReport.of(PlacementError("forged"))
KINDS = [
    kind
    for kind in vars(m).values()
    if isinstance(kind, type)
    and issubclass(kind, m.Base)
    and isinstance(kind.__struct_config__.tag, int)
]

TAGS = """
    Hello=1 Refused=2 Heartbeat=3 Goodbye=4 PeerLost=5 PeerRefused=6 PeerSilent=7 RegisterHost=10
    HostRejected=11 FormIsland=12 IslandJoined=13 IslandJoinFailed=14 LeaveIsland=15
    Directory=16 IslandFormed=17 EpochEnded=18 CoordinationStarted=19 StartCoordination=20
    StopCoordination=21 EndEpoch=22 AskToLeave=23 DrainHost=24 Leave=25 HostEmptied=26 Draining=27
    MigrateClient=257 PlanMoves=258 MovesPlanned=259
    HostMustEnd=28 ClientsLeft=29 HostEnded=39 Attach=30
    Attached=31 Identify=32 Evicted=33 AllocateSlice=34 SliceBound=35 SliceRefused=36
    ReleaseSlice=37 SliceLost=38 RegisterProgram=40 ReleaseProgram=41 Run=42 RunFailed=43
    RunsSettled=44 CreateArray=45 Delete=46 GetStatus=47 Status=48 GetStats=49 Stats=50
    Checkpoint=51 Inquire=52 Answered=53 UploadAgain=54 InputGone=55 ForgetInputs=56
    ForgetRuns=57 Resumed=58 Offer=59 AddClient=60 Submit=61 SegmentLaunched=62 SegmentDone=63
    UploadEnded=64 Release=65 RemoveClient=66 CancelRun=67 InstallProgram=68 ProgramInstalled=69
    UninstallProgram=70 Install=71 Installed=72 Launch=73 Discard=74 Progress=75 LaunchGap=76
    GangBroken=77 CopyArrays=78 Replicate=79 RunRefused=80 ArrayPlaced=81 RunAtHead=82
    ReserveRun=83 RunAdmitted=84 EdgeCredit=90 EdgeData=91 EdgeFailed=92 Upload=93
    UploadLanding=94 Uploaded=95 Fetch=96 Fetched=97 Wait=98 Ready=99 RequestFailed=100
    CancelRequest=101 UploadAborted=102 Holdings=103 Restore=104 FetchReplica=105
    ReplicaData=106 ReplicaRefused=107 OfferReplica=108 DropReplicas=109 ArraysLost=110
    LinkLost=111 Copied=112 EdgeProbe=113 EdgeGone=114 DropUploads=115 Stalled=120 Explain=121
    ExplainIsland=122 IslandReport=123 ExplainHost=124 HostReport=125 Explanation=126
    CallEnded=130 RunStarted=131 Cancel=132 CancelRuns=133 PassedLaunches=134 SaveArrays=140
    FileWritten=141 CommitFiles=142 FilesCommitted=143 AbandonFiles=144 Describe=145
    Described=146 ReadArray=147 HoldsNoMore=148 Printed=149 Compile=150 Compiled=151
    CallClient=152 CallReturned=153 CallLanding=154 LookForFolders=155 FoldersGone=156
    ReadRecords=170 Records=171 GetMemory=180
    MeasureIsland=181 IslandMeasured=182 MeasureHost=183 HostMeasured=184 Memory=185 Observe=186
    Observed=187 GetPlan=188 ProgramPlan=189 HostRegistered=201
"""
"""Each message with its tag."""


def test_names_tell_roles() -> None:
    assert role_of(CONTROLLER) is Role.CONTROLLER
    assert role_of("client-12-ab") is Role.CLIENT
    assert role_of("gpu-7") is Role.WORKER


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_message_has_a_sender_or_stays_in_its_process(kind: type[m.Base]) -> None:
    assert (kind in m.REMOTE) is not issubclass(kind, m.Local)
    has_route = bool(kind.senders and kind.receiver)
    assert has_route + issubclass(kind, m.Local) + issubclass(kind, m.OnLink) == 1
    for role, node in (
        (Role.CONTROLLER, CONTROLLER),
        (Role.WORKER, "host"),
        (Role.CLIENT, "client-1"),
    ):
        assert permits(node, kind.receiver, kind) or role not in kind.senders


def test_a_message_of_several_routes_has_each_of_them() -> None:
    for node, actor in (("client-1", "controller"), ("client-1", "store")):
        assert permits(node, actor, m.GetStats)
    for node in (CONTROLLER, "host"):
        assert permits(node, "session", m.Stats)
    assert permits("host", "scheduler/a", m.CallEnded)
    assert permits(CONTROLLER, "executor", m.CallEnded)
    assert not permits("host", "executor", m.CallEnded)


def test_tags_stay_what_they_are() -> None:
    """A tag says what a message is, also to processes of other versions."""
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    now = {f"{kind.__name__}={tag}" for kind, tag in zip(KINDS, tags, strict=True)}
    assert now.issuperset(TAGS.split())


@pytest.mark.parametrize(
    ("node", "actor", "kind"),
    [
        ("client-1", "resources", m.RegisterHost),
        ("client-1", "resources", m.ReleaseSlice),
        ("client-1", "scheduler/a", m.LaunchGap),
        ("client-1", "controller", m.ArraysLost),
        ("client-1", "executor", m.Leave),
        ("client-1", "coordinator", m.EdgeData),
        ("host", "executor", m.Leave),
        ("host", "executor", m.HostRejected),
        ("host", "controller", m.Run),
        ("host", "controller", m.DrainHost),
        ("host", "store", m.Fetch),
        ("host", "session", m.RunFailed),
    ],
)
def test_other_roles_are_refused(node: str, actor: str, kind: type) -> None:
    assert not permits(node, actor, kind)


def test_local_messages_never_come_from_another_node() -> None:
    for role in ("controller", "client-1", "host"):
        for actor in ("controller", "resources", "scheduler/a", "services"):
            assert not permits(role, actor, m.Submit)
            assert not permits(role, actor, m.EpochEnded)
            assert not permits(role, actor, m.StartCoordination)


class Intruder(Actor):
    """Keeps what it receives."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.received: list[object] = []

    def receive(self, sender: Address, message: object) -> None:
        self.received.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if type(message) is kind]


@pytest.mark.processes
def test_a_client_that_forges_messages_does_no_harm() -> None:
    """A process of this user dials the cluster as a client, and sends what hosts and the controller send."""
    with pw.LocalCluster(hosts_per_island=2, allow_python=True) as cluster:
        devices = pw.make_virtual_device_set().add_slice(devices=2).devices
        before = pw.put(np.arange(4.0), devices[0])
        pids = [host.runtime_pid() for host in cluster.hosts]
        thread = LoopThread("intruder")
        try:

            def enter() -> tuple[Node, Intruder]:
                network = StreamNetwork(thread.loop, "client-evil", incarnation())
                node = Node("client-evil", thread.loop, network)
                intruder = node.add("session", Intruder)
                network.introduce(CONTROLLER, cluster.address)
                intruder.env.send(CONTROL, m.Attach("evil", 1.0, 0))
                return node, intruder

            node, intruder = thread.call(enter)
            until(lambda: intruder.of(m.Attached), "the intruder is attached")
            (peers,) = [directory.peers for directory in intruder.of(m.Directory)[-1:]]
            numbers = [info.number for info in pw.status().clients]

            def attack() -> None:
                send = intruder.env.send
                send(RESOURCES, m.RegisterHost("island-0", 2, 1, "cpu", "ipc:///nowhere", 1))
                send(RESOURCES, m.IslandJoinFailed("island-0", 1, ERROR))
                send(scheduler_of("island-0"), m.LaunchGap(1, 0, 1))
                send(scheduler_of("island-0"), m.GangBroken(1, "forged"))
                for number in numbers:
                    for serial in range(8):
                        send(RESOURCES, m.ReleaseSlice((number << 40) | serial))
                        send(CONTROL, m.ArraysLost(((number << 40) | serial,)))
                for peer in peers:
                    intruder.env.introduce(peer.node, peer.endpoint)
                    send(executor_of(peer.node), m.Leave("forged"))
                    send(executor_of(peer.node), m.HostRejected(ERROR))
                    send(executor_of(peer.node), m.LeaveIsland("island-0", 1, "forged"))

            thread.call(attack)
            refused = {CONTROLLER: 4 + 16 * len(numbers)} | {peer.node: 3 for peer in peers}

            def is_over() -> bool:
                counts = pw.stats()
                return all(
                    counts[node].get("messages_refused", 0) >= n for node, n in refused.items()
                )

            until(is_over, f"{refused} messages refused")
            assert not intruder.of(m.FormIsland)
            assert np.array_equal(np.asarray(before), np.arange(4.0))
            after = pw.put(np.arange(6.0), devices[1])
            assert np.array_equal(np.asarray(after), np.arange(6.0))
            assert [host.runtime_pid() for host in cluster.hosts] == pids
            (island,) = pw.status().islands
            assert island.formed == 1
            thread.call(node.close)
        finally:
            thread.stop()
