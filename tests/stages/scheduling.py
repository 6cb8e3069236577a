"""One scheduler without a cluster: a test says what hosts and the controller tell it."""

from __future__ import annotations

from typing import Any

from pw.core import messages as msg
from pw.core.ids import client_id, executor_of, scheduler_of
from pw.core.programs.plan import Execute, HostPlan, HostSegment
from pw.core.programs.program import Computation, Program
from pw.core.sharding import Binding, DeviceAddress, Placement
from pw.sched.island.policy import POLICIES
from pw.sched.island.scheduler import IslandScheduler
from tests.stages.actors import World


class Bench:
    """One scheduler of island "i", and answers of its hosts when the test gives them."""

    def __init__(
        self,
        policy: str = "fifo",
        hosts: tuple[str, ...] = ("h0", "h1"),
        *,
        counts_tenants: bool = False,
    ) -> None:
        self.world = World()
        self.address = scheduler_of("i")
        self.scheduler: IslandScheduler = self.world.add(
            self.address,
            lambda env: IslandScheduler(
                env, "i", POLICIES[policy](), counts_tenants=counts_tenants
            ),
        )
        self.hosts = hosts
        self.runs = 0
        self.scanned = 0
        self.known: list[msg.Launch] = []
        self.tell(msg.IslandFormed("i", 1, hosts))

    def tell(self, *messages: object, sender: Any = None) -> None:
        for message in messages:
            self.world.mailboxes["controller"].append(
                (sender or self.address, self.address, message)
            )
        self.world.drain("controller")

    def client(self, number: int, share: float = 1.0, priority: int = 0, *tenant: Any) -> None:
        """Add a client, perhaps with its tenant and the tenant's share."""
        self.tell(msg.AddClient(number, share, priority, *tenant))
        body = Program("p", (Computation("f", b"", Placement(7, ()), (), ()),), (), (), ())
        self.tell(msg.InstallProgram(client_id(number, 1), body, (), ()))

    def submission(self, client: int, depends: tuple[int, ...] = (), **how: Any) -> msg.Submit:
        self.runs += 1
        producers = tuple(("j", producer) for producer in depends)
        return msg.Submit(
            client_id(client, 1000 + self.runs),
            client_id(client, 1),
            (7,),
            (how.get("hosts", self.hosts),),
            (how.get("reporters", 1),),
            (producers,),
            (),
            (),
            ((),),
            how.get("awaits", ()),
            is_whole=how.get("is_whole", False),
            has_gaps=how.get("has_gaps", False),
        )

    def launches(self) -> list[msg.Launch]:
        """All launches so far on host h0, which is in every gang."""
        new = self.world.sent[self.scanned :]
        self.scanned = len(self.world.sent)
        first = executor_of("h0")
        self.known += [m for _, to, m in new if to == first and isinstance(m, msg.Launch)]
        return self.known

    def owners(self) -> list[int]:
        return [launch.run >> 40 for launch in self.launches()]

    def end(self, launch: msg.Launch, device_time_us: int = 100, host: str = "h0") -> None:
        finished = (msg.Finished(launch.sequence, device_time_us),)
        self.tell(msg.Progress(launch.epoch, finished), sender=executor_of(host))

    def measure(self, *clients: int) -> None:
        """One run of each of these clients ends, so that the device time of its program is known."""
        for client in clients:
            self.tell(self.submission(client))
            self.end(self.launches()[-1])


def runs_on(
    bench: Bench, client: int, *at: int, share: float = 1.0, priority: int = 0, node: str = ""
) -> None:
    """The client's program, on some of the two devices of each of two hosts; its session is on `node`."""
    devices = tuple(DeviceAddress(f"h{number // 2}", number % 2) for number in range(4))
    binding = Binding.of(7, "i", devices)
    body = Program("p", (Computation("f", b"", Placement(7, at), (), ()),), (), (), ())
    hosts = dict.fromkeys(devices[number].host for number in at)
    does = (HostSegment(7, (Execute(0, (), (), ()),)),)
    plans = tuple(HostPlan(host, does, (), (), (binding,)) for host in hosts)
    bench.tell(msg.AddClient(client, share, priority, node=node, line=node))
    bench.tell(msg.InstallProgram(client_id(client, 1), body, plans, ()))
