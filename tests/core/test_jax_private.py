"""Differences between releases of JAX, shown by objects that behave as those of each release."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pw.core.jax_private.releases import shards_by_device


class OnOneDevice:
    """An array whose only shard is the array itself, and is remembered, as in jax 0.10.1."""

    @functools.cached_property
    def addressable_shards(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(device="d", data=self)]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_shards_do_not_keep_their_array() -> None:
    array = OnOneDevice()
    assert shards_by_device(array) == {"d": array}
    left = weakref.ref(array)
    del array
    assert left() is None
