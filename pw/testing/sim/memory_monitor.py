"""The monitor of schedulers' memory: what views and leased launches take there, and what lies in files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from pw.core.ids import client_of
from pw.sched.island.buffers import Tier
from pw.sched.island.memory_report import counted
from pw.sched.island.memory_tiers import host_bytes
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.world import Violation, World


def watch_memory(cluster: SimCluster, island: str) -> None:
    """Watch the memory of an island from now on: a view takes none, and leases take what was set aside."""
    scheduler = cluster.schedulers.get(island)
    memory: Any = None if scheduler is None else scheduler.admission.memory
    if memory is None:
        return
    reserve, end = memory.reserve, memory.end

    def watched(act: Callable[..., Any], *args: Any, back: int = 0) -> Any:
        before = counted_bytes(memory) + back
        result = act(*args)
        cluster.world.checked["views' memory"] += 1
        if counted_bytes(memory) > before:
            raise Violation("views", f"{island} counts memory for a view")
        return result

    def reserved(program: int, args: Any, results: Any) -> Any:
        needs = memory.programs.get(program)
        has_views = needs is not None and any(one.shards for one in needs.memory.outputs)
        # A small host value is no array: hosts make it for the view.
        if has_views and all(isinstance(arg, int) for arg in args):
            back = memory.returns(needs, args)  # what it names comes back to the devices
            back_bytes = 0 if back is None else sum(back.bytes_in(t).sum() for t in memory.totals)
            return watched(reserve, program, args, results, back=back_bytes)
        return reserve(program, args, results)

    def ended(claim: Any) -> None:
        outputs = () if claim.needs is None else claim.needs.memory.outputs
        if any(output.shards for output in outputs):
            watched(end, claim)
        else:
            end(claim)

    memory.reserve, memory.end = reserved, ended
    _watch_lent(cluster.world, island, memory)
    if memory.tiers.spill_bytes:
        _watch_room(cluster.world, island, scheduler)
        _watch_files(cluster, island, memory)


def _watch_room(world: World, island: str, scheduler: Any) -> None:
    """Check that no run is refused for which arrays could have left the devices."""
    admission, residency = scheduler.admission, scheduler.residency
    make_room = residency.make_room

    def room() -> bool:
        is_on_its_way: bool = make_room()
        memory = admission.memory
        if is_on_its_way or memory is None or memory.claims or memory.arriving:
            return is_on_its_way
        for reservation in admission.blocked():
            world.checked["room"] += 1
            queue = scheduler.queues.clients.get(client_of(reservation.run))
            if queue is not None and queue.held_but is not None:
                continue  # its client is to leave the devices: it may fit, and waits
            if reservation.tried_at != memory.frees:
                continue  # it may fit now, and has not been tried: the window is closed
            read = {memory.buffer_of(arg) for arg in reservation.args}
            total = reservation.short or memory.total
            free = -memory.shortage(total, reservation.program, reservation.args)
            used = memory.tiers.used_bytes.copy()
            for buffer in set(memory.buffers.values()) - read:
                if buffer.may_leave and total in buffer.on.totals:
                    free[buffer.on.devices] += buffer.shard_bytes
                    for device in buffer.on.addresses:
                        used[device.host] += buffer.shard_bytes
            if any(size_bytes > memory.tiers.spill_bytes for size_bytes in used.values()):
                continue  # it depends on which of them leave
            if (free >= 0).all():
                words = (
                    f"{island} finds no room for run {reservation.run:x}, though arrays could leave"
                )
                raise Violation("memory", words)
        return is_on_its_way

    residency.make_room = room


def _watch_files(cluster: SimCluster, island: str, memory: Any) -> None:
    """Check that an array counts as one in files when its hosts have written them, and not before."""
    tiers = memory.tiers
    written = tiers.written
    hosts = {host.name: host for host in cluster.hosts}

    def checked(buffer: Any, *, kept: bool) -> None:
        arrays = [array for array, one in memory.buffers.items() if one is buffer]
        for host in {device.host for device in buffer.on.addresses} if not kept else ():
            cluster.world.checked["files"] += 1
            store = hosts[host].store
            for entry in filter(None, map(store.arrays.get, arrays)):
                if entry.value.error is None and not entry.value.is_in_file:
                    words = f"{island} counts array {entry.array:x} in files, and {host} has no file of it"
                    raise Violation("files", words)
        written(buffer, kept=kept)
        used: Counter[str] = Counter()
        for one in tiers.off:
            if one.tier is not Tier.FILE:
                used += host_bytes(one.on.addresses, one.shard_bytes)
        if used != +tiers.used_bytes or any(n > tiers.spill_bytes for n in used.values()):
            raise Violation(
                "files", f"{island} counts {tiers.used_bytes} in host memory, not {used}"
            )

    tiers.written = checked


def _watch_lent(world: World, island: str, memory: Any) -> None:
    """Check that what is reserved for a leased launch was set aside before, and is counted."""
    claim = memory.claim

    def claimed(room: Any, *run: Any) -> Any:
        reservation = claim(room, *run)
        world.checked["lent memory"] += 1
        if room.peaks < 0 or any(one.arrays_bytes < 0 for one in counted(memory)):
            words = f"{island} reserves memory for a leased launch that was not set aside"
            raise Violation("memory", words)
        return reservation

    memory.claim = claimed


def counted_bytes(memory: Any) -> int:
    """Return what a scheduler counts on all devices of its island together, for each total."""
    memory.settle()
    return sum(int(total.used.sum()) for total in memory.totals)
