"""How a scheduler ends a lease when the holder has lost its link to a host."""

from __future__ import annotations

from typing import Any

from pw.core import messages as msg
from pw.core.ids import client_id, executor_of
from pw.core.sharding import DeviceAddress
from tests.stages.scheduling import Bench, runs_on
from tests.stages.scripted import split

HOLDER = 1


def ready() -> Bench:
    """Hosts h0 and h1, on which the program of a client is."""
    bench = Bench()
    runs_on(bench, HOLDER, 0, 2, node="user")
    for host in bench.hosts:
        installed = msg.Installed(1, client_id(HOLDER, 1), None)
        bench.tell(installed, sender=executor_of(host))
    return bench


def lent() -> Bench:
    """Hosts h0 and h1, lent to a client."""
    bench = ready()
    ran(bench, 9)
    assert len(sent(bench, msg.Lend)) == 2
    return bench


def ran(bench: Bench, runs: int, is_whole: bool = True, has_gaps: bool = False) -> None:
    """The client has waited for so many runs, one after the other."""
    for _ in range(runs):
        bench.tell(bench.submission(HOLDER, is_whole=is_whole, has_gaps=has_gaps))
        bench.end(bench.launches()[-1])


def sent(bench: Bench, kind: type[Any]) -> list[tuple[str, Any]]:
    """All messages of a kind, with their hosts."""
    return [(to.node, message) for _, to, message in bench.world.sent if isinstance(message, kind)]


def launched(bench: Bench) -> msg.LeasedLaunch:
    """The holder launches a run, and tells of it; returns what it sends to h0."""
    (lease,) = {message.lease for _, message in sent(bench, msg.Lend)}
    submit = bench.submission(HOLDER, is_whole=True)
    bench.tell(msg.SubmitLeased(submit, lease, 0))
    steps = msg.steps_of(submit, "h0")
    return msg.LeasedLaunch(1, lease, 0, submit.run, submit.program, 0, steps, (), ())


def closed(bench: Bench, host: str, lease: int, taken: int, *launches: msg.LeasedLaunch) -> None:
    bench.tell(msg.LeaseClosed(1, lease, taken, launches), sender=executor_of(host))


def test_a_client_whose_earlier_runs_wait_for_an_island_gets_no_lease() -> None:
    """It would launch runs that read what those have yet to make."""
    bench = ready()
    ran(bench, 20, has_gaps=True)
    assert not sent(bench, msg.Lend)
    ran(bench, 9)
    assert len(sent(bench, msg.Lend)) == 2


def test_a_launch_that_was_lost_with_the_link_reaches_its_host() -> None:
    bench = lent()
    launch = launched(bench)
    bench.tell(msg.HolderCutOff(HOLDER, "h1"))
    assert {host for host, _ in sent(bench, msg.CloseLease)} == {"h0", "h1"}
    closed(bench, "h0", launch.lease, 1)
    closed(bench, "h1", launch.lease, 0)
    ((host, passed_on),) = sent(bench, msg.LeasedLaunch)
    assert (host, passed_on.run) == ("h1", launch.run)
    assert {host for host, _ in sent(bench, msg.EndLease)} == {"h0", "h1"}


def test_a_launch_that_no_host_has_told_of_reaches_all() -> None:
    bench = lent()
    launch = launched(bench)
    bench.tell(msg.HolderCutOff(HOLDER, "h0"), msg.HolderCutOff(HOLDER, "h1"))
    closed(bench, "h0", launch.lease, 0)
    closed(bench, "h1", launch.lease, 0)
    assert sorted(host for host, _ in sent(bench, msg.LeasedLaunch)) == ["h0", "h1"]


def test_others_that_are_cut_off_end_no_lease() -> None:
    bench = lent()
    bench.tell(msg.HolderCutOff(HOLDER + 1, "h0"), msg.HolderCutOff(HOLDER, "h2"))
    assert not sent(bench, msg.CloseLease)


def test_the_lease_of_a_client_that_falls_silent_ends_and_nothing_else_does() -> None:
    """It may have been stopped between the sends to two hosts of a gang."""
    bench = lent()
    launch = launched(bench)
    bench.tell(msg.PeerSilent("another"))
    assert not sent(bench, msg.CloseLease)
    bench.tell(msg.PeerSilent("user"))
    assert {host for host, _ in sent(bench, msg.CloseLease)} == {"h0", "h1"}
    closed(bench, "h0", launch.lease, 1)
    closed(bench, "h1", launch.lease, 0)
    ((host, passed_on),) = sent(bench, msg.LeasedLaunch)
    assert (host, passed_on.run) == ("h1", launch.run)
    ran(bench, 9)  # it goes on as any client
    assert bench.launches()


def test_a_run_of_a_lease_that_is_gone_waits_for_what_it_reads() -> None:
    """Its hosts were lost with what it had read, which is on its way to them again."""
    bench = lent()
    (lease,) = {message.lease for _, message in sent(bench, msg.Lend)}
    array, gone = client_id(HOLDER, 500), lease + 1
    submit = bench.submission(HOLDER, awaits=(array,))
    bench.tell(msg.SubmitLeased(submit, gone, 0), msg.HolderCutOff(HOLDER, "h0"))
    for host in bench.hosts:
        closed(bench, host, lease, 0)
    before = len(bench.launches())
    assert submit.run not in {launch.run for launch in bench.launches()}
    bench.tell(msg.UploadEnded(array))
    assert bench.launches()[before:][0].run == submit.run


def test_after_a_lease_that_was_not_worth_it_more_runs_come_first_but_not_in_a_row() -> None:
    bench = lent()
    bench.tell(bench.submission(HOLDER, is_whole=True))  # it launches nothing itself
    (lease,) = {message.lease for _, message in sent(bench, msg.Lend)}
    for host in bench.hosts:
        closed(bench, host, lease, 0)
    bench.end(bench.launches()[-1])
    for lends in (2, 4):
        ran(bench, 1, is_whole=False)
        ran(bench, 9)
        assert len(sent(bench, msg.Lend)) == lends


def test_copies_of_another_client_end_the_lease_of_their_hosts() -> None:
    """Else they would wait as long as the holder launches."""
    bench = lent()
    copy = msg.ArrayCopy(client_id(HOLDER + 1, 5), split(1, 1), (DeviceAddress("h0", 0),), (0,))
    bench.tell(msg.CopyArrays(HOLDER + 1, (("h2", copy),), ()))
    assert not sent(bench, msg.CloseLease)
    bench.tell(msg.CopyArrays(HOLDER + 1, (("h0", copy),), ()))
    assert {host for host, _ in sent(bench, msg.CloseLease)} == {"h0", "h1"}
    assert bench.world.counters["leases_ended_by_copy"] == 1
