"""The memory of a lease: room for launches that the scheduler does not know of yet.

A client under a lease launches runs that were not admitted. So their memory is set aside before: the same
room on each device of the lease, and the temporaries of its programs. The client counts what its launches take
(`LentProgram.room_bytes`), and launches nothing beyond the room. When it tells of a run, room becomes the
reservation of the run, like that of every run. What runs and deletes free makes the room wider again.

So what is set aside, and what is reserved, never goes beyond what the devices have, nor beyond what the tenant
and the slices may have there. On a slice that has a bound, as much is set aside as on the devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pw.core.ids import client_of
from pw.core.programs.peak import OutputMemory
from pw.sched.island.memory import Claim, DeviceMemory
from pw.sched.island.memory_totals import Needs

RUNS = 8
"""Number of runs below which room is not worth a lease."""


class LentMemory:
    """Memory that is set aside for one launch lease.

    Args:
        memory: that of the island.
        client: the client that gets the lease.
        programs: what the client may launch.
        window: of so many runs the client may be ahead.
    """

    def __init__(
        self, memory: DeviceMemory, client: int, programs: Collection[int], window: int
    ) -> None:
        self._memory = memory
        needs = {number: memory.programs.get(number) for number in programs}
        self.charges = {
            number: 0 if one is None else one.largest_bytes for number, one in needs.items()
        }
        """Bytes of the room that a run of each program takes."""
        self._needs = [one for one in needs.values() if one is not None]
        self._room = memory.room(client, self._needs)
        self._largest = max(self.charges.values(), default=0)
        self._most = self._largest * window
        self.granted_bytes = 0
        """Bytes that are set aside in all."""
        self._tried_at = -1
        memory.aside.add(self._room)
        for one in self._needs:
            one.let_compute()

    @property
    def _room_bytes(self) -> int:
        """Set aside on each device now."""
        return int(self._room.peaks)

    @property
    def is_enough(self) -> bool:
        """Whether there is room for some runs."""
        return self._room_bytes >= min(RUNS * self._largest, self._most)

    def widen(self) -> bool:
        """Set more aside if half of the room is used; return whether it is worth telling.

        Half of what is free stays free: uploads are not admitted.
        """
        memory = self._memory
        if self._tried_at == memory.frees or 2 * self._room_bytes >= self._most:
            return False
        self._tried_at = memory.frees
        free_bytes = max(0, memory.free_bytes(self._room)) // 2
        more_bytes = min(free_bytes, self._most - self._room_bytes)
        if more_bytes < max(self._largest, self._room_bytes // 2):
            return False
        memory.set_aside(self._room, more_bytes)
        self.granted_bytes += more_bytes
        return True

    def launched(self, program: int, args: Sequence[int | bytes], results: Sequence[int]) -> Claim:
        """A run has been launched: reserve its memory out of the room."""
        return self._memory.claim(self._room, self.charges[program], program, args, results)

    def keep(self, programs: Sequence[int | None]) -> None:
        """No more has been launched than a run of each of these programs, None for one of any.

        The client will tell of them.
        """
        kept = [self._largest if one is None else self.charges[one] for one in programs]
        self._memory.set_aside(self._room, sum(kept) - self._room_bytes)
        self._memory.aside.discard(self._room)
        self._memory.reserved.add(self._room)

    def end(self) -> None:
        """Set nothing aside any more."""
        self._memory.set_aside(self._room, -self._room_bytes)
        self._memory.aside.discard(self._room)
        self._memory.reserved.discard(self._room)
        needs, self._needs = self._needs, []
        for one in needs:
            one.let_compute_no_more()


def shared_arrays(memory: DeviceMemory, client: int) -> tuple[int, ...]:
    """Return the arrays of a client whose buffers others have, too: hosts donate a copy of such an array."""
    return tuple(
        array
        for array, buffer in memory.buffers.items()
        if client_of(array) == client and (buffer.names > 1 or buffer.shards is not None)
    )


def can_be_lent(memory: DeviceMemory, programs: Collection[int]) -> bool:
    """Whether a client can count what these programs need: no donated array has another name."""
    needs = [one for number in programs if (one := memory.programs.get(number)) is not None]
    return not any(one.memory.donated for one in needs) or not any(map(_shares, needs))


def _shares(needs: Needs) -> bool:
    """Whether a result of a program has the buffer of something that stays."""
    donated = needs.memory.donated
    return any(_is_shared(output, donated) for output, _ in needs.outputs)


def _is_shared(output: OutputMemory, donated: tuple[int, ...]) -> bool:
    stays = output.same_as_input >= 0 and output.same_as_input not in donated
    return stays or output.same_as_output >= 0 or bool(output.shards)
