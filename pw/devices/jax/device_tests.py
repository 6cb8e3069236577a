"""Tests a device: a matrix product, a sum and a copy whose bits are known, and how fast each was.

The numbers of the products are small integers that all float formats hold, so the bits do not depend on the
precision of products, on the order of additions, or on the number of threads. A result of which one bit
differs from `DIGESTS` is the device's fault; a device that raises an error has failed, too. What says nothing
about the device (no memory for the test, a program that does not compile) is no failure.

The test runs in the host's own process, beside what runs there: a second process cannot open most
accelerators. Its programs are enqueued by the execute thread, as all are, and a thread for each device waits
for them. It takes less than 64 MiB of a device, and rarely more than a second. Devices are tested at the same
time: those that are threads of the host share its processors, so their rates are those with all at work.
"""

from __future__ import annotations

import functools
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from pw.core.errors import InternalError
from pw.core.messages import WORDS, DeviceOutcome, DeviceTest
from pw.core.platforms import platform_of
from pw.devices.jax.threads import Completions, QueueThread

ROUNDS = 3
"""Number of times that each program runs; the fastest counts, and all bits are compared."""


class TestSize(NamedTuple):
    """Size of the test on one kind of device."""

    rows: int
    """Rows and columns of the matrices."""
    products: int
    """Number of matrix products, each of which takes the one before."""
    words: int
    """Number of 32-bit words that are added up, and copied."""
    dtype: str
    """Type of the matrices' elements."""


HOST = TestSize(512, 1, 1 << 20, "float32")
"""For devices that are threads of the host."""
ACCELERATOR = TestSize(2048, 8, 1 << 22, "bfloat16")
"""For all others: as many tiles as keep each of their units busy."""

_NO_ROOM = re.compile("RESOURCE_EXHAUSTED|out.of.memory", re.IGNORECASE)
"""Words of errors that say that memory is short, and nothing about the device."""

COLUMNS = 1 << 10
"""Number of columns of the words; each column has a sum."""

DIGESTS = {
    HOST: (
        "b1fea7b3d7d24464469e114c5ebd5b91",
        "8efa20257193edad08b3e85a839e1ab8",
        "58ec0ffea7407ba0253c5a3fb7675a8e",
    ),
    ACCELERATOR: (
        "e73a075f4404b1ae8dd69b38bc951291",
        "58fec056e541f9d424462b704cad0221",
        "ad9aaf0ff4346b74904db241a87278d1",
    ),
}
"""First half of the SHA-256 of the results of the product, the sum and the copy, in hexadecimal."""


def mixed(rows: int, columns: int, salt: int) -> np.ndarray[Any, Any]:
    """Return a matrix of random 32-bit words."""
    row = np.arange(rows, dtype=np.uint32)[:, None] * np.uint32(0x9E3779B1)
    column = np.arange(columns, dtype=np.uint32)[None, :] * np.uint32(0x85EBCA77)
    word = row ^ column ^ np.uint32(salt)
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        word = (word ^ (word >> np.uint32(shift))) * np.uint32(factor)
    return word ^ (word >> np.uint32(15))


@functools.lru_cache(maxsize=1)  # the devices of a host are all alike
def operands(size: TestSize) -> tuple[np.ndarray[Any, Any], ...]:
    """Return the two matrices of a test, with integers from -4 to 3, and its words."""
    one, other = (
        ((mixed(size.rows, size.rows, salt) >> np.uint32(29)).astype(np.int32) - 4).astype(
            jnp.dtype(size.dtype)
        )
        for salt in (1, 2)
    )
    return one, other, mixed(size.words // COLUMNS, COLUMNS, 3)


def product(size: TestSize, one: Any, other: Any) -> Any:
    """Return the last of a chain of products; elements are brought back to -4 to 3 between two."""
    result = jnp.matmul(one, other, preferred_element_type=jnp.float32)
    for _ in range(size.products - 1):
        other = (result - 8 * jnp.floor(result * 0.125) - 4).astype(size.dtype)
        result = jnp.matmul(one, other, preferred_element_type=jnp.float32)
    return result


def column_sums(words: Any) -> Any:
    """Return the sum of each column, modulo 2**32."""
    return jnp.sum(words, axis=0, dtype=jnp.uint32)


def digest(data: np.ndarray[Any, Any]) -> str:
    """Return what `DIGESTS` has of the bits of a result."""
    return hashlib.sha256(np.ascontiguousarray(data).data).hexdigest()[:32]


def bits_of(array: jax.Array) -> np.ndarray[Any, Any]:
    """Return a result in host memory."""
    return np.asarray(array)


@dataclass(frozen=True, slots=True)
class _Programs:
    """The programs of the test, for one device."""

    size: TestSize
    fill: Callable[[], tuple[jax.Array, ...]]
    """Function that copies the operands to the device."""
    product: Callable[..., jax.Array]
    column_sums: Callable[..., jax.Array]
    copy: Callable[..., jax.Array]

    @classmethod
    def of(cls, device: jax.Device, size: TestSize) -> _Programs:
        """Compile them. Each is small; on a device that is new to this process it takes most of the time."""
        here = SingleDeviceSharding(device)

        def compiled(function: Callable[..., Any], *shapes: jax.ShapeDtypeStruct) -> Any:
            return jax.jit(function, out_shardings=here).lower(*shapes).compile()

        one, other, words = (
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here)
            for array in operands(size)
        )
        return cls(
            size,
            lambda: tuple(jax.device_put(array, device) for array in operands(size)),
            compiled(partial(product, size), one, other),
            compiled(column_sums, words),
            compiled(jnp.copy, words),
        )


class _Wrong(Exception):
    """A device computed a wrong result."""


class DeviceTester:
    """Tests the devices of a host; each has a thread for it, from its first test on.

    Args:
        device: returns the JAX device of an ordinal.
        append: runs a function on the execute thread, in its turn.
        completions: the way back to the loop.
    """

    def __init__(
        self,
        device: Callable[[int], jax.Device],
        append: Callable[[Callable[[], None]], None],
        completions: Completions,
    ) -> None:
        self._device = device
        self._append = append
        self._completions = completions
        self._testers: dict[int, _Tester] = {}

    def test(self, ordinal: int, done: Callable[[DeviceTest], None]) -> None:
        """Test a device; `done` is called on the loop."""
        tester = self._testers.get(ordinal)
        if tester is None:
            device = partial(self._device, ordinal)
            tester = _Tester(ordinal, device, self._append, self._completions)
            self._testers[ordinal] = tester
        tester.thread.put(done)

    def close(self) -> list[QueueThread[Any]]:
        """Give up what is tested now; return the threads, which end soon."""
        for tester in self._testers.values():
            tester.give_up()
        return [tester.thread for tester in self._testers.values()]


class _Tester:
    """Tests one device."""

    def __init__(
        self,
        ordinal: int,
        device: Callable[[], jax.Device],
        append: Callable[[Callable[[], None]], None],
        completions: Completions,
    ) -> None:
        self._ordinal = ordinal
        self._device = device
        self._append = append
        self._completions = completions
        self._programs: _Programs | None = None
        """Programs of the test; None until its first time."""
        self._answers: SimpleQueue[tuple[float, Any] | Exception] = SimpleQueue()
        """Results of the program that was enqueued last, with the time before it in seconds, or its error."""
        self.thread: QueueThread[Callable[[DeviceTest], None]] = QueueThread(
            f"pw-test-{ordinal}", self._run, completions.fail
        )

    def give_up(self) -> None:
        """Have the thread wait for no program."""
        self._answers.put(InternalError("the host ends"))

    def _run(self, done: Callable[[DeviceTest], None]) -> None:
        self._completions.post(done, self._outcome())

    def _outcome(self) -> DeviceTest:
        ordinal = self._ordinal
        try:
            programs = self._programs
            if programs is None:
                device = self._device()
                size = HOST if platform_of(device.platform).is_host else ACCELERATOR
                programs = self._programs = _Programs.of(device, size)
        except Exception as error:  # noqa: BLE001 - a compiler may fail with anything
            words = f"its programs do not compile: {_first_line(error)}"
            return DeviceTest(ordinal, DeviceOutcome.UNTESTED, words[:WORDS])
        try:
            return DeviceTest(ordinal, DeviceOutcome.OK, "", *self._rates(programs))
        except _Wrong as wrong:
            return DeviceTest(ordinal, DeviceOutcome.FAILED, str(wrong))
        except Exception as error:  # noqa: BLE001 - a sick device may raise anything
            if _NO_ROOM.search(str(error)):
                words = "the device has no room for the test, which takes 64 MiB"
                return DeviceTest(ordinal, DeviceOutcome.UNTESTED, words)
            words = f"it raised an error: {_first_line(error)}"
            return DeviceTest(ordinal, DeviceOutcome.FAILED, words[:WORDS])

    def _rates(self, programs: _Programs) -> tuple[float, float, float]:
        """Run the test; return the rates of the product, the sum and the copy, in amounts per second."""
        size = programs.size
        _, (one, other, words) = self._timed(programs.fill)
        steps = (
            ("matrix product", programs.product, (one, other), 2 * size.rows**3 * size.products),
            ("sum", programs.column_sums, (words,), 4 * size.words),
            ("copy", programs.copy, (words,), 8 * size.words),
        )
        rates = []
        for (name, program, arguments, amount), expected in zip(steps, DIGESTS[size], strict=True):
            least_s = float("inf")
            for _ in range(ROUNDS):
                seconds, result = self._timed(program, *arguments)
                least_s = min(least_s, seconds)
                if digest(bits_of(result)) != expected:
                    raise _Wrong(f"the result of the {name} has wrong bits")
                del result
            rates.append(amount / max(least_s, 1e-9))
        return rates[0], rates[1], rates[2]

    def _timed(self, program: Callable[..., Any], *arguments: jax.Array) -> tuple[float, Any]:
        """Have the execute thread enqueue a program; wait for its results, and return them with its seconds."""

        def enqueue() -> None:
            try:
                began_s = time.monotonic()
                self._answers.put((began_s, program(*arguments)))
            except Exception as error:  # noqa: BLE001 - the test reports it
                self._answers.put(error)

        self._append(enqueue)
        answer = self._answers.get()
        if isinstance(answer, Exception):
            raise answer
        began_s, results = answer
        jax.block_until_ready(results)
        return time.monotonic() - began_s, results


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
