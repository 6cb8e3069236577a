"""`stream`: a Python generator, or any iterable, that feeds a program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax

from pw.building.feeding.in_client import InClient
from pw.building.feeding.on_hosts import OnHosts
from pw.building.feeding.source import Position, StreamSource
from pw.client.arrays.mesh import OwnMesh, default_mesh, mesh_of
from pw.client.functions.host_function import declared, output_types, takes_part
from pw.client.functions.prefixes import mesh_in, spread
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError, PlacementError, PythonRefused
from pw.transport.log import log

STATE_BYTES = 992
"""Room for the state of an iterator: with its note, a kibibyte for each device."""

Where = Literal["hosts", "client"]


class Stream(Iterator[Any]):
    """The elements that a generator makes, as trees of arrays; see `pw.stream`.

    It is a pytree with one leaf, its position. So `pw.checkpoint` saves it in a tree, and
    `pw.restore` with the stream in `like` returns another one that goes on from there.
    """

    def __init__(self, source: StreamSource, where: Where | None, start: Any = None) -> None:
        self._source = source
        self._where = where
        self._start = start
        self._feed: OnHosts | InClient | None = None
        self._lock = threading.Lock()

    @property
    def position(self) -> int:
        """Return the number of elements that were handed out."""
        return self._position().number

    @property
    def where(self) -> str:
        """Where the generator runs: "hosts" or "client"; known after the first element."""
        return self._where or "hosts"

    def _position(self) -> Position:
        if self._feed is not None:
            return self._feed.position
        return Position(0) if self._start is None else Position.of(self._start)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        """Return the next element, once it is made.

        Raises:
            StopIteration: the generator has ended.
            Error: the generator failed at this element; the next call tries it again.
        """
        with self._lock:
            feed = self._feed or self._begin(self._where or "hosts")
            try:
                leaves = feed.next()
            except PythonRefused:
                if self._where is not None:
                    raise
                self._where = "client"
                log(
                    "info",
                    "the hosts run no Python: the generator runs in the client",
                    self._source.name,
                )
                leaves = self._begin("client").next()
            except StopIteration:
                raise
            except Exception:
                if isinstance(feed, InClient):  # its thread has ended
                    self._start, self._feed = feed.position.saved(), None
                raise
            self._where = self._where or "hosts"
            return jax.tree_util.tree_unflatten(self._source.tree, leaves)

    def _begin(self, where: Where) -> OnHosts | InClient:
        kind = OnHosts if where == "hosts" else InClient
        position = self._position()
        self._feed = feed = kind(self._source, position)
        return feed

    def close(self) -> None:
        """End the generator, and drop the elements that were not handed out; its position stays."""
        with self._lock:
            self._start, self._feed = self._position().saved(), None

    def __repr__(self) -> str:
        return f"<pw.Stream {self._source.name} on {self.where}>"

    def _flat(self) -> tuple[tuple[Any], tuple[StreamSource, Where | None]]:
        leaf = self._start
        if self._feed is not None or leaf is None:
            leaf = self._position().saved()
        return (leaf,), (self._source, self._where)


jax.tree_util.register_pytree_node(
    Stream, Stream._flat, lambda source, leaves: Stream(*source, leaves[0])
)


@checks_keywords
def stream(
    make: Callable[..., Any] | Any,
    like: Any,
    *,
    sharding: Any = None,
    devices: Sequence[Any] | Any = None,
    prefetch: int = 2,
    where: Where | None = None,
    state_bytes: int = STATE_BYTES,
    timeout: float | None = None,
) -> Stream:
    """Feed a program from a Python generator: iterate over the stream to get arrays on devices.

    The generators run on the hosts of the devices, each host's in a process of its own, and
    work ahead: `prefetch` elements are on the devices before they are asked for. Where hosts run no
    Python (`pw-worker --allow-python`), one generator runs in a thread here, and elements are
    uploaded.

    An element is known by its number. If a host is lost, its generator begins again and goes on
    at the very element. Generators must therefore be deterministic. One whose iterable or iterator has
    `get_state` and `set_state`, `state_dict` and `load_state_dict`, or `state` and `restore` (as
    those of grain and torchdata) continues from its state; others are counted, and skipped up to the
    element. The same holds after `pw.restore` of a tree with the stream in it.

    Args:
        make: a function that returns an iterable, such as a generator function; or an iterable that can be
            iterated over anew. With the parameter `part` it gets a `pw.Part`, and its elements are the part
            of its host; otherwise elements are whole, the same on all hosts, and hosts take their parts.
        like: the tree of an element, as `jax.ShapeDtypeStruct`s or arrays, with the whole shapes.
        sharding: how elements lie on devices: a tree prefix of `pw.NamedSharding`s, or of partition specs
            over `devices` with the axis "devices".
        devices: virtual devices, if `sharding` names none; by default one.
        prefetch: how many elements are made ahead of those that were asked for.
        where: "hosts" or "client"; by default hosts, if they run Python.
        state_bytes: room for the pickled state of an iterator, in bytes; 0 to count instead.
        timeout: seconds that a host may take for an element.

    Raises:
        ArgumentError: `make` is an iterator, which cannot begin anew, or cannot be pickled; `like` is not a
            tree of shapes and dtypes; `prefetch` is less than 1.
        ShardingError: an element cannot be split that way.
    """
    name = getattr(make, "__name__", type(make).__name__)
    if isinstance(make, Iterator):
        raise ArgumentError(
            f"pw.stream was given the iterator {name!r}, which cannot begin anew on another host; give it "
            "the function that makes it"
        )
    if not callable(make) and not hasattr(make, "__iter__"):
        raise ArgumentError(f"pw.stream was given {make!r}, which is no function and no iterable")
    begin = make if callable(make) else _Iterable(make)
    if prefetch < 1:
        raise ArgumentError(f"prefetch of the stream {name!r} is {prefetch}; at least 1 is needed")
    if where not in (None, "hosts", "client"):
        raise ArgumentError(f'where of the stream {name!r} is {where!r}: "hosts" or "client"')
    avals, tree = declared(like, f"like= of the stream {name!r}")
    mesh = mesh_in(sharding) or _mesh(devices)
    if mesh.parts:
        if where == "hosts":
            raise PlacementError(
                f"the stream {name!r} feeds {mesh!r}: over several islands its generator runs in the client, "
                'where="client"'
            )
        where = "client"
    wanted = spread(sharding, like, f"sharding= of the stream {name!r}")
    types = output_types(avals, wanted, mesh)
    for type_ in types:
        if type_.key_impl is not None:
            raise ArgumentError(
                f"like= of the stream {name!r} has typed PRNG keys, which have no numpy form; make "
                "jax.random.key_data of them"
            )
    source = StreamSource(
        name, begin, takes_part(begin), types, tree, mesh, prefetch, state_bytes, timeout or 0.0
    )
    return Stream(source, where)


class _Iterable:
    """Returns an iterable; picklable if that is."""

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def __call__(self) -> Any:
        return self._iterable


def _mesh(devices: Any) -> OwnMesh:
    return default_mesh() if devices is None else mesh_of(devices)
