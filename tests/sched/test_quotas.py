"""Rights of tenants at the controller: what exceeds a bound waits or is refused, and comes back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pw.core import messages as msg
from pw.core.compact import Compact
from pw.core.ids import CONTROL, session_of
from pw.core.rights import NewRights, Resource, Rights, TenantRights
from pw.core.tenants import NO_SECRET, OPERATOR
from pw.core.waits import RECOVERY_S
from pw.sched.control import registry
from pw.sched.control.usage import RoomQueue, Usage
from tests.sched.test_names import NameStage
from tests.stages.actors import Recorder, World
from tests.stages.scripted import Client, chain, join, split

RED, BLUE = "red", "blue"


class Stage:
    """One island of two hosts with four devices each, and clients `r1`, `r2` of red and `b1` of blue."""

    def __init__(self, **rights: Any) -> None:
        self.world = World(1)
        self.world.controller(rights=TenantRights(named={RED: Rights(**rights)}))
        self.world.host("h0", "i", 2, 4)
        self.world.host("h1", "i", 2, 4)
        self.world.tenants = dict.fromkeys(("r1", "r2", "r3"), RED) | {"b1": BLUE}
        self.world.settle()
        self.r1, self.r2, self.b1 = (join(self.world, name) for name in ("r1", "r2", "b1"))
        self.usage = self.world.control.usage

    def slice(self, client: Client, devices: int, **how: Any) -> int:
        number = client.id()
        client.tell(msg.AllocateSlice(number, devices, None, None, None, **how))
        self.world.settle()
        return number

    def give_back(self, client: Client, number: int) -> None:
        client.tell(msg.ReleaseSlice(number))
        self.world.settle()

    def leave(self, name: str) -> None:
        self.world.kill(name)
        self.world.settle()

    def refusals(self, client: Client) -> list[str]:
        return [f"{one.error.kind}: {one.error.message}" for one in client.of(msg.SliceRefused)]

    def new_rights(self, **rights: Any) -> None:
        self.world.post(CONTROL, CONTROL, NewRights(TenantRights(named={RED: Rights(**rights)})))
        self.world.settle()


# --- devices --------------------------------------------------------------------------------------


def test_a_slice_waits_until_its_tenant_has_given_devices_back() -> None:
    stage = Stage(devices=4)
    first = stage.slice(stage.r1, 3)
    second, third = stage.slice(stage.r2, 2), stage.slice(stage.r1, 1)
    assert stage.slice(stage.b1, 8) in stage.b1.bound, "other tenants are not bounded"
    assert first in stage.r1.bound
    assert not {second, third} & (stage.r1.bound.keys() | stage.r2.bound.keys()), "in their order"
    assert stage.usage.amount(RED, Resource.DEVICES) == 3
    stage.give_back(stage.r1, first)
    assert second in stage.r2.bound
    assert third in stage.r1.bound
    assert stage.usage.amount(RED, Resource.DEVICES) == 3


def test_a_slice_that_can_never_fit_is_refused_with_the_numbers() -> None:
    stage = Stage(devices=4)
    stage.slice(stage.r1, 3)
    stage.slice(stage.r2, 5)
    (words,) = stage.refusals(stage.r2)
    assert words.startswith(
        "QuotaExceeded: tenant 'red' has 3 devices and may have 4 devices; 5 devices more"
    )
    assert stage.usage.amount(RED, Resource.DEVICES) == 3


@pytest.mark.parametrize("how", ["given back", "left", "other rights"])
def test_who_waits_goes_on(how: str) -> None:
    """A client that is killed while it has devices, or waits for some, gives them back."""
    stage = Stage(devices=4)
    first, second = stage.slice(stage.r1, 4), stage.slice(stage.r2, 4)
    third = join(stage.world, "r3")
    last = stage.slice(third, 2)
    if how == "given back":
        stage.give_back(stage.r2, second)  # it waits
        stage.give_back(stage.r1, first)
    elif how == "left":
        stage.leave("r2")
        stage.leave("r1")
    else:
        stage.new_rights(devices=10)
    assert last in third.bound
    assert stage.usage.amount(RED, Resource.DEVICES) == (10 if how == "other rights" else 2)


def test_a_slice_that_waits_is_refused_when_its_tenant_can_never_have_it_any_more() -> None:
    stage = Stage(devices=4)
    stage.slice(stage.r1, 3)
    stage.slice(stage.r2, 3)
    small = stage.slice(stage.r1, 1)
    assert small not in stage.r1.bound
    stage.new_rights(devices=2)
    (words,) = stage.refusals(stage.r2)
    assert words.startswith("QuotaExceeded: tenant 'red' has 3 devices and may have 2 devices")
    stage.new_rights(devices=4)
    assert small in stage.r1.bound


def test_a_slice_that_no_island_has_counts_no_more() -> None:
    stage = Stage(devices=100)
    stage.slice(stage.r1, 99)
    stage.world.wait(31.0)
    (words,) = stage.refusals(stage.r1)
    assert words.startswith("InsufficientDevices")
    assert stage.usage.amount(RED, Resource.DEVICES) == 0


def test_an_explanation_says_that_the_tenant_has_no_more_devices() -> None:
    stage = Stage(devices=4)
    stage.slice(stage.r1, 4)
    stage.slice(stage.r2, 2)
    stage.r2.tell(msg.Explain(1))
    stage.world.settle()
    stage.world.wait(1.0)
    (answer,) = stage.r2.of(msg.Explanation)
    assert "2 devices, until tenant 'red', which may have 4, has given some back" in answer.text


def test_a_client_of_an_earlier_controller_has_no_more_than_its_tenant_may() -> None:
    """What is above the bound waits like a new slice; what lay there waits for it, and not for ever."""
    stage = Stage(devices=4)
    first = stage.slice(stage.r1, 1)
    back = stage.world.add(session_of("r3"), Recorder)
    attach = msg.Attach("r3", 1.0, 0, 900, NO_SECRET.claim(900, RED))
    back.env.send(CONTROL, attach)
    had = [
        msg.AllocateSlice(900 << 40 | n, devices, None, None, None, resumed=True, formerly="i")
        for n, devices in ((1, 3), (2, 1), (3, 5))
    ]
    awaited = msg.AllocateSlice(900 << 40 | 4, 1, None, None, None, resumed=True)
    for message in (*had, awaited):
        back.env.send(CONTROL, message)
    stage.world.settle()
    assert [one.slice for one in back.of(msg.SliceBound)] == [had[0].slice]
    assert stage.usage.amount(RED, Resource.DEVICES) == 4
    client = stage.world.client(900)
    assert client.slices.unbound.keys() == {had[1].slice, had[2].slice}
    assert awaited.slice not in client.slices.unbound, "its stream does not wait"
    back.env.send(CONTROL, msg.Resumed((), Compact.of(msg.KnownArrays(())), (), ()))
    stage.give_back(stage.r1, first)
    assert [one.slice for one in back.of(msg.SliceBound)] == [had[0].slice, had[1].slice]
    stage.new_rights(devices=4)
    assert not back.of(msg.SliceRefused)
    stage.world.wait(RECOVERY_S + 1)
    assert not client.slices.unbound, "it is given up"
    stage.new_rights(devices=20)
    assert [one.slice for one in back.of(msg.SliceBound)][2:] == [had[2].slice, awaited.slice]


def test_lower_rights_refuse_any_number_of_slices_that_wait() -> None:
    stage = Stage(devices=8)
    stage.slice(stage.r1, 8)
    for devices in (1, *[4] * 600, 2):
        stage.r2.tell(msg.AllocateSlice(stage.r2.id(), devices, None, None, None))
    stage.world.settle()
    stage.new_rights(devices=2)
    assert len(stage.refusals(stage.r2)) == 600
    stage.leave("r1")
    assert len(stage.r2.bound) == 1, "one device is left, and 2 are asked for"
    assert stage.usage.amount(RED, Resource.DEVICES) == 1


def test_what_waits_of_one_tenant_costs_others_nothing() -> None:
    usage = Usage(TenantRights(named={RED: Rights(devices=0)}))
    usage.attach(1, RED)
    usage.attach(2, BLUE)
    queue, began = RoomQueue(usage, Resource.DEVICES, float), []
    for key in range(50):
        assert not queue.ask(1, RED, key, 1, lambda: began.append("red"))
    asked = []
    usage.take = lambda *args: asked.append(args)  # type: ignore[method-assign]
    queue.try_again(BLUE)
    assert not asked
    assert queue.ask(2, BLUE, 99, 1, lambda: began.append("blue"))
    assert len(asked) == 1
    assert began == ["blue"]
    usage.leave(1)
    queue.client_left(1, RED)
    assert not queue.keys


@pytest.mark.parametrize("to", [(), ("blue",)])
def test_a_name_lends_devices_to_those_to_whom_it_has_offered_a_version(to: tuple[str]) -> None:
    stage = NameStage()
    red, blue = stage.red, stage.blue
    model = red.id()
    red.tell(msg.AllocateSlice(model, 1, None, None, None))
    stage.world.settle()
    spec = split(model, 1)
    array = red.upload(np.arange(8), spec)
    stage.world.settle()
    token = bytes(msg.OFFER_TOKEN_BYTES - 1) + b"t"
    offer = msg.Offer(red.id(), token, (array,), (spec,))
    stage.ask(red, msg.Publish(stage.request(), "base", (offer,), b"tree", 0.0, to), msg.Published)
    (holder,) = [one for one in stage.world.control.sessions.clients if one.is_holder]
    (lent,) = holder.slices.owned
    bound = []
    for _ in range(2):
        number = blue.id()
        blue.tell(msg.AllocateSlice(number, 1, None, None, None, like=lent))
        stage.world.settle()
        bound.append(number in blue.bound)
        stage.look_up(blue, "red/base")
    assert bound == [False, bool(to)]
    assert stage.world.control.usage.amount(BLUE, Resource.DEVICES) == 0, "they are the name's"


@pytest.mark.parametrize("tenant", [RED, BLUE])
def test_a_slice_is_shared_with_a_client_that_comes_back_later_if_it_is_of_the_tenant(
    tenant: str,
) -> None:
    """Until then the controller does not know whose slice the model is."""
    stage = Stage()
    model = 900 << 40 | 1
    client = stage.r2 if tenant == RED else stage.b1
    number = stage.slice(client, 1, like=model, resumed=True)
    assert number not in client.bound
    back = stage.world.add(session_of("r3"), Recorder)
    back.env.send(CONTROL, msg.Attach("r3", 1.0, 0, 900, NO_SECRET.claim(900, RED)))
    had = msg.AllocateSlice(model, 1, None, None, None, resumed=True, formerly="i")
    back.env.send(CONTROL, had)
    stage.world.settle()
    stage.world.wait(60.0)
    assert [one.slice for one in back.of(msg.SliceBound)] == [model]
    assert number in client.bound
    requests = stage.world.client(client.number).slices.requests
    assert requests[number].like == (model if tenant == RED else 0)


@pytest.mark.parametrize("tenant", [RED, BLUE])
def test_no_tenant_shares_devices_of_a_slice_of_another_one(tenant: str) -> None:
    stage = Stage()
    model = stage.slice(stage.r1, 2)
    client = stage.r2 if tenant == RED else stage.b1
    number = stage.slice(client, 2, like=model)
    assert (number in client.bound) is (tenant == RED)
    if tenant == BLUE:
        (words,) = stage.refusals(client)
        assert words.startswith(
            "NotOwner: the devices that a slice is to share are of another tenant"
        )


def test_no_client_says_by_itself_that_it_had_a_slice() -> None:
    stage = Stage(devices=4)
    stage.slice(stage.r1, 4)
    assert stage.slice(stage.r2, 1, resumed=True, formerly="i") not in stage.r2.bound
    assert stage.usage.amount(RED, Resource.DEVICES) == 4


# --- programs -------------------------------------------------------------------------------------


def test_runs_of_programs_beyond_the_bound_fail_until_others_are_released() -> None:
    stage = Stage(programs=1)
    slice_ = stage.slice(stage.r1, 1)
    spec = split(slice_, 1)
    one, two = stage.r1.program(chain([spec])), stage.r1.program(chain([spec, spec]))
    argument = bytes(spec.size_bytes)
    (result,), (failed,) = stage.r1.run(one, argument), stage.r1.run(two, argument)
    stage.world.settle()
    assert result not in stage.r1.failed
    error = stage.r1.failed[failed]
    assert error.kind == "QuotaExceeded"
    assert (
        "tenant 'red' has 1 program and may have 1 program; 1 program more cannot" in error.message
    )
    stage.r1.release(one)
    (result,) = stage.r1.run(two, argument)
    stage.world.settle()
    assert result not in stage.r1.failed
    assert stage.usage.amount(RED, Resource.PROGRAMS) == 1


def test_programs_of_a_client_that_left_make_room() -> None:
    stage = Stage(programs=1)
    specs = [split(stage.slice(client, 1), 1) for client in (stage.r1, stage.r2)]
    stage.r1.program(chain([specs[0]]))
    stage.world.settle()
    two = stage.r2.program(chain([specs[1]]))
    stage.world.settle()
    assert stage.world.client(stage.r2.number).programs[two].error is not None
    stage.leave("r1")
    assert stage.world.client(stage.r2.number).programs[two].error is None
    (result,) = stage.r2.run(two, bytes(specs[1].size_bytes))
    stage.world.settle()
    assert result not in stage.r2.failed


def test_so_many_programs_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "WAITING", 3)
    stage = Stage(programs=1)
    spec = split(stage.slice(stage.r1, 1), 1)
    programs = [stage.r1.program(chain([spec] * (1 + length))) for length in range(6)]
    stage.world.settle()
    waiting = stage.world.control.registry.queue.keys
    assert list(waiting) == programs[1:4]
    (result,) = stage.r1.run(programs[5], bytes(spec.size_bytes))
    stage.world.settle()
    error = stage.r1.failed[result]
    assert error.kind == "QuotaExceeded"
    assert "3 wait for room already, so this one is not kept" in error.message
    kept = stage.world.client(stage.r1.number).programs
    assert not kept[programs[5]].artifacts
    for number in programs:
        stage.r1.release(number)
    stage.world.settle()
    assert not waiting
    assert stage.usage.amount(RED, Resource.PROGRAMS) == 0


# --- clients, shares, host memory -----------------------------------------------------------------


def test_a_tenant_has_so_many_clients_at_once() -> None:
    stage = Stage(clients=2)
    late = stage.world.add(session_of("r3"), Recorder)
    attach = msg.Attach("r3", 1.0, 0)
    late.env.send(CONTROL, attach)
    stage.world.settle()
    (evicted,) = late.of(msg.Evicted)
    assert evicted.error.kind == "QuotaExceeded"
    assert "tenant 'red' has 2 clients and may have 2 clients" in evicted.error.message
    stage.leave("r1")
    late.env.send(CONTROL, attach)
    stage.world.settle()
    assert late.of(msg.Attached)


def test_new_rights_bound_shares_at_schedulers_and_lose_no_queue() -> None:
    stage = Stage(share=2.0)
    queues = stage.world.schedulers["i"].queues
    queue = queues.clients[stage.r1.number]
    assert queue.stake == (stage.r1.number, 1.0, RED, 2.0)
    stage.new_rights(share=3.0, max_share=0.5)
    assert queues.clients[stage.r1.number] is queue
    assert queue.stake == (stage.r1.number, 0.5, RED, 3.0)
    stage.new_rights(max_share=5.0)
    assert queue.stake == (stage.r1.number, 1.0, RED, 1.0), "the client has what it asked for again"


def test_replicas_of_checkpoints_are_bounded() -> None:
    spec_bytes = 64
    stage = Stage(host_memory=2 * spec_bytes)
    slice_ = stage.slice(stage.r1, 1)
    spec = split(slice_, 1)
    assert spec.size_bytes == spec_bytes
    program = stage.r1.program(chain([spec]))
    (first,), (second,) = (stage.r1.run(program, bytes(spec_bytes)) for _ in range(2))
    stage.world.settle()

    def checkpoint(request: int, *arrays: int) -> Any:
        stage.r1.tell(msg.Checkpoint(request, arrays))
        stage.world.settle()
        stage.world.wait(6.0)
        return next(a for a in stage.r1.of(msg.Answered) if a.request == request).error

    assert checkpoint(1, first) is None
    assert stage.usage.amount(RED, Resource.HOST_MEMORY) == 2 * spec_bytes
    assert checkpoint(2, first) is None, "it counts once"
    assert checkpoint(3, second).kind == "QuotaExceeded"
    stage.r1.tell(msg.Delete((first,)))
    stage.world.settle()
    assert stage.usage.amount(RED, Resource.HOST_MEMORY) == 0
    assert checkpoint(4, second) is None


# --- what a tenant may do -------------------------------------------------------------------------


def test_a_tenant_with_the_right_drains_and_cancels() -> None:
    stage = Stage(may_drain=True, may_cancel=True)
    for client, refused in ((stage.r1, False), (stage.b1, True)):
        client.tell(msg.CancelRuns(1, (stage.b1 if client is stage.r1 else stage.r1).number))
        client.tell(msg.DrainHost(2, "h1"))
        stage.world.settle()
        answers = {one.request: one.error for one in client.of(msg.Answered)}
        assert (answers[1] is not None) is refused
        assert (answers.get(2) is not None) is refused
    assert "h1" in stage.world.resources.inventory.draining


@pytest.mark.parametrize(
    ("python", "words"), [(False, "may run none"), ((), "may run none"), (("h1",), "")]
)
def test_slices_for_python_are_on_the_hosts_of_the_tenant(python: Any, words: str) -> None:
    world = World(1)
    world.controller(rights=TenantRights(named={RED: Rights(python=python)}))
    for name in ("h0", "h1"):
        world.host(name, "i", 2, 2, python=True)
    world.tenants = {"r1": RED}
    world.settle()
    client = join(world, "r1")
    number = client.id()
    client.tell(msg.AllocateSlice(number, 1, None, None, None, python=True))
    world.settle()
    if words:
        (refused,) = client.of(msg.SliceRefused)
        assert refused.error.kind == "PythonRefused"
        assert words in refused.error.message
    else:
        assert [device.host for device in client.bound[number].devices] == ["h1"]


# --- reports --------------------------------------------------------------------------------------


def test_status_has_what_tenants_have_and_may_have() -> None:
    stage = Stage(devices=4, clients=3)
    stage.slice(stage.r1, 3)
    op = join(stage.world, "op")
    shown = {}
    for client in (op, stage.r1):
        client.tell(msg.GetStatus(1))
        stage.world.settle()
        (status,) = client.of(msg.Status)
        shown[client] = {one.name: one for one in status.tenants}
    assert shown[op].keys() == {RED, BLUE, OPERATOR}
    assert shown[stage.r1].keys() == {RED}
    red = shown[stage.r1][RED]
    assert red.amounts == {"clients": 2, "devices": 3, "runs": 0}
    assert red.bounds == {"clients": 3, "devices": 4}


def test_the_ledger_counts_under_ids() -> None:
    usage = Usage(TenantRights(named={RED: Rights(programs=2)}))
    usage.attach(1, RED)
    usage.take(1, Resource.PROGRAMS, {5: 1})
    usage.take(1, Resource.PROGRAMS, {5: 1})
    assert usage.amount(RED, Resource.PROGRAMS) == 1
    assert usage.give(1, Resource.PROGRAMS, 5)
    assert not usage.give(1, Resource.PROGRAMS, 5)
    usage.leave(1)
    assert usage.amount(RED, Resource.PROGRAMS) == usage.amount(RED, Resource.CLIENTS) == 0
