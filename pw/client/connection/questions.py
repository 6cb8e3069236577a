"""What the API asks the controller and the hosts; each answer is a future."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any, TypeVar

import msgspec

from pw.client.connection.waiting import Waiting, time_left
from pw.client.display.live import About, patiently
from pw.client.session.thread_messages import (
    Ask,
    AskCompiler,
    DescribeCheckpoint,
    Listen,
    StartTimeline,
    StopTimeline,
)
from pw.client.session.timelines import RecordedProcess
from pw.core import messages as msg
from pw.core.errors import ArgumentError, ConnectionFailed, Error
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding
from pw.transport.links.codec import MAX_FRAME_BYTES

T = TypeVar("T")

STATUS_S = 30.0
EXPLAIN_S = 10.0
ARTIFACT_BYTES = MAX_FRAME_BYTES - (1 << 20)
"""The largest artifact that a message holds, beside what else is in it."""
HURRIED_S = 1.5
"""Seconds that an explanation may take that belongs to an error."""


class Questions:
    """Asks on behalf of the API's threads.

    Args:
        post: hands a note to the session. Raises Error when the session has ended.
        address: the controller's address; None if it is in this process.
        artifact_bytes: how large a compiled function may be.
    """

    def __init__(
        self,
        post: Callable[[object], None],
        address: str | None,
        artifact_bytes: int = ARTIFACT_BYTES,
    ) -> None:
        self._post = post
        self._artifact_bytes = artifact_bytes
        self._where = f"at {address}" if address else "in this process"
        self._timelines = count(1)
        self._saving: set[Waiting[Any]] = set()
        """Checkpoints that hosts are writing to disk."""

    def waiting(self, what: str, before: Callable[[], None] = lambda: None) -> Waiting[Any]:
        """Return a future whose line says that a thread waits for `what`."""
        return Waiting(self.in_the_way, partial(self.about, what), before)

    def about(self, what: str) -> About:
        """Describe a wait for `what`."""
        return About(what, self.ask_why)

    def _ask(
        self, request: Callable[[int], object], answer: Future[T], arrays: tuple[int, ...] = ()
    ) -> Future[T]:
        self._post(Ask(request, answer, arrays))
        return answer

    # --- reports -------------------------------------------------------------------------------------

    def status(self, timeout_s: float = STATUS_S) -> msg.Status:
        """Return the state of the cluster. Raises ConnectionFailed if the controller does not answer."""
        return self._answered(self._ask(msg.GetStatus, Future[msg.Status]()), timeout_s)

    def memory(self, timeout_s: float = STATUS_S) -> msg.Memory:
        """Return the memory of all devices. Raises ConnectionFailed if the controller does not answer."""
        return self._answered(self._ask(msg.GetMemory, Future[msg.Memory]()), timeout_s)

    def queue(self, timeout_s: float = STATUS_S) -> msg.Queue:
        """Return which clients wait, and for which. Raises ConnectionFailed if nothing answers."""
        return self._answered(self._ask(msg.GetQueue, Future[msg.Queue]()), timeout_s)

    def test_devices(self, island: str, timeout_s: float) -> msg.DevicesTested:
        """Have the devices of an island tested, of all if it is empty. Raises AccessRefused, ArgumentError."""
        request = partial(msg.TestDevices, island=island)
        answer: Future[msg.DevicesTested] = self.waiting("the test of devices")
        self._ask(request, answer)
        return self._answered(answer, timeout_s)

    def plan(self, name: str, program: int, timeout_s: float = STATUS_S) -> msg.ProgramPlan:
        """Return the plan of a program. Raises ArgumentError if there is none, or ConnectionFailed."""
        request = partial(msg.GetPlan, name=name, program=program)
        return self._answered(self._ask(request, Future[msg.ProgramPlan]()), timeout_s)

    def stats(self, timeout_s: float) -> dict[str, msg.Stats]:
        """Return what the controller and each host say of themselves."""
        answer = self._ask(msg.GetStats, self.waiting("the counters of all hosts"))
        return dict(answer.result(timeout_s))

    def ask_why(self) -> Future[msg.Explanation]:
        """Ask the controller what holds up this client."""
        return self._ask(msg.Explain, Future[msg.Explanation]())

    def explain(self, timeout_s: float = EXPLAIN_S) -> msg.Explanation:
        """Return what holds up this client. Raises ConnectionFailed if the controller does not answer."""
        return self._answered(self.ask_why(), timeout_s)

    def in_the_way(self) -> str:
        """Return in words what holds up this client, for the error of a timeout; raises nothing."""
        try:
            return self.explain(HURRIED_S).text
        except Error as error:
            return str(error)

    def start_timeline(self, timeout_s: float = STATUS_S) -> int:
        """Have all processes record; return the timeline's number. Raises ConnectionFailed."""
        number, ready = next(self._timelines), Future[None]()
        self._post(StartTimeline(number, ready))
        self._answered(ready, timeout_s)
        return number

    def stop_timeline(
        self, number: int, timeout_s: float = STATUS_S
    ) -> tuple[RecordedProcess, ...]:
        """End a timeline, and return what each process has recorded. Raises ConnectionFailed."""
        collected: Future[tuple[RecordedProcess, ...]] = Future()
        self._post(StopTimeline(number, collected))
        return self._answered(collected, timeout_s)

    def _answered(self, answer: Future[T], timeout_s: float) -> T:
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            raise ConnectionFailed(
                f"the controller {self._where} has not answered within {timeout_s:g} s; is it running?"
            ) from None

    # --- requests ------------------------------------------------------------------------------------

    def cancel_runs(self, client: int, run: int = 0) -> Future[None]:
        """Cancel one run of any client, or all that the client has in flight."""
        return self._ask(lambda request: msg.CancelRuns(request, client, run), Future[None]())

    def suspend(
        self, client: int, tenant: str, island: str, *, to_files: bool = False
    ) -> Waiting[None]:
        """Have clients leave their devices, for host memory or files; settled when they have."""
        request = partial(
            msg.SuspendClients, client=client, tenant=tenant, island=island, to_files=to_files
        )
        answer = self.waiting("clients to leave their devices")
        self._ask(request, answer)
        return answer

    def resume(self, client: int, tenant: str, island: str) -> Future[None]:
        """Have suspended clients go on."""
        request = partial(msg.ResumeClients, client=client, tenant=tenant, island=island)
        return self._ask(request, Future[None]())

    def migrate(
        self, client: int, slice_: int, island: str, devices: tuple[DeviceAddress, ...] = ()
    ) -> Waiting[None]:
        """Have a client go on on another island; settled when it has left its devices.

        With a slice, only this one moves, and to these devices if they are free.
        """
        request = partial(
            msg.MigrateClient, island=island, client=client, slice=slice_, devices=devices
        )
        answer = self.waiting(f"its devices to be left, for island {island}")
        self._ask(request, answer)
        return answer

    def plan_moves(self, request: msg.PlanMoves, timeout_s: float = STATUS_S) -> msg.MovesPlanned:
        """Return the moves that make room, or that spread slices. Raises InsufficientDevices."""
        answer: Future[msg.MovesPlanned] = Future()
        self._ask(lambda number: msgspec.structs.replace(request, request=number), answer)
        return self._answered(answer, timeout_s)

    def checkpoint(self, arrays: Sequence[int]) -> Future[None]:
        """Copy arrays to host memory, in order with the runs that make and donate them."""
        numbers = tuple(dict.fromkeys(arrays))
        answer = self.waiting(f"a checkpoint of {counted(len(arrays))}")
        return self._ask(lambda request: msg.Checkpoint(request, numbers), answer, numbers)

    def publish(
        self,
        name: str,
        offers: tuple[msg.Offer, ...],
        tree: bytes,
        keep_s: float,
        to: tuple[str, ...],
    ) -> Future[msg.Published]:
        """Publish the arrays of these offers under a name."""
        answer: Future[msg.Published] = self.waiting(f"the publication of {name!r}")
        arrays = tuple([array for offer in offers for array in offer.arrays])
        return self._ask(
            lambda request: msg.Publish(request, name, offers, tree, keep_s, to), answer, arrays
        )

    def look_up(
        self, name: str, version: int, after: int, wait_s: float
    ) -> Future[msg.VersionOffer]:
        """Ask for the arrays of a name. Fails with NameNotFound."""
        request = partial(msg.Lookup, name=name, version=version, after=after, wait_s=wait_s)
        return self._ask(request, self.waiting(f"what is published as {name!r}"))

    def unpublish(self, name: str) -> Future[None]:
        """End a name. Fails with NameNotFound, or AccessRefused."""
        return self._ask(partial(msg.Unpublish, name=name), self.waiting(f"the end of {name!r}"))

    def names(self, timeout_s: float = STATUS_S) -> msg.NameList:
        """Return the names that this client may read. Raises ConnectionFailed if nothing answers."""
        return self._answered(self._ask(msg.GetNames, Future[msg.NameList]()), timeout_s)

    def save(
        self, path: str, overwrite: bool, arrays: Mapping[str, int], tree: bytes
    ) -> Future[None]:
        """Have hosts write arrays to disk, in order with the runs that make and donate them."""
        names, numbers = tuple(arrays), tuple(arrays.values())
        checkpoint = secrets.token_hex(8)
        answer = self.waiting(f"a checkpoint of {counted(len(arrays))} at {path}")
        self._ask(
            lambda request: msg.SaveArrays(
                request, checkpoint, path, overwrite, numbers, names, tree
            ),
            answer,
            numbers,
        )
        self._saving.add(answer)
        answer.add_done_callback(lambda _: self._saving.discard(answer))
        return answer

    def wait_until_saved(self) -> None:
        """Wait until hosts have written all checkpoints to disk, or failed to."""
        saving = set(self._saving)
        if saving:
            about = partial(About, "checkpoints to be written before the session ends")
            patiently(partial(_all_settle, saving), about)

    def look(self, path: str, placement: Placement) -> Future[msg.Described]:
        """Ask for the description of the checkpoint at `path`, as the hosts of this placement see it."""
        answer: Future[msg.Described] = self.waiting(f"the description of {path}")
        self._post(
            DescribeCheckpoint(path, ArraySpec((), "bool", Sharding((), ()), placement), answer)
        )
        return answer

    def compile(
        self, code: Stablehlo, placement: Placement, detail: msg.Detail = msg.Detail.FACTS
    ) -> Future[msg.Compiled]:
        """Have the hosts of a placement compile a module for its devices, and describe it; waits for nothing.

        A program with a computation of this artifact and placement, registered within a minute, shares the
        executable. The future fails with CompileError and XLA's words. Raises ArgumentError for a module that
        no message can hold.
        """
        artifact = encode(code)
        if len(artifact) > self._artifact_bytes:
            raise ArgumentError(
                f"a compiled function takes {len(artifact)} bytes, more than the {self._artifact_bytes} that "
                "can be sent to hosts; pass large constants to it as arguments"
            )
        answer = self.waiting("the compilation of a function")
        anywhere = ArraySpec((), "bool", Sharding((), ()), placement)
        if code.callbacks:
            self._post(Listen((placement.slice,), for_calls=True))
        self._post(AskCompiler(artifact, anywhere, detail, answer))
        return answer

    def drain(self, host: str) -> Waiting[None]:
        """Move all work and data off a host; settled when it may be switched off."""
        answer = self.waiting(f"host {host} to be left by all that runs and lies there")
        self._ask(lambda request: msg.DrainHost(request, host), answer)
        return answer


def _all_settle(futures: Collection[Waiting[Any]], timeout_s: float | None) -> bool:
    """Wait at most so long; return whether all have a result or an error."""
    left = time_left(timeout_s)
    return all(one.settles(left()) for one in futures)


def counted(arrays: int) -> str:
    """Return the number of arrays, in words."""
    return f"{arrays} array{'' if arrays == 1 else 's'}"
