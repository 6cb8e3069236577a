"""The mutations: each breaks one promise of one actor, and the simulator must find it.

A row has a name, the breakage (`operators`, `breakages`), and how it is noticed.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from pw.core import messages as m
from pw.core.programs.guards import is_skipped
from pw.core.rights import Resource
from pw.core.tenants import OPERATOR
from tests.sim.mutations import breakages, operators
from tests.sim.mutations.operators import (
    after,
    alter,
    double,
    drop,
    each,
    forget,
    hear,
    mishear,
    mix,
    on_the_way,
    put,
    reorder,
    replay,
    skip,
    together,
    wrap,
)


class Seen(NamedTuple):
    """How a mutation is noticed."""

    profile: str
    """The mildest profile in which the mutation matters."""
    seed: int
    """A seed of the profile in which a monitor notices it soon."""
    monitors: tuple[str, ...]
    """The monitors that may notice it."""


class Mutation(NamedTuple):
    """One row."""

    install: operators.Install
    seen: Seen


MUTATIONS: dict[str, Mutation] = {}


def seen(profile: str, seed: int, *monitors: str) -> Seen:
    """Say how a mutation is noticed."""
    return Seen(profile, seed, monitors)


def row(name: str, install: operators.Install, seen: Seen) -> None:
    """Add a row to the table."""
    MUTATIONS[name] = Mutation(install, seen)


GUARDS = "host.executor.interpreter.guards"
LANES = "host.executor.interpreter.lanes"
MADE = "values are made before they are used"

# --- events --------------------------------------------------------------------------------------

# The controller publishes no end of the runs that a host took with it.
row(
    "publish-no-lost-runs",
    wrap("events.publish", lambda publish, it: None if it.what == "lost" else publish(it)),
    seen("events", 19, "events"),
)
# A client that leaves while it recovers does so for ever.
row(
    "publish-recoveries-without-end",
    forget("controller._publishing.client_left"),
    seen("events", 6, "events"),
)

# --- watches of islands --------------------------------------------------------------------------

# A client does not watch on when there is another controller.
row(
    "forget-to-watch-again",
    forget("client.session.islands.attached_again"),
    seen("watchers", 33, "watches"),
)
# The controller tells a client only the states of the moment in which it begins to watch.
row(
    "tell-no-change-of-islands",
    drop(m.IslandStates, when=lambda it: not it.is_all),
    seen("watchers", 18, "watches"),
)
# The controller tells no client that an island has not come back.
row(
    "give-up-no-island",
    forget("controller.watches.tell_given_up"),
    seen("watchers-left", 33, "watches"),
)

# --- sick devices --------------------------------------------------------------------------------

# A host says what is sick, and not that it is well again.
row(
    "say-no-device-is-well",
    drop(m.HostDevices, when=lambda it: not it.sick),
    seen("sick", 37, "sick in the end"),
)
# A host that begins again is not tested, although a device of it was sick.
row(
    "test-no-next-incarnation",
    drop(m.TestHost, when=lambda it: not it.request),
    seen("sick-lost", 37, "sick in the end"),
)
# A device that is suspect is not tested.
row(
    "test-no-suspect",
    forget("host.store.health.test_suspects", False),
    seen("sick", 34, "sick in the end"),
)
# Wrong bits count as right ones.
row(
    "take-wrong-bits",
    wrap(
        "host.store.health.judge", lambda judge, it: judge(replace(it, outcome=m.DeviceOutcome.OK))
    ),
    seen("sick", 37, "sick", "sick in the end"),
)

# A slice stays on a device that has failed.
row(
    "stay-on-failed-devices",
    forget("resources.slices.may_stay", True),
    seen("sick", 35, "left out"),
)
# New slices get devices that have failed.
row(
    "place-on-failed-devices",
    wrap("resources.slices.room", breakages.as_if_well),
    seen("sick", 35, "left out"),
)

# --- gang scheduling -----------------------------------------------------------------------------

# Two launches reach one host of a gang in the opposite order.
row("reorder-launches", reorder(0.05), seen("calm", 5, "G1", "liveness"))
# A host gets one launch twice, under two numbers.
row("duplicate-launch", double(0.2), seen("calm", 13, "once"))
# A segment is launched before the segments that make its inputs (G4).
row(
    "launch-before-producers",
    mishear("scheduler", m.Submit, lambda it: replace(it, depends=((),) * len(it.depends))),
    seen("calm", 5, "G4"),
)
# A run is launched before its arguments have arrived.
row(
    "forget-to-wait-for-an-upload",
    mishear("scheduler", m.Submit, lambda it: replace(it, awaits=())),
    seen("calm", 7, MADE, "oracle"),
)
# A host takes a launch that was meant for its island's last epoch.
row(
    "ignore-an-epoch",
    together(
        replay,
        wrap(
            "host.executor.order.take",
            lambda take, order, *rest: take(replace(order, epoch=take.__self__.epoch), *rest),
        ),
    ),
    seen("crashes", 16, "epochs"),
)
# A host does not pass an order on to the hosts below it.
row(
    "pass-nothing-on",
    forget("host.executor.passing.pass_on"),
    seen("calm", 18, "liveness", "epochs last", "G1"),
)
# A host passes an order on twice.
row(
    "pass-on-twice",
    wrap(
        "host.executor.passing.pass_on", lambda pass_on, *order: (pass_on(*order), pass_on(*order))
    ),
    seen("calm", 26, "epochs last"),
)
# A host does not keep orders that have come early.
row(
    "forget-early-orders",
    forget("host.executor.order.next_early"),
    seen("calm", 1, "epochs last", "liveness"),
)
# A host does not report that a link is lost, with what it has passed on, and another one does not miss that.
row(
    "lose-what-was-passed-on",
    together(forget("host.executor.order.link_lost"), forget("host.executor.order.look_for_gap")),
    seen("network", 11, "liveness", "G1"),
)
# A gang of one client passes another's that waits for an input on this host.
row(
    "gangs-pass-gangs",
    wrap(f"{LANES}.put", lambda method, client, work, together=False: method(client, work)),
    seen("slow", 5, "G1", "liveness"),
)
# Work of a client passes its earlier work, which waits for an input on this host.
row(
    "work-passes-work",
    wrap(f"{LANES}.put", lambda method, client, *rest: method(object(), *rest)),
    seen("calm", 26, MADE, "oracle"),
)
# A host that has lost an input of its gang is not heard.
row("gang-not-broken", drop(m.GangBroken), seen("devices", 4, "liveness", "G1"))
# A host is not told that its island's epoch is over.
row("lose-leave", drop(m.LeaveIsland), seen("crashes", 31, "liveness"))

# --- silent peers ---------------------------------------------------------------------------------

# The controller takes a client that is stopped for dead, though its machine answers.
row("silence-is-death", put("node.network.patience_s", 5.0), seen("calm", 8, "alive and given up"))
# It goes on to wait for a client whose machine is gone.
row("gone-clients-stay", put("node.network.lease_s", math.inf), seen("clients", 0, "gone and kept"))

# --- launch leases -------------------------------------------------------------------------------

# The scheduler launches on hosts that it has lent, beside their holder.
row(
    "two-numberers",
    together(
        forget("scheduler.leases.close_on"), forget("scheduler._launcher.leases.are_free", True)
    ),
    seen("leases", 0, "leases", "G1", "liveness"),
)
# The scheduler does not take back what it has lent.
row(
    "lend-parts",
    wrap("scheduler.leases.is_simple", breakages.lend_parts),
    seen("chaos", 0, "liveness", "actors never raise"),
)
row("never-revoke", drop(m.CloseLease), seen("leases", 22, "liveness"))
# The controller passes a launched run on before what it reads has come, and the scheduler does not wait either.
row(
    "queue-leased-runs-at-once",
    together(
        wrap("controller.stream.obstacle", breakages.overlook_uploads),
        mishear(
            "scheduler",
            m.SubmitLeased,
            lambda it: replace(it, submit=replace(it.submit, awaits=())),
        ),
    ),
    seen("leases-lost", 15, "oracle", "liveness", "values are made before they are used"),
)
# A host takes launches of a client after it has said what it has taken.
row(
    "take-after-the-answer",
    wrap("host.executor.leases.close", breakages.answer_and_go_on),
    seen("leases-late", 2, "leases", "liveness", "epochs last", "once"),
)
# A host does not look whose run, arrays or results a holder names in a launch.
for part, seed in (("run", 22), ("args", 19), ("results", 1)):
    row(
        f"launch-{part}-of-others",
        wrap("host.executor.leases.may_launch", partial(breakages.look_away, part)),
        seen("trespasses", seed, "leases"),
    )
# What another client launches under a lease ends it.
row(
    "strangers-end-leases",
    hear("host.executor", m.LeasedLaunch, breakages.close_for_strangers),
    seen("trespasses", 17, "leases"),
)
# A host says nothing of launches for which it has no room before their lease.
row(
    "lose-early-launches",
    forget("host.executor.leases.keep_early"),
    seen("leases-late", 2, "leases"),
)
# A launch of one computation passes earlier work of its client that waits.
row(
    "direct-past-waiting-work",
    wrap("host.executor.direct.launch", partial(breakages.overlook, ("lanes",))),
    seen("steps", 29, "G1", MADE, "oracle"),
)
# A launch of one computation does not wait for an argument that another host sends.
row(
    "direct-before-arguments",
    wrap("host.executor.direct.launch", partial(breakages.overlook, ("lanes", "arriving"))),
    seen("steps", 2, MADE, "G1", "oracle"),
)
# A host does not report the launches of one computation.
row(
    "direct-without-report",
    forget("host.executor.interpreter.ends.follow"),
    seen("steps", 0, "credits", "liveness", "census", "ledger"),
)
# What some hosts have taken of a lease does not reach the others.
row(
    "leave-a-gang-in-two",
    wrap("scheduler.leases.agree", breakages.believe_all_alike),
    seen("chaos", 94, "liveness"),
)
# The next lease begins with numbers of launches that are in flight.
row(
    "numbers-of-leases-again",
    wrap("scheduler.leases.agree", breakages.begin_again),
    seen("leases", 11, "liveness", "credits", "leases"),
)
# An end that is reported before the client has told of its launch is forgotten.
row(
    "forget-early-ends",
    put("scheduler.leases.table.early", breakages.Nothing()),
    seen("leases", 33, "liveness", "credits", "ledger"),
)
# An end is kept that is reported after the client has gone without telling of its launch.
row(
    "keep-early-ends",
    forget("scheduler.leases.table.may_be_told_of", answer=True),
    seen("clients", 19, "census"),
)
# What was asked for with a launch is said to be ready without a look.
row("ready-without-a-look", forget("host.backend.is_there", True), seen("leases", 33, "oracle"))
# A host drops an array before a leased launch that reads it.
row(
    "discard-before-leased-launches",
    alter(m.Discard, lambda it: replace(it, after=0)),
    seen("leases-late", 49, "oracle", MADE, "epochs last"),
)
# What a line was asked when it was lost is asked of no one.
row(
    "forget-what-a-line-was-asked",
    forget("client.session.lines.give_back"),
    seen("leases", 0, "liveness"),
)
# A client goes on with its lease when a line is lost, and tells of it to no one.
row(
    "overlook-a-lost-line", forget("client.session.lines.lost"), seen("leases-lost", 49, "liveness")
)
# A client does not tell of what it has launched under a lease.
row(
    "keep-launches-secret",
    forget("client.session.link.tell_launched"),
    seen("leases-lost", 0, "oracle", "liveness", "census"),
)
# A line's answer that there is no value is taken for one.
row(
    "take-every-answer",
    wrap("client.session.lines.received", breakages.take_every_answer),
    seen("leases-lost", 3, "oracle", "actors never raise"),
)
# What comes with the answer to a launch is not the value of its result.
row(
    "another-value-with-a-launch",
    wrap("host.backend.read_now", breakages.read_another),
    seen("steps", 44, "oracle"),
)
# An upload over a line is announced before earlier ones.
row(
    "overtake-earlier-uploads",
    wrap("client.session.put", breakages.overtake_earlier_uploads),
    seen("views", 40, "oracle", "liveness"),
)
# Launches read an upload that may not be on its hosts yet.
row(
    "take-for-arrived",
    wrap("client.session.put", breakages.take_for_arrived),
    seen("leases-lost", 119, "oracle", "liveness", "once"),
)
# A launch is taken for launched though no host has the upload before it.
row(
    "launch-before-its-upload",
    wrap("controller.stream.obstacle", breakages.overlook_uploads),
    seen("leases-lost", 0, "actors never raise", "oracle", "liveness"),
)
# A client gets a lease though a run that waits for another island has yet to make what it reads.
row(
    "lend-while-islands-are-away",
    mishear("scheduler", m.Submit, lambda it: replace(it, has_gaps=False)),
    seen("checkpoints", 5853027912, "oracle"),
)
# The memory of a lease is lent to others, too.
row(
    "lend-memory-twice",
    wrap("memory.set_aside", breakages.lend_uncounted),
    seen("leases-memory", 33, "memory"),
)
# The memory of a lease that is over stays set aside.
row(
    "keep-lent-memory",
    wrap("scheduler.leases.end", breakages.keep_what_was_lent),
    seen("leases-memory", 24, "memory", "census"),
)
# A host takes launches of a lease before the memory for them is free.
row(
    "launch-beyond-the-room",
    wrap("host.executor.leases.take", breakages.take_beyond_the_room),
    seen("leases-memory", 1, "memory"),
)
# A slow host stays though a spare could take its place.
row(
    "keep-the-slow-host",
    skip("resources", m.ReplaceHost, lambda it: True),
    seen("stragglers-replaced", 0, "stragglers"),
)
# --- hosts that are told to end ------------------------------------------------------------------

# A host ends before its clients have left.
row(
    "end-before-the-clients-leave",
    after("controller", m.HostMustEnd, breakages.end_at_once),
    seen("notices", 7, "suspended"),
)
# What no other host can take is not left for the next worker.
row(
    "leave-nothing-behind",
    alter(m.Leave, lambda it: replace(it, keeps=False)),
    seen("notices", 11, "oracle"),
)
# Clients do not hear that the host is gone.
row("stay-suspended", drop(m.HostEnded), seen("notices", 41, "liveness"))
# --- bounds of slices ----------------------------------------------------------------------------

# Schedulers hear of higher bounds than slices have.
row(
    "leave-out-the-bounds-of-slices",
    mishear("scheduler", m.BoundMemory, lambda it: replace(it, memory_bytes=it.memory_bytes << 9)),
    seen("bounds", 13, "bounds"),
)
# Runs do not count for their slices while they are in flight.
row(
    "count-runs-for-no-slice",
    mishear("scheduler", m.InstallProgram, breakages.forget_slices_of_runs),
    seen("bounds", 13, "bounds"),
)
# What is set aside for a lease does not count for slices.
row(
    "lend-beside-the-bound-of-slices",
    wrap("memory.room", breakages.count_for_no_slice),
    seen("bounds", 13, "bounds"),
)
# The bound of a slice is kept when the slice has been given back.
row(
    "keep-the-bounds-of-slices",
    skip("scheduler", m.BoundMemory, lambda it: not it.memory_bytes),
    seen("bounds", 8, "bounds"),
)

# --- tiers of memory -----------------------------------------------------------------------------

# A host says that an array has left before its copy is complete.
row(
    "spilled-before-the-copy",
    wrap("host.store.tiers.leave", breakages.say_spilled_at_once),
    seen("tiers", 6, "memory"),
)
# A host of a gang keeps what the others have copied to their memory.
row(
    "keep-what-others-spill",
    wrap("host.store.tiers.leave", breakages.say_spilled_and_keep),
    seen("tiers", 6, "memory"),
)
# What a run brings back to the devices is not counted.
row("return-uncounted", forget("memory.tiers.bring_back"), seen("tiers", 4, "memory"))
# Nothing is reserved for what a run brings back.
row("return-without-room", forget("memory.returns", None), seen("tiers", 6, "memory"))
# A launch reads an array in host memory.
row(
    "read-host-memory",
    wrap("host.store.tiers.bring_back", breakages.leave_the_value_away),
    seen("tiers", 11, "memory"),
)
# Arrays leave the devices that their clients have in host memory.
row(
    "spill-what-is-in-host-memory",
    wrap("scheduler.residency.candidates", breakages.also_what_is_in_host_memory),
    seen("tiers", 8, "memory"),
)
# No array leaves that a queued run reads.
row(
    "keep-what-queued-runs-read",
    wrap("scheduler.residency.candidates", breakages.only_unread),
    seen("tiers", 11, "memory"),
)
# An array counts as one in a file before the file is complete.
row(
    "in-files-before-the-file",
    wrap("host.store.tiers.write", breakages.say_written_at_once),
    seen("tiers", 10, "files"),
)
# An array is dropped from host memory before its file has its bytes.
row(
    "drop-before-the-file",
    wrap("host.files.write", breakages.write_nothing),
    seen("tiers", 7, "oracle"),
)
# A file outlives its array.
row("keep-files", forget("host.files.delete"), seen("tiers", 3, "census"))
# A run is launched while a file is written of what it reads.
row(
    "return-while-it-is-written",
    wrap("memory.tiers.returns", breakages.return_while_written),
    seen("tiers", 7, "files", "memory"),
)
# --- data ----------------------------------------------------------------------------------------

# A sender is not told where the bytes of an edge go.
row("drop-handshake", drop(m.EdgeCredit, 0.3), seen("calm", 34, "liveness"))
# An edge brings what another edge should have brought.
row("cross-edges", mix(m.EdgeData, "data", 0.1), seen("calm", 0, "oracle", "replicas are equal"))
# A receiver is not told that its sender has failed.
row(
    "lose-poison",
    drop(m.EdgeFailed, when=lambda it: not is_skipped(it.error)),
    seen("calm", 29, "liveness", "oracle"),
)
# A client gets what another client has asked for.
row("wrong-client", mix(m.Fetched, "data", apart=True), seen("calm", 13, "oracle"))
# After an island is formed again, a client looks for its arrays on the wrong hosts.
row(
    "stale-binding",
    on_the_way(m.SliceBound, breakages.turned_bindings),
    seen("crashes", 16, "oracle", "liveness"),
)
# A client is not asked for an input that was lost.
row("lose-upload-again", drop(m.UploadAgain), seen("crashes", 4, "liveness"))
# A host waits for what was asked of an earlier incarnation, of which it knows nothing.
row(
    "keep-stale-requests",
    forget("host.store.requests.is_stale", False),
    seen("shapes", 167, "liveness"),
)
# A host hands over other bytes than its devices had.
row(
    "spoil-replicas",
    wrap(
        "supervisor.hand_over",
        lambda hand_over, all: hand_over([one._replace(data=one.data[::-1]) for one in all]),
    ),
    seen("crashes", 5, "oracle", "replicas are equal"),
)
# A checkpoint is answered before the supervisors have taken the copies.
row(
    "answer-before-it-is-kept",
    wrap("supervisor.keep", breakages.keep_later),
    seen("crashes", 8, "kept", "survives"),
)
# An array counts as replicated when some of its boxes are in host memory.
row(
    "some-boxes-are-all",
    forget("controller.replicas.are_complete", True),
    seen("checkpoints", 7, "kept"),
)
# A host answers questions about values when it has computed all that it was told to before.
row("questions-stand-in-line", breakages.of_each_op(breakages.in_line), seen("slow", 22, "prompt"))

# --- releases ------------------------------------------------------------------------------------

# Hosts keep arrays that their clients have deleted.
row(
    "skip-free",
    alter(m.Discard, lambda it: replace(it, arrays=it.arrays[1:])),
    seen("calm", 12, "census"),
)
# A host never hears that it may drop something.
row("lose-a-discard", drop(m.Discard, 0.2), seen("calm", 22, "epochs last"))
# The controller does not notice that a client has died.
row(
    "lease-never-ends",
    skip("controller", m.PeerLost, lambda it: it.node.startswith("client")),
    seen("clients", 9, "census"),
)
# A client does not tell the next controller which runs were in flight.
row(
    "runs-not-retold",
    on_the_way(m.Attach | m.Resumed | m.Run, breakages.untold_runs),
    seen("restarts", 27, "oracle", "credits", "liveness"),
)
# The next controller gives its clients numbers that the last one has given.
row(
    "numbers-given-again",
    put("cluster.numbers_apart", 0),
    seen("restarts", 2, "oracle", "sessions last", "G1", "census"),
)
# A client does not get back the credit of a run.
row("lose-a-credit", drop(m.RunsSettled, 0.1), seen("calm", 12, "credits"))
# A client gets back more credits than it had runs.
row(
    "double-credit",
    alter(m.RunsSettled, lambda it: replace(it, count=it.count + 1)),
    seen("calm", 13, "credits"),
)

# --- programs and compilers ----------------------------------------------------------------------

# A client does not hear of what it has had compiled.
row("silent-compiler", drop(m.Compiled), seen("calm", 37, "liveness"))
# Hosts compile themselves, so what crashes the compiler crashes its host.
row(
    "crash-with-the-compiler",
    each("host", breakages.crash_with_compiler),
    seen("calm", 0, "epochs last"),
)
# All clients share a process, and a crash of it fails all their tasks.
row(
    "blame-all-for-a-crash-of-the-compiler",
    each("host.backend.compilers", breakages.crash_all_compilations),
    seen("calm", 13, "oracle"),
)
# Hosts compute a task before the one in front of it; the results are the same.
row(
    "later-task-first",
    mishear("host.executor", m.Install, breakages.later_task_first),
    seen("pipelines", 13, "program order"),
)
# The planner takes the same devices in another order for the same placement.
row(
    "re-shard-in-another-order",
    mishear("host.executor", m.Install, breakages.reshard_reversed),
    seen("moves", 0, "oracle", "replicas are equal"),
)

# --- shares and fairness -------------------------------------------------------------------------

# The scheduler keeps no device for a client that is about to come back.
row("keep-no-place", put("scheduler.policy.keeps_devices", False), seen("tenants", 46, "shares"))
# Work of low priority never ages: others go first for ever.
row(
    "never-age",
    wrap("scheduler.policy.order", lambda order, queues, now_s: order(queues, -math.inf)),
    seen("tenants", 124, "shares"),
)
# The table of who waits has the launches in the order of their arrival, whatever the policy is.
row(
    "foretell-by-arrival",
    wrap("scheduler.reports.forecast", breakages.by_arrival),
    seen("tenants", 11, "waits"),
)
# The scheduler launches all queued work at once, however much is in flight.
row(
    "launch-far-ahead",
    forget("scheduler.window.is_open", True),
    seen("tenants", 124, "response", "waits"),
)
# The scheduler takes the time for which a host keeps an answer for a long way: no clock can be trusted.
row(
    "mistake-time-for-distance",
    mishear("scheduler", m.PaceReport, lambda it: replace(it, held_us=0)),
    seen("stragglers", 1, "stragglers"),
)
# Hosts note launches, and never which the scheduler is told of.
row(
    "tell-no-times",
    mishear("scheduler", m.PaceReport, lambda it: replace(it, times=())),
    seen("stragglers", 0, "stragglers"),
)
# A host counts as slow because it waits in a collective: clocks do not say that it ends with the others.
row(
    "blame-hosts-that-wait",
    mishear(
        "scheduler",
        m.PaceReport,
        lambda it: replace(
            it,
            times=tuple(
                replace(one, began_us=0, ended_us=one.ended_us - one.began_us) for one in it.times
            ),
        ),
    ),
    seen("stragglers", 23, "stragglers"),
)
# A launch without room on some of its devices keeps none of them free.
row("later-launches-first", forget("scheduler._launcher._keep_free"), seen("parts", 0, "shares"))
# The scheduler divides devices among clients by what they ask for, whatever their tenants.
row(
    "shares-of-clients-alone",
    mishear("scheduler", m.AddClient, lambda it: replace(it, tenant=OPERATOR)),
    seen("divided", 1, "shares"),
)
# A user who serves has less than half of its share.
row(
    "serve-with-a-smaller-share",
    mishear(
        "scheduler",
        m.AddClient,
        lambda it: replace(it, share=0.8) if it.node.startswith("client-7.") else it,
    ),
    seen("many", 0, "deadlines"),
)
# The scheduler forgets a client when the one before it has left or was killed.
row(
    "forget-the-neighbour",
    after("scheduler", m.RemoveClient, breakages.forget_the_neighbour),
    seen("many", 0, "starvation"),
)
# Nodes handle messages in the order in which they come, whatever peer sends them.
row(
    "one-queue-for-all",
    together(
        *(
            wrap(
                f"{node}.mailbox.deliver",
                lambda deliver, peer, entry: deliver.__self__.own.append(entry),
            )
            for node in ("node", "host.node")
        )
    ),
    seen("floods", 6, "fair"),
)
# Hosts get each program when it is registered, before the launches of others.
row(
    "send-every-program-at-once",
    put("scheduler.programs.queues.at_once", 1 << 30),
    seen("floods", 16, "fair"),
)
# A host's answer for a program that was released meanwhile makes no room for the next one.
row(
    "await-programs-that-were-released",
    each("scheduler", breakages.heed_only_the_living),
    seen("floods", 16, "liveness"),
)

# --- branches ------------------------------------------------------------------------------------

# Some hosts of a gang take the branch that the others skip.
row(
    "take-a-branch-on-one-host",
    each("host", breakages.on_every_second_host),
    seen("branches", 21, "G1"),
)
# A merge gives the results of the branch that was not taken.
row(
    "merge-the-other-branch",
    wrap(f"{GUARDS}.decision", partial(breakages.opposite, merges=True)),
    seen("branches", 4, "oracle"),
)
# A host does not tell the others that it sends no value of a branch that it skips.
row(
    "skip-in-silence",
    drop(m.EdgeFailed, when=lambda it: is_skipped(it.error)),
    seen("branches", 3, "liveness", "oracle", "epochs last"),
)
# A launch holds what its branches have made, until it ends.
row("hold-to-the-end", forget(f"{GUARDS}.freed"), seen("suspended-tiers", 4311611008, "memory"))
# A computation behind a hold takes the buffer over that the value before the hold still needs.
row(
    "take-over-what-is-held-back",
    wrap(f"{GUARDS}.go", breakages.take_over_held),
    seen("branches", 0, "oracle"),
)
# A host goes on with work that waits for a value only the first time that one arrives.
row(
    "go-on-once",
    each("host.executor.interpreter", breakages.go_on_once),
    seen("branches", 88, "liveness", "oracle", "epochs last"),
)
# A host that alone could not read a predicate leaves its gang without a word.
row(
    "gang-without-its-poisoned-host",
    wrap(f"{GUARDS}.poison", lambda poison, *of, alone=False: poison(*of)),
    seen("reads", 52, "G1", "liveness", "credits"),
)

# --- rows that count -----------------------------------------------------------------------------

# A sender without rows says nothing, and its receivers wait.
row(
    "say-nothing-of-no-rows",
    wrap("host.coordinator.sending._send_inline", breakages.talk_of_rows),
    seen("ragged", 0, "liveness"),
)
# Rows travel by the counts of another cell.
row(
    "count-by-another-cell",
    breakages.counted(lambda counts: np.roll(counts, 1)),
    seen("ragged", 3, "oracle", "replicas are equal"),
)
# Rows beyond the fourth are dropped, and no error tells of it.
row(
    "drop-rows-silently",
    breakages.counted(lambda counts: np.minimum(counts, 4)),
    seen("ragged", 2, "oracle"),
)
# The padding of received rows is what was in the memory before.
row(
    "leave-old-bytes-as-padding",
    breakages.of_each_op(breakages.dirty_padding),
    seen("ragged", 3, "oracle", "replicas are equal"),
)
# A receiver takes each third small route for one without rows.
row(
    "take-rows-for-none",
    each("host.coordinator.receiving", breakages.third_without_rows),
    seen("ragged", 2, "oracle", "replicas are equal"),
)

# --- functions cut over islands ------------------------------------------------------------------

# The parts of a sum are added in another order than that of the islands.
row(
    "add-in-another-order",
    breakages.added(lambda _, op: (*op.args[1:], *op.args[:1])),
    seen("islands", 11, "oracle"),
)
# An island's part is lost, and another one is added in its place.
row(
    "add-a-part-twice",
    breakages.added(lambda _, op: (*op.args[:-1], op.args[0])),
    seen("islands", 11, "oracle"),
)
# An island's part is not added at all.
row("drop-a-part", breakages.added(breakages.without_the_last_part), seen("islands", 11, "oracle"))
# An iteration that takes over what it carries runs once more, on its own result.
row(
    "run-a-piece-twice",
    wrap("host.backend.submit", breakages.run_twice),
    seen("islands", 4, "oracle"),
)
# An edge brings a piece what another island has sent.
row(
    "take-from-another-island",
    mishear("host.executor", m.Install, breakages.take_from_another),
    seen("islands", 20, "oracle", "replicas are equal"),
)

# --- slices --------------------------------------------------------------------------------------

# When a spare has the place of a host that a slice names, the slice goes on there.
row(
    "bind-to-the-spare",
    wrap("resources.slices.bind_again", breakages.bind_anywhere),
    seen("slices", 17, "named hosts"),
)
# A block goes around the end of an axis that does not wrap around.
row(
    "wrap-around-everywhere",
    wrap("resources.slices.room", breakages.wrap_around_everywhere),
    seen("shapes", 28, "shapes"),
)
# A block has a hole.
row(
    "block-with-a-hole",
    wrap("resources.slices.room", breakages.with_a_hole),
    seen("shapes", 0, "shapes"),
)
# Two exclusive slices have one device.
row(
    "share-exclusive-devices",
    wrap("resources.slices.room", breakages.as_if_alone),
    seen("shapes", 1, "shapes"),
)
# An island refuses a shape that fits.
row(
    "refuse-shapes",
    wrap(
        "resources.slices.room", lambda room, it, but=None: None if it.topology else room(it, but)
    ),
    seen("shapes", 1, "shapes"),
)
# When a host at another place has joined, a slice stays where it has no block any more.
row(
    "stay-in-a-broken-block",
    forget("resources.slices.may_stay", True),
    seen("shapes", 17, "shapes"),
)
# The devices of an exclusive slice are kept when it is given back.
row(
    "keep-exclusive-devices",
    wrap(
        "resources.slices.vacate",
        lambda vacate, it: vacate.__self__.inventory.islands[it.island].vacate(
            it.positions, replace(it.request, exclusive=False)
        ),
    ),
    seen("shapes", 1, "shapes"),
)
# Slices with a bound may have more of a device together than it has.
row(
    "promise-memory-twice",
    wrap(
        "resources.slices.room", lambda room, it, but=None: room(replace(it, memory_bytes=0), but)
    ),
    seen("shapes", 11, "shapes"),
)
# The memory of a slice that is given back stays promised.
row(
    "keep-promised-memory",
    wrap(
        "resources.slices.vacate",
        lambda vacate, it: vacate.__self__.inventory.islands[it.island].vacate(
            it.positions, replace(it.request, memory_bytes=0)
        ),
    ),
    seen("shapes", 1, "shapes"),
)
# A slice that waits for an island is not bound when that is ready.
row("leave-it-parked", forget("resources.slices.retry_parked"), seen("calm", 1, "start"))
# While the cluster starts, requests for devices are refused at once.
row("refuse-at-the-start", put("resources.inventory.expected_islands", 0), seen("calm", 1, "start"))

# --- streams -------------------------------------------------------------------------------------

# A generator that begins anew skips nothing, so the stream goes on with its first elements.
row(
    "lose-elements-of-a-stream",
    put("host.backend.feeds.make_feeder", breakages.SkipsNothing),
    seen("streams-lost", 8, "oracle"),
)
# A host that is asked for an element again makes the next one in its place.
row(
    "read-on-in-a-stream",
    put("host.backend.feeds.make_feeder", breakages.ReadsOn),
    seen("streams-lost", 3, "oracle"),
)
# A host takes the state of an iterator for that of one element later.
row(
    "restore-a-stream-one-off",
    put("host.backend.feeds.make_feeder", breakages.IsOneElementBehind),
    seen("streams-lost", 11, "oracle"),
)
# A client begins more elements of a stream than it may.
row(
    "streams-without-back-pressure",
    each("cluster", lambda cluster: setattr(cluster, "streams", breakages.FarAhead())),
    seen("streams", 28, "back-pressure"),
)

# --- tenants -------------------------------------------------------------------------------------

# A client gets whichever number it says that it had.
row(
    "believe-every-claim", forget("cluster.claims.is_valid", True), seen("trespasses", 9, "tenants")
)
# Every client has the rights of the operator.
row(
    "rights-not-checked",
    forget("cluster.world.tenants", OPERATOR),
    seen("trespasses", 29, "tenants", "oracle"),
)
# Hosts take all programs for those of one tenant, and give it the names of all computations.
row(
    "names-for-all",
    alter(m.Install, lambda it: replace(it, tenant="tenant-0")),
    seen("trespasses", 12, "tenants"),
)
# Actors take every message that they have a handler for, whatever its sender is.
row(
    "believe-every-sender",
    forget("cluster.world.permits", True),
    seen("intruders", 17, "liveness", "epochs last", "oracle", "census"),
)
# A host gives its replicas to every host that asks.
row("permits-not-checked", each("host", breakages.permit_all), seen("trespasses", 1, "replicas"))
# A host takes replicas that another host offers.
row(
    "take-every-offer",
    wrap("cluster.world.permits", lambda permits, *of: of[2] is m.OfferReplica or permits(*of)),
    seen("trespasses", 9, "replicas"),
)
# The controller believes every host that says that it has replicas.
row(
    "believe-every-holding",
    forget("cluster.claims.may_keep", True),
    seen("trespasses", 3, "replicas"),
)
# The controller believes every host that says that an array is lost.
row(
    "believe-every-loss",
    hear("controller", m.ArraysLost, breakages.believe_loss),
    seen("trespasses", 20, "replicas"),
)
# The controller notes uploads to hosts that have no slice of the client.
row(
    "believe-every-upload",
    hear("controller", m.Uploaded, breakages.believe_upload),
    seen("trespasses", 13, "replicas"),
)

# --- timelines -----------------------------------------------------------------------------------

# A host goes on recording for a client that has died.
row(
    "record-for-ever",
    together(
        forget("host.store.recordings.forget_node"),
        forget("host.store.recordings._leases._act", False),
    ),
    seen("timelines", 93, "timelines", "census"),
)
# A client does not get one of the records of a process.
row(
    "lose-a-record",
    alter(m.Records, breakages.without_a_record, 0.2),
    seen("timelines", 0, "timelines"),
)
# A host forgets what one client has read, although another one has not read it.
row(
    "forget-what-another-reads",
    after("host.store", m.ReadRecords, lambda store, _: store.env.recorder.values.clear()),
    seen("timelines", 9, "timelines"),
)
# The controller stops recording when the first of several clients stops.
row(
    "stop-for-all",
    after(
        "controller",
        m.ReadRecords,
        lambda control, it: it.stop and setattr(control.env.recorder, "on", False),
    ),
    seen("timelines", 22, "timelines"),
)
# The controller's process leaves out the launches that have not ended when a timeline ends.
row(
    "leave-out-what-is-in-flight",
    each("scheduler.env.recorder.unfinished", dict.clear),
    seen("timelines", 35, "timelines"),
)
# A process tells another time than that of its records.
row(
    "wrong-time",
    alter(m.Records, lambda it: replace(it, now_s=it.now_s + 0.2)),
    seen("timelines", 16, "clocks"),
)

# --- views and handovers -------------------------------------------------------------------------

# When a source is deleted, a host frees its shards, although views name them.
row(
    "free-viewed-shards",
    wrap("host.store.arrays.drop", breakages.free_viewed),
    seen("views", 16, "oracle", "replicas are equal"),
)
# A computation overwrites a donated shard that a view names as well.
row("donate-viewed-shards", breakages.of_each_op(breakages.unshared), seen("views", 8, "views"))
# A gang reads a view of which one host has an error, before the other hosts know of it.
row(
    "uneven-views-are-not-settled",
    wrap("host.executor.interpreter._await_outcome", breakages.at_once),
    seen("views", 5, "liveness", "oracle", "G1"),
)
# The scheduler counts the memory of a shard for its array, and for each view of it.
row(
    "count-viewed-shards-twice",
    wrap(
        "memory._view", lambda view, output, on, of, *to: view(output, on, dict.fromkeys(of), *to)
    ),
    seen("views-lost", 1, "views"),
)
# The scheduler counts the memory of a shard for ever, if a view has named it.
row(
    "keep-viewed-shards",
    wrap(
        "memory._let_go",
        lambda let_go, buffer: None if buffer.shards is not None else let_go(buffer),
    ),
    seen("views-lost", 7, "memory"),
)
# The exporter may delete and donate what it has offered before the importer has it.
row(
    "offers-not-guarded",
    after(
        "controller",
        m.Offer,
        lambda control, _: [client.offered.clear() for client in control.sessions.clients],
    ),
    seen("shares", 127, "repeats"),
)
# The controller deletes offered arrays before they are taken.
row(
    "delete-offered-arrays",
    wrap("controller.handovers.keep", lambda keep, client, arrays: arrays),
    seen("shares", 32, "oracle"),
)
# The controller counts a taken array as arrived before the exporter has made it.
row(
    "arrived-when-taken",
    wrap("controller.handovers.ask", breakages.arrived_when_asked),
    seen("shares", 6, "oracle", "liveness", "epochs last", "views"),
)
# Recovery repeats a run before what it reads, of another session, is made.
row(
    "repeat-before-it-is-made",
    wrap("controller.handovers.is_asked", lambda is_asked, number: False),
    seen("shares-lost", 9810733, "liveness"),
)

# What is handed on before it has come holds up its client, whose later offer may be needed first.
row(
    "hand-on-in-line",
    forget("controller.handovers.is_behind", False),
    seen("shares", 920035, "oracle"),
)

# --- islands that are away -----------------------------------------------------------------------

# What needs an island that is away, or what comes of that, is handled at once.
row(
    "away-passes-everything",
    wrap("controller.stream.proceed", breakages.pass_everything),
    seen("away", 4, "oracle", "actors never raise"),
)
# Everything waits while an island is away.
row(
    "away-holds-everything",
    wrap("controller.stream.proceed", breakages.set_all_aside),
    seen("away", 4, "others go on"),
)
# A message passes a run whose results it reads.
row(
    "away-forgets-what-is-made",
    wrap("controller.stream.proceed", partial(breakages.forget_aside, "results")),
    seen("away", 5, "oracle", "census"),
)
# A message takes away what a waiting run reads.
row(
    "away-forgets-what-is-read",
    wrap("controller.stream.proceed", partial(breakages.forget_aside, "arguments")),
    seen("away", 4, "oracle"),
)
# A run that was passed is taken for one that has come before.
row(
    "away-forgets-who-was-passed",
    wrap("controller.stream.proceed", partial(breakages.forget_aside, "overtaken")),
    seen("away", 10, "liveness", "credits", "oracle"),
)
# What waited returns in the opposite order.
row(
    "away-returns-backwards",
    wrap("controller.stream.go_on", breakages.return_backwards),
    seen("away", 4, "oracle"),
)
# An island is never given up.
row("away-waits-for-ever", forget("controller.slices.expect"), seen("away", 5, "given up"))
# An island is given up before the client's time is over.
row(
    "away-gives-up-early",
    wrap("controller.slices.expect", breakages.give_up_early),
    seen("away", 5, "given up"),
)

# --- what tenants may have ------------------------------------------------------------------------

# The ledger counts the devices of a slice that was given back.
row(
    "count-devices-for-ever",
    wrap(
        "controller.usage.give",
        lambda give, client, resource, key: (
            resource is not Resource.DEVICES and give(client, resource, key)
        ),
    ),
    seen("quotas", 2, "ledger"),
)
# The ledger counts the programs that were released.
row(
    "count-programs-for-ever",
    wrap(
        "controller.usage.give",
        lambda give, client, resource, key: (
            resource is not Resource.PROGRAMS and give(client, resource, key)
        ),
    ),
    seen("quotas", 5, "ledger"),
)
# The ledger counts the replicas of arrays that were deleted.
row(
    "count-replicas-for-ever",
    wrap(
        "controller.usage.give",
        lambda give, client, resource, key: (
            resource is not Resource.HOST_MEMORY and give(client, resource, key)
        ),
    ),
    seen("quotas", 6, "ledger"),
)
# The ledger counts what a client had that was killed.
row("count-clients-that-left", forget("controller.usage.leave"), seen("quotas", 37, "ledger"))
# The controller compares nothing with the bounds.
row("leave-out-the-bounds", forget("controller.usage.check"), seen("quotas", 6, "quotas"))
# Schedulers do not hear what tenants may have on a device.
row(
    "leave-out-the-bounds-of-devices",
    mishear("scheduler", m.AddClient, lambda it: replace(it, device_memory_bytes=None)),
    seen("quotas", 17, "quotas"),
)
# An upload counts for its tenant, although the tenant may not have so much.
row(
    "let-all-uploads-in",
    forget("scheduler.admission.pending.fits", True),
    seen("quotas", 22, "quotas"),
)
# What is set aside for a lease counts for no tenant.
row(
    "lend-beside-the-bound",
    wrap("memory.room", breakages.count_for_no_tenant),
    seen("quotas", 15, "quotas"),
)
# The results of a run count for no tenant once it has ended.
row(
    "count-results-for-no-tenant",
    wrap("memory.end", breakages.end_for_no_tenant),
    seen("quotas", 17, "quotas"),
)
# Work that waits for memory of its tenant is never refused.
row(
    "wait-for-memory-for-ever",
    forget("scheduler.admission.go_on", False),
    seen("quotas", 33, "liveness"),
)
# A slice waits on after a client of its tenant has left.
row(
    "wait-on-after-a-client-left",
    wrap("controller.slices.client_left", breakages.without_another_try),
    seen("quotas", 25, "quotas"),
)
# A client that comes back gets the slices that it says it had, whatever its tenant may have.
row(
    "believe-what-clients-had",
    wrap("controller.slices.queue.ask", breakages.believe_what_it_had),
    seen("quotas", 64, "quotas"),
)
# A client gets a slice on the devices of another tenant's.
row(
    "lend-devices-to-all", forget("controller.slices.lends", True), seen("trespasses", 0, "tenants")
)
# The accounts have no launches that end after their client has left.
row("forget-late-launches", forget("scheduler.spending.ended_late"), seen("quotas", 11, "accounts"))
# The accounts have each launch twice.
row(
    "account-twice",
    wrap("controller.accounts.take", lambda take, client: [*take(client)] * 2),
    seen("quotas", 0, "accounts"),
)
# Hosts forget a part of what they send.
row(
    "forget-bytes-sent",
    wrap("host.coordinator.sending.count", lambda count, run, size: count(run, size // 2)),
    seen("moves", 4, "accounts"),
)
# The accounts have what hosts send twice.
row(
    "account-bytes-twice",
    wrap("controller.accounts.add", breakages.count_bytes_twice),
    seen("moves", 4, "accounts"),
)
# The accounts lose what the disk had no room for.
row(
    "lose-what-is-not-written",
    wrap("cluster.accounts.write", lambda write, entries: write(entries) or True),
    seen("quotas", 23, "accounts"),
)

# --- names ---------------------------------------------------------------------------------------

# A name gets a version although a computation that makes an array of it has failed.
row(
    "publish-before-values",
    wrap("controller.names.confirmations.ask", lambda ask, arrays, then: then(None)),
    seen("names", 7, "names"),
)
# One array of a version is that of the version before it.
row(
    "mix-versions",
    wrap("controller.names.take", breakages.with_an_older_array),
    seen("names", 13, "oracle"),
)
# A version is complete when the arrays of its first slice are there.
row(
    "swap-by-halves",
    wrap("controller.names.arrive", breakages.by_its_first_part),
    seen("names", 3, "names"),
)
# A version that arrives late replaces a later one.
row(
    "bring-an-older-version-back",
    wrap("controller.names.complete", breakages.whatever_is_newer),
    seen("names-lost", 25, "names"),
)
# A version goes while readers have arrays of it.
row(
    "delete-versions-with-readers",
    wrap("controller.names.release", breakages.without_counting),
    seen("names", 2, "names"),
)
# The controller does not tell a publisher that its version has ended.
row("keep-what-has-ended", forget("controller.names.tell_of_end"), seen("names", 26, "names"))
# A client publishes again at another controller what had ended while it arrived.
row(
    "publish-again-what-has-ended",
    forget("client.session.link.has_ended", False),
    seen("names-lost", 90, "names", "liveness"),
)
# What a holder has to do when its versions end is not done.
row("let-holders-sleep", forget("controller.sessions.wake"), seen("names", 0, "names"))

# --- suspensions ---------------------------------------------------------------------------------

ASUNDER = ("run once", "suspended", "oracle", "liveness", "repeats", MADE)
# A scheduler goes on with what is queued of a client that is to leave its devices.
row(
    "launch-of-the-suspended",
    after("scheduler", m.HoldLaunches, breakages.hold_nothing),
    seen("suspended", 46, *ASUNDER),
)
# The boundary of a suspension is before what was launched.
row(
    "withdraw-launched-runs",
    wrap("controller.suspensions.behind_boundary", breakages.all_in_flight),
    seen("suspended", 3, *ASUNDER),
)
# What only queued runs read is not copied.
row(
    "copy-only-what-is-held",
    wrap("controller.suspensions.present", breakages.held_alone),
    seen("suspended", 56, *ASUNDER),
)
# A client leaves its devices before its arrays are copied.
row(
    "leave-before-copies",
    forget("controller.suspensions.are_copied", answer=True),
    seen("suspended", 3, *ASUNDER),
)
# The hosts keep the arrays of a client that has left its devices.
row(
    "keep-arrays-of-the-suspended",
    forget("controller.suspensions.release"),
    seen("suspended", 33, *ASUNDER),
)
# A client uploads on while it is suspended.
row(
    "upload-while-suspended",
    mishear("client.session", m.PauseUploads, lambda it: replace(it, is_over=True)),
    seen("suspended", 154, *ASUNDER),
)
# A client does not say to another controller that it was suspended.
row(
    "forget-who-was-suspended",
    alter(m.Attach, lambda it: replace(it, suspended_by="")),
    seen("suspended-restarted", 29, "suspended"),
)
# Arrays with an error come back as if they had none.
row(
    "forget-errors-of-values",
    mishear("host.store", m.Restore, lambda it: replace(it, error=None)),
    seen("suspended-tiers", 15, *ASUNDER),
)
# A host answers with the bytes of another array while a client is suspended.
row(
    "read-the-copy-of-another",
    wrap("host.store.arrays.copies", breakages.copies_turned_round),
    seen("suspended", 16, "oracle"),
)
# A host tells of a copy that is to lie in a file before the file is complete.
row(
    "tell-of-copies-before-their-files",
    wrap("host.store.replicas.memory.hold", breakages.write_later),
    seen("suspended-tiers", 6, "copies in files"),
)
# The file of a copy outlives the copy.
row(
    "keep-files-of-copies",
    forget("host.store.replicas.memory.held.delete_file"),
    seen("suspended-tiers", 15, "census"),
)
# The files of copies do not have their bytes.
row(
    "copies-of-zeros",
    wrap("host.files.write", breakages.write_nothing),
    seen("suspended-tiers", 10, "oracle"),
)
# --- moves that are prepared ---------------------------------------------------------------------

# A client leaves its devices before its programs are compiled at its new place.
row(
    "move-before-compilations",
    forget("controller.migrations.is_prepared", answer=True),
    seen("suspended", 11, "compiled ahead"),
)
# What was copied for a move stays in host memory.
row(
    "keep-copies-of-moves",
    wrap("controller.migrations.clear", breakages.forget_copies),
    seen("suspended", 6, "copies ahead"),
)
# --- moves that make room ------------------------------------------------------------------------

# The slices with the most bytes move.
row(
    "move-the-most-bytes",
    wrap("resources.planner.candidates", breakages.the_last_first),
    seen("rebalanced", 16, "moves"),
)
# One of the slices in the way stays.
row(
    "leave-one-in-the-way",
    wrap("resources.planner.tried", breakages.all_but_one),
    seen("rebalanced", 27, "moves"),
)
# A suspended client keeps the slices that it has asked for while it left the others.
row(
    "keep-new-slices",
    wrap("controller.suspensions.suspend", breakages.keep_new_slices),
    seen("rebalanced", 9, *ASUNDER),
)
# Who asks for the devices of a slice that is away is told to ask again at once.
row(
    "ask-again-at-once",
    alter(m.Inquire, lambda it: replace(it, slices=())),
    seen("rebalanced", 73, "oracle"),
)
# Slices of a client that goes on are bound one by one.
row(
    "bind-one-by-one",
    mishear("resources", m.AllocateSlice, lambda it: replace(it, together=False)),
    seen("rebalanced", 107, "liveness"),
)
