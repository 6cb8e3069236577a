"""The memory of a lease: what is set aside for launches, and what becomes of it."""

from __future__ import annotations

from pw.core.ids import client_id
from pw.core.programs.peak import IslandMemory, OutputMemory
from pw.core.sharding import DeviceAddress
from pw.sched.island.lent_memory import LentMemory, can_be_lent, shared_arrays
from pw.sched.island.memory import DeviceMemory
from pw.sched.island.memory_report import counted

DEVICE = DeviceAddress("h0", 0)
CLIENT = 1
PROGRAM, OTHER = client_id(CLIENT, 1), client_id(CLIENT, 2)
RESULT = 10
ROOM = 1000


def needs(
    *outputs: OutputMemory, inputs: int = 1, donated: tuple[int, ...] = (), temporary: int = 0
) -> IslandMemory:
    size = sum(one.shard_bytes for one in outputs if one.same_as_input < 0)
    computes = ((0, 0, size + temporary),)
    return IslandMemory(
        "i", ((DEVICE,),), (size,), computes, tuple(range(inputs)), donated, outputs
    )


def made(output: int = 0, same_as_input: int = -1) -> OutputMemory:
    return OutputMemory(output, (DEVICE,), RESULT, same_as_input)


def lent(memory: DeviceMemory, window: int = 256) -> LentMemory:
    room = LentMemory(memory, CLIENT, (PROGRAM,), window)
    room.widen()
    return room


def memory_with(island: IslandMemory) -> DeviceMemory:
    memory = DeviceMemory("i", ROOM)
    memory.install(PROGRAM, "p", island)
    return memory


def test_half_of_what_is_free_is_set_aside_but_no_more_than_runs_can_take() -> None:
    memory = memory_with(needs(made()))
    assert lent(memory).granted_bytes == ROOM // 2
    assert memory.used_bytes(DEVICE) == ROOM // 2
    other = memory_with(needs(made()))
    assert lent(other, window=5).granted_bytes == 5 * RESULT


def test_a_lease_with_room_for_few_runs_is_not_worth_it() -> None:
    memory = memory_with(needs(made()))
    memory.place(client_id(CLIENT, 5), (DEVICE,), ROOM - 14 * RESULT)
    room = lent(memory)
    assert not room.is_enough
    room.end()
    assert memory.used_bytes(DEVICE) == ROOM - 14 * RESULT


def test_a_launch_takes_its_memory_out_of_the_room_and_gives_it_back() -> None:
    memory = memory_with(needs(made()))
    room = lent(memory, window=20)
    whole = memory.used_bytes(DEVICE)
    claim = room.launched(PROGRAM, (client_id(CLIENT, 5),), (client_id(CLIENT, 6),))
    assert memory.used_bytes(DEVICE) == whole  # reserved instead of set aside
    memory.end(claim)
    assert memory.used_bytes(DEVICE) == whole  # a live array
    memory.release(client_id(CLIENT, 6))
    assert memory.used_bytes(DEVICE) == whole - RESULT
    for number in range(10, 20):
        memory.end(room.launched(PROGRAM, (client_id(CLIENT, 5),), (client_id(CLIENT, number),)))
        memory.release(client_id(CLIENT, number))
    assert room.widen()
    assert room.granted_bytes == 20 * RESULT + 11 * RESULT
    assert not room.widen()


def test_temporaries_stay_reserved_while_hosts_are_lent() -> None:
    memory = memory_with(needs(made()))
    memory.add_temporaries(PROGRAM, (300,))
    room = lent(memory, window=5)
    assert memory.used_bytes(DEVICE) == 300 + 5 * RESULT
    memory.end(room.launched(PROGRAM, (client_id(CLIENT, 5),), (client_id(CLIENT, 6),)))
    assert memory.used_bytes(DEVICE) == 300 + 5 * RESULT
    room.end()
    assert memory.used_bytes(DEVICE) == RESULT


def test_after_a_lease_only_what_was_launched_keeps_its_room() -> None:
    memory = memory_with(needs(made()))
    room = lent(memory)
    room.keep([PROGRAM, None, PROGRAM])  # one launch that is not known
    assert memory.used_bytes(DEVICE) == 3 * RESULT
    assert memory.claims == 1  # others wait for it, and are not refused
    (device,) = counted(memory)
    assert device.reserved == ((CLIENT, 3 * RESULT),)
    room.end()
    assert memory.used_bytes(DEVICE) == 0
    assert memory.claims == 0


def test_programs_that_donate_are_not_lent_with_those_that_share_buffers() -> None:
    memory = memory_with(needs(made(), donated=(0,)))
    assert can_be_lent(memory, (PROGRAM,))
    memory.install(OTHER, "returns its argument", needs(made(0, same_as_input=0)))
    assert can_be_lent(memory, (OTHER,))
    assert not can_be_lent(memory, (PROGRAM, OTHER))


def test_arrays_that_share_a_buffer_are_named() -> None:
    memory = memory_with(needs(made(0, same_as_input=0)))
    argument, result = client_id(CLIENT, 5), client_id(CLIENT, 6)
    memory.place(argument, (DEVICE,), RESULT)
    assert shared_arrays(memory, CLIENT) == ()
    claim = memory.reserve(PROGRAM, (argument,), (result,))
    assert claim is not None
    memory.end(claim)
    assert set(shared_arrays(memory, CLIENT)) == {argument, result}
    assert shared_arrays(memory, CLIENT + 1) == ()
