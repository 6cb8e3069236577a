"""Arrays that one session hands to another: views across sessions, on real devices."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import pw
from pw.client.connection.runtime import Runtime
from pw.core.programs.program import Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing import InProcessCluster
from tests.stages.daemons import until

DEVICES = 4
ROWS = Sharding(("x",), (DEVICES,), (("x",),))
COLUMNS = Sharding(("a", "b"), (2, 2), ((), ("a", "b")))


class User:
    """A session with one slice."""

    def __init__(self, runtime: Runtime, like: int = 0) -> None:
        self.runtime = runtime
        self.slice = runtime.allocate_slice(DEVICES, like=like)

    def spec(self, shape: tuple[int, ...], sharding: Sharding = ROWS) -> ArraySpec:
        place = Placement(self.slice.slice, tuple(range(DEVICES)))
        return ArraySpec(shape, "float32", sharding, place)

    def put(self, value: np.ndarray[Any, Any], spec: ArraySpec) -> int:
        return self.runtime.upload(value, spec)

    def value(self, array: int, spec: ArraySpec) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.runtime.fetch(array, spec).result(60)
        return found

    def donating(self, spec: ArraySpec) -> int:
        """A program that moves its argument, which it donates, to the devices in another order."""
        turned = ArraySpec(
            spec.shape, spec.dtype, spec.sharding, Placement(spec.placement.slice, (3, 2, 1, 0))
        )
        body = Program("turn", (), (), (spec,), (Output(ValueRef(-1, 0), turned),), (0,))
        return self.runtime.register_program(body, {})


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(devices_per_island=DEVICES) as cluster:
        yield cluster


@pytest.fixture
def users(cluster: InProcessCluster) -> Iterator[tuple[User, User]]:
    exporter = User(cluster.client())
    importer = User(cluster.client(), like=exporter.slice.slice)
    yield exporter, importer
    exporter.runtime.close()
    importer.runtime.close()
    until(lambda: pw.stats()["controller"]["offers"] == 0, "no offer is left")


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def hand(
    exporter: User, importer: User, arrays: Sequence[int], specs: Any, others: Any
) -> list[int]:
    token = exporter.runtime.handovers.offer(list(zip(arrays, specs, strict=True)))
    return importer.runtime.handovers.take(token, others)


def bytes_held() -> int:
    return pw.stats()["host-0"]["live_bytes"]


def test_an_array_is_handed_over_in_another_layout(users: tuple[User, User]) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8, 2)), importer.spec((2, 8), COLUMNS)
    x = exporter.put(numbers(8, 2), given)
    (y,) = hand(exporter, importer, [x], [given], [wanted])
    # Shard i of both is rows 2i and 2i+1 of x: columns 2i and 2i+1 of y.
    expected = np.concatenate(np.split(numbers(8, 2), 4), axis=1)
    np.testing.assert_array_equal(importer.value(y, wanted), expected)
    assert bytes_held() == given.size_bytes
    exporter.runtime.delete((x,))
    np.testing.assert_array_equal(importer.value(y, wanted), expected)
    importer.runtime.delete((y,))
    until(lambda: bytes_held() == 0, "nothing lies on the host")


def test_the_offer_may_come_after_the_take(users: tuple[User, User]) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    token = secrets.token_bytes(16)
    (y,) = importer.runtime.handovers.take(token, [wanted])
    x = exporter.put(numbers(8), given)
    exporter.runtime.handovers.offer([(x, given)], token)
    exporter.runtime.delete((x,))
    np.testing.assert_array_equal(importer.value(y, wanted), numbers(8))


def test_arrays_of_one_offer_are_deleted_before_they_are_taken(users: tuple[User, User]) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    arrays = [exporter.put(numbers(8) + n, given) for n in range(3)]
    token = exporter.runtime.handovers.offer([(x, given) for x in arrays])
    exporter.runtime.delete(tuple(arrays))
    exporter.value(exporter.put(numbers(8), given), given)  # the delete has come before the take
    for n, y in enumerate(importer.runtime.handovers.take(token, [wanted] * 3)):
        np.testing.assert_array_equal(importer.value(y, wanted), numbers(8) + n)


@pytest.mark.parametrize("donor", [0, 1])
def test_either_side_may_donate(users: tuple[User, User], donor: int) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    x = exporter.put(numbers(8), given)
    (y,) = hand(exporter, importer, [x], [given], [wanted])
    user, own, spec = ((exporter, x, given), (importer, y, wanted))[donor]
    (turned,) = user.runtime.run(user.donating(spec), [own], 1)
    turned_spec = ArraySpec(
        spec.shape, spec.dtype, spec.sharding, Placement(spec.placement.slice, (3, 2, 1, 0))
    )
    np.testing.assert_array_equal(user.value(turned, turned_spec), numbers(8))
    other, kept, kept_spec = ((exporter, x, given), (importer, y, wanted))[1 - donor]
    np.testing.assert_array_equal(other.value(kept, kept_spec), numbers(8))


def test_a_call_that_donates_waits_until_its_array_is_taken(users: tuple[User, User]) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    x = exporter.put(numbers(8), given)
    token = exporter.runtime.handovers.offer([(x, given)])
    exporter.runtime.run(exporter.donating(given), [x], 1)
    (y,) = importer.runtime.handovers.take(token, [wanted])
    np.testing.assert_array_equal(importer.value(y, wanted), numbers(8))


def test_taken_arrays_live_on_without_the_exporter(cluster: InProcessCluster) -> None:
    exporter = User(cluster.client())
    importer = User(cluster.client(), like=exporter.slice.slice)
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    (y,) = hand(exporter, importer, [exporter.put(numbers(8), given)], [given], [wanted])
    importer.runtime.wait([(y, wanted)]).result(60)
    exporter.runtime.close()
    np.testing.assert_array_equal(importer.value(y, wanted), numbers(8))
    importer.runtime.run(importer.donating(wanted), [y], 1)
    importer.runtime.close()
    until(lambda: bytes_held() == 0, "nothing lies on the host")


def test_an_array_on_other_devices_is_refused(cluster: InProcessCluster) -> None:
    exporter, importer = (User(cluster.client()) for _ in range(2))
    given, wanted = exporter.spec((8,)), importer.spec((4,))
    other = ArraySpec(
        (4,),
        "float32",
        Sharding(("x",), (2,), (("x",),)),
        Placement(wanted.placement.slice, (0, 1)),
    )
    (y,) = hand(exporter, importer, [exporter.put(numbers(8), given)], [given], [other])
    with pytest.raises(pw.PlacementError, match="other devices than"):
        importer.value(y, other)
    (z,) = hand(exporter, importer, [exporter.put(numbers(8), given)], [given], [wanted])
    with pytest.raises(pw.ShardingError, match="shards of"):
        importer.value(z, wanted)
    exporter.runtime.close()
    importer.runtime.close()


def test_an_offer_is_taken_once(users: tuple[User, User], cluster: InProcessCluster) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    token = exporter.runtime.handovers.offer([(exporter.put(numbers(8), given), given)])
    (y,) = importer.runtime.handovers.take(token, [wanted])
    np.testing.assert_array_equal(importer.value(y, wanted), numbers(8))
    third = User(cluster.client(), like=exporter.slice.slice)
    (z,) = third.runtime.handovers.take(token, [third.spec((8,))])
    with pytest.raises(pw.NotOwner, match="taken once"):
        third.value(z, third.spec((8,)))
    third.runtime.close()


def test_what_waits_alone_ends(users: tuple[User, User], monkeypatch: pytest.MonkeyPatch) -> None:
    from pw.sched.control import handovers

    monkeypatch.setattr(handovers, "ALONE_S", 0.5)
    monkeypatch.setattr(handovers, "GUARDED_S", 0.2)
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    (y,) = importer.runtime.handovers.take(secrets.token_bytes(16), [wanted])
    with pytest.raises(pw.ArrayLost, match="no session has offered"):
        importer.value(y, wanted)
    x = exporter.put(numbers(8), given)
    exporter.runtime.handovers.offer([(x, given)])
    exporter.runtime.run(exporter.donating(given), [x], 1)
    until(lambda: bytes_held() == given.size_bytes, "the donation went on")


def test_an_error_is_handed_over_with_its_array(users: tuple[User, User]) -> None:
    exporter, importer = users
    given, wanted = exporter.spec((8,)), importer.spec((8,))
    x = exporter.put(numbers(8), given)
    exporter.runtime.delete((x,))
    (y,) = hand(exporter, importer, [x], [given], [wanted])
    with pytest.raises(pw.ArrayDeleted, match="before it was handed over"):
        importer.value(y, wanted)
