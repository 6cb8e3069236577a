"""Programs while they are being recorded, and what a recorded one costs to run again.

A `Recorder` collects calls of computations into a core `Program`: one node per call, whatever the
number of shards. Values in it are `ProgramTracer`s. A value lies where its producer leaves it; a
consumer that wants it elsewhere makes its edge a transfer, which nobody writes down. A host value is
placed by its consumers: each different way of wanting it is an input of the program.

The result is a `Launch`: the registered program and a table of where each input comes from. Calling it
is the client's hot path. A call of a single computation is a program of one node, and takes this road
too.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

from pw.client.arrays import jaxtype
from pw.client.arrays.array import Array, giving_up
from pw.client.arrays.indexing import elements, item_at
from pw.client.arrays.mesh import Mesh
from pw.client.arrays.methods import Methods
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, aval_of, host_value, signature_of
from pw.client.connection import current
from pw.client.trace.export import Traced, constant
from pw.core.errors import ArgumentError, ArrayDeleted, NotOwner, TracerError
from pw.core.messages import INLINE_BYTES
from pw.core.program import Computation, Node, Output, Program, Value
from pw.core.sharding import ArraySpec

__all__ = ["Launch", "Launches", "ProgramTracer", "Recorder", "recording"]


class Feed(NamedTuple):
    """Where a program input comes from: a leaf of the call, or a value fixed when it was traced."""

    leaf: int
    fixed: Array | bytes | np.ndarray[Any, Any] | None
    type: ArrayType


class Launch:
    """A registered program, ready to run."""

    __slots__ = ("_donated", "_feeds", "_program", "_results", "name", "runtime", "tree")

    def __init__(
        self,
        session: Any,
        name: str,
        program: int | None,
        feeds: Sequence[Feed],
        results: Sequence[ArrayType],
        donated: dict[int, str],
        tree: Any = None,
    ) -> None:
        self.runtime = session
        self.name = name
        self.tree = tree
        self._program = program
        self._feeds = tuple(feeds)
        self._results = tuple(results)
        self._donated = tuple(
            (position, f"it was donated to the computation {name!r}")
            for position, name in donated.items()
        )

    def __call__(self, leaves: Sequence[Any]) -> list[Array]:
        """Run on the leaves of a call that this program was recorded for; returns at once."""
        session = self.runtime
        if self._program is None:
            return []
        args: list[int | bytes] = []
        uploads = []
        for leaf, fixed, type_ in self._feeds:
            value = leaves[leaf] if fixed is None else fixed
            if type(value) is Array:
                if value._gone is not None:
                    value._check_usable()
                args.append(value._id)
            elif type(value) is bytes:
                args.append(value)
            else:
                array = host_value(value, type_)
                if array.nbytes <= INLINE_BYTES:
                    args.append(array.tobytes())
                else:
                    number = session.upload(array, type_.spec, for_run=True)
                    uploads.append(Array(session, number, type_))
                    args.append(number)
        if self._donated:
            return self._run_donating(leaves, args)
        made = session.run(self._program, args, len(self._results))
        return [Array(session, n, type_) for n, type_ in zip(made, self._results, strict=True)]

    def _run_donating(self, leaves: Sequence[Any], args: list[int | bytes]) -> list[Array]:
        given: list[tuple[Array, str]] = []
        uses = Counter(args) if len(set(args)) < len(args) else None
        for position, fate in self._donated:
            leaf, fixed, _ = self._feeds[position]
            value = leaves[leaf] if fixed is None else fixed
            if isinstance(value, Array):
                if uses is not None and uses[value._id] > 1:
                    raise ArgumentError(
                        f"the array {value.aval.str_short()} is donated, but the same array is passed "
                        f"to {self.name!r} more than once; pass a copy, copy.copy(x), or do not donate it"
                    )
                given.append((value, fate))
        alive = self.runtime.alive
        marked: list[Array] = []
        try:
            with giving_up:
                for value, _ in given:
                    if value._gone is not None or not alive:
                        value._check_usable()
                for value, fate in given:
                    marked.append(value)
                    value._gone = fate
            made = self.runtime.run(self._program, args, len(self._results))
        except BaseException:
            for value in marked:
                value._gone = None
            raise
        for value, _ in given:
            value._fetching = None
        return [Array(self.runtime, n, t) for n, t in zip(made, self._results, strict=True)]

    def __del__(self) -> None:
        session = getattr(self, "runtime", None)
        if session is not None and self._program is not None and session.alive:
            session.release_program(self._program)


class Launches:
    """Launches by what they were recorded for; forgets those of closed sessions.

    Looking up takes no lock. Whoever finds nothing records under `lock`, so that threads that make the
    same new call share one recording.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._by_key: dict[Any, Launch] = {}
        self.get = self._by_key.get

    def add(self, key: Any, launch: Launch) -> Launch:
        """Remember `launch`; call with the lock held."""
        for stale in [k for k, known in self._by_key.items() if not known.runtime.alive]:
            del self._by_key[stale]
        self._by_key[key] = launch
        return launch


class ProgramTracer(Methods):
    """A value of a program that is being traced: it has a shape and a dtype, but no contents yet."""

    __slots__ = ("_leaf", "_moved", "_type", "_value", "aval", "recorder")

    def __init__(
        self,
        recorder: Recorder,
        aval: Any,
        type_: ArrayType | None,
        value: Value | None,
        leaf: Any,
        moved: object = None,
    ) -> None:
        self.recorder = recorder
        self.aval = aval
        self._type = type_
        self._value = value
        self._leaf = leaf
        self._moved = moved

    shape = property(lambda self: tuple(self.aval.shape))
    dtype = property(lambda self: self.aval.dtype)
    ndim = property(lambda self: len(self.aval.shape))
    size = property(lambda self: int(self.aval.size))
    weak_type = property(lambda self: bool(self.aval.weak_type))

    @property
    def sharding(self) -> NamedSharding | None:
        """How the value lies; None for a host value, which goes where its consumers want it."""
        return None if self._type is None else self._type.sharding

    @property
    def identity(self) -> object:
        """What a donation takes away; None for a host value, of which each consumer has its own."""
        return self._value if self._moved is None else self._moved

    @property
    def signature(self) -> Any:
        """What a call sees of it: the type of an array, or the aval of a host value."""
        return self.aval if self._type is None else self._type

    def __repr__(self) -> str:
        return f"ProgramTracer({self.aval.str_short()}, program={self.recorder.name!r})"

    def __len__(self) -> int:
        if not self.aval.shape:
            raise TypeError("len() of unsized object")
        return int(self.aval.shape[0])

    def _needed(self, why: str) -> NoReturn:
        raise TracerError(
            f"{why} needs the value {self.aval.str_short()} of the program {self.recorder.name!r}, in "
            f"{_user_line()}, but while a program is traced its values do not exist yet. Move this into "
            "a pw.jit function (there with jnp.where or jax.lax.cond instead of if), "
            "make it a static argument of the program, or return the value and use it outside"
        )

    def __bool__(self) -> bool:
        self._needed("bool() (an if, while, and, or, or assert)")

    def __int__(self) -> int:
        self._needed("int()")

    def __float__(self) -> float:
        self._needed("float()")

    def __complex__(self) -> complex:
        self._needed("complex()")

    def __index__(self) -> int:
        self._needed("using it as an index or a count")

    def __iter__(self) -> Any:
        return elements(self)

    def __getitem__(self, index: Any) -> Any:
        return item_at(self, index)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        self._needed("conversion to numpy")

    def __jax_array__(self) -> NoReturn:
        self._needed("a jax function outside of pw.jit, or a function that closes over it,")

    _as_jax_array = __jax_array__

    @property
    def format(self) -> Any:
        """What JAX reads before it computes on this machine; raises."""
        return self.__jax_array__()

    def item(self) -> Any:
        """Raises: values do not exist while a program is traced."""
        self._needed("item()")

    tolist = item


# Known to JAX only so that its refusal is ours: an error raised while it asks for the aval is reworded.
jaxtype.register(ProgramTracer, lambda tracer: tracer.aval, lambda tracer: tracer.__jax_array__())


def _user_line() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("pw.client", "jax", "numpy")
    ):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_qualname} ({code.co_filename}:{frame.f_lineno})"


class Recorder:
    """A program under construction."""

    def __init__(self, name: str, timeout_s: float = 0.0) -> None:
        self.name = name
        self.runtime: Any = None
        self._timeout_s = timeout_s
        self._feeds: list[Feed] = []
        self._feed_of: dict[Any, int] = {}
        self._traced: list[Traced] = []
        self._index_of: dict[Computation, int] = {}
        self._nodes: list[Node] = []
        self._given: dict[object, str] = {}
        """Inputs, results and moved copies that were donated, and what to."""

    def leaf(self, index: int, signature: Any) -> ProgramTracer:
        """Leaf `index` of the program's arguments."""
        if isinstance(signature, ArrayType):
            value = self._input(Feed(index, None, signature))
            return ProgramTracer(self, signature.aval, signature, value, None)
        return ProgramTracer(self, aval_of(signature), None, None, index)

    def lift(self, leaf: Any) -> ProgramTracer:
        """Anything a computation takes, as a value of this program."""
        if type(leaf) is ProgramTracer:
            if leaf.recorder is not self:
                raise TracerError(
                    f"a value {leaf.aval.str_short()} of the program {leaf.recorder.name!r} was kept "
                    "and used after that program had been traced; return it from the program instead"
                )
            return leaf
        if type(leaf) is Array:
            leaf._check_usable()
            value = self._input(Feed(-1, leaf, leaf._type))
            return ProgramTracer(self, leaf.aval, leaf._type, value, None)
        return ProgramTracer(self, aval_of(signature_of(leaf)), None, None, _Constant(leaf))

    def call(self, traced: Traced, leaves: Sequence[Any]) -> list[ProgramTracer]:
        """Add a node that applies `traced` to `leaves`; returns its results."""
        computation = traced.computation
        self._use(traced.mesh)
        arguments = [self.lift(leaf) for leaf in (*leaves, *traced.captured)]
        types = [*traced.inputs, *(array._type for array in traced.captured)]
        args = []
        for position, (argument, type_) in enumerate(zip(arguments, types, strict=True)):
            donated = position in computation.donated
            args.append(self.place(argument, type_, computation.name, own=donated))
        identities = [argument.identity for argument in arguments]
        for position in computation.donated:
            identity = identities[position]
            if identity is not None:
                if identities.count(identity) > 1:
                    raise ArgumentError(
                        f"{computation.name!r} donates an argument "
                        f"{arguments[position].aval.str_short()} that it is also given as another "
                        "argument; pass a copy or do not donate it"
                    )
                self._given[identity] = computation.name
            if arguments[position]._value is None:
                self._given[args[position]] = computation.name
        index = self._index_of.get(computation)
        if index is None:
            index = self._index_of[computation] = len(self._traced)
            self._traced.append(traced)
        self._nodes.append(Node(index, tuple(args)))
        node = len(self._nodes) - 1
        return [
            ProgramTracer(self, type_.aval, type_, Value(node, result), None)
            for result, type_ in enumerate(traced.outputs)
        ]

    def reshard(self, leaf: Any, sharding: NamedSharding) -> ProgramTracer:
        """The same value, lying as `sharding`: another array, unless it lies so already."""
        tracer = self.lift(leaf)
        self._use(sharding.mesh)
        type_ = ArrayType.of(tracer.aval, sharding)
        self._check_not_given(tracer, "pw.put")
        if type_ is tracer._type:
            return tracer
        source = tracer._leaf
        if isinstance(leaf, np.ndarray):  # its owner may write to it before it is used
            value = np.array(leaf, dtype=type_.numpy_dtype, order="C")
            value.flags.writeable = False
            source = _Constant(value)
        return ProgramTracer(self, tracer.aval, type_, tracer._value, source, moved=object())

    def place(
        self, tracer: ProgramTracer, type_: ArrayType, consumer: str, own: bool = False
    ) -> Value:
        """The value to feed to a consumer; a host value becomes an input of its own type, or `type_`."""
        self._check_not_given(tracer, consumer)
        if tracer._value is not None:
            return tracer._value
        type_ = tracer._type or type_
        source = tracer._leaf
        if isinstance(source, _Constant):
            return self._input(Feed(-1, source.placed(type_, own), type_), own)
        return self._input(Feed(source, None, type_), own)

    def _check_not_given(self, tracer: ProgramTracer, consumer: str) -> None:
        donated_to = self._given.get(tracer.identity)
        if donated_to is not None:
            raise ArrayDeleted(
                f"{consumer!r} uses a value {tracer.aval.str_short()} of the program {self.name!r} "
                f"that was donated to the computation {donated_to!r} before"
            )

    def finish(self, outputs: Sequence[ProgramTracer], tree: Any = None) -> Launch:
        """Register the program whose results are `outputs`, each lying as its tracer says."""
        delivered, types = [], []
        for tracer in outputs:
            type_ = tracer._type
            assert type_ is not None
            delivered.append(Output(self.place(tracer, type_, "return"), type_.spec))
            types.append(type_)
        donated = {
            value.index: name
            for value, name in self._given.items()
            if isinstance(value, Value) and value.node < 0
        }
        if not self._nodes and not delivered:
            return Launch(current.runtime(), self.name, None, (), (), {}, tree)
        program = Program(
            self.name,
            tuple(traced.computation for traced in self._traced),
            tuple(self._nodes),
            tuple(feed.type.spec for feed in self._feeds),
            tuple(delivered),
            tuple(sorted(donated)),
            self._timeout_s,
        )
        artifacts = {traced.computation.artifact: traced.artifact for traced in self._traced}
        number = self.runtime.register_program(program, artifacts)
        return Launch(self.runtime, self.name, number, self._feeds, types, donated, tree)

    def _input(self, feed: Feed, own: bool = False) -> Value:
        """An input of the program; one for each source and spec, unless its consumer eats it."""
        self._use(feed.type.sharding.mesh)
        fixed = feed.fixed if isinstance(feed.fixed, bytes) else id(feed.fixed)
        key = (feed.leaf, fixed, feed.type.spec)
        index = None if own else self._feed_of.get(key)
        if index is None:
            index = len(self._feeds)
            self._feeds.append(feed)
            if not own:
                self._feed_of[key] = index
        return Value(-1, index)

    def _use(self, mesh: Mesh) -> None:
        mesh.check_alive()
        if self.runtime is None:
            self.runtime = mesh.runtime
        elif self.runtime is not mesh.runtime:
            raise NotOwner(
                f"the program {self.name!r} uses devices or arrays of two sessions; fetch values of the "
                "other one with pw.get(x) and pass those"
            )


class _Constant:
    """A host value that the program's function made or closed over."""

    __slots__ = ("_uploaded", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self._uploaded: dict[ArraySpec, Array] = {}

    def placed(self, type_: ArrayType, own: bool) -> Array | bytes | np.ndarray[Any, Any]:
        """What to feed at every run: a large value is uploaded once, unless each run eats its own."""
        if type_.size_bytes <= INLINE_BYTES:
            return host_value(self.value, type_).tobytes()
        if own:
            return host_value(self.value, type_).copy()
        uploaded = self._uploaded.get(type_.spec)
        if uploaded is None:
            uploaded = self._uploaded[type_.spec] = constant(self.value, type_)
        return uploaded


_thread = threading.local()


def recording() -> Recorder | None:
    """The program that this thread is tracing, if any."""
    return getattr(_thread, "recorder", None)


class Recording:
    """Makes a recorder this thread's current one for the length of a `with` block."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before: Recorder | None = None

    def __enter__(self) -> Recorder:
        self._before = recording()
        _thread.recorder = self._recorder
        return self._recorder

    def __exit__(self, *exc: object) -> None:
        _thread.recorder = self._before
